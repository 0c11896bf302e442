"""A process with several local devices: what an operation gives is where its operand is."""

import subprocess
import sys

PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = jax.device_put(jnp.ones(3), jax.devices()[2])
cart = comm.Create_cart([comm.size])
for f in (
    mpi4jax.allreduce,
    mpi4jax.allgather,
    jax.jit(mpi4jax.allreduce),
    lambda x: mpi4jax.allreduce({"a": x, "b": x}),
    lambda x: mpi4jax.halo_add(x, cart),
    lambda x: mpi4jax.gather_blocks(x, cart),
    mpi4jax.assert_equal,
):
    result, token = f(x)
    print([leaf.devices() == {jax.devices()[2]} for leaf in (*jax.tree.leaves(result), token)])
"""


def test_the_token_is_on_the_device_of_the_operand():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    lines = run.stdout.split()
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("True") >= 14, run.stdout
    assert "False" not in run.stdout, lines
