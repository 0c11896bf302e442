"""Sum over all ranks, inside a jitted function.

    $ mpiexec -n 4 python examples/global_sum.py
    rank 0: [6. 6. 6.]
    rank 1: [6. 6. 6.]
    rank 2: [6. 6. 6.]
    rank 3: [6. 6. 6.]

Rank r contributes r: 0 + 1 + 2 + 3 = 6. The ranks may print in another order.
"""

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

comm = MPI.COMM_WORLD


@jax.jit
def global_sum(x):
    total = mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)
    return total


mine = jnp.full(3, comm.rank, jnp.float32)
print(f"rank {comm.rank}: {global_sum(mine)}\n", end="", flush=True)
