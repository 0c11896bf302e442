"""Time of operations in a loop on a GPU, each beside what it should cost no more than.

    mpiexec -n 1 python benches/micro/gpu_loops.py

MPI4JAX_TRANSPORT names the transport. An argument makes all arrays small, for a trial without a
GPU.
"""

import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
is_small = len(sys.argv) > 1
if comm.allreduce(mpi4jax.transport_info().gpu_error is not None and not is_small, MPI.LOR):
    sys.exit(77)
left, right = (rank - 1) % size, (rank + 1) % size
ring = [(k, (k + 1) % size) for k in range(size)]
cart = comm.Create_cart([size, 1], periods=[True, True])


def seconds(step, x, times):
    """Of one step of a loop: the best of three."""
    f = mpi4jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: step(x), x))
    x, best = jax.block_until_ready(f(x)), float("inf")
    for _ in range(3):
        comm.Barrier()
        began = time.perf_counter()
        x = jax.block_until_ready(f(x))
        best = min(best, (time.perf_counter() - began) / times)
    return comm.allreduce(best, MPI.MAX)


def row(name, step, x, times):
    t = seconds(step, x, 3 if is_small else times)
    if rank == 0:
        print(f"| {name:34} {t * 1e6:10.1f} us", flush=True)


def maximum_of_bits(x):
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(nt.allreduce(bits, MPI.MAX), jnp.float32) * 0.5


def started(x):
    return mpi4jax.wait(mpi4jax.iallreduce(x)) / size


def ones(mib):
    return jnp.ones(100 if is_small else mib << 18)


one = jnp.ones(1)
row("allreduce SUM 4 B", lambda x: nt.allreduce(x, MPI.SUM) / size, one, 200)
row("allreduce MAX 4 B", lambda x: nt.allreduce(x, MPI.MAX) * 0.5, one, 200)
row("allreduce MAX of int32 4 B", maximum_of_bits, one, 200)
row("sendrecv 1 MiB", lambda x: nt.sendrecv(x, x, left, right), ones(1), 50)
row("permute 1 MiB", lambda x: nt.permute(x, ring), ones(1), 50)
for mib in (1, 16, 64):
    row(f"allreduce {mib} MiB", lambda x: nt.allreduce(x, MPI.SUM) / size, ones(mib), 20)
    row(f"iallreduce and wait {mib} MiB", started, ones(mib), 20)
if mpi4jax.transport_info().gpu == "staged":
    # Where operand and result exceed MPI4JAX_STAGING_MIB, each call allocates page-locked memory.
    for mib in (128, 192, 256, 320, 512):
        row(f"sendrecv {mib} MiB", lambda x: nt.sendrecv(x, x, left, right), ones(mib), 2)


def stencil(u):
    neighbors = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return u.at[1:-1, 1:-1].set(0.25 * neighbors)


block = jnp.ones((64 if is_small else 4096,) * 2)
row("stencil", stencil, block, 50)
row("stencil and halo_exchange", lambda u: stencil(nt.halo_exchange(u, cart)), block, 50)
