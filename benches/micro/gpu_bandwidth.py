"""Time and bandwidth of allreduce and sendrecv on a GPU, by size.

Beside them, what a program does without a transport: copy to pageable memory, communicate with
mpi4py, copy back. Also runs on mpi4jax 0.9.1, through benches/programs/on_reference.py.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
if hasattr(mpi4jax, "transport_info"):
    unusable = mpi4jax.transport_info().gpu_error is not None
else:  # 0.9.1, which does not build its part for GPUs where it finds no CUDA
    unusable = jax.default_backend() == "gpu" and not mpi4jax.has_cuda_support()
if comm.allreduce(unusable, MPI.LOR):
    sys.exit(77)


def by_hand(communicate):
    def run(x):
        host = np.asarray(x)
        result = np.empty_like(host)
        communicate(host, result)
        return jax.device_put(result)

    return run


OPS = {
    "allreduce": mpi4jax.jit(lambda x: nt.allreduce(x, op=MPI.SUM) / size),
    "sendrecv": mpi4jax.jit(lambda x: nt.sendrecv(x, x, left, right)),
    "allreduce by hand": by_hand(
        lambda a, b: (comm.Allreduce(a, b, MPI.SUM), np.divide(b, size, out=b))
    ),
    "sendrecv by hand": by_hand(lambda a, b: comm.Sendrecv(a, right, recvbuf=b, source=left)),
}


def seconds(f, x, calls):
    """Of one call. Each is on the result of the one before: JAX keeps host copies of arrays."""
    best = float("inf")
    for _ in range(5):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            x = f(x)
        jax.block_until_ready(x)
        best = min(best, (time.perf_counter() - start) / calls)
    return comm.allreduce(best, MPI.MAX)


for name, f in OPS.items():
    for kib in (1, 64, 4096, 65536):
        x = f(jnp.ones(kib * 256, jnp.float32))
        t = seconds(f, jax.block_until_ready(x), 200 if kib < 1000 else 10)
        if rank == 0:
            print(f"| {name:17} {kib:6} KiB {t * 1e6:10.1f} us {kib / 1024 / 1024 / t:8.2f} GiB/s")
