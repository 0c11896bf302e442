"""Warnings of what was hardly meant, and none of what was."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
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


def test_a_batched_condition_of_a_loop():
    def until(bound):
        def step(x):
            return notoken.allreduce(x, MPI.MAX) / 2

        return jax.lax.while_loop(lambda x: x > bound, lambda x: step(x) + 0 * bound + x / 4, 8.0)

    bounds = jnp.array([1.0, 2.0, 4.0])
    line = r"test_misuse.py:\d+: allreduce is in a while_loop under vmap whose condition differs"
    with pytest.warns(UserWarning, match=line):
        batch = mpi4jax.jit(jax.vmap(until))(bounds)
    alone = jnp.stack([until(bound) for bound in bounds])
    assert (batch == alone).all()


def test_a_condition_of_a_loop_that_all_ranks_have_in_common():
    @jax.jit
    def residual(x):
        return notoken.allreduce(jnp.vdot(x, x), MPI.SUM)

    def solve(x):
        def step(state):
            k, x, _ = state
            return k + 1, x / 2, residual(x / 2)

        def again(state):
            return (state[0] < 50) & (state[2] > 1e-3)

        return jax.lax.while_loop(again, step, (0, x, residual(x)))[1]

    batch = mpi4jax.jit(jax.vmap(solve))(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    assert (abs(batch) < 0.1).all()
    # The same number of rounds for all: nothing to warn of.
    jax.vmap(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: notoken.scan(x, MPI.MAX), x))(x)


# ---- `jax.linearize` of a `while_loop` that communicates: JAX runs the whole loop again


def loop(x):
    step = lambda s: (s[0] + 1, notoken.allreduce(jnp.sin(s[1]), MPI.SUM))
    return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


LINE = r"(test_misuse.py:\d+: )?allreduce is in a while_loop"
AROUND = {
    "eager": loop,
    "jit": jax.jit(loop),
    "scan": lambda x: jax.lax.scan(lambda c, _: (loop(c), None), x, None, length=1)[0],
}


@pytest.mark.parametrize("f", AROUND.values(), ids=AROUND)
def test_a_linearized_loop(f):
    with pytest.warns(UserWarning, match=f"{LINE} that JAX linearizes"):
        value, linear = jax.linearize(f, x)
    expected, tangent = jax.jvp(jax.checkpoint(f), (x,), (x,))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(linear(x), tangent, rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.linearize, jax.vjp])
def test_a_checkpoint_around_a_linearized_loop(transform):
    with pytest.raises(NotImplementedError, match=f"{LINE} in a jax.checkpoint, which"):
        transform(jax.checkpoint(loop), x)


def test_linearized_loops_without_a_warning():
    """Of a fixed length; and one that does not communicate."""
    fixed = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: notoken.allreduce(y, MPI.SUM), x)
    silent = lambda x: jax.lax.while_loop(lambda y: y[0] < 3, lambda y: y + 1, x)
    _, linear = jax.linearize(lambda x: fixed(silent(x)), x)
    np.testing.assert_allclose(linear(x), x * MPI.COMM_WORLD.size**3)
