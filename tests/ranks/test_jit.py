"""What `jax.jit` offers, of functions that communicate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, assert_equal

import mpi4jax
from mpi4jax import notoken


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def test_keys_and_weak_types():
    """What stands around the program keeps the types of arguments and results."""
    f = jax.jit(lambda key, w: (notoken.bcast(key, 0), total(w), w))
    key, y, w = f(jax.random.key(RANK), 2.0)
    assert jax.random.key_impl(key) == jax.random.key_impl(jax.random.key(0))
    assert_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))
    assert float(y) == 2 * SIZE
    assert w.weak_type


def test_it_is_jax_jit():
    assert mpi4jax.jit is notoken.jit is jax.jit


def test_ahead_of_time():
    f = jax.jit(lambda x, n: total(x) * n, static_argnums=1)
    compiled = f.lower(jnp.ones(3), 2).compile()
    for i in range(4):
        assert_equal(compiled(np.full(3, i, np.float32)), np.full(3, 2 * i * SIZE, np.float32))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert_equal(f.lower(shape, 3).compile()(jnp.ones(2)), np.full(2, 3 * SIZE, np.float32))
    assert "mpi4jax_allreduce" in f.lower(shape, 3).as_text()


def test_donation():
    @functools.partial(jax.jit, donate_argnames="x")
    def step(x, y):
        return notoken.sendrecv(x, x, LEFT, RIGHT), total(y)

    x, y = jnp.full(100, RANK, jnp.float32), jnp.ones(100)
    for i in range(1, 4):
        old = x
        x, z = step(x=x, y=y)
        assert old.is_deleted()
        assert not y.is_deleted()
        assert_equal(x, np.full(100, (RANK - i) % SIZE, np.float32))
        assert_equal(z, np.full(100, SIZE, np.float32))
