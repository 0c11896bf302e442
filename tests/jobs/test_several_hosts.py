"""Several hosts: namespaces of one machine, each with a network, a host name and a `/dev/shm`."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import mpirun as launcher
import two_hosts

# Cases that run in `make test-matrix` alone.
MORE = pytest.mark.one_in(2**33)
RANKS_OF_A_HOST = 2
# The size of a board of this number of ranks, in KiB.
BOARD = 20 + 92 * RANKS_OF_A_HOST

PROGRAM = """
import os, sys, time
from pathlib import Path
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
is_over = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.MAX))
with mpi4jax.time_limit(None): is_over(jnp.zeros(1000)).block_until_ready()
# Open MPI itself aborts a job that opens a connection to a host which it cannot reach.
MPI.COMM_WORLD.alltoall(range(size))
boards = [file.stat().st_size // 1024 for file in Path("/dev/shm").glob("mpi4jax-*/*")]
print(f"started {os.uname().nodename} {boards}", flush=True)
while is_over(jnp.full(1000, float(os.path.exists(sys.argv[1]))))[0] == 0: time.sleep(0.05)
x = nt.sendrecv(jnp.ones(3) * rank, jnp.ones(3), (rank - 1) % size, (rank + 1) % size)
print(f"completed {rank} {x[0]:.0f}", flush=True)
"""


class Job:
    def __init__(self, process, hosts, log, over):
        self.process, self.hosts, self.log, self.over = process, hosts, log, over

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, is_true, seconds=60):
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def wait_for_text(self, pattern, times=1, seconds=60):
        def is_there():
            found = len(re.findall(pattern, self.text())) >= times
            assert found or self.process.poll() is None, self.text()
            return found

        self.wait_for(is_there, seconds)

    def ranks(self, host):
        """The processes of the ranks of a host."""
        command = ["ip", "netns", "pids", self.hosts.names[host]]
        pids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        words = [
            Path(f"/proc/{pid}/cmdline").read_text()
            for pid in pids
            if os.path.exists(f"/proc/{pid}")
        ]
        return [word for word in words if word.startswith(f"{sys.executable}\0")]

    def complete(self):
        """Let the ranks leave their loop, and return the exit status."""
        self.over.touch()
        self.wait_for(lambda: self.process.poll() is not None)
        return self.process.returncode


@contextmanager
def started(tmp_path, count, settings="", **how):
    """A job on `count` hosts, whose ranks communicate until the job is to complete."""
    if why := two_hosts.missing():
        pytest.skip(f"several hosts: {why}")
    program, log, over = tmp_path / "program.py", tmp_path / "log", tmp_path / "over"
    program.write_text(PROGRAM)
    ranks = count * RANKS_OF_A_HOST
    environment = ["env", "JAX_PLATFORMS=cpu", f"MPI4JAX_DUMP_DIR={tmp_path}", *settings.split()]
    with open(log, "w") as output, two_hosts.hosts(count, **how) as hosts:
        process = subprocess.Popen(
            [*hosts.mpiexec, *two_hosts.passed_on(), "-n", str(ranks), *environment,
             sys.executable, program, over],
            env=launcher.environment_outside_mpi(),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        job = Job(process, hosts, log, over)
        try:
            # Each rank imports JAX and compiles for itself, on two cores that others use too.
            job.wait_for_text("started", ranks, seconds=30 * ranks)
            yield job
        finally:
            # Open MPI's mpiexec may wait forever for a host that it cannot reach.
            process.kill()
            process.wait(30)


def completed(text, ranks):
    received = {int(rank): int(x) for rank, x in re.findall(r"completed (\d+) (\d+)", text)}
    return received == {rank: (rank - 1) % ranks for rank in range(ranks)}


def healthy(tmp_path, count):
    """Each host has a board with slots of its own ranks, and mpi4jax prints nothing."""
    with started(tmp_path, count) as job:
        assert job.complete() == 0, job.text()
    text = job.text()
    boards = re.findall(r"started (\S+) (\[.*\])", text)
    assert sorted(boards) == sorted(2 * [(name, f"[{BOARD}]") for name in job.hosts.names]), text
    assert completed(text, 2 * count), text
    assert "mpi4jax:" not in text, text


def without_board(tmp_path, count):
    """One line says so, and the job runs."""
    with started(tmp_path, count, without_board=[1]) as job:
        assert job.complete() == 0, job.text()
    text = job.text()
    boards = re.findall(r"started (\S+) (\[.*\])", text)
    expected = [(name, "[]" if i == 1 else f"[{BOARD}]") for i, name in enumerate(job.hosts.names)]
    assert sorted(boards) == sorted(2 * expected), text
    (line,) = re.findall(r"mpi4jax: .*", text)
    assert re.search("no board in /dev/shm.*; the job runs, but", line), text
    assert completed(text, 2 * count), text


def silent_ranks(count):
    """The pattern of the ranks of the second host: ranks are distributed over the hosts in turn."""
    return rf"ranks 1, {1 + count} are silent: no answer over MPI within 5 s"


def frozen(tmp_path, count):
    """Lines say which ranks do not answer; the job is not aborted, and completes once they do."""
    settings = "MPI4JAX_REPORT_AFTER=4 MPI4JAX_DEADLOCK_AFTER=5"
    with started(tmp_path, count, settings) as job:
        two_hosts.send_signal(job.hosts.names[1], signal.SIGSTOP)
        # The second line is later than MPI4JAX_DEADLOCK_AFTER.
        job.wait_for_text(f"has waited for .*{silent_ranks(count)}.*; the job continues", 2)
        two_hosts.send_signal(job.hosts.names[1], signal.SIGCONT)
        assert job.complete() == 0, job.text()
    assert completed(job.text(), 2 * count), job.text()


def lost(tmp_path, count):
    """With MPI4JAX_TIMEOUT, a report says which ranks do not answer, and the job is aborted."""
    with started(tmp_path, count, "MPI4JAX_TIMEOUT=6") as job:
        job.hosts.cut(1)
        job.wait_for_text(r"aborting the job \(")
        # Open MPI's mpiexec may wait forever for the host; the ranks of the others are terminated.
        job.wait_for(lambda: not job.ranks(0))
    headline = r"r\d+ \| mpi4jax: allreduce #\d+ .* has not completed after MPI4JAX_TIMEOUT=6 s"
    assert re.search(rf"{headline}\n(  .*\n)*  {silent_ranks(count)}", job.text()), job.text()


# `make test` runs the first case, and `make test-matrix` all.
CASES = [(without_board, 2), (healthy, 4), (frozen, 2), (lost, 2)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mode, count",
    [
        pytest.param(mode, count, marks=MORE if i else (), id=f"{mode.__name__}-{count}")
        for i, (mode, count) in enumerate(CASES)
    ],
)
def test_several_hosts(mode, count, tmp_path):
    mode(tmp_path, count)
