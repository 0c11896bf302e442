"""With MPI4JAX_WAIT=sleep, a rank that waits leaves its core to others."""

import pytest

PROGRAM = """
import time
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
for name, call in calls.items():
    jax.block_until_ready(call())  # makes communicators, and compiles
    comm.Barrier()
    if rank == 1:
        time.sleep(0.3)
    began, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    if rank == 0:
        print(name, (time.process_time() - used) / (time.perf_counter() - began), flush=True)
"""


@pytest.mark.parametrize("wait", ["poll", "sleep"])
def test_processor_time_of_waiting(mpirun, wait):
    env = {"MPI4JAX_WAIT": wait, "JAX_PLATFORMS": "cpu", "LD_PRELOAD": ""}
    result = mpirun(2, "-c", PROGRAM, env=env)
    assert result.returncode == 0, result.stderr
    shares = {line.split()[-2]: float(line.split()[-1]) for line in result.stdout.splitlines()}
    assert len(shares) == 10
    if wait == "sleep":
        assert max(shares.values()) < 0.5, shares
    else:  # on a busy machine, it gets a part of a core
        assert max(shares.values()) > 0.2, shares
