"""The solvers of `mpi4jax.linalg`, on vectors of which each rank has a part, against NumPy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE, enable_x64

import mpi4jax
from mpi4jax import linalg, notoken

ROWS = [2 + rank % 2 for rank in range(SIZE)]  # of each rank
N = sum(ROWS)
MINE = slice(sum(ROWS[:RANK]), sum(ROWS[: RANK + 1]))
UP = [(rank, rank + 1) for rank in range(SIZE - 1)]
DOWN = [(b, a) for a, b in UP]


def operator(d, upper):
    """This rank's part of the product with a matrix of three diagonals: -1, ``d``, ``upper``."""

    def A(x):
        below, above = notoken.permute(x[-1:], UP), notoken.permute(x[:1], DOWN)
        z = jnp.concatenate([below, x, above])
        return -z[:-2] + d * z[1:-1] + upper * z[2:]

    return A


def matrix(d, upper):
    return d * np.eye(N) - np.eye(N, k=-1) + upper * np.eye(N, k=1)


# The solver, the diagonal and the upper diagonal.
SOLVERS = {
    "cg": (linalg.cg, 4.0, -1.0),
    "bicgstab": (linalg.bicgstab, 4.0, 0.5),
    "gmres": (linalg.gmres, 4.0, 0.5),
    "gmres, restarted": (lambda *a, **k: linalg.gmres(*a, restart=2, **k), 4.0, 0.5),
}
solvers = pytest.mark.parametrize("solver, d, upper", SOLVERS.values(), ids=SOLVERS)


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def vectors(many, dtype=np.float64):
    rng = np.random.default_rng(7)
    real, imaginary = rng.normal(size=(2, many, N))
    return (real + 1j * imaginary).astype(dtype) if dtype == np.complex128 else real


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@solvers
def test_solution(solver, d, upper, jit):
    (b,) = vectors(1)
    x, info = jit(lambda b: solver(operator(d, upper), b, tol=1e-10))(b[MINE])
    assert info is None
    close(x, np.linalg.solve(matrix(d, upper), b)[MINE])


@pytest.mark.one_in(2)
@solvers
def test_derivatives(solver, d, upper):
    b, t, w = vectors(3)
    solve = lambda d, b: solver(operator(d, upper), b, tol=1e-10)[0]
    A = matrix(d, upper)
    x, inverse = np.linalg.solve(A, b), np.linalg.inv(A)

    @jax.jit
    def everything(d, b, t, w):
        return (
            jax.jvp(lambda b: solve(d, b), (b,), (t,))[1],
            jax.jvp(lambda d: solve(d, b), (d,), (1.0,))[1],
            jax.grad(lambda d, b: jnp.sum(w * solve(d, b)), argnums=(0, 1))(d, b),
            jax.jacfwd(lambda d: solve(d, b))(d),
        )

    of_b, of_d, (by_d, by_b), column = everything(d, b[MINE], t[MINE], w[MINE])
    close(of_b, (inverse @ t)[MINE])
    close(of_d, -(inverse @ x)[MINE])
    close(by_b, (inverse.T @ w)[MINE])
    close(COMM.allreduce(float(by_d)), -w @ inverse @ x)
    close(column, -(inverse @ x)[MINE])


@pytest.mark.one_in(4)
@solvers
def test_second_derivative(solver, d, upper):
    b, w = vectors(2)
    loss = lambda d: jnp.sum(w[MINE] * solver(operator(d, upper), b[MINE], tol=1e-11)[0])
    inverse = np.linalg.inv(matrix(d, upper))
    second = jax.jit(jax.jacfwd(jax.jacfwd(loss)))(d)
    close(COMM.allreduce(float(second)), 2 * w @ inverse @ inverse @ inverse @ b)


@pytest.mark.one_in(2)
@solvers
def test_vmap(solver, d, upper):
    """Some of the batch need more iterations than others, and one none."""
    bs = vectors(3)
    bs[1] = 0
    run = jax.jit(jax.vmap(lambda b: solver(operator(d, upper), b, tol=1e-10)[0]))
    close(run(bs[:, MINE]), np.linalg.solve(matrix(d, upper), bs.T).T[:, MINE])


@pytest.mark.parametrize("solver", [linalg.bicgstab, linalg.gmres])
def test_complex_numbers(solver):
    (b,) = vectors(1, np.complex128)
    d = 4 + 2j
    run = jax.jit(lambda b: solver(operator(d, 0.5), b, tol=1e-10)[0])
    close(run(b[MINE]), np.linalg.solve(matrix(d, 0.5), b)[MINE])


def test_hermitian_matrices():
    b, w = vectors(2, np.complex128)
    A = lambda x: operator(5.0, -1.0)(x) + 0.5j * (operator(0.0, 1.0)(x))
    whole = matrix(5.0, -1.0) + 0.5j * matrix(0.0, 1.0)
    np.testing.assert_array_equal(whole, whole.conj().T)
    solve = lambda b: linalg.cg(A, b, tol=1e-10)[0]
    y, back = jax.vjp(jax.jit(solve), b[MINE])
    close(y, np.linalg.solve(whole, b)[MINE])
    close(back(w[MINE])[0], np.linalg.solve(whole.T, w)[MINE])


@pytest.mark.one_in(2)
@solvers
def test_start_preconditioner_and_trees(solver, d, upper):
    (b,) = vectors(1)
    split = lambda v: {"head": v[:1], "rest": v[1:]}
    join = lambda t: jnp.concatenate([t["head"], t["rest"]])
    A = lambda t: split(operator(d, upper)(join(t)))
    expected = np.linalg.solve(matrix(d, upper), b)[MINE]
    x, _ = solver(
        A,
        split(b[MINE]),
        split(expected + 0.1),
        tol=1e-10,
        M=lambda t: jax.tree.map(lambda v: v / d, t),
    )
    close(join(x), expected)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
@solvers
def test_preconditioner_of_another_size(solver, d, upper, scale):
    """The tolerance is relative, also where it is that of the preconditioned residual."""
    (b,) = vectors(1)
    x, _ = solver(operator(d, upper), b[MINE], tol=1e-10, maxiter=50, M=lambda v: scale * v)
    close(x, np.linalg.solve(matrix(d, upper), b)[MINE])


@solvers
def test_limits(solver, d, upper):
    (b,) = vectors(1)
    A = operator(d, upper)
    start = np.full(ROWS[RANK], 0.25)
    for options in ({"maxiter": 0}, {"tol": 0, "atol": 1e9}):
        np.testing.assert_array_equal(solver(A, b[MINE], start, **options)[0], start)


def test_integers_and_a_communicator():
    x, _ = linalg.cg(lambda v: 2 * v, np.arange(3), comm=MPI.COMM_SELF)
    close(x, np.arange(3) / 2)


def test_messages_of_an_iteration():
    """One for the products that are needed at once."""
    for solver, expected in ((linalg.cg, 2), (linalg.bicgstab, 3)):
        jaxpr = jax.make_jaxpr(lambda b, s=solver: s(lambda v: 2 * v, b)[0])(jnp.ones(3))
        (solve,) = [eqn for eqn in jaxpr.eqns if "linear_solve" in str(eqn.primitive)]
        loops = [e for e in solve.params["jaxprs"].solve.eqns if str(e.primitive) == "while"]
        ops = [str(eqn.primitive) for eqn in loops[0].params["body_jaxpr"].eqns]
        assert ops.count("mpi4jax_allreduce") == expected


def test_wrong_arguments():
    for name in linalg.__all__:
        solver = getattr(linalg, name)
        with pytest.raises(TypeError, match=rf"^{name}: argument 'A' must be a function .*ndarray"):
            solver(np.eye(3), np.ones(3))
        with pytest.raises(TypeError, match=rf"^{name}: argument 'M' must be a function .*int"):
            solver(lambda v: v, np.ones(3), M=3)
        with pytest.raises(ValueError, match=rf"^{name}: argument 'x0' must have the shapes of"):
            solver(lambda v: v, np.ones(3), np.ones(4))


def test_it_is_part_of_the_package():
    assert mpi4jax.linalg is linalg
