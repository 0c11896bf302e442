"""With MPI4JAX_WAIT=sleep, a rank that waits leaves its core to others."""

import pytest

PROGRAM = """
import os, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
comm = MPI.COMM_WORLD
rank, other = comm.rank, 1 - comm.rank
ring = comm.Create_cart([2], [True])
x = jnp.arange(4.0) + 10 * rank
calls = {
    "allreduce": lambda: nt.allreduce(x, MPI.SUM),
    "barrier": lambda: nt.barrier() or x,
    "recv": lambda: nt.recv(x, 1) if rank == 0 else nt.send(x, 0) or x,
    "send": lambda: nt.send(large, 1) or x if rank == 0 else nt.recv(large, 0),
    "sendrecv": lambda: nt.sendrecv(x, x, other, other),
    "bcast": lambda: nt.bcast(x, 1),
    "allgatherv": lambda: nt.allgatherv(x, [4, 4]),
    "alltoallv": lambda: nt.alltoallv(x, [2, 2], [2, 2]),
    "halo_exchange": lambda: nt.halo_exchange(x, ring),
    "wait": lambda: mpi4jax.wait(mpi4jax.iallreduce(x, MPI.SUM)),
}
large = jnp.ones(1 << 20)
tasks = Path(f"/proc/{comm.bcast(os.getpid())}/task")
def is_ready():
    # Whether a thread of rank 0 runs, or would run if others had not the cores.
    states = [file.read_text().rpartition(")")[2].split()[0] for file in tasks.glob("*/stat")]
    return "R" in states
for name, call in calls.items():
    jax.block_until_ready(call())  # makes communicators, and compiles
    began, used = time.perf_counter(), time.process_time()
    if rank == 0:
        comm.send(None, 1)
    else:
        comm.recv(source=0)
        looks = [time.sleep(0.02) or is_ready() for _ in range(15)]
    jax.block_until_ready(call())
    if rank == 0:
        share = (time.process_time() - used) / (time.perf_counter() - began)
        print(name, share, comm.recv(source=1), flush=True)
    else:
        comm.send(np.mean(looks), 0)
"""


@pytest.mark.parametrize("wait", ["poll", "sleep"])
def test_processor_time_of_waiting(mpirun, wait):
    env = {"MPI4JAX_WAIT": wait, "JAX_PLATFORMS": "cpu", "LD_PRELOAD": ""}
    result = mpirun(2, "-c", PROGRAM, env=env)
    assert result.returncode == 0, result.stderr
    lines = [line.split()[-2:] for line in result.stdout.splitlines()]
    assert len(lines) == 10
    if wait == "sleep":
        assert max(float(share) for share, _ in lines) < 0.5, result.stdout
    else:  # on a busy machine, it gets a part of a core
        assert max(float(ready) for _, ready in lines) > 0.8, result.stdout
