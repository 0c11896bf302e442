"""`mpi4jax.jit` is a drop-in for `jax.jit`."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, assert_equal

import mpi4jax
from mpi4jax import notoken

compilers = pytest.mark.parametrize("jit", [jax.jit, mpi4jax.jit], ids=["jax.jit", "mpi4jax.jit"])


def total(x):
    return notoken.allreduce(x, MPI.SUM)


@compilers
def test_keys_and_weak_types(jit):
    """What stands around the program keeps the types of arguments and results."""
    f = jit(lambda key, w: (notoken.bcast(key, 0), total(w), w))
    key, y, w = f(jax.random.key(RANK), 2.0)
    assert jax.random.key_impl(key) == jax.random.key_impl(jax.random.key(0))
    assert_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))
    assert float(y) == 2 * SIZE
    assert w.weak_type


def test_it_is_jax_jit():
    """So it can be copied, inspected ... as far as a function of `jax.jit` can."""
    assert type(mpi4jax.jit(total)) is type(jax.jit(total))


@pytest.mark.parametrize("f", [total, lambda x: x], ids=["named", "lambda"])
def test_pickling(f):
    """With `check` too, what comes of it is what comes of a function of `jax.jit`."""

    def outcome(jitted):
        try:
            return float(pickle.loads(pickle.dumps(jitted))(jnp.float32(1)))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            return type(error), str(error)

    assert outcome(mpi4jax.jit(f, check=True)) == outcome(jax.jit(f))
    assert outcome(mpi4jax.jit(f)) == outcome(jax.jit(f))


MINE = RANK == 0  # what this rank does differently
RING = MPI.COMM_WORLD.Create_cart([SIZE], periods=[True])
X = jnp.ones(6, np.float32)


def exchanged(x):
    return notoken.alltoall(jnp.ones((SIZE, 1), x.dtype) * x)


DIFFERENT = {
    "operation": lambda x: (notoken.scan if MINE else notoken.allreduce)(x, MPI.SUM),
    "root": lambda x: notoken.bcast(x, int(MINE)),
    "reduction": lambda x: notoken.allreduce(x, MPI.MAX if MINE else MPI.SUM),
    "dtype": lambda x: notoken.allreduce(x.astype(np.int32) if MINE else x, MPI.SUM),
    "count": lambda x: notoken.allreduce(x[int(MINE) :], MPI.SUM),
    "block": lambda x: notoken.alltoall(jnp.ones((SIZE, 1 + MINE))),
    "width": lambda x: notoken.halo_exchange(x, RING, width=1 + MINE),
    "order": lambda x: [total(v) for v in ((x, x[:2]) if MINE else (x[:2], x))],
    "one more": lambda x: [total(x) for _ in range(1 + MINE)],
    "length": lambda x: lax.scan(lambda c, _: (total(c), None), x, length=1 + MINE),
    "loop": lambda x: lax.scan(lambda c, _: (total(c), None), x, length=1) if MINE else total(x),
    "branch": lambda x: total(lax.cond(x[0] > 0, total if MINE else abs, abs, x)),
    "started": lambda x: mpi4jax.wait(mpi4jax.iallreduce(x)) if MINE else total(x),
    "derivative": lambda x: (jax.grad(lambda x: exchanged(x).sum()) if MINE else exchanged)(x),
}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("f", DIFFERENT.values(), ids=DIFFERENT)
def test_schedules_that_differ(f):
    with pytest.raises(RuntimeError, match=r"the ranks' versions of .* differ on .*, at step \d"):
        mpi4jax.jit(f, check=True)(X)


@compilers
def test_ahead_of_time(jit):
    f = jit(lambda x, n: total(x) * n, static_argnums=1)
    compiled = f.lower(jnp.ones(3), 2).compile()
    for i in range(4):
        assert_equal(compiled(np.full(3, i, np.float32)), np.full(3, 2 * i * SIZE, np.float32))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert_equal(f.lower(shape, 3).compile()(jnp.ones(2)), np.full(2, 3 * SIZE, np.float32))
    assert "mpi4jax_allreduce" in f.lower(shape, 3).as_text()


@compilers
def test_donation(jit):
    @functools.partial(jit, donate_argnames="x")
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
