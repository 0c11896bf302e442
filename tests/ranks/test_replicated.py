"""Warnings of a missing `pvary`, and none of programs that are right."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import RANK, SIZE

import mpi4jax
from mpi4jax import linalg
from mpi4jax.notoken import allgather, allreduce, bcast, permute, pvary

pytestmark = pytest.mark.min_ranks(2)
X = jnp.arange(1.0, 4.0) + RANK
SELF = MPI.COMM_SELF
NEXT = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
LACKS = r"test_replicated.py:\d+: the gradient of this allreduce has only .*test_replicated.py:\d+"
DIFFER = r"test_replicated.py:\d+: in a backward pass, .*of the result of this {}"


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def steps(mark, x, viscosity):
    """As a flow that is solved in time: a mean flow that all ranks use, and ghost cells."""

    def step(x, _):
        mean = mark(allreduce(x.sum() * viscosity)) / 10
        return x - viscosity * mean * permute(x, NEXT), None

    x, _ = lax.scan(jax.checkpoint(step), x, length=3)
    return allreduce(jnp.sum(x**2))


def ensemble(mark, members, scale):
    """As a filter: each rank has members, and the analysis needs their mean and variance."""
    mean = mark(allreduce(scale * members, mpi4jax.MEAN))
    variance = mark(allreduce((scale * members - mean) ** 2, mpi4jax.MEAN))
    gain = variance / (1 + variance)
    analysis = members + gain * (RANK - members)
    return allreduce(jnp.sum(jnp.sin(analysis)), mpi4jax.MEAN)


def nested(mark, x, _):
    return allreduce(jnp.sum(jnp.sin(mark(allreduce(x)))))


PROGRAMS = [steps, ensemble, nested]
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)


@programs
def test_a_sum_that_is_made_of_a_sum(program):
    with pytest.warns(UserWarning, match=LACKS):
        jax.jit(jax.grad(lambda x: program(lambda v: v, x, 0.3)))(X)
    with pytest.warns(UserWarning, match=LACKS):
        jax.grad(jax.jit(lambda x: program(lambda v: v, x, 0.3)))(X)


@programs
def test_right_programs_are_left_alone(program, monkeypatch):
    """Their gradients agree with finite differences."""

    def loss(s):
        return program(pvary, pvary(s) * X, pvary(s))

    h = 1e-2
    slope = (loss(0.3 + h) - loss(0.3 - h)) / (2 * h)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.3), slope, rtol=2e-2)
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    np.testing.assert_allclose(jax.jit(lambda s: jax.grad(loss)(s))(0.3), slope, rtol=2e-2)
    jax.jit(jax.grad(lambda s: jax.grad(loss)(s)))(0.3)
    jax.block_until_ready(jax.jit(jax.vmap(jax.grad(loss)))(jnp.array([0.1, 0.2])))


# Right without `pvary`, although a result that all ranks have goes into a sum.
RIGHT = {
    "each uses its own block": lambda x: allreduce(jnp.sum(jnp.sin(allgather(x)[RANK]))),
    "the root's summand": lambda x: allreduce(jnp.sum(bcast(x, 0) ** 2) * (RANK == 0)),
    "two communicators": lambda x: allreduce(jnp.sum(jnp.sin(allreduce(x, comm=SELF)))),
    "one value": lambda x: jnp.sum(allreduce(x) ** 2) * jnp.sum(jnp.sin(allgather(x))),
    "a loop": lambda x: jnp.sum(
        lax.fori_loop(0, 3, lambda _, v: allreduce(jnp.sin(pvary(v))) / SIZE, allreduce(x))
    ),
    "a solve": lambda x: allreduce(
        linalg.cg(lambda v: 3 * v + pvary(allreduce(v.sum())), x, tol=1e-6)[0].sum()
    ),
    "a norm": lambda x: linalg.norm(x) * allreduce(jnp.sum(x / pvary(linalg.norm(x)))),
}


@pytest.mark.parametrize("f", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("check", ["samples", "1"])
def test_sums_that_need_none(f, check, monkeypatch):
    monkeypatch.setenv("MPI4JAX_CHECK", check)
    jax.block_until_ready(jax.jit(jax.grad(f))(X))
    jax.effects_barrier()


def test_a_gradient_that_goes_into_a_pvary_lacks_none():
    gradient = jax.grad(lambda v: jnp.sum(allreduce(v) ** 2))
    np.testing.assert_allclose(jax.jit(lambda x: pvary(gradient(x)))(X), 2 * allreduce(X))


WRONG = {
    "allreduce": lambda x: (RANK + 1) * jnp.sum(allreduce(x)),
    "allgather": lambda x: allreduce(jnp.sum(X * jnp.sin(allgather(x).sum(0)))),
    "bcast": lambda x: allreduce((RANK + 1) * jnp.sum(bcast(x, 0))),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cotangents_that_differ(name, jit, monkeypatch):
    """Seen where ranks are compared before they run."""
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    gradient = jit(jax.grad(WRONG[name]))

    def run():
        jax.block_until_ready(gradient(X))
        jax.effects_barrier()

    with pytest.warns(UserWarning, match=DIFFER.format(name)):
        run()


TOO_MANY = {
    # Each rank computes the whole loss.
    "replicated use": (lambda w: jnp.sum(pvary(w) ** 2), True),
    "two communicators": (lambda w: jnp.sum(pvary(w, comm=SELF) ** 2), False),
    # The ranks' summands are equal, and their sum is the loss.
    "a sum": (lambda w: allreduce(jnp.sum(pvary(w) ** 2)), False),
    "own data": (lambda w: allreduce(jnp.sum(X * pvary(w))), False),
    "no use": (lambda w: jnp.sum(0 * pvary(w)) + jnp.sum(w), False),
    "one leaf with own data": (lambda w: jnp.sum(pvary([w, w * X])[1] * X), False),
    "an allreduce, whose adjoint is a pvary": (
        lambda w: jax.grad(lambda v: jnp.sum(allreduce(v) ** 3))(w).sum(),
        False,
    ),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_equal_cotangents_of_a_pvary(name, monkeypatch):
    """The line is said under MPI4JAX_CHECK=1, and names the line of the `pvary`."""
    f, is_wrong = TOO_MANY[name]
    w, gradient = jnp.array([1.0, 2.0, 3.0]), jax.jit(jax.grad(f))

    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.block_until_ready(gradient(w))
            jax.effects_barrier()
        return [str(each.message) for each in caught]

    assert run() == []
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    jax.clear_caches()
    said = run()
    assert len(said) == is_wrong
    if is_wrong:
        match = rf"test_replicated.py:\d+: .* the same cotangent .* {SIZE} times too large"
        assert re.search(match, said[0])
