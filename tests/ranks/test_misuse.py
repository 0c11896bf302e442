"""Warnings of what was hardly meant, and none of what was."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from table import REDUCING, good

import mpi4jax
from mpi4jax import notoken

rank = MPI.COMM_WORLD.rank
x = jnp.ones(3)


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", REDUCING)
def test_a_result_that_is_not_used(name):
    arguments = good(name)
    x = arguments.pop("x")

    @mpi4jax.jit
    def f(x):
        getattr(notoken, name)(x, **arguments)
        return x

    if name == "reduce" and rank != 0:
        f(x)
        return
    with pytest.warns(UserWarning, match=rf"test_misuse.py:\d+: the result of {name} is not used"):
        f(x)


def test_results_that_are_used_or_need_not_be():
    @mpi4jax.jit
    def f(x):
        notoken.bcast(x, 0)
        y = notoken.allreduce(x, MPI.SUM)
        return jax.lax.cond(x[0] > 0, lambda: y, lambda: x)

    f(x)
    mpi4jax.jit(jax.grad(lambda x: notoken.allreduce(x, MPI.SUM)))(1.0)  # drops the sum
