"""A job that is interrupted or terminated ends at once, with a line of each host and no more."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import mpirun as launcher

PROGRAM = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
rank, x = MPI.COMM_WORLD.rank, jnp.ones(3)
jax.block_until_ready(nt.allreduce(x))
child = os.fork()
if child == 0: time.sleep(1000)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM  # it is no rank
handler = os.environ.get("HANDLER")
def stop(*_): print("stopped", rank, flush=True); os._exit(3)
if handler == "own": signal.signal(signal.SIGTERM, stop)
if rank == 1: print("ready", flush=True); time.sleep(1000)
jax.block_until_ready(nt.allreduce(x))
"""
SLEEPS = 16
# Rank 1 sleeps, as good as, and rank 0 is in its second operation.
READY = ("ready", r"(?s)(?:r0 \| \w+ \| MPI_Allreduce with .*){2}")
# Longer than it takes, on a busy machine. Without a handler of ours an interrupt would not end a
# rank that waits.
TIME_LIMIT = 30
MARK = "MPI4JAX_TEST_SIGNALS"
# A rank that gets no processor time for half a second after the signal is not waited for.
RUNS = 3


def ranks_of(mark):
    """The ranks of the job with this mark that live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_marked = f"{MARK}={mark}".encode() in (process / "environ").read_bytes()
            name = (process / "cmdline").read_text().split("\0")[0]
            if (
                is_marked
                and name == sys.executable
                and ") Z " not in (process / "stat").read_text()
            ):
                found.append(int(process.name))
    return found


@pytest.fixture
def run(tmp_path):
    """Starts the program on 2 ranks, and sends a signal; returns what the job has said."""
    mark, log = uuid.uuid4().hex, tmp_path / "log"
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(number, to, first=None, **env):
        env = {
            **launcher.environment_outside_mpi(),
            "JAX_PLATFORMS": "cpu",
            "MPI4JAX_DUMP_DIR": str(tmp_path),
            "MPI4JAX_DEBUG": "1",
            MARK: mark,
            **env,
        }
        mpiexec = launcher.find_mpiexec(sys.executable)
        command = [mpiexec, "-n", "2", sys.executable, "program.py"]
        with open(log, "w") as output:
            job = subprocess.Popen(
                command, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip

        def wait_for(*patterns):
            deadline = time.monotonic() + 60
            while not all(re.search(pattern, log.read_text()) for pattern in patterns):
                assert job.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)

        wait_for(*READY)
        ranks = ranks_of(mark)
        assert len(ranks) == 2
        if first:
            for pid in ranks:
                os.kill(pid, first)
            wait_for("rank 0 is in", "rank 1 is in")
            time.sleep(2)  # for a second report, which there should not be
        parent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in {"mpiexec": [job.pid], "ranks": ranks}.get(to, [parent]):
            os.kill(pid, number)
        assert job.wait(TIME_LIMIT) != 0
        deadline = time.monotonic() + TIME_LIMIT
        while ranks_of(mark):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return log.read_text()

    yield run
    for pid in ranks_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# Of a rank in an operation, and of one in Python.
PLACES = [
    r"in allreduce #2 .*program.py:\d+",
    rf"in no operation; .*Python is at .*program.py:{SLEEPS} in <module>",
]


@pytest.mark.parametrize("to", ["mpiexec", "ranks"])
def test_termination_is_one_line_of_a_host(run, to):
    line = (
        rf"r[01] \| mpi4jax: SIGTERM ends ranks 0-1: rank 0 is {PLACES[0]}; rank 1 is {PLACES[1]}\n"
    )
    for _ in range(RUNS):
        text = run(signal.SIGTERM, to)
        said = text.count("mpi4jax:")
        # Open MPI's mpiexec may not forward any more what its ranks print.
        assert said <= 1 if to == "mpiexec" else said == 1, text
        assert "Traceback" not in text
        if len(re.findall(line, text)) == said:
            return
    raise AssertionError(text)


@pytest.mark.parametrize("to", ["mpiexec", "ranks"])
def test_an_interrupt_is_a_line_of_each_rank(run, to):
    """Open MPI's mpiexec terminates its ranks then; MPICH's mpiexec passes the interrupt on."""
    waits = rf"mpi4jax: SIG(INT|TERM) ends .*rank.* is {PLACES[0]}"
    for _ in range(RUNS):
        text = run(signal.SIGINT, to)
        found = len(re.findall(waits, text))
        assert found <= 1, text
        assert text.count("mpi4jax:") <= 2, text
        assert "Traceback" not in text
        if found == 1 or to == "mpiexec":
            return
    raise AssertionError(text)


def test_all_ranks_are_asked_for_a_report_and_one_answers(run):
    text = run(signal.SIGTERM, "ranks", first=signal.SIGUSR1)
    assert text.count("report (SIGUSR1)") == 1, text
    for rank, place in enumerate(["in allreduce #2", "in no operation"]):
        assert f"  rank {rank} is {place}" in text, text


def test_a_program_has_its_own_use_of_a_signal(run):
    text = run(signal.SIGTERM, "ranks", HANDLER="own")
    assert "stopped 1" in text
    assert "r1 | mpi4jax: SIGTERM" not in text


@pytest.mark.parametrize("killed", ["mpiexec", "the parent of the ranks"])
def test_no_rank_is_left_where_the_launcher_is_killed(run, killed):
    """MPICH's ranks have a parent of their own, of whose end its mpiexec knows nothing."""
    run(signal.SIGKILL, killed)
