"""Many operations take no memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

STEPS, CALLS = 500, 8  # of 5 operations: 20,000 in all


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@pytest.mark.ranks(2)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_many_operations_take_no_memory():
    def step(_, x):
        x = nt.allreduce(x, MPI.MAX)
        x = nt.sendrecv(x, x, 1 - rank, 1 - rank)
        x = nt.bcast(x, 0)
        x = nt.allgather(x)[rank]
        return nt.scan(x, MPI.MIN)

    f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, STEPS, step, x))
    x, seen = jnp.ones(8), []
    for _ in range(CALLS):
        x = f(x).block_until_ready()
        nt.barrier()
        seen.append(resident_megabytes())
    assert (x == 1).all()
    assert max(seen[2:]) - seen[2] < 2, seen  # 168 bytes for each operation
