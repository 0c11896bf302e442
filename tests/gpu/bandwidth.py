"""Time and bandwidth of allreduce and sendrecv on a GPU, by size."""

import sys
import time

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if comm.allreduce(mpi4jax.transport_info().gpu_error is not None, MPI.LOR):
    sys.exit(77)

OPS = {
    "allreduce": mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM)),
    "sendrecv": mpi4jax.jit(lambda x: nt.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size)),
}


def seconds(f, x, calls):
    best = float("inf")
    for _ in range(5):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            y = f(x)
        jax.block_until_ready(y)
        best = min(best, (time.perf_counter() - start) / calls)
    return comm.allreduce(best, MPI.MAX)


for name, f in OPS.items():
    for kib in (1, 64, 4096, 65536):
        x = jnp.ones(kib * 256, jnp.float32)
        jax.block_until_ready(f(x))
        t = seconds(f, x, 200 if kib < 1000 else 10)
        if rank == 0:
            print(f"| {name:10} {kib:6} KiB {t * 1e6:10.1f} us {kib / 1024 / 1024 / t:8.2f} GiB/s")
