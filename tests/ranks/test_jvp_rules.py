"""Rules of the user's, in which one rank sends tangents and the other receives into constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

from mpi4jax import notoken

RANK = MPI.COMM_WORLD.rank
X = jnp.array([0.5, 2.0, 3.0])
ZEROS = np.zeros(3, np.float32)

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(60)]


def received(like):
    """What rank 0 sends of what is ``like`` it: of a primal, or of a tangent."""
    return notoken.recv(0 * like, 0)


def several(t):
    return lax.scan(lambda c, _: (c + received(c), None), 0 * t, None, length=2)[0]


# What rank 0 sends of its value and its tangent; what rank 1 makes of it, of its own value and of
# its own tangent; by how much the tangents of both count there.
RULES = {
    "added": (lambda x, t: notoken.send(t, 1), lambda x, t: t + received(t), (1, 1)),
    "alone": (lambda x, t: notoken.send(t, 1), lambda x, t: received(t), (1, 0)),
    "in a jit": (
        lambda x, t: jax.jit(lambda t: notoken.send(t, 1))(t),
        lambda x, t: jax.jit(lambda t: 2 * (t + received(t)))(t),
        (2, 2),
    ),
    "in a loop": (
        lambda x, t: [notoken.send(t, 1), notoken.send(t, 1)],
        lambda x, t: t + several(t),
        (2, 1),
    ),
    "in a branch": (
        lambda x, t: notoken.send(t, 1),
        lambda x, t: t + lax.cond(jnp.array([1])[0] > 0, received, lambda t: 0 * t, t),
        (1, 1),
    ),
    "a value": (lambda x, t: notoken.send(x, 1), lambda x, t: t * received(x), (0, X)),
    "a value and a tangent": (
        lambda x, t: [notoken.send(x, 1), notoken.send(t, 1)],
        lambda x, t: t * received(x) + received(t),
        (1, X),
    ),
}

AROUND = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1][0],
    "cond": lambda f: lambda x: lax.cond(jnp.sum(x) > 0, f, f, x),
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


def with_rule(name):
    sends, makes, counts = RULES[name]
    f = jax.custom_jvp(lambda x: x)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        if RANK == 0:
            sends(x, t)
            return x, t
        return x, makes(x, t)

    return f, counts


@pytest.mark.one_in(5)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", RULES)
def test_gradient(name, around):
    f, (theirs, ours) = with_rule(name)
    f = AROUND[around](f)
    weight = (1.0, 10.0)[RANK]
    grad = jax.grad(lambda x: jnp.sum(weight * f(x)))
    expected = np.broadcast_to(1 + 10 * theirs if RANK == 0 else 10 * ours, 3)
    for function in (grad, jax.jit(grad)):
        np.testing.assert_allclose(function(X), expected)


@pytest.mark.parametrize("name", RULES)
def test_tangent(name):
    f, (theirs, ours) = with_rule(name)
    tangent = X + RANK
    expected = tangent if RANK == 0 else X * theirs + tangent * ours
    for function in (f, jax.jit(f)):
        actual = jax.jvp(function, (X,), (tangent,))[1]
        np.testing.assert_allclose(actual, expected)
        np.testing.assert_allclose(jax.linearize(function, X)[1](tangent), expected)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_only_values_depend_on_is_a_value(jit):
    """A function that receives into a constant is called by its rule."""

    def body(x):
        if RANK == 0:
            notoken.send(x, 1)
            return x
        return x * notoken.recv(jnp.zeros(3), 0)

    f = jax.custom_jvp(body)
    f.defjvp(lambda primals, tangents: (body(*primals), 3 * tangents[0]))
    np.testing.assert_allclose(jit(jax.grad(lambda x: jnp.sum(f(x))))(X), np.full(3, 3.0))


def test_rule_with_symbolic_zeros_that_wants_concrete_values():
    f = jax.custom_jvp(lambda x, y: x * y)

    def rule(primals, tangents):
        (x, y), (t, zero) = primals, tangents
        assert type(zero) is jax.custom_derivatives.SymbolicZero
        if RANK == 0:
            notoken.send(t, 1)
            return x * y, t * y
        return x * y, (t + received(t)) * y

    f.defjvp(rule, symbolic_zeros=True)
    actual = jax.grad(lambda x: jnp.sum(f(x, 2.0)))(X)
    np.testing.assert_allclose(actual, np.full(3, 4.0 if RANK == 0 else 2.0))

    g = jax.custom_jvp(lambda x: x)
    g.defjvps(lambda t, y, x: 2 * t if x[0] > 0 else t)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(g(x)))(X), np.full(3, 2.0))
