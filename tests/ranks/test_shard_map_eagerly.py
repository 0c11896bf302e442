"""`mpi4jax.shard_map` outside of `jit`, where a function is evaluated equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import COMM

import mpi4jax


@pytest.mark.parametrize(
    "result", [2, 2.5, 1j, True, np.float32(3), np.int64(4), np.ones(2)], ids=repr
)
def test_results_are_arrays(result):
    """Also numbers of Python and arrays of NumPy, with the types that they have under `jit`."""
    f = mpi4jax.shard_map(
        lambda x: {"result": result, "size": lax.psum(1, "i"), "array": jnp.asarray(result)},
        mesh=mpi4jax.Mesh(comm=COMM),
        in_specs=P("i"),
        out_specs=P(),
    )
    found, expected = f(jnp.ones(2)), jax.jit(f)(jnp.ones(2))
    for name, y in found.items():
        assert isinstance(y, jax.Array), name
        assert jax.typeof(y) == jax.typeof(expected[name]), name
        np.testing.assert_array_equal(y, expected[name])
