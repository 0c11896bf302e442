"""``jax.linearize`` of a ``while_loop`` that communicates: JAX runs the whole loop again."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

from mpi4jax import notoken

SIZE = MPI.COMM_WORLD.size
X = jnp.arange(3.0)

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.timeout(60)]


def loop(x):
    step = lambda s: (s[0] + 1, notoken.allreduce(jnp.sin(s[1]), MPI.SUM))
    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


def scanned(x):
    return lax.scan(lambda c, _: (loop(c), None), x, None, length=1)[0]


AROUND = {"eager": loop, "jit": jax.jit(loop), "scan": scanned}
LINE = r"(test_linearized_loops.py:\d+: )?allreduce is in a while_loop"


@pytest.mark.parametrize("name", AROUND)
def test_it_is_warned_of(name):
    f = AROUND[name]
    with pytest.warns(UserWarning, match=f"{LINE} of which JAX makes a linear function"):
        value, linear = jax.linearize(f, X)
    expected, tangent = jax.jvp(f, (X,), (X,))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(linear(X), tangent, rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.jvp, jax.linearize])
def test_nothing_else_is(transform):
    fixed = lambda x: lax.fori_loop(0, 3, lambda _, y: notoken.allreduce(y, MPI.SUM), x)
    silent = lambda x: lax.while_loop(lambda y: y[0] < 3, lambda y: y + 1, x)
    f = loop if transform is jax.jvp else fixed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if transform is jax.jvp:
            jax.jvp(jax.checkpoint(f), (X,), (X,))
        else:
            value, linear = jax.linearize(lambda x: f(silent(x)), X)
            np.testing.assert_allclose(value, (X + 3) * SIZE**3)
            np.testing.assert_allclose(linear(X), X * SIZE**3)


@pytest.mark.parametrize("transform", [jax.linearize, jax.vjp])
def test_a_checkpoint_around_it_is_refused(transform):
    with pytest.raises(NotImplementedError, match=f"{LINE} in a jax.checkpoint, of which"):
        transform(jax.checkpoint(loop), X)
