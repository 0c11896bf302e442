"""`linalg.host_solve`: solvers of other libraries, in compiled functions and with derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import COMM, RANK, SIZE, enable_x64

from mpi4jax import linalg, notoken

M = 3
ROWS = slice(M * RANK, M * (RANK + 1))
rng = np.random.default_rng(0)
WHOLE = rng.normal(size=(M * SIZE, M * SIZE)) + 4 * np.eye(M * SIZE)
B, C = rng.normal(size=(2, M * SIZE))


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True):
        yield


@pytest.fixture(scope="module")
def solvers():
    """A direct solver on the first rank, and the one of the transposed equation."""
    comm = COMM.Dup()

    def solver(matrix):
        def solve(b, k):
            parts = comm.gather(b)
            found = None
            if comm.rank == 0:
                found = np.linalg.solve(k * matrix, np.concatenate(parts)).reshape(SIZE, -1)
            return comm.scatter(found)

        return solve

    yield solver(WHOLE), solver(WHOLE.T)
    comm.Free()


def operator(k):
    return lambda x: k * (WHOLE[ROWS] @ notoken.allgather(x).ravel())


def test_values_and_derivatives(solvers):
    """In order with operations, and with respect to what the operator closes over."""
    solve, transposed = solvers

    def f(b, k):
        b = notoken.sendrecv(b, b, source=RANK, dest=RANK)
        x = linalg.host_solve(solve, b, k, A=operator(k), transpose_solve=transposed)
        return notoken.sendrecv(x, x, source=RANK, dest=RANK)

    @jax.jit
    def everything(b, c, k):
        x, pull = jax.vjp(f, b, k)
        return x, jax.jvp(f, (b, k), (c, 1.0))[1], *pull(c)

    x, tangent, by_b, by_k = everything(B[ROWS], C[ROWS], 2.0)
    expected = np.linalg.solve(2 * WHOLE, B)
    np.testing.assert_allclose(x, expected[ROWS], rtol=1e-10)
    known = np.linalg.solve(2 * WHOLE, C) - expected / 2
    np.testing.assert_allclose(tangent, known[ROWS], rtol=1e-9)
    np.testing.assert_allclose(by_b, np.linalg.solve(2 * WHOLE.T, C)[ROWS], rtol=1e-9)
    np.testing.assert_allclose(COMM.allreduce(float(by_k)), -C @ expected / 2, rtol=1e-9)
    with pytest.raises(TypeError, match="transpose_solve required for backwards"):
        jax.grad(lambda b: linalg.host_solve(solve, b, 1.0).sum())(B[ROWS])


def test_preconditioner_of_trees(solvers):
    """In the loop of a solver, which it ends after one iteration."""
    split = lambda v: {"head": v[:1], "rest": v[1:]}
    join = lambda xp, t: xp.concatenate([t["head"], t["rest"]])
    A = lambda t: split(operator(1.0)(join(jnp, t)))
    apply = lambda t: split(solvers[0](join(np, t), 1.0))
    run = jax.jit(lambda b: linalg.gmres(A, b, tol=1e-9, M=lambda v: linalg.host_solve(apply, v)))
    x, info = run(split(B[ROWS]))
    assert info.iterations == 1
    np.testing.assert_allclose(join(np, x), np.linalg.solve(WHOLE, B)[ROWS], rtol=1e-8)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_all_ranks_raise_what_one_has_raised(jit):
    def fails(b):
        if RANK == SIZE - 1:
            raise np.linalg.LinAlgError("the matrix is singular")
        return b

    words = rf"'solve' raised an exception on rank {SIZE - 1}: (?s:.*)the matrix is singular"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jit(lambda b: linalg.host_solve(fails, b))(B[ROWS]))
    wrong = lambda b: b[RANK // SIZE + 1 :]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"shapes of 'b', \[\(3,\)\], got \[\(2,"):
        jax.block_until_ready(jit(lambda b: linalg.host_solve(wrong, b))(B[ROWS]))
    # Operations go on afterwards.
    assert int(notoken.allreduce(jnp.asarray(1))) == SIZE


def test_wrong_arguments():
    for options in ({}, {"A": 1}, {"transpose_solve": 1}):
        with pytest.raises(
            TypeError, match=r"host_solve: argument '(solve|A|transpose_solve)' must"
        ):
            linalg.host_solve(None if not options else lambda b: b, np.ones(3), **options)
