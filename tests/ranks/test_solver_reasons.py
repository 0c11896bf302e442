"""Why a solve stops (`Info.reason`), and what `monitor` is called with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import COMM, RANK, SIZE

from mpi4jax import linalg, notoken
from mpi4jax.linalg import Reason

ROWS = [2 + rank % 2 for rank in range(SIZE)]  # of each rank
N = sum(ROWS)
MINE = slice(sum(ROWS[:RANK]), sum(ROWS[: RANK + 1]))
B = np.random.default_rng(3).normal(size=N).astype(np.float32)
VALUES = np.arange(1, N + 1, dtype=np.float32)
SOLVERS = [linalg.bicgstab, linalg.cg, linalg.gmres, linalg.lsmr, linalg.minres]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.__name__)


def diagonal(values):
    mine = jnp.asarray(values, jnp.float32)[MINE]
    return lambda x: mine * x


def sheared(x):
    """Return the product with a matrix that is not symmetric: ``x + `` what is one row above."""
    above = notoken.permute(x[:1], [(r + 1, r) for r in range(SIZE - 1)])
    return x + jnp.concatenate([x[1:], above])


def reason(solver, A, b=B, **options):
    info = jax.jit(lambda b: solver(A, b, **options)[1])(b[MINE])
    assert info.reason.dtype == jnp.int32
    assert info.converged == (info.reason > 0)
    return Reason(int(info.reason))


@solvers
def test_reasons_that_all_solvers_have(solver):
    assert reason(solver, diagonal(VALUES)) is Reason.TOLERANCE
    assert reason(solver, diagonal(VALUES), 0 * B) is Reason.TOLERANCE
    few = {"restart": 1} if solver is linalg.gmres else {}
    assert reason(solver, sheared, maxiter=1, tol=1e-7, **few) is Reason.ITERATIONS
    assert reason(solver, diagonal(np.nan * VALUES)) is Reason.BREAKDOWN
    assert reason(solver, diagonal(VALUES), np.nan * B) is Reason.BREAKDOWN
    zero = {linalg.bicgstab: Reason.BREAKDOWN, linalg.cg: Reason.INDEFINITE}
    zero[linalg.lsmr] = Reason.TOLERANCE  # any vector has the least residual
    assert reason(solver, diagonal(0 * VALUES)) is zero.get(solver, Reason.STAGNATION)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_cg_notices_what_is_not_definite(dtype):
    signs = np.where(np.arange(N) % 2, 1.0, -1.0)
    b = B.astype(dtype)
    assert reason(linalg.cg, diagonal(signs * VALUES), b) is Reason.INDEFINITE
    of_M = {"M": diagonal(signs / VALUES)}
    assert reason(linalg.cg, diagonal(VALUES), b, **of_M) is Reason.INDEFINITE
    # The solution of a negative definite equation is right.
    assert reason(linalg.cg, diagonal(-VALUES), b) is Reason.TOLERANCE
    assert reason(linalg.cg, diagonal(signs * VALUES), b, pipelined=True) is Reason.INDEFINITE
    assert reason(linalg.cg, diagonal(-VALUES), b, pipelined=True) is Reason.TOLERANCE
    assert reason(linalg.minres, diagonal(signs * VALUES), b) is Reason.TOLERANCE


def test_reasons_of_a_batch():
    """Each element of the batch has its own."""
    scales = jnp.asarray([1.0, 0.0])
    solve = lambda s: linalg.cg(lambda x: s * diagonal(VALUES)(x), B[MINE])[1].reason
    assert jax.vmap(solve)(scales).tolist() == [Reason.TOLERANCE, Reason.INDEFINITE]


@solvers
def test_monitor(solver):
    """The solver's norm in each iteration; the last one belongs to the solution."""
    seen = []
    monitor = lambda k, norm: seen.append((int(k), float(norm)))
    A = diagonal(VALUES)
    _, info = jax.jit(lambda b: solver(A, b, tol=1e-4, monitor=monitor))(1e3 * B[MINE])
    jax.effects_barrier()
    seen.sort()
    assert [k for k, _ in seen] == [*range(int(info.iterations) + 1)]
    norms = [norm for _, norm in seen]
    first = VALUES * B if solver is linalg.lsmr else B  # lsmr has the gradient's norm
    np.testing.assert_allclose(norms[0], 1e3 * np.linalg.norm(first), rtol=1e-5)
    assert norms[-1] <= 1.01e-4 * norms[0]
    if solver is not linalg.lsmr:
        np.testing.assert_allclose(norms[-1], info.residual_norm, rtol=0.5, atol=1e-3)
    with pytest.raises(TypeError, match=r"'monitor' must be a function of an iteration number"):
        solver(A, B[MINE], monitor=3)


def test_a_monitor_may_communicate():
    comm, seen = COMM.Dup(), []
    monitor = lambda k, _: seen.append(comm.allreduce(int(k)))
    _, info = jax.jit(lambda b: linalg.cg(diagonal(VALUES), b, monitor=monitor))(B[MINE])
    jax.effects_barrier()
    assert seen == [k * comm.size for k in range(int(info.iterations) + 1)]
    comm.Free()


def test_monitor_of_a_gradient():
    """The transposed equation has one, too."""
    seen = []
    solve = lambda b: linalg.cg(diagonal(VALUES), b, monitor=lambda k, _: seen.append(int(k)))[0]
    jax.grad(lambda b: jnp.sum(solve(b)))(B[MINE])
    jax.effects_barrier()
    assert seen.count(0) == 2
