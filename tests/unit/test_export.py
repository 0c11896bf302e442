"""`jax.export`: what cannot be exported. Programs that can are in tests/jobs/test_programs.py."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from table import ROWS

from mpi4jax import notoken

CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{name}") for name in [*ROWS, "after"]]


def test_what_has_no_name():
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_name("")
    status, first = MPI.Status(), MPI.Op.Create(lambda a, b, _: None)
    x = jnp.ones(3)
    for f, expected in {
        lambda x: notoken.bcast(x, 0, comm=comm): "call comm.Set_name",
        lambda x: notoken.allreduce(x, first): "MPI.Op.Create",
        lambda x: notoken.recv(x, MPI.PROC_NULL, status=status): "status",
    }.items():
        jitted = jax.jit(f)
        with pytest.raises(ValueError, match=expected):
            jax.export.export(jitted, disabled_checks=CALLS)(x)
    comm.Free()
    first.Free()


def test_symbolic_shapes():
    """A program is exported once for batches of all sizes. It sends to itself: order is kept."""
    (size,) = jax.export.symbolic_shape("size")
    batch, weights = jax.ShapeDtypeStruct((size, 3), jnp.float32), jnp.arange(3.0)

    def loss(w, x):
        total = notoken.allreduce(x, MPI.SUM)
        notoken.send(x + total, 0)
        x = notoken.recv(x, 0)
        notoken.send(x**2, 0)
        blocks = notoken.allgather(notoken.recv(x, 0))
        return jnp.mean(blocks @ notoken.allreduce(w, MPI.SUM)) ** 2

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    exported = jax.export.export(step, disabled_checks=CALLS)(weights, batch)
    for n in (2, 5):
        x = jnp.arange(3.0 * n).reshape(n, 3)
        for actual, expected in zip(
            jax.tree.leaves(jax.jit(exported.call)(weights, x)),
            jax.tree.leaves(step(weights, x)),
            strict=True,
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
