"""What else JAX has, where ranks communicate. With `jax.jit`: `mpi4jax.jit` is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import RANK, SIZE, assert_equal

import mpi4jax
from mpi4jax import notoken


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def test_disable_jit():
    @jax.jit
    def f(x):
        if x > 0:  # concrete, without jit
            return total(x)
        return x

    with jax.disable_jit():
        assert float(f(jnp.float32(2))) == 2 * SIZE
        assert float(lax.fori_loop(0, 2, lambda i, x: total(x), jnp.float32(1))) == SIZE**2
        y, _token = mpi4jax.allreduce(jnp.arange(3.0), MPI.SUM)
        assert_equal(y, np.arange(3, dtype=np.float32) * SIZE)
        assert_equal(jax.vmap(total)(jnp.ones(2)), np.full(2, SIZE, np.float32))
        assert_equal(notoken.bcast({"a": jnp.ones(2)}, 0)["a"], np.ones(2, np.float32))
        lines = notoken.Layout((SIZE, 4), {0: SIZE})
        y = notoken.fft.fftn(jnp.ones((1, 4)), lines, axes=(1,))
        assert_equal(y, np.array([[4, 0, 0, 0]], np.complex64))


def test_errors_of_the_function_come_through():
    class Mine(Exception):
        pass

    @jax.jit
    def f(x):
        total(x)
        raise Mine("here")

    for _ in range(2):
        with pytest.raises(Mine, match="here"):
            f(jnp.ones(3))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: total(x) if total(x) > 0 else x)(1.0)
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


def test_debug_callbacks_and_other_effects():
    """Effects of others beside ours, ordered ones included."""
    seen = []

    @jax.jit
    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x, ordered=True)
        y = total(x)
        jax.debug.callback(lambda v: seen.append(float(v)), y, ordered=True)
        z = jax.pure_callback(lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct((), jnp.float32), y)
        return total(z)

    assert float(f(jnp.float32(1))) == (SIZE + 1) * SIZE
    jax.effects_barrier()
    assert seen == [1, SIZE]


def test_arrays_whose_type_says_how_they_are_sharded():
    if jax.version.__version_info__ < (0, 8):
        pytest.skip("up to 0.7, JAX cannot transpose a reshard to another mesh")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        x = jax.device_put(jnp.arange(3.0) + RANK, sharding)

        def loss(x):
            y, _ = lax.scan(lambda c, _: (total(c) / SIZE, None), x, None, length=2)
            return (y**2).sum() + notoken.allgather(x).sum()

        mean = np.arange(3) + (SIZE - 1) / 2
        gradient = jax.jit(jax.grad(loss))(x)
        assert gradient.sharding.spec == sharding.spec
        np.testing.assert_allclose(gradient, 2 * mean / SIZE**2 + 1, rtol=1e-6)


def test_flush_where_transfers_are_forbidden():
    with jax.transfer_guard("disallow"):
        mpi4jax.flush()


def test_flush_in_a_function_that_is_compiled():
    def f(x):
        y = total(x)
        mpi4jax.flush()
        return y

    with pytest.raises(RuntimeError, match="flush: called inside a function that JAX is"):
        jax.jit(f)(jnp.float32(1))
    assert float(f(jnp.float32(1))) == SIZE
    assert float(jax.grad(f)(jnp.float32(1))) == 1


def test_checkify():
    from jax.experimental import checkify

    def f(x):
        y = total(x)
        checkify.check(y > 0, "not positive: {}", y)
        return y

    error, y = jax.jit(checkify.checkify(f))(jnp.float32(1))
    assert error.get() is None
    assert float(y) == SIZE
    error, _ = jax.jit(checkify.checkify(f))(jnp.float32(-1))
    assert "not positive" in error.get()
