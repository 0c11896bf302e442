"""An op overwrites its operand exactly where nothing else uses it."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from mpi4py import MPI
from reference import SIZE, assert_equal, marks

from mpi4jax import notoken
from mpi4jax._compile import in_place

x = jnp.arange(64.0)


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def marked(f, *args, donated=None):
    closed = jax.make_jaxpr(f)(*args)
    return in_place.mark(closed, [False] * len(args) if donated is None else donated)


def loop(body, init):
    return lax.fori_loop(0, 3, lambda _, carry: body(carry), init)


def scanned(body, init, **kwargs):
    return lax.scan(lambda c, v: (body(c), None), init, None, length=3, **kwargs)[0]


class Opaque:
    """A function whose constant is an array."""

    constant = jnp.ones(64)  # NumPy's would be copied first, in JAX 0.7

    def __call__(self, x):
        return total(self.constant) + x


@jax.custom_jvp
def custom(x):
    return total(x)


custom.defjvps(lambda t, y, x: total(t))


PROGRAMS = {
    "an argument": (total, [False]),
    "a constant": (Opaque(), [False]),
    "a literal": (lambda x: x + total(jnp.float32(2)), [False]),
    "a value of its own": (lambda x: total(2 * x), [True]),
    "a chain": (lambda x: total(total(2 * x)), [True, True]),
    "also a result": (lambda x: (lambda y: (y, total(y)))(2 * x), [False]),
    "used after": (lambda x: (lambda y: total(y) + y)(2 * x), [False]),
    "used before": (lambda x: (lambda y: (jnp.sum(y), total(y)))(2 * x), [False]),
    "used by two ops": (lambda x: (lambda y: total(y) + total(y))(2 * x), [False, False]),
    "carried": (lambda x: loop(total, x), [True]),
    "carried by a scan": (lambda x: scanned(total, x), [True]),
    "carried twice": (lambda x: loop(lambda c: (total(c[0]), c[0]), (x, x)), [False]),
    "not carried": (lambda x: loop(lambda y: total(x) + y, x), [False]),
    "not carried by a while_loop": (
        lambda x: lax.while_loop(lambda y: y[0] < 9, lambda y: total(x) + y + 1, x),
        [False],
    ),
    "a turn's own": (lambda x: lax.map(total, x.reshape(4, 16)), [True]),
    "in the condition": (
        lambda x: lax.while_loop(lambda y: total(y)[0] < 0, lambda y: total(y), x),
        [False, True],
    ),
    "in a branch": (lambda x: lax.cond(x[0] > 0, total, lambda y: y, 2 * x), [False]),
    "made in a branch": (
        lambda x: lax.cond(x[0] > 0, lambda y: total(2 * y), lambda y: y, x),
        [True],
    ),
    "in a jit, dead outside": (lambda x: jax.jit(total)(2 * x), [True]),
    "in a jit, used outside": (lambda x: (lambda y: jax.jit(total)(y) + y)(2 * x), [False]),
    "in a jit in a loop": (lambda x: loop(jax.jit(total), x), [True]),
    "in a checkpoint": (lambda x: jax.checkpoint(total)(2 * x), [True]),
    "in a custom derivative": (lambda x: custom(2 * x), [True]),
    "a scan over the ranks": (lambda x: notoken.scan(2 * x, MPI.SUM), [True]),
    # MPI libraries take a buffer of their own for it.
    "reduced, on the root": (lambda x: notoken.reduce(2 * x, MPI.SUM, 0), [False]),
    "results of another shape": (lambda x: notoken.allgather(2 * x), [False]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_which(name):
    f, expected = PROGRAMS[name]
    closed = jax.make_jaxpr(f)(x)
    assert not any(marks(closed.jaxpr, "in_place"))
    result = in_place.mark(closed, [False])
    assert marks(result.jaxpr, "in_place") == expected
    assert not any(marks(closed.jaxpr, "in_place"))  # the one that was given is as it was
    for got, want in zip(jax.jit(jaxpr_as_fun(result))(x), jax.tree.leaves(f(x)), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("f", [total, lambda x: loop(total, x)], ids=["a call", "a loop"])
def test_nothing_is_copied_if_it_is_donated(f, monkeypatch):
    def copies():
        text = jax.jit(lambda x: f(x), donate_argnums=0).lower(x).compile().as_text()
        return re.findall(r"f32\[64\]\S* copy\(", text)

    assert not copies()
    # What makes the pass worth its while: if XLA ever does without the copies, so can we.
    monkeypatch.setattr(in_place, "mark", lambda closed, donated: closed)
    assert copies()


def test_an_operand_that_lives_on_is_not_changed():
    """XLA copies what must not be overwritten, whatever it is told."""
    closed = jax.make_jaxpr(lambda x: (lambda y: total(y) + y)(2 * x))(x)
    wrong = [
        e.replace(params={**e.params, "how": e.params["how"]._replace(in_place=True)})
        if e.primitive.name == "mpi4jax_allreduce"
        else e
        for e in closed.jaxpr.eqns
    ]
    result = jax.jit(jaxpr_as_fun(ClosedJaxpr(closed.jaxpr.replace(eqns=wrong), [])))(x)
    assert_equal(result[0], 2 * (SIZE + 1) * x)
