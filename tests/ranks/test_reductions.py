"""How many global reductions an iteration of a solver takes, and those that take one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import RANK, SIZE, enable_x64
from test_linalg import SOLVERS, operator

from mpi4jax import linalg


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True):
        yield


def test_messages_of_an_iteration():
    """One for the products that are needed at once."""

    def innermost(jaxpr):
        for eqn in jaxpr.eqns:
            if str(eqn.primitive) == "while":
                body = eqn.params["body_jaxpr"].jaxpr
                yield from innermost(body) if "while" in str(body) else [body]

    names = {"cg": 2, "bicgstab": 3, "minres": 2, "bicgstab, merged": 1, "cg, pipelined": 0}
    for name, expected in names.items():
        solver = SOLVERS[name][0]
        jaxpr = jax.make_jaxpr(lambda b, s=solver: s(lambda v: 2 * v + v[::-1], b)[0])(jnp.ones(3))
        (solve,) = [eqn for eqn in jaxpr.eqns if "linear_solve" in str(eqn.primitive)]
        (loop,) = innermost(solve.params["jaxprs"].solve.jaxpr)
        ops = [str(eqn.primitive) for eqn in loop.eqns]
        assert ops.count("mpi4jax_allreduce") == expected
        # One, which overlaps the product.
        order = [op for op in ops if op in ("mpi4jax_start", "rev", "mpi4jax_wait")]
        products = ["rev"] * (2 if "bicgstab" in name else 1)
        if name == "cg, pipelined":
            products = ["mpi4jax_start", "rev", "mpi4jax_wait"]
        assert order == products


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["cg", "bicgstab"])
def test_fewer_reductions_take_the_same_iterations(name):
    """Through several replacements of the residual, for a condition number of some thousands."""
    rows, more = 240 // SIZE, "pipelined" if name == "cg" else "merged"
    b = np.random.default_rng(RANK).normal(size=rows)
    solver = getattr(linalg, name)

    @jax.jit
    def run(b):
        return [solver(operator(2.0, -1.0), b, tol=1e-8, **{more: k}) for k in (False, True)]

    (x, info), (y, of_fewer) = run(b)
    assert info.converged
    assert of_fewer.converged
    assert info.iterations > 120
    scale = np.abs(x).max()
    np.testing.assert_allclose(y, x, atol=1e-5 * scale)
    if name == "cg":  # the iterations of the other method depend on rounding errors
        assert abs(of_fewer.iterations - info.iterations) < 0.2 * info.iterations


def test_fewer_reductions_are_not_reproducible():
    for solver, option in ((linalg.cg, "pipelined"), (linalg.bicgstab, "merged")):
        with pytest.raises(ValueError, match=f"arguments '{option}' and 'reproducible' are both"):
            solver(lambda x: x, np.ones(3), reproducible=True, **{option: True})


@pytest.mark.parametrize("name", ["cg, pipelined", "bicgstab, merged"])
def test_monitor_of_a_norm_that_is_known_one_iteration_later(name):
    """Each is reported once, the last one too."""
    seen = []
    monitor = lambda k, norm: seen.append((int(k), float(norm)))
    b = np.random.default_rng(RANK).normal(size=30)
    solve = lambda b: SOLVERS[name][0](operator(3.0, -1.0), b, tol=1e-6, monitor=monitor)
    _, info = jax.jit(solve)(b)
    jax.effects_barrier()
    seen.sort()
    assert [k for k, _ in seen] == [*range(int(info.iterations) + 1)]
    assert seen[-1][1] <= 1.01e-6 * seen[0][1]
