"""An op returns before it has ended exactly where there is much to compute beside it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mpi4py import MPI
from reference import marks

from mpi4jax import _detached, notoken

x = jnp.ones(16)
large = jnp.ones((400, 400))  # 1.28e8 operations a product


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def marked(f, *args):
    return marks(_detached.mark(jax.make_jaxpr(f)(*args)), "detached")


def scanned(f, x):
    return lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0]


def several(x, m):
    y = total(x)
    n = m @ m
    return total(y * 2), total(n), m @ m.T


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        pytest.param(lambda x, m: (total(x), m @ m), [True], id="beside a product"),
        pytest.param(lambda x, m: (m @ m, total(x)), [True], id="after a product"),
        pytest.param(lambda x, m: (total(x), m[:9] @ m), [False], id="beside a small one"),
        pytest.param(lambda x, m: (total(x), m + 1), [False], id="beside a sum"),
        pytest.param(lambda x, m: total(x)[0] * m @ m, [False], id="needed"),
        pytest.param(lambda x, m: total((m @ m)[0]), [False], id="needing"),
        pytest.param(several, [True, True, True], id="several"),
        pytest.param(
            lambda x, m: (
                total(x),
                scanned(lambda c: c[:100, :100] @ c[:100, :100], m[:100, :100]),
            ),
            [False],
            id="beside a short loop",
        ),
        pytest.param(
            lambda x, m: (total(x), scanned(lambda c: c @ c, m[:300, :300])),
            [True],
            id="beside a loop",
        ),
        pytest.param(lambda x, m: (scanned(total, x), m @ m), [False], id="in a loop"),
        pytest.param(
            lambda x, m: scanned(lambda c: (total(c[0]), c[1] @ c[1]), (x, m)),
            [True],
            id="in a loop with a product",
        ),
        pytest.param(lambda x, m: (jax.jit(total)(x), m @ m), [True], id="in a call"),
        pytest.param(
            lambda x, m: (lax.cond(x[0] > 0, total, lambda x: x, x), m @ m),
            [False],
            id="in a branch",
        ),
        pytest.param(
            lambda x, m: lax.cond(x[0] > 0, lambda: (total(x), m @ m), lambda: (x, m)),
            [True],
            id="in a branch with a product",
        ),
        pytest.param(
            lambda x, m: (total(x), jnp.linalg.cholesky(m)), [False], id="beside a factorization"
        ),
        pytest.param(
            lambda x, m: (total(x), jnp.linalg.svd(m)), [True], id="beside an expensive one"
        ),
    ],
)
def test_mark(f, expected):
    assert marked(f, x, large) == expected


def test_functions_of_the_users_stay_in_their_thread():
    op = MPI.Op.Create(lambda a, b, dtype: None, commute=True)
    assert marked(lambda x, m: (notoken.allreduce(x, op), m @ m), x, large) == [False]
    op.Free()


def test_a_function_of_many_equations():
    """Sets of equations are small, and the pass does not call itself for each."""

    def f(x, m):
        for _ in range(300):
            x = total(x) + 1
            m = m @ m
        return x, m

    assert marked(f, x, large) == [True] * 300


def test_the_setting(monkeypatch):
    monkeypatch.setenv("MPI4JAX_DETACH", "0")
    assert marked(lambda x, m: (total(x), m @ m), x, large) == [False]
    monkeypatch.setenv("MPI4JAX_DETACH", "perhaps")
    with pytest.raises(ValueError, match="MPI4JAX_DETACH=perhaps is not understood"):
        marked(lambda x, m: (total(x), m @ m), x, large)


def test_programs_say_so():
    text = jax.jit(lambda x, m: (total(x), m @ m)).lower(x, large).as_text()
    assert "@mpi4jax_allreduce_detached" in text
    assert text.count("@mpi4jax_after") >= 8
    text = jax.jit(lambda x, m: (total(x), m[:9] @ m)).lower(x, large).as_text()
    assert "@mpi4jax_allreduce_detached" not in text
    assert "@mpi4jax_after" not in text
