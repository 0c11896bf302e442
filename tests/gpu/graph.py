"""Whether XLA records NCCL's calls into a CUDA graph, by what it says of the compiled program."""

import re
import sys

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

if mpi4jax.transport_info().gpu_error is not None or jax.default_backend() != "gpu":
    sys.exit(77)


@mpi4jax.jit
def step(x):
    for _ in range(8):
        x = nt.allreduce(x, MPI.SUM) + 1
    return x


x = jnp.ones(1000)
text = step.lower(x).compile().as_text()
calls = len(re.findall(r"custom_call_target=\"mpi4jax_allreduce\"", text))
recorded = len(re.findall(r"command_buffer", text))
for _ in range(10):
    step(x).block_until_ready()
jax.block_until_ready(x)
print(f"| {calls} calls, {recorded} mentions of a command buffer in the compiled program")
sys.exit(0 if calls == 8 and recorded else 1)
