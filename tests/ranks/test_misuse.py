"""Warnings of what was hardly meant, and none of what was."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from table import REDUCING, good

import mpi4jax
from mpi4jax import notoken
from mpi4jax._call import eager

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


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("api", [mpi4jax, notoken])
def test_a_result_that_an_eager_call_drops(api, monkeypatch):
    """Once for each line. What is assigned, passed on or done for a status is not dropped."""
    pair = MPI.COMM_WORLD.Split(rank // 2)
    if pair.size == 1:
        return
    other = 1 - pair.rank

    monkeypatch.setattr(eager, "_lines", {})

    def drop():
        if pair.rank == 0:
            api.send(x, 1, comm=pair)
        else:
            api.recv(x, 0, comm=pair)
        api.sendrecv(x, x, other, other, comm=pair)
        api.bcast(x, 0, comm=pair)
        api.allreduce({"a": x}, comm=pair)

    def keep():
        _ = api.sendrecv(x, x, other, other, comm=pair)
        api.sendrecv(x, x, other, other, comm=pair, status=MPI.Status())
        jax.block_until_ready(api.allreduce(x, comm=pair))
        api.gather(x, 0, comm=pair)
        api.barrier(comm=pair)
        api.assert_equal(x, comm=pair)

    keep()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        drop()
        drop()
    dropped = [str(w.message).partition("the result of ")[2].split()[0] for w in said]
    assert dropped == [*["recv"] * pair.rank, "sendrecv", *["bcast"] * pair.rank, "allreduce"]


def test_results_that_are_used_or_need_not_be():
    @mpi4jax.jit
    def f(x):
        notoken.bcast(x, 0)
        y = notoken.allreduce(x, MPI.SUM)
        return jax.lax.cond(x[0] > 0, lambda: y, lambda: x)

    f(x)
    mpi4jax.jit(jax.grad(lambda x: notoken.allreduce(x, MPI.SUM)))(1.0)  # drops the sum
