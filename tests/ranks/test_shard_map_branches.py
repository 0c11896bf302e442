"""Branches of a function over two axes that only some ranks take, and their gradients.

JAX's own collectives on CPUs deadlock in them. The expected values are computed from whole arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import COMM

import mpi4jax

pytestmark = pytest.mark.ranks(4)


def solved(x, w):
    return lax.custom_linear_solve(
        lambda y: (2 + w * x) * y, x, lambda f, b: b / f(jnp.ones_like(b)), symmetric=True
    )


def nested(x, w):
    """Only one rank multiplies; the sum of its gradient is outside of both branches."""
    inner = lambda x, w: lax.cond(lax.axis_index("b") == 0, jnp.multiply, jnp.add, x, w)
    return lax.cond(lax.axis_index("a") == 0, inner, lambda x, w: 2 * x, x, w)


def nested_over_both(x, w):
    corner = lambda x, w: lax.axis_index("a") + lax.axis_index("b") == 0
    inner = lambda x, w: lax.cond(corner(x, w), jnp.multiply, jnp.add, x, w)
    return lax.cond(lax.axis_index("a") == 0, inner, lambda x, w: 2 * x, x, w)


def solve(x, w):
    w = (
        lax.pcast(w, ("a", "b"), to="varying")
        if hasattr(lax, "pcast")
        else lax.pvary(w, ("a", "b"))
    )
    y = solved(x, w)
    return lax.cond(lax.axis_index("a") == 0, solved, lambda y, w: 2 * y, y, w)


def solve_with_replicated(x, w):
    """JAX refuses its gradient, unless `w` is made to vary first."""
    y = lax.cond(lax.axis_index("a") == 0, solved, lambda y, w: 2 * y, x, w)
    return solved(y, w) + solved(x, lax.psum(w * x.sum(), "b"))


def expected(f, x, w):
    """The same on the blocks of all ranks, which are rows: (0, 0), (0, 1), (1, 0), (1, 1)."""
    if f is solve:
        y = solved(x, w)
        return jnp.concatenate([solved(y[:2], w), 2 * y[2:]])
    if f is solve_with_replicated:
        y = jnp.concatenate([solved(x[:2], w), 2 * x[2:]])
        sums = w * jnp.repeat(x.reshape(2, 4).sum(1), 2)[:, None]
        return solved(y, w) + solved(x, sums)
    return jnp.stack([x[0] * w, x[1] + w, 2 * x[2], 2 * x[3]])


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "f", [nested, nested_over_both, solve, solve_with_replicated], ids=lambda f: f.__name__
)
def test_gradients_of_branches(f, jit):
    mesh, spec = mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM), P(("a", "b"))
    of_rank = mpi4jax.shard_map(f, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    x, w = jnp.arange(1.0, 9.0).reshape(4, 2), jnp.float32(3)
    block = mpi4jax.sharding.cut(x, P(("a", "b")), mesh=mesh)
    total = lambda f: lambda x, w: jnp.sin(f(x, w)).sum()
    found = jit(jax.grad(total(of_rank), (0, 1)))(block, w)
    of_x, of_w = jax.grad(total(lambda x, w: expected(f, x, w)), (0, 1))(x, w)
    np.testing.assert_allclose(found[0], of_x[COMM.rank][None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], of_w, rtol=1e-5)
