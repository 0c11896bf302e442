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


def test_what_nccl_has_is_not_converted():
    for reduction, dtype in [("SUM", np.float32), ("MAX", np.int32), ("LOR", np.bool_)]:
        assert reductions.converted(reduction, dtype, 2) is None
    for reduction, dtype in [("BAND", np.int32), ("PROD", np.complex64), ("MAXLOC", np.float32)]:
        assert reductions.converted(reduction, dtype, 2) is None
    assert reductions.converted("LOR", np.int32, 1) is None
