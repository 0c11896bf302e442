"""`MPI4JAX_LOG`: which events are written, and how."""

import json
import re

import pytest

PROGRAM = """
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
comm = MPI.COMM_WORLD.Dup()
mpi4jax.notoken.allreduce(jnp.ones(3), MPI.SUM, comm=comm).block_until_ready()
comm.Free()
print(mpi4jax.transport_info())
"""
GRIDS = """
for grid in [MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size]) for _ in range(2)]:
    mpi4jax.notoken.barrier(comm=grid)
"""
LINE = re.compile(r"r(\d+) \| \d\d:\d\d:\d\d\.\d{3} ([A-Z]+) (\w+) \| (.*)")


@pytest.fixture
def lines(mpirun):
    """lines(ranks, env): rank, level, target and message of each line of the log."""

    def run(ranks, env, more=""):
        job = mpirun(ranks, "-c", PROGRAM + more, env=env)
        assert job.returncode == 0, job.stderr
        return LINE.findall(job.stderr), job

    return run


def messages(lines, rank, target):
    return [message for of, _, name, message in lines if (of, name) == (str(rank), target)]


def test_without_the_setting_nothing_is_written(lines):
    found, job = lines(1, {})
    assert not found
    assert "chosen" not in job.stderr


def test_what_was_chosen_is_written_by_each_rank(lines):
    found, _ = lines(2, {"MPI4JAX_LOG": "transport=info,comm=info"}, GRIDS)
    targets = {("INFO", "transport"), ("INFO", "comm")}
    assert {(level, target) for _, level, target, _ in found} == targets
    for rank in range(2):
        of_rank = messages(found, rank, "transport")
        assert 'chosen platform=cpu reason="the default" transport=mpi' in of_rank
        assert 'chosen platform=cuda reason="the default" transport=staged' in of_rank
        assert of_rank.count("started platform=cpu transport=mpi") == 1
        # The second of two unnamed grids of the same ranks.
        (of_grid,) = messages(found, rank, "comm")
        words = "an earlier communicator has the same ranks and name"
        assert of_grid.startswith(f'not compared comm=comm#2 rank={rank} reason="{words}')


def test_communicators_libraries_and_memory(lines):
    env = {"MPI4JAX_TRANSPORT": "staged", "MPI4JAX_LIBCUDA": "/nowhere/libcuda.so.1"}
    found, _ = lines(1, {"MPI4JAX_LOG": "debug", **env})
    of_comm = messages(found, 0, "comm")
    form = re.compile(r"attached comm=\S+ rank=0 size=1")
    (attached,) = filter(form.fullmatch, of_comm)
    assert attached.replace("attached", "freed") in of_comm
    (library,) = [line for line in messages(found, 0, "library") if "/nowhere/" in line]
    assert library.startswith("cannot be loaded error=")
    memory = [line for line in messages(found, 0, "transport") if "memory for copies" in line]
    assert len(memory) == 2, "one for each way; the next call takes them again"


def test_calls_are_events_too(lines):
    found, job = lines(1, {"MPI4JAX_LOG": "op=info", "MPI4JAX_DEBUG": "1"})
    start, end = messages(found, 0, "op")
    assert start.startswith("MPI_Allreduce with 3 items (SUM) call=")
    assert end.startswith("MPI_Allreduce done with code 0 (")
    call = re.search(r" call=(\w{8}) ", start)[1]
    # The lines of MPI4JAX_DEBUG stay what they are, where they are.
    text = [line for line in job.stdout.splitlines() if line.startswith("r0 | ")]
    assert text[0] == f"r0 | {call} | MPI_Allreduce with 3 items (SUM)"
    assert re.fullmatch(rf"r0 \| {call} \| MPI_Allreduce done with code 0 \(.*s\)", text[1])
    assert len(text) == 2


def test_json(mpirun):
    env = {"MPI4JAX_LOG": "info", "MPI4JAX_LOG_FORMAT": "json"}
    job = mpirun(2, "-c", PROGRAM, env=env)
    assert job.returncode == 0, job.stderr
    events = [json.loads(line) for line in job.stderr.splitlines() if line.startswith("{")]
    assert {event["world_rank"] for event in events} == {0, 1}
    chosen = [event for event in events if event["message"] == "chosen"]
    assert {event["transport"] for event in chosen} == {"mpi", "staged"}
    for rank in range(2):
        calls = [event for event in events if event["target"] == "op"]
        start, end = (event for event in calls if event["world_rank"] == rank)
        assert start["call"] == end["call"]
        assert (start["op"], start["level"], end["code"]) == ("allreduce", "info", 0)
        assert 0 <= end["seconds"] < 100
        assert start["time"] <= end["time"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MPI4JAX_LOG": "loud"}, "MPI4JAX_LOG=loud is not understood: expected a level"),
        ({"MPI4JAX_LOG": "pigeon=info"}, "op, transport, comm, library"),
        ({"MPI4JAX_LOG_FORMAT": "xml"}, "MPI4JAX_LOG_FORMAT=xml is not understood: expected text"),
    ],
)
def test_wrong_settings_are_errors_at_import(mpirun, env, words):
    job = mpirun(1, "-c", "import mpi4jax", env=env)
    assert job.returncode != 0
    assert "ValueError: " in job.stderr
    assert words in job.stderr


def test_the_transport_of_the_page_on_extending(lines):
    """Counted and logged by a transport that consists of a file, a variant and a line."""
    found, job = lines(2, {"MPI4JAX_TRANSPORT": "traced", "MPI4JAX_LOG": "transport=debug"})
    assert "CPU: traced (MPI4JAX_TRANSPORT=traced)" in job.stdout
    for rank in range(2):
        of_rank = messages(found, rank, "transport")
        assert "call failed=false number=1 op=allreduce" in of_rank
        assert of_rank[-1] == "stopped calls=1"
