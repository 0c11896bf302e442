"""Two hosts: network namespaces of one machine.

Where their link is interrupted in the middle of an allreduce, raw Open MPI waits forever, and so
does its mpiexec.
"""

import re
import subprocess
import sys
import time

import pytest

import mpirun as launcher
import two_hosts

PROGRAM = """
import os, sys, time
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
from mpi4jax._job import job
if sys.argv[1].endswith("hangs") and MPI.COMM_WORLD.rank == 1:
    os.umask(0o077)
    os.makedirs(job.directory(2))
    # Without a reader, the copy of the board waits forever.
    os.mkfifo(job.directory(2) / f"board.{os.getpid()}.tmp")
f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.MAX))
with mpi4jax.time_limit(None): x = f(jnp.ones(200000)).block_until_ready()
print("started", flush=True)
if sys.argv[1].startswith("elsewhere") and MPI.COMM_WORLD.rank == 1: time.sleep(60)
while True: x = f(x).block_until_ready()
"""

TIMEOUT = 6

# What goes wrong, whether the hosts see one directory, and what rank 0 says of rank 1.
CASES = [
    ("cut", True, "rank 1 is silent: no answer over MPI within 5 s"),
    ("elsewhere", False, r"rank 1 is in no operation; .*Python is at .*program.py:16"),
    # The answer of a host does not wait for the copy of its board.
    ("elsewhere, and its disk hangs", False, r"rank 1 is in no operation; .*program.py:16"),
]

DIFFERENT = """
import sys, time
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
rank, comm = MPI.COMM_WORLD.rank, None
nt.barrier()
if sys.argv[1] == "own": comm = MPI.COMM_WORLD.Dup()
x = jnp.arange(3) if rank == 0 else jnp.arange(3.0)
nt.allreduce(x, MPI.SUM, comm=comm).block_until_ready()
nt.allreduce(jnp.ones(3), MPI.SUM, comm=comm).block_until_ready()
if rank == 1: time.sleep(60)
nt.recv(x, 1).block_until_ready()
"""


@pytest.fixture(autouse=True)
def _has_hosts():
    if why := two_hosts.missing():
        pytest.skip(f"two hosts: {why}")


@pytest.mark.parametrize("comm, says", [("default", "do not"), ("own", "may not")])
def test_collectives_of_two_hosts_that_differ(tmp_path, comm, says):
    """They have completed, with wrong values: found when the hosts ask each other about a wait."""
    program = tmp_path / "program.py"
    program.write_text(DIFFERENT)
    rank = ["env", "JAX_PLATFORMS=cpu", "MPI4JAX_TIMEOUT=20", f"MPI4JAX_DUMP_DIR={tmp_path}"]
    with two_hosts.hosts() as hosts:
        job = subprocess.run(
            [
                *hosts.mpiexec,
                *two_hosts.passed_on(),
                "-n",
                "2",
                *rank,
                sys.executable,
                program,
                comm,
            ],
            env=launcher.environment_outside_mpi(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )
    assert f"r0 | mpi4jax: the operations of the ranks {says} match" in job.stderr, job.stderr
    assert re.search(r"  rank 0: allreduce #\d \(SUM, 3 x int32\) on .*:11\n", job.stderr), (
        job.stderr
    )
    assert re.search(r"  rank 1: another collective #\d\n", job.stderr), job.stderr
    assert job.returncode == (1 if comm == "default" else 97), job.stderr


@pytest.mark.parametrize("fault, shared, says", CASES)
def test_two_hosts(tmp_path, fault, shared, says):
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    # `hostname` differs between the two: a directory per host, if it is part of the name.
    directory = tmp_path / ("all" if shared else "$(hostname)")
    settings = f"JAX_PLATFORMS=cpu MPI4JAX_TIMEOUT={TIMEOUT} MPI4JAX_DUMP_DIR={directory}"
    rank = [
        "sh",
        "-c",
        f"mkdir -p {directory}; {settings} exec $0 {program} '{fault}'",
        sys.executable,
    ]
    with open(log, "w") as output, two_hosts.hosts() as hosts:
        job = subprocess.Popen(
            [*hosts.mpiexec, *two_hosts.passed_on(), "-n", "2", *rank],
            env=launcher.environment_outside_mpi(),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 60
            while log.read_text().count("started") < 2 and time.monotonic() < deadline:
                assert job.poll() is None, log.read_text()
                time.sleep(0.1)
            if fault == "cut":
                hosts.cut()
            # Open MPI's mpiexec may wait forever for a host that it cannot reach.
            deadline = time.monotonic() + 60
            while job.poll() is None and "aborting the job (" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            if fault == "elsewhere":
                job.wait(30)
                # After the report, each host has left a copy of its board.
                for name in hosts.names:
                    assert list((tmp_path / name).glob("mpi4jax-*/*/board")), log.read_text()
        finally:
            job.kill()
            job.wait(30)
    text = log.read_text()
    assert "r0 | mpi4jax: allreduce #" in text, text
    assert f"has not completed after MPI4JAX_TIMEOUT={TIMEOUT} s" in text, text
    (report,) = re.findall(r"^r0 \| mpi4jax: .*\n(?:  .*\n)+", text, re.MULTILINE)
    assert re.search(says, report), text
