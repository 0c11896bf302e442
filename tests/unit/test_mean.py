"""The mean over more ranks than a small float can count."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import mpi4jax
from mpi4jax._compile.lowering import mean_of_sum


@pytest.mark.parametrize(
    "dtype, size", [("bfloat16", 257), ("float16", 2049), ("float8_e5m2", 9), ("float32", 3)]
)
def test_mean_of_many_ranks(dtype, size):
    total = jnp.full(2, 8, dtype)
    mean = mean_of_sum(total, size)
    np.testing.assert_array_equal(mean, np.full(2, np.float32(8) / size).astype(mean.dtype))
    assert mean.dtype == total.dtype


def test_it_is_copied_and_pickled():
    mean = mpi4jax.MEAN
    assert pickle.loads(pickle.dumps(mean)) is copy.deepcopy({"op": mean})["op"] is mean
