"""maxloc and minloc over ranks: exact values, exact indices, and a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from mpi4py import MPI
from reference import DTYPES, RANK, SIZE, assert_equal, enable_x64, kind
from values_on_devices import EIGHT_BITS, FLOATS, INTEGERS, operands

import mpi4jax
from mpi4jax import notoken

NAMES = [n for n in ("bool", *INTEGERS, *FLOATS, *EIGHT_BITS) if n in DTYPES]


def model(name, xs, indices):
    """Per element, Python's numbers: NaN first, then the extremum, then the lowest index."""
    sign = 1 if name == "maxloc" else -1

    def key(value):
        value = float(value) if kind(xs.dtype) == "f" else int(value)
        return (value != value, 0 if value != value else sign * value)

    values, places = [], []
    for column, where in zip(xs.T, indices.T, strict=True):
        best = max(map(key, column))
        ties = [r for r, value in enumerate(column) if key(value) == best]
        values.append(column[ties[0]])
        places.append(min(where[r] for r in ties))
    return np.array(values, xs.dtype), np.array(places)


@pytest.mark.parametrize("name", ["maxloc", "minloc"])
@pytest.mark.parametrize("dtype", NAMES)
def test_values_and_indices(dtype, name):
    xs = operands(dtype, SIZE)
    rng = np.random.default_rng(1)
    indices = 2**24 + 1 + 2 * rng.permuted(np.tile(np.arange(SIZE)[:, None], xs.shape[1]), axis=0)
    expected, places = model(name, xs, indices)
    index_dtype = np.dtype(np.int32 if name == "maxloc" else np.uint64)
    with enable_x64(True):
        f = jax.jit(getattr(notoken, name))
        y, index = f(jnp.asarray(xs[RANK]), indices[RANK].astype(index_dtype))
    assert_equal(index, places.astype(index_dtype), what=dtype)
    assert y.dtype == xs.dtype
    np.testing.assert_array_equal(*(np.asarray(v).astype(np.float64) for v in (y, expected)))


def test_pairs_of_float32_cannot_hold_such_indices():
    index = 2**24 + 1 + 2 * RANK
    pair = notoken.allreduce(jnp.array([float(RANK), index]), MPI.MAXLOC)
    value, exact = notoken.maxloc(float(RANK), index)
    assert int(exact) == 2**24 + 1 + 2 * (SIZE - 1) != int(pair[1])
    assert float(value) == SIZE - 1
    (_, with_token), _ = mpi4jax.maxloc(float(RANK), index)
    assert int(with_token) == int(exact)


def test_the_largest_index_and_scalars():
    most = np.iinfo(np.int32).max
    value, index = notoken.minloc(np.float32(np.nan), most - RANK)
    assert np.isnan(value)
    assert int(index) == most - (SIZE - 1)
    value, index = notoken.maxloc(RANK == SIZE - 1, np.uint8(255 - RANK))
    assert bool(value)
    assert (int(index), index.dtype) == (256 - SIZE, np.uint8)


def test_transformations():
    x = jnp.asarray(np.random.default_rng(RANK).normal(size=(4, 3)), np.float32)
    every = np.stack([np.random.default_rng(r).normal(size=(4, 3)) for r in range(SIZE)])
    winner = every.astype(np.float32).argmax(axis=0)
    value, index = jax.vmap(lambda x: notoken.maxloc(x, RANK))(x)
    assert_equal(index, winner.astype(np.int32))
    f = lambda x: notoken.maxloc(x, RANK)[0] ** 2
    y, gradient = jax.value_and_grad(lambda x: f(x).sum())(x)
    assert_equal(gradient, np.where(winner == RANK, 2 * value, 0).astype(np.float32))
    del y
    check_grads(f, (x,), order=1, modes=["fwd"], atol=1e-2, rtol=1e-2)


def test_errors():
    with pytest.raises(TypeError, match="maxloc: argument 'x' must have ordered values, got compl"):
        notoken.maxloc(1j, 0)
    with pytest.raises(TypeError, match="minloc: argument 'index' must be of integers, got float"):
        notoken.minloc(1.0, 2.0)
    with pytest.raises(ValueError, match=r"maxloc: argument 'index'.*expected \(2,\), got \(3,\)"):
        notoken.maxloc(np.ones(2), np.arange(3))
    with pytest.raises(ValueError, match="do not fit into int32; set JAX_ENABLE_X64"):
        notoken.maxloc(1.0, np.int64(2**40))
