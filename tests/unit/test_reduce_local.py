"""reduce_local against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import DTYPES, FOLDS, SUPPORTED, assert_equal, enable_x64, exact_values, fold

import mpi4jax
from mpi4jax import reduce_local


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(dtype):
    x, y = (exact_values(dtype, (33,), seed) for seed in (1, 2))
    with enable_x64(True):
        for name in FOLDS:
            f = jax.jit(functools.partial(reduce_local, op=getattr(MPI, name)))
            if name in SUPPORTED[dtype]:
                assert_equal(f(jnp.asarray(x), jnp.asarray(y)), fold(name, [x, y]), what=name)
            else:
                with pytest.raises(TypeError, match=f"reduce_local: reduction {name} is not def"):
                    f(jnp.asarray(x), jnp.asarray(y))


@pytest.mark.parametrize("name", ["MAXLOC", "MINLOC"])
def test_location_of_extremum(name):
    nan = np.nan
    x = np.array([[1, 0], [2, 5], [3, 1], [nan, 3], [1, 4], [nan, 2]], np.float32)
    y = np.array([[2, 1], [2, 4], [1, 2], [1, 2], [nan, 1], [nan, 1]], np.float32)
    wins = {"MAXLOC": "yyxxyy", "MINLOC": "xyyxyy"}[name]
    expected = np.stack([{"x": a, "y": b}[w] for w, a, b in zip(wins, x, y, strict=True)])
    got = np.asarray(reduce_local(x, y, getattr(MPI, name)))
    assert got.tobytes() == expected.tobytes()


def test_reductions_of_the_user_in_their_order():
    def minus_twice(inbuf, inoutbuf, datatype):
        a = np.frombuffer(inbuf, np.float32)
        b = np.frombuffer(inoutbuf, np.float32)
        b[:] = a - 2 * b

    op = MPI.Op.Create(minus_twice, commute=False)
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(jax.jit(lambda: reduce_local(x, y, op))(), x - 2)
    np.testing.assert_array_equal(jax.vmap(lambda a, b: reduce_local(a, b, op))(x, y), x - 2)
    with pytest.raises(NotImplementedError, match="reduce_local: a reduction made with"):
        jax.jvp(lambda a: reduce_local(a, y, op), (jnp.asarray(x),), (jnp.asarray(x),))
    with pytest.raises(TypeError, match="reduce_local: mpi4py has no MPI datatype for dtype bf"):
        reduce_local(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), op)
    op.Free()


def test_derivatives_and_pytrees():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    other = {"a": jnp.array([2.0, 2.0]), "b": jnp.array([1.0])}

    def f(x):
        y = reduce_local(x, other, MPI.MAX)
        return jnp.sum(reduce_local(y, y, MPI.PROD)["a"]) + y["b"][0]

    gradient = jax.grad(f)(tree)
    np.testing.assert_array_equal(gradient["a"], [0, 2])
    np.testing.assert_array_equal(gradient["b"], [1])


@pytest.mark.parametrize(
    ("x", "y", "op", "error", "words"),
    [
        (jnp.ones(2), jnp.ones(3), MPI.SUM, ValueError, r"'y' .* float32\[2\], got float32\[3\]"),
        (jnp.ones(2), jnp.ones(2, int), MPI.SUM, ValueError, r"got int32\[2\]"),
        ([jnp.ones(2)], jnp.ones(2), MPI.SUM, ValueError, "structure of 'x'"),
        (jnp.ones(2), jnp.ones(2), mpi4jax.MEAN, TypeError, "over all ranks"),
        (jnp.ones(2), jnp.ones(2), "SUM", TypeError, "'op' must be an mpi4py.MPI.Op"),
        (jnp.ones(3), jnp.ones(3), MPI.MINLOC, ValueError, "reduces pairs"),
    ],
)
def test_errors(x, y, op, error, words):
    with pytest.raises(error, match=f"reduce_local: .*{words}"):
        reduce_local(x, y, op)
