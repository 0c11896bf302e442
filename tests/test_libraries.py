"""Modules of Equinox and Flax with operations in them, and gradients that ranks share.

Each rank has a part of the batch. What comes of it is compared with one process that has all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE

import mpi4jax
from mpi4jax import notoken as nt

ROWS = 3
X = np.random.default_rng(1).normal(size=(SIZE * ROWS, 4)).astype(np.float32)
MINE = slice(RANK * ROWS, (RANK + 1) * ROWS)
KEY = jax.random.key(0)


def mean_over_ranks(tree):
    """Of a pytree that is different on each rank."""
    return jax.tree.map(lambda x: x / SIZE, nt.allreduce(tree, MPI.SUM, comm=COMM))


def shared_mean(x):
    """Of all rows on all ranks; each rank goes on with it in its own way, hence `pvary`."""
    return mpi4jax.pvary(mean_over_ranks(x.mean(axis=0)), comm=COMM)


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, other)


@pytest.mark.parametrize("jit", ["mpi4jax.jit", "filter_jit"])
def test_equinox(jit):
    eqx = pytest.importorskip("equinox")

    class Centred(eqx.Module):
        """A layer that communicates; its communicator is static."""

        mlp: eqx.nn.MLP
        comm: MPI.Comm | None = eqx.field(static=True)

        def __call__(self, x):
            x = x - (x.mean(axis=0) if self.comm is None else shared_mean(x))
            return jax.vmap(self.mlp)(x)

    mlp = eqx.nn.MLP(4, 1, 8, 1, key=KEY)

    def loss(arrays, static, x):
        return (eqx.combine(arrays, static)(x) ** 2).mean()

    arrays, static = eqx.partition(Centred(mlp, None), eqx.is_array)
    expected = jax.value_and_grad(loss)(arrays, static, X)

    arrays, static = eqx.partition(Centred(mlp, COMM), eqx.is_array)

    def step(arrays, x):
        return mean_over_ranks(jax.value_and_grad(loss)(arrays, static, x))

    compiled = mpi4jax.jit(step) if jit == "mpi4jax.jit" else eqx.filter_jit(step)
    value, gradient = compiled(arrays, X[MINE])
    assert_close((value, jax.tree.leaves(gradient)), (expected[0], jax.tree.leaves(expected[1])))


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Centred(nn.Module):
        distributed: bool

        @nn.compact
        def __call__(self, x):
            x = x - (shared_mean(x) if self.distributed else x.mean(axis=0))
            return nn.Dense(1)(nn.relu(nn.Dense(8)(x)))

    alone, together = Centred(False), Centred(True)
    variables = alone.init(KEY, X)

    def loss(module, variables, x):
        return (module.apply(variables, x) ** 2).mean()

    @mpi4jax.jit
    def step(variables, x):
        value, gradient = jax.value_and_grad(lambda v: loss(together, v, x))(variables)
        return mean_over_ranks((value, gradient))

    expected = jax.value_and_grad(lambda v: loss(alone, v, X))(variables)
    assert_close(step(variables, X[MINE]), expected)


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Centred(nnx.Module):
        def __init__(self, rngs, distributed):
            self.linear = nnx.Linear(4, 1, rngs=rngs)
            self.distributed = distributed

        def __call__(self, x):
            return self.linear(x - (shared_mean(x) if self.distributed else x.mean(axis=0)))

    def gradient(model, x):
        graph, state = nnx.split(model)

        def loss(state):
            return (nnx.merge(graph, state)(x) ** 2).mean()

        return jax.tree.leaves(jax.grad(loss)(state))

    graph, state = nnx.split(Centred(nnx.Rngs(0), True))

    @mpi4jax.jit
    def step(state, x):
        return mean_over_ranks(gradient(nnx.merge(graph, state), x))

    expected = gradient(Centred(nnx.Rngs(0), False), jnp.asarray(X))
    assert_close(step(state, jnp.asarray(X[MINE])), expected)
