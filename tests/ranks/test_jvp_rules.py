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


def received():
    return notoken.recv(jnp.zeros(3), 0)


def both():
    value, tangent = received(), received()
    return lambda t: t * value + tangent


def several():
    return lax.scan(lambda c, _: (c + received(), None), jnp.zeros(3), None, length=2)[0]


def added_twice(r, t):
    return lax.scan(lambda s, _: (s + r, None), t, None, length=2)[0]


# What rank 0 sends of its value and its tangent; what rank 1 makes of it and of its tangent; by how
# much the tangents of both count there.
RULES = {
    "added": (lambda x, t: notoken.send(t, 1), lambda t: t + received(), (1, 1)),
    "subtracted": (lambda x, t: notoken.send(t, 1), lambda t: t - received(), (-1, 1)),
    "scaled": (lambda x, t: notoken.send(t, 1), lambda t: t + 3 * received(), (3, 1)),
    "chosen": (
        lambda x, t: notoken.send(t, 1),
        lambda t: jnp.where(jnp.ones(3, bool), received(), t),
        (1, 0),
    ),
    "alone": (lambda x, t: notoken.send(t, 1), lambda t: received(), (1, 0)),
    "in a jit": (
        lambda x, t: jax.jit(lambda t: notoken.send(t, 1))(t),
        lambda t: jax.jit(lambda t: 2 * (t + received()))(t),
        (2, 2),
    ),
    "in a loop": (
        lambda x, t: [notoken.send(t, 1), notoken.send(t, 1)],
        lambda t: t + several(),
        (2, 1),
    ),
    "added in a loop": (
        lambda x, t: notoken.send(t, 1),
        lambda t: added_twice(received(), t),
        (2, 1),
    ),
    "in a branch": (
        lambda x, t: notoken.send(t, 1),
        lambda t: t + lax.cond(jnp.array([1])[0] > 0, received, lambda: jnp.zeros(3)),
        (1, 1),
    ),
    "a value": (lambda x, t: notoken.send(x, 1), lambda t: t * received(), (0, X)),
    "a value and a tangent": (
        lambda x, t: [notoken.send(x, 1), notoken.send(t, 1)],
        lambda t: both()(t),
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
        return x, makes(t)

    return f, counts


@pytest.fixture
def rule_of_jax(name):
    if name == "added in a loop" and jax.version.__version_info__ < (0, 8):
        pytest.skip("JAX 0.7 transposes no scan that adds a linear constant to what it carries")


@pytest.mark.one_in(5)
@pytest.mark.usefixtures("rule_of_jax")
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


def constant_sent(x, t):
    notoken.send(ZEROS, MPI.PROC_NULL)
    return x, t


def value_and_tangent_at_once(x, t):
    r = notoken.recv(jnp.zeros(3), MPI.PROC_NULL)
    return x + r, t + r


def product_of_two(x, t):
    r, q = (notoken.recv(jnp.zeros(3), MPI.PROC_NULL) for _ in range(2))
    return x, t + r * q


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (constant_sent, "'send' in the rule of a custom_jvp communicates a constant"),
        (value_and_tangent_at_once, "'recv' in the rule of a custom_jvp is used as a value and"),
        (product_of_two, "'mul' in the rule of a custom_jvp is a product of two received values"),
    ],
)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_could_be_either_is_refused(rule, words, jit):
    f = jax.custom_jvp(lambda x: x)
    f.defjvp(lambda primals, tangents: rule(*primals, *tangents))
    with pytest.raises(NotImplementedError, match=rf"test_jvp_rules.py:\d+: {words}"):
        jit(jax.grad(lambda x: jnp.sum(f(x))))(X)


def test_rule_with_symbolic_zeros_that_wants_concrete_values():
    f = jax.custom_jvp(lambda x, y: x * y)

    def rule(primals, tangents):
        (x, y), (t, zero) = primals, tangents
        assert type(zero) is jax.custom_derivatives.SymbolicZero
        if RANK == 0:
            notoken.send(t, 1)
            return x * y, t * y
        return x * y, (t + received()) * y

    f.defjvp(rule, symbolic_zeros=True)
    actual = jax.grad(lambda x: jnp.sum(f(x, 2.0)))(X)
    np.testing.assert_allclose(actual, np.full(3, 4.0 if RANK == 0 else 2.0))

    g = jax.custom_jvp(lambda x: x)
    g.defjvps(lambda t, y, x: 2 * t if x[0] > 0 else t)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(g(x)))(X), np.full(3, 2.0))
