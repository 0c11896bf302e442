"""Healthy functions over a mesh of two axes, which a comparison of the ranks' orders must not end.

That orders which differ are found is in `tests/jobs/faults_different.py`.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import COMM, RANK as R

import mpi4jax

pytestmark = pytest.mark.ranks(4)
X = jnp.arange(1.0, 4.0) + R


def step(x):
    """A collective over each axis, one after the other; the result varies over both axes."""
    y = lax.psum(jnp.sin(x), "a") * lax.ppermute(x, "b", [(0, 1), (1, 0)])
    return x + lax.pmean(jnp.cos(y), "b") / 10


@jax.custom_vjp
def by_rule(x):
    return step(x)


by_rule.defvjp(lambda x: jax.vjp(step, x), lambda back, c: back(c))


def if_positive(x):
    positive = lax.psum(lax.psum(x.sum(), "a"), "b") > 0
    return lax.cond(positive, step, lambda x: x - lax.psum(x, "b"), x)


def on_the_index(x):
    y = step(x)
    return lax.cond(lax.axis_index("a") == 0, lambda y: 2 * y, jnp.sin, y)


FUNCTIONS = {
    "step": step,
    "scan": lambda x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0],
    "while": lambda x: lax.fori_loop(0, lax.axis_size("a") + 1, lambda _, x: step(x), x),
    "grad": lambda x: jax.grad(lambda x: lax.pmean(lax.psum(step(x).sum(), "b"), "a"))(x),
    "vmap": lambda x: jax.vmap(step)(jnp.stack([x, 2 * x]))[1],
    "remat": lambda x: jax.checkpoint(step)(x),
    "custom_vjp": lambda x: jax.grad(lambda x: by_rule(x).sum())(x),
    "cond": if_positive,
    "cond on the index": on_the_index,
    "jit inside": lambda x: jax.jit(step)(step(x)),
}


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def mapped(f, **how):
    mesh = mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM)
    spec = P(("a", "b"))
    return mpi4jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **how)


@pytest.mark.parametrize("call, check_vma", [("value", True), ("value", False), ("grad", True)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_healthy_functions(name, call, check_vma):
    if name == "while" and call == "grad":
        pytest.skip("JAX has no reverse mode of it")
    f = mapped(FUNCTIONS[name], check_vma=check_vma)
    if call == "grad":
        f = jax.grad(lambda x, f=f: f(x).sum())
    expected = jax.jit(f)(X)
    # Compiled, a gradient does not compute the value that nothing uses.
    has_gradient = "grad" in (name, call) or name == "custom_vjp"
    for compiles in [False] if has_gradient else [False, R == 0, R in (1, 2), R != 3]:
        found = (jax.jit(f) if compiles else f)(X)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_some_ranks_may_sum_over_another_axis_for_themselves(jit):
    coordinates = mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM).coordinates

    def f(x):
        y = step(x)
        if coordinates["a"] == 0:  # all ranks along "b"
            y = y + 0 * lax.pmax(x, "b")
        return lax.psum(y, "a") + 0 * x

    found = jit(mapped(f))(X)
    np.testing.assert_allclose(found, jit(mapped(lambda x: lax.psum(step(x), "a") + 0 * x))(X))


def test_sums_that_do_not_need_each_other_may_have_any_order():
    def f(x):
        found = {axis: lax.psum(x, axis) for axis in ("ab" if R else "ba")}
        return found["a"] - 2 * found["b"]

    with warnings.catch_warnings():  # a warning that they are wrong if one needs another
        warnings.simplefilter("ignore")
        found = jax.jit(mapped(f))(X)
    mates = X - R + np.arange(4).reshape(-1, 1)
    a, b = divmod(R, 2)
    expected = mates[b] + mates[2 + b] - 2 * (mates[2 * a] + mates[2 * a + 1])
    np.testing.assert_allclose(found, expected)
