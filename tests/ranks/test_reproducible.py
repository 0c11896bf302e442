"""`reproducible_sum`: it has the bits of the exact sum, rounded once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE, dtype_of, enable_x64

import mpi4jax
from mpi4jax import notoken, reproducible_sum

FLOATS = ("float16", "bfloat16", "float32", "float64")
floats = pytest.mark.parametrize("name", FLOATS)


@pytest.fixture(autouse=True)
def _x64(request):
    """What is no float64 is summed with 32 bits alone."""
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    with enable_x64(name in ("float64", "complex128")):
        yield


def numbers(name, count, kind, seed=0):
    rng = np.random.default_rng([seed, count])
    v = rng.normal(size=count)
    if kind == "wide":
        v = v * 2.0 ** rng.integers(-9, 9, count)
    elif kind == "cancelling":
        v = np.concatenate([v[: count // 2], -v[: count // 2], v[: count % 2] * 2.0**-9])
    elif kind == "small":
        v = v * 2.0 ** {"float16": -12, "float64": -980}.get(name, -100)
    elif kind == "large":
        v = v * 2.0 ** {"float16": 3, "float64": 1015}.get(name, 118)
    return v.astype(dtype_of(name))


def cut(v, seed=0):
    """This rank's part of the numbers, in an order and of a size that come by chance."""
    rng = np.random.default_rng([seed, v.size, SIZE])
    cuts = np.sort(rng.integers(0, v.size + 1, SIZE - 1))
    return np.split(rng.permutation(v), cuts)[RANK]


def exact(v):
    """The sum, rounded once."""
    down = 2.0**-200 if v.dtype == np.float64 and v.size and np.abs(v).max() > 1e300 else 1.0
    total = math.fsum(np.asarray(v, np.float64) * down) / down
    narrow = np.asarray(total).astype(v.dtype)
    if v.dtype.itemsize >= 4 or not narrow or not np.isfinite(narrow):
        return narrow
    # Of the neighbors, the nearest: a conversion from float64 may round twice.
    bits = narrow.view(np.int16)
    near = [(bits + k).astype(np.int16).view(v.dtype) for k in (-1, 0, 1)]
    return min(near, key=lambda n: (abs(float(n) - total), int(n.view(np.int16)) & 1))


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes(), (a, b)


@floats
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling", "small", "large"])
def test_bits(name, kind):
    counts = (0, 1, 2, 257, 20_001)
    for seed, count in enumerate(counts if kind == "normal" else counts[-1:]):
        v = numbers(name, count, kind, seed)
        got = jax.jit(reproducible_sum)(cut(v, seed))
        same_bits(got, exact(v))


def test_bits_of_many_numbers():
    """More than what is added before carries are propagated, all of one sign and the same."""
    for v in (np.full(600_000, 1 - 2.0**-24, np.float32), numbers("float32", 10**6, "normal")):
        same_bits(reproducible_sum(np.array_split(v, SIZE)[RANK]), exact(v))


def test_a_small_number_decides_between_two_neighbours():
    """More than half of the last bit, by what only the last bin holds."""
    v = np.array([1, 2.0**-24, 2.0**-60], np.float32)
    same_bits(reproducible_sum(np.array_split(v, SIZE)[RANK]), np.float32(1 + 2.0**-23))


@pytest.mark.parametrize("name", ["float32", "complex128"])
def test_axes_and_trees(name):
    rng = np.random.default_rng(3)
    whole = rng.normal(size=(SIZE, 3, 50, 2)) + 1j * rng.normal(size=(SIZE, 3, 50, 2))
    whole = (whole if "complex" in name else whole.real).astype(name)

    def expected(axes):
        moved = np.moveaxis(whole, axes, range(len(axes)))
        columns = moved.reshape(-1, *moved.shape[len(axes) :])
        parts = [columns.real, columns.imag] if "complex" in name else [columns]
        sums = [np.apply_along_axis(exact, 0, part) for part in parts]
        return (sums[0] + 1j * sums[1] if "complex" in name else sums[0]).astype(name)

    mine = {"a": whole[RANK], "n": np.full((3, 2), RANK, np.int16)}
    for axis, axes in ((1, (0, 2)), (-2, (0, 2)), ((), (0,)), ((0, 1), (0, 1, 2))):
        same_bits(reproducible_sum(mine["a"], axis=axis), expected(axes))
    out = reproducible_sum(mine, axis=0)
    same_bits(out["a"], expected((0, 1)))
    same_bits(out["n"], notoken.allreduce(jnp.sum(mine["n"], 0)))
    batched = jax.vmap(lambda v: reproducible_sum(v, axis=0), in_axes=1)(mine["a"])
    same_bits(batched, expected((0, 1)))


@floats
def test_what_is_not_finite(name):
    for special, expected in (
        ([np.inf], np.inf),
        ([-np.inf], -np.inf),
        ([np.inf, -np.inf], np.nan),
        ([np.nan], np.nan),
        ([-np.nan, np.inf], np.nan),
        ([-0.0, 0.0], 0.0),
    ):
        mine = np.ones(5000, dtype_of(name)) * (expected != 0)
        if RANK == SIZE - 1:
            mine[70 : 70 + len(special)] = special
        total = np.asarray(reproducible_sum(mine), np.float64)
        np.testing.assert_array_equal(total, expected)
        assert not (expected == 0 and np.signbit(total))


def test_too_large_a_sum_is_infinite():
    most = np.finfo(np.float32).max
    assert np.isinf(reproducible_sum(np.full(2, most, np.float32)))
    mine = np.array([most, most, -most, -most, 2.0**100], np.float32)
    assert reproducible_sum(mine) == SIZE * np.float32(2.0**100)


def test_derivatives():
    """They are the derivatives of an allreduce; in loops, and under checkpoint."""
    x, t = numbers("float32", 6, "normal"), np.arange(6, dtype=np.float32)
    f = lambda x: reproducible_sum(x) ** 2
    total = float(reproducible_sum(x))
    _, tangent = jax.jvp(jax.jit(f), (x,), (t,))
    np.testing.assert_allclose(tangent, 2 * total * 15 * SIZE, rtol=1e-5)
    for g in (f, jax.checkpoint(f)):
        np.testing.assert_allclose(jax.grad(g)(x), np.full(6, 2 * total), rtol=1e-6)
    loop = lambda x: jax.lax.fori_loop(0, 2, lambda _, v: v + f(v) / 100, x).sum()
    plain = lambda x: notoken.allreduce(jnp.sum(x)) ** 2
    other = lambda x: jax.lax.fori_loop(0, 2, lambda _, v: v + plain(v) / 100, x).sum()
    np.testing.assert_allclose(jax.grad(loop)(x), jax.grad(other)(x), rtol=1e-4)
    z = (x + 1j * t).astype(np.complex64)
    square = lambda z: jnp.abs(reproducible_sum(z)) ** 2
    other = lambda z: jnp.abs(notoken.allreduce(jnp.sum(z))) ** 2
    np.testing.assert_allclose(jax.grad(square)(z), jax.grad(other)(z), rtol=1e-5)


def test_arguments():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^reproducible_sum: argument 'axis' names axis 2, which"):
        reproducible_sum(x, axis=2)
    with pytest.raises(ValueError, match="'axis' names one axis twice"):
        reproducible_sum(x, axis=(0, -2))
    assert reproducible_sum({}) == {}
    assert reproducible_sum(x, comm=MPI.COMM_SELF) == 6
    assert reproducible_sum(x, comm=COMM) == 6 * SIZE
    assert notoken.reproducible_sum is mpi4jax.reproducible_sum
