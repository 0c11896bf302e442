"""How often NCCL's calls wait on the host.

MPI4JAX_LIBCUDA names a library made of count.c. The flight recorder tells how many calls there
were.
"""

import ctypes
import os
import re
import sys

import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native, notoken as nt

CALLS, STEPS = 8, 20

if mpi4jax.transport_info().gpu_error is not None:
    sys.exit(77)
count_of_waits = ctypes.CDLL(os.environ["MPI4JAX_LIBCUDA"]).count_of_waits
count_of_waits.restype = ctypes.c_long


def calls_on_the_host():
    return max(map(int, re.findall(r"allreduce #(\d+)", str(_native.operations()))), default=0)


@mpi4jax.jit
def step(x):
    for _ in range(CALLS):
        x = nt.allreduce(x, MPI.SUM) + 1
    return x


x = jnp.ones(1000)
step(x).block_until_ready()
calls, waits = calls_on_the_host(), count_of_waits()
for _ in range(STEPS):
    step(x).block_until_ready()
calls, waits = calls_on_the_host() - calls, count_of_waits() - waits
print(f"| {STEPS * CALLS} operations, {calls} calls on the host, {waits} waits of ours")
sys.exit(bool(waits) or calls != STEPS * CALLS)
