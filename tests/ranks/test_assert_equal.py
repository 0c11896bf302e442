"""`assert_equal`: silent where all ranks have the same value; else all are told where not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reference import DTYPES, RANK, SIZE, Threaded, assert_equal, enable_x64, random_bits

import mpi4jax
from mpi4jax import notoken

LAST = SIZE - 1
JITS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "grad": lambda f: jax.jit(lambda x: jax.vjp(f, x)[0]),
    "checkpoint": lambda f: jax.jit(lambda x: jax.vjp(jax.checkpoint(f), x)[0]),
}
jits = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)


def fails(f, x, what="values"):
    """The words of the error that all ranks get."""

    def run():
        jax.block_until_ready(f(x))
        jax.effects_barrier()

    with pytest.raises(Exception, match=f"assert_equal: ranks have different {what}: ") as caught:
        run()
    return re.search(rf"different {what}: (.*)", str(caught.value))[1].strip()


def others(value):
    """How an error says that all but the last rank have a value."""
    return f"rank 0 has {value!s}" if SIZE == 2 else f"ranks 0-{LAST - 1} have {value!s}"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_of_every_dtype(dtype):
    with enable_x64(True):
        x = random_bits(dtype, (3, 7), seed=1)  # NaNs included
        for f in (notoken.assert_equal, jax.jit(notoken.assert_equal), Threaded().assert_equal):
            assert_equal(f(jnp.asarray(x)), x, bits=True)


@pytest.mark.one_in(5)
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit(dtype):
    with enable_x64(True):
        x = random_bits(dtype, (3, 7), seed=1)
        zero, one = np.array([dtype != "bool" and 0.5, 1]).astype(x.dtype)
        x[1, 2] = one if RANK == LAST else zero
        words = fails(notoken.assert_equal, jnp.asarray(x))
    assert words == f"index (1, 2): {others(zero)}, rank {LAST} has {one!s}"


TREES = {
    "keys": ({"a": 0, "b": 1}, {"b": 0, "c": 1}, "['a'] float32 (2, 2), ['b'] int32 (3)"),
    "order": ([0, 1], [1, 0], "[0] float32 (2, 2), [1] int32 (3)"),
    "size": ([0], [0, 1], "[0] float32 (2, 2)"),
    "shape": (0, 2, "float32 (2, 2)"),
}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", TREES)
@jits
def test_trees(name, jit):
    *trees, words = TREES[name]
    arrays = [jnp.ones((2, 2)), jnp.arange(3), jnp.ones(4)]
    x = jax.tree.map(lambda i: arrays[i], trees[RANK == LAST])
    said = fails(jit(notoken.assert_equal), x, "trees or shapes")
    assert said.startswith(f"{others(words)}, rank {LAST} has "), said


@pytest.mark.min_ranks(2)
@jits
def test_where(jit):
    x = {"a": jnp.zeros((0, 2)), "b": [jnp.arange(3.0), jnp.ones((2, 2))]}
    jit(notoken.assert_equal)(x)
    x["b"][1] = x["b"][1].at[1, 0].add(RANK == LAST)
    words = fails(jit(notoken.assert_equal), x)
    assert words == f"leaf ['b'][1] at index (1, 0): {others(1.0)}, rank {LAST} has 2.0"


@pytest.mark.min_ranks(2)
def test_many_leaves():
    x = [jnp.float32(RANK == LAST)] * 5
    words = fails(notoken.assert_equal, x)
    assert words.startswith(f"leaf [0]: {others(0.0)}, rank {LAST} has 1.0; leaf [1]: ")
    assert words.endswith("; and in 2 more leaves")


def test_nan_is_nan_and_zero_has_a_sign():
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    notoken.assert_equal(nans[RANK % 2])
    if SIZE > 1:
        words = fails(notoken.assert_equal, -jnp.float32(0) if RANK == LAST else jnp.float32(0))
        assert words == f"{others(0.0)}, rank {LAST} has -0.0"


def test_debug_nans():
    with jax.debug_nans(True):
        assert_equal(notoken.assert_equal(np.ones(2, np.float32)), np.ones(2, np.float32))
        notoken.assert_equal(jnp.ones(2, np.complex64))


@pytest.mark.min_ranks(2)
def test_keys_and_batches():
    fails(notoken.assert_equal, jax.random.key(RANK))
    notoken.assert_equal(jax.random.key(0))
    x = jnp.ones((3, 2))
    run = jax.jit(jax.vmap(notoken.assert_equal))
    assert_equal(run(x), np.ones((3, 2), np.float32))
    assert f"rank {LAST} has 2.0" in fails(run, x.at[1, 1].add(RANK == LAST))


def test_derivatives_are_those_of_the_identity():
    y, t = jax.jvp(jax.jit(notoken.assert_equal), (3.0,), (2.0,))
    assert (float(y), float(t)) == (3, 2)
    square = lambda x: notoken.assert_equal(x) ** 2
    assert float(jax.jit(jax.grad(square))(3.0)) == 6
    assert float(jax.jit(jax.grad(jax.checkpoint(square)))(3.0)) == 6


def test_trees_without_leaves():
    assert notoken.assert_equal({"a": ()}) == {"a": ()}
    x, token = mpi4jax.assert_equal(None)
    assert x is None
    assert token.shape == ()
