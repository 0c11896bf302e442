"""Modules of Equinox and Flax with operations in them, and gradients that ranks share.

Each rank has a part of the batch. What comes of it is compared with one process that has all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, LEFT, RIGHT

import mpi4jax
from mpi4jax import notoken as nt


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, other)


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["direct", "in a jit"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_equinox_filter_custom_vjp(jit, inner):
    """It fails if an argument is perturbed that it does not differentiate."""
    eqx = pytest.importorskip("equinox")
    factors, seen = jnp.array([1.0, 2.0, 3.0]), []

    def call(x, factors):
        return mpi4jax.notoken.allgather(x[0] * factors).sum(0)

    f = eqx.filter_custom_vjp(call)

    @f.def_fwd
    def forward(perturbed, x, factors):
        seen.append(perturbed)
        return call(x, factors), None

    @f.def_bwd
    def backward(residuals, cotangent, perturbed, x, factors):
        return mpi4jax.notoken.allreduce(cotangent * 10, MPI.SUM) * factors, None

    constant = COMM.size > 1 and COMM.rank == 0

    def loss(x):
        y = jax.lax.stop_gradient(x) if constant else x
        return jnp.sum(inner(f)((y, jnp.arange(3)), factors)) + jnp.sum(x)

    actual = jit(jax.grad(loss))(jnp.ones(3))
    expected = 1 + (0 if constant else 10 * COMM.size) * factors
    np.testing.assert_allclose(actual, np.broadcast_to(expected, 3))
    assert seen
    assert all(perturbed == (True, False) for perturbed in seen)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_equinox_checkpointed_loop_of_a_constant(jit, checkpoints):
    """Rank 0 differentiates nothing that goes into the loop, and only it uses what comes out."""
    eqxi = pytest.importorskip("equinox.internal")

    def loss(x):
        init = jax.lax.stop_gradient(x) if COMM.rank == 0 else x
        body = lambda s: (2 * nt.sendrecv(s[0], jnp.zeros(3), LEFT, RIGHT, comm=COMM), s[1] + 1)
        more = lambda s: s[1] < 3
        kwargs = {"max_steps": 5, "kind": "checkpointed", "checkpoints": checkpoints}
        y = eqxi.while_loop(more, body, (init, 0), **kwargs)[0]
        return jnp.sum(x) + (jnp.sum(y) if COMM.rank == 0 else 0)

    source = -3 % COMM.size  # whose values arrive at rank 0
    expected = 1 + 8 * (COMM.rank == source != 0)
    assert_close(jit(jax.grad(loss))(jnp.arange(1.0, 4.0)), np.full(3, expected, np.float32))


def test_functions_that_do_not_communicate_are_as_without_mpi4jax():
    """Those that need concrete values, and rules that are never called."""

    @jax.custom_vjp
    def tripled_backward(x, flag):
        return x

    def backward(flag, c):
        return (3 * c if jnp.any(flag + 1 > 0) else c), jnp.zeros_like(flag)

    tripled_backward.defvjp(lambda x, flag: (x, flag), backward)
    assert float(jax.grad(lambda x: tripled_backward(x, jnp.float32(1)))(1.0)) == 3

    @jax.custom_vjp
    def forward_only(x):
        return x

    def refuse(_, c):
        raise NotImplementedError

    forward_only.defvjp(lambda x: (x, None), refuse)
    assert float(jax.vjp(forward_only, 1.0)[0]) == 1

    @jax.custom_jvp
    def doubled_if_positive(x):
        return 2 * x if x > 0 else x

    doubled_if_positive.defjvps(lambda t, ans, x: 2 * t)
    assert float(jax.grad(lambda x: x * doubled_if_positive(jnp.float32(3)))(1.0)) == 6

    weights = jnp.ones(3)
    scaled = lambda x: x * weights if jnp.any(weights + 1 > 0) else x
    assert_close(jax.linear_transpose(scaled, weights)(2 * weights)[0], 2 * weights)
