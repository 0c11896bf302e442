"""Reductions that NCCL lacks, by others: extrema of floats by extrema of integers, for instance."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpi4jax._compile import reductions

SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, 1e-5, -1e-5, 3e38, -3e38)
FOLD = {"MAX": jnp.maximum, "MIN": jnp.minimum, "SUM": jnp.add, "PROD": jnp.multiply}
EXACT = {"MAX": jax.lax.max, "MIN": jax.lax.min}


def bits(x):
    """With one NaN for all, whose payload nothing promises."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype(np.float64)), 0x7FFF, x.view(f"u{x.dtype.itemsize}"))


@pytest.mark.parametrize("reduction", ["MAX", "MIN"])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_extrema_of_special_values_are_those_of_jax(reduction, dtype):
    with np.errstate(all="ignore"):
        pairs = np.array([*itertools.product(SPECIAL, repeat=2)]).astype(dtype)
    how = reductions.converted(reduction, dtype, 2)
    assert how.dtype == np.int32
    a, b = jnp.asarray(pairs.T)
    y = how.back(FOLD[how.reduction](how.to(a), how.to(b)))
    np.testing.assert_array_equal(bits(y), bits(EXACT[reduction](a, b)))
    np.testing.assert_array_equal(bits(how.back(how.to(a))), bits(a))


@pytest.mark.parametrize("reduction", FOLD)
@pytest.mark.parametrize("dtype", [np.int16, np.uint16])
def test_narrow_integers_wrap(reduction, dtype):
    limits = np.iinfo(dtype)
    values = np.array([limits.min, limits.max, 0, 1, 255, 256, limits.max - 1], dtype)
    pairs = np.array([*itertools.product(values, repeat=2)])
    how = reductions.converted(reduction, dtype, 2)
    a, b = jnp.asarray(pairs.T)
    y = how.back(FOLD[how.reduction](how.to(a), how.to(b)))
    np.testing.assert_array_equal(y, FOLD[reduction](a, b))
    assert y.dtype == dtype


LOGICAL = {
    "LAND": lambda values: np.logical_and.reduce(values),
    "LOR": lambda values: np.logical_or.reduce(values),
    "LXOR": lambda values: np.logical_xor.reduce(values),
}
# The blocks of three ranks, with each triple of zero, one, and another number.
TRIPLES = np.array([*itertools.product([0, 1, 6], repeat=3)], np.int32).T


@pytest.mark.parametrize("reduction", LOGICAL)
def test_logical_reductions_of_integers(reduction):
    how = reductions.converted(reduction, np.int32, 3)
    a, b, c = map(how.to, TRIPLES)
    y = how.back(FOLD[how.reduction](FOLD[how.reduction](a, b), c))
    np.testing.assert_array_equal(y, LOGICAL[reduction](TRIPLES))


@pytest.mark.parametrize("reduction", [*LOGICAL, "SUM", "MAX"])
@pytest.mark.parametrize("is_exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefix_reductions_of_gathered_blocks(reduction, is_exclusive, reverse):
    model = LOGICAL.get(reduction) or {"SUM": np.add, "MAX": np.maximum}[reduction].reduce
    for rank in range(3):
        own = slice(rank + is_exclusive, 3) if reverse else slice(0, rank + 1 - is_exclusive)
        blocks = jnp.asarray(TRIPLES)
        y = reductions.folded(reduction, blocks, rank, is_exclusive=is_exclusive, reverse=reverse)
        if reduction in LOGICAL and len(TRIPLES[own]) == 1:
            expected = TRIPLES[own][0]  # of one block, MPI leaves it unchanged
        else:
            expected = model(TRIPLES[own]) if len(TRIPLES[own]) else np.zeros_like(TRIPLES[0])
        np.testing.assert_array_equal(y, expected)


def test_what_nccl_has_is_not_converted():
    for reduction, dtype in [("SUM", np.float32), ("MAX", np.int32), ("LOR", np.bool_)]:
        assert reductions.converted(reduction, dtype, 2) is None
    for reduction, dtype in [("BAND", np.int32), ("PROD", np.complex64), ("MAXLOC", np.float32)]:
        assert reductions.converted(reduction, dtype, 2) is None
    assert reductions.converted("LOR", np.int32, 1) is None
