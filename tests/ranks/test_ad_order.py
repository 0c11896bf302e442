"""Order and safety of differentiated communication.

Programs whose ranks do different things: what is perturbed on one rank is a constant on another,
a result is dropped, a loss depends on one rank only. Every one of them has to communicate in
program order, backward in the reverse order, once, on both ranks. If it does not, it waits
forever: conftest.py ends it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

from mpi4jax import notoken

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
OTHER = 1 - RANK
CONSTANT = np.zeros(3, np.float32)

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(60)]


def stage(x, k):
    return jnp.sin(x * k) + x


def there_and_back(x):
    """What the two ranks compute together."""
    return jnp.sum(stage(stage(stage(x, 1.0), 2.0), 3.0))


# ---- Programs: rank 0 has the loss, rank 1 returns a constant


def no_arguments(x):
    """Functions without any argument receive."""
    if RANK == 0:
        notoken.send(stage(x, 1.0), 1, tag=1)
        return jnp.sum(stage(jax.jit(lambda: notoken.recv(CONSTANT, 1, tag=2))(), 3.0))
    y = jax.jit(jax.checkpoint(lambda: notoken.recv(CONSTANT, 0, tag=1)))()
    notoken.send(stage(y, 2.0), 0, tag=2)
    return jnp.float32(0)


def integers_beside(x):
    """An integer message, which has no derivative, between two that have one."""
    number = jnp.arange(2)
    if RANK == 0:
        notoken.send(stage(x, 1.0), 1, tag=1)
        notoken.send(number, 1, tag=7)
        return jnp.sum(stage(notoken.recv(CONSTANT, 1, tag=2), 3.0))
    y = notoken.recv(CONSTANT, 0, tag=1)
    two = notoken.recv(number, 0, tag=7)[1] * 2.0
    notoken.send(stage(y, two), 0, tag=2)
    return jnp.float32(0)


def zero_on_one_rank(x):
    """The cotangent of what rank 1 has sent is a symbolic zero on rank 0."""
    y = notoken.sendrecv(stage(x, 1.0), CONSTANT, OTHER, OTHER)
    if RANK == 0:
        z = notoken.sendrecv(x, CONSTANT, OTHER, OTHER)
        return jnp.sum(z) * 0 + there_and_back(x)
    notoken.sendrecv(stage(y, 2.0), CONSTANT, OTHER, OTHER)
    return jnp.float32(0)


def stopped(x):
    """stop_gradient on one rank only."""
    y = notoken.sendrecv(lax.stop_gradient(x) if RANK == 1 else x, CONSTANT, OTHER, OTHER)
    y = notoken.allreduce(lax.stop_gradient(y) if RANK == 1 else y, MPI.SUM)
    return there_and_back(x) + 0 * jnp.sum(y) if RANK == 0 else jnp.float32(0)


def scan_without_carry(x):
    """On rank 1 the loop has neither operands nor results."""
    if RANK == 0:
        notoken.send(stage(x, 1.0), 1, tag=1)
        step = lambda y, _: (notoken.recv(CONSTANT, 1, tag=2), None)
        return jnp.sum(stage(lax.scan(step, x, None, length=1)[0], 3.0))

    def step(c, _):
        notoken.send(stage(notoken.recv(CONSTANT, 0, tag=1), 2.0), 0, tag=2)
        return c, None

    lax.scan(step, None, None, length=1)
    return jnp.float32(0)


ONES = jnp.ones(3)


X = jnp.array([0.1, 0.2, 0.3])
jvp = lambda f: lambda x: jax.jvp(f, (x,), (ONES,))[1]
hvp = lambda f: jvp(jax.grad(f))


def vhp(f):
    """Reverse over reverse."""
    return lambda x: jax.vjp(jax.grad(f), x)[1](ONES)[0]


def vmapped(f):
    return lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x, x]))[2]


# What is done to a program, and what the result is called on the reference.
CASES = [
    (no_arguments, jax.grad, jax.grad),
    (no_arguments, lambda f: jax.jit(jvp(f)), jvp),
    (integers_beside, lambda f: jax.jit(hvp(f)), hvp),
    (integers_beside, lambda f: jax.jit(vmapped(f)), jax.grad),
    (zero_on_one_rank, lambda f: jax.jit(jax.jacrev(f)), jax.grad),
    (zero_on_one_rank, lambda f: jax.jit(vhp(f)), vhp),
    (stopped, lambda f: jax.grad(jax.jit(jax.checkpoint(f))), jax.grad),
    (stopped, lambda f: lambda x: jax.linearize(f, x)[1](ONES), jvp),
    (scan_without_carry, lambda f: jax.jit(jax.grad(jax.checkpoint(f))), jax.grad),
    (scan_without_carry, lambda f: jax.jit(vhp(f)), vhp),
]


@pytest.mark.parametrize("f, transform, on_reference", CASES, ids=lambda f: f.__name__)
def test_asymmetric_program(f, transform, on_reference):
    actual = transform(f)(X)
    if RANK == 0:
        np.testing.assert_allclose(actual, on_reference(there_and_back)(X), rtol=1e-4)
    else:
        np.testing.assert_array_equal(actual, np.zeros(np.shape(actual)))


@pytest.mark.parametrize("taken", [(True, False), (True, True)], ids=str)
def test_gradient_below_vmap_of_a_branch_that_is_not_taken(taken):
    """Both branches communicate, there and back, though nothing is kept of one not taken."""

    def exchange(x):
        if RANK == 0:
            notoken.send(x, 1)
            return notoken.recv(np.zeros(x.shape, x.dtype), 1)  # with any tag
        y = notoken.recv(np.zeros(x.shape, x.dtype), 0)
        notoken.send(x, 0)
        return y

    def f(x, take):
        both = lambda x: exchange(exchange(x))
        return jnp.sum(lax.cond(take, lambda x: exchange(jnp.sin(x)), both, x))

    x = jnp.linspace(0, 1, 6).reshape(2, 3)
    expected = np.where(np.array(taken)[:, None], np.cos(x), 1)
    actual = jax.jit(jax.vmap(jax.grad(f)))(x, jnp.array(taken))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_rule_of_the_users_with_a_literal_argument():
    """A jaxpr has Python numbers among its operands, which are no arrays to be tied."""

    @jax.custom_vjp
    def f(x, flag, factor):
        return notoken.sendrecv(x, x, OTHER, OTHER)

    f.defvjp(
        lambda x, flag, factor: (f(x, flag, factor), None),
        lambda _, c: (notoken.sendrecv(c, c, OTHER, OTHER), None, None),
    )
    loss = lambda x: jnp.sum((RANK + 1) * jax.jit(lambda x: f(x, True, 2.0))(x))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X), np.full(3, OTHER + 1, np.float32))
