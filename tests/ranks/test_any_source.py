"""Receives from any rank, with any tag, while other ranks are in their backward pass already."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken

RANK = MPI.COMM_WORLD.Get_rank()
X = np.array([2.0, 3.0], np.float32)

pytestmark = pytest.mark.min_ranks(3)


def late(x):
    """x, half a second later."""

    def sleep(zero):
        time.sleep(0.5)
        return zero

    zero = jax.lax.stop_gradient(0 * x[0])
    return x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), zero)


# Rank 1 has what it needs at once, and answers what it got from rank 0. Rank 2 is late.
def receives(x):
    if RANK == 0:
        notoken.send(x, 1)
        return notoken.recv(x) * x
    if RANK == 1:
        return notoken.recv(x, 0) ** 2
    if RANK == 2:
        notoken.send(3 * late(x), 0)
    return 0 * x


def exchanges(x):
    if RANK == 0:
        return notoken.sendrecv(x, x, source=MPI.ANY_SOURCE, dest=1) * x
    return receives(x)


def starts(x):
    """Derivatives of what is started are started too."""
    if RANK == 0:
        mpi4jax.wait(mpi4jax.isend(x, 1))
        return notoken.recv(x) * x
    if RANK == 1:
        return mpi4jax.wait(mpi4jax.irecv(x, 0)) ** 2
    return receives(x)


def receives_in_another_order(x):
    """Rank 0 needs the second of the cotangents that it has set aside first."""
    if RANK == 0:
        notoken.send(x, 1, tag=3)
        notoken.send(2 * x, 1, tag=4)
        return notoken.recv(x) * x
    if RANK == 1:
        later = notoken.recv(x, 0, tag=4)
        return notoken.recv(x, 0, tag=3) ** 2 + later**3
    return receives(x)


def receives_in_a_loop(x):
    if RANK == 0:
        return jax.lax.scan(lambda y, _: (y * notoken.recv(x), None), x, length=2)[0]
    if RANK == 1:
        notoken.send(x, 0)
    if RANK == 2:
        notoken.send(3 * late(x), 0)
    return 0 * x


# The gradient of the sum over the ranks of what they return.
GRADIENT = {
    receives: {0: 3 * X + 2 * X, 2: 3 * X},
    exchanges: {0: 3 * X + 2 * X, 2: 3 * X},
    starts: {0: 3 * X + 2 * X, 2: 3 * X},
    receives_in_another_order: {0: 3 * X + 2 * X + 24 * X**2, 2: 3 * X},
    receives_in_a_loop: {0: 3 * X**2, 1: 3 * X**2, 2: 3 * X**2},
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("f", GRADIENT, ids=lambda f: f.__name__)
def test_cotangents_are_not_taken_for_messages(f, jit):
    g = jit(jax.grad(lambda x: f(x).sum()))
    for _ in range(2):
        ct = g(jnp.asarray(X))
        np.testing.assert_allclose(ct, GRADIENT[f].get(RANK, 0 * X), rtol=1e-6)


@pytest.mark.parametrize("f", GRADIENT, ids=lambda f: f.__name__)
def test_tangents_are_not_taken_for_messages(f):
    _, push = jax.linearize(f, jnp.asarray(X))
    for _ in range(2):
        dy = push(jnp.ones(2))
    expected = {
        receives: {0: 6 * X, 1: 2 * X},
        exchanges: {0: 6 * X, 1: 2 * X},
        starts: {0: 6 * X, 1: 2 * X},
        receives_in_another_order: {0: 6 * X, 1: 2 * X + 24 * X**2},
        receives_in_a_loop: {0: 9 * X**2},
    }
    np.testing.assert_allclose(dy, expected[f].get(RANK, 0 * X), rtol=1e-6)


def sends_to_1(x):
    notoken.send(x, 1, tag=3)
    return x.sum()


def receives_from_0(x):
    return 2 * notoken.recv(x, 0, tag=3).sum()


@pytest.mark.timeout(60)
def test_a_thread_that_receives_from_anybody_takes_nothing_of_another_ones_derivative():
    """It may come upon the message that the other thread is about to wait for."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    x, n = jnp.ones(2), 1000
    if RANK == 0:
        anybody = threading.Thread(target=lambda: [notoken.recv(x) for _ in range(n)])
        anybody.start()
    if RANK < 2:
        gradient = jax.jit(jax.grad(sends_to_1 if RANK == 0 else receives_from_0))
        for i in range(n):
            np.testing.assert_array_equal(gradient(x * i), np.full(2, 3 if RANK == 0 else 0))
    if RANK == 0:
        anybody.join()
    if RANK == 2:
        for _ in range(n):
            notoken.send(x, 0)
