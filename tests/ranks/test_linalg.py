"""The solvers of `mpi4jax.linalg`, on vectors that are distributed over ranks, against NumPy."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE, enable_x64

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
    "cg, pipelined": (functools.partial(linalg.cg, pipelined=True), 4.0, -1.0),
    "bicgstab": (linalg.bicgstab, 4.0, 0.5),
    "bicgstab, merged": (functools.partial(linalg.bicgstab, merged=True), 4.0, 0.5),
    "gmres": (linalg.gmres, 4.0, 0.5),
    "gmres, restarted": (lambda *a, **k: linalg.gmres(*a, restart=2, **k), 4.0, 0.5),
    "minres": (linalg.minres, 4.0, -1.0),
    "lsmr": (lambda *a, M=None, **k: linalg.lsmr(*a, **k), 4.0, 0.5),
}
solvers = pytest.mark.parametrize("solver, d, upper", SOLVERS.values(), ids=SOLVERS)
names = pytest.mark.parametrize("name", SOLVERS)


@functools.cache
def program(name):
    """A solve, compiled once for all tests that ask for it with one data type."""
    solver, d, upper = SOLVERS[name]

    def solve(b, x0, tol, atol, maxiter, scale):
        options = {"tol": tol, "atol": atol, "maxiter": maxiter, "M": lambda v: scale * v}
        return solver(operator(d, upper), b, x0, **options)

    return jax.jit(solve)


def run(name, b, x0=None, *, tol=1e-10, atol=0.0, maxiter=50, scale=1.0):
    x0 = np.zeros_like(b) if x0 is None else x0
    scale = np.asarray(scale, b.dtype)
    return program(name)(b, x0, tol, atol, maxiter, scale)


def expected(name, b):
    return np.linalg.solve(matrix(*SOLVERS[name][1:]), b)


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


@names
def test_solution(name):
    (b,) = vectors(1)
    x, info = run(name, b[MINE])
    close(x, expected(name, b)[MINE])
    assert info.converged.dtype == bool
    assert info.converged
    assert 0 < info.iterations <= 2 * N
    everyone = np.concatenate(COMM.allgather(np.asarray(x)))
    left = np.linalg.norm(b - matrix(*SOLVERS[name][1:]) @ everyone)
    np.testing.assert_allclose(info.residual_norm, left, rtol=0.1, atol=1e-14)
    # The tolerance is for the norm of the residual, even if a recurrence has another norm.
    most = run(name, b[MINE], tol=0.02)[1].iterations
    for scale in (1e-9, 1e9):
        close(run(name, b[MINE], scale=scale)[0], expected(name, b)[MINE])
        assert run(name, b[MINE], tol=0.02, scale=scale)[1].iterations == most


@names
def test_limits(name):
    (b,) = vectors(1)
    start = np.full(ROWS[RANK], 0.25)
    for options in ({"maxiter": 0}, {"tol": 0.0, "atol": 1e9}):
        np.testing.assert_array_equal(run(name, b[MINE], start, **options)[0], start)
    _, info = run(name, b[MINE], tol=1e-30, maxiter=1)
    assert info.iterations == 1
    assert not info.converged


def test_derivatives():
    solver, d, upper = SOLVERS["gmres"]  # of lsmr: test_least_squares
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
        )

    of_b, of_d, (by_d, by_b) = everything(d, b[MINE], t[MINE], w[MINE])
    close(of_b, (inverse @ t)[MINE])
    close(of_d, -(inverse @ x)[MINE])
    close(by_b, (inverse.T @ w)[MINE])
    close(COMM.allreduce(float(by_d)), -w @ inverse @ x)


def test_second_derivative():
    solver, d, upper = SOLVERS["lsmr"]
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


@pytest.mark.parametrize(
    "solver", [SOLVERS[name][0] for name in ("bicgstab", "bicgstab, merged", "gmres")]
)
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
    for solver in (linalg.cg, SOLVERS["cg, pipelined"][0]):
        solve = lambda b, s=solver: s(A, b, tol=1e-10)[0]
        close(jax.jit(solve)(b[MINE]), np.linalg.solve(whole, b)[MINE])
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


def test_integers_and_a_communicator():
    x, _ = linalg.cg(lambda v: 2 * v, np.arange(3), comm=MPI.COMM_SELF)
    close(x, np.arange(3) / 2)


# ---- What is said of a solve


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "gmres"])
def test_small_dtypes(name):
    """Counters go on after 256, and norms do not vanish."""
    (b,) = vectors(1)
    x, info = run(name, jnp.asarray(b[MINE], jnp.bfloat16), maxiter=300, tol=1e-7)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert x.dtype == jnp.bfloat16
    assert info.iterations.dtype == jnp.int32
    assert info.residual_norm.dtype == jnp.float32
    assert info.residual_norm < 8 * eps * np.linalg.norm(b)
    assert info.converged == (info.residual_norm <= 1e-7 * np.linalg.norm(b))
    np.testing.assert_allclose(np.asarray(x, float), expected(name, b)[MINE], rtol=0, atol=8 * eps)


@pytest.mark.one_in(2)
@names
def test_sizes_whose_squares_are_no_numbers(name):
    """In float32; zeros are the solution for zeros, wherever it starts."""
    (b,) = vectors(1)
    for scale in (0.0, 1e-30, 1e30):
        mine = jnp.asarray(scale * b[MINE], jnp.float32)
        x, info = run(name, mine, jnp.ones_like(mine) * scale, tol=1e-5)
        assert info.converged
        assert info.residual_norm <= 1e-5 * scale * np.linalg.norm(b)
        solution = scale * expected(name, b)[MINE]
        np.testing.assert_allclose(x, solution, rtol=0, atol=1e-5 * scale)
        if scale == 0:
            assert info.iterations == 0
            assert not np.asarray(x).any()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", [s for s, *_ in SOLVERS.values()], ids=SOLVERS)
def test_what_has_no_solution(solver):
    x, info = solver(lambda v: 0 * v, jnp.ones(ROWS[RANK]), maxiter=50)
    assert not np.isnan(np.asarray(x)).any()
    np.testing.assert_allclose(info.residual_norm, np.sqrt(N))
    is_least = solver is SOLVERS["lsmr"][0]  # nothing is nearer
    assert info.converged == is_least
    x, info = solver(lambda v: 2 * v, jnp.full(ROWS[RANK], jnp.nan))
    assert np.isnan(np.asarray(x)).all()
    assert not info.converged


def test_parts_that_are_empty():
    rows = 4 if RANK == SIZE - 1 else 0
    for solver, *_ in SOLVERS.values():
        x, info = jax.jit(lambda b, s=solver: s(lambda v: 2 * v, b, tol=1e-12))(np.ones(rows))
        close(x, np.full(rows, 0.5))
        assert info.converged


def test_a_hermitian_matrix_that_is_not_definite():
    (b,) = vectors(1, np.complex128)
    d = jnp.where(jnp.arange(N) % 2 == 0, 3.0, -3.0)[MINE]
    A = lambda x: operator(d, -1.0)(x)
    whole = matrix(0, -1.0) + np.diag(np.where(np.arange(N) % 2 == 0, 3.0, -3.0))
    solve = lambda b: linalg.minres(A, b, tol=1e-12, M=lambda v: v / 2)
    (x, info), back = jax.vjp(jax.jit(solve), b[MINE])
    close(x, np.linalg.solve(whole, b)[MINE])
    assert info.converged
    (g,) = back((jnp.asarray(b[MINE]), jax.tree.map(_no_cotangent, info)))
    close(g, np.linalg.solve(whole.T, b)[MINE])


def _no_cotangent(x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros_like(x) if is_float else np.zeros(x.shape, jax.dtypes.float0)


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_least_squares(damp):
    """More rows than columns, a pytree, and complex numbers."""
    rng = np.random.default_rng(5)
    whole = rng.normal(size=(2 * N, N)) + 1j * rng.normal(size=(2 * N, N))
    b = rng.normal(size=2 * N) + 0j
    columns, rows = whole[:, MINE], np.array_split(np.arange(2 * N), SIZE)
    counts = [len(r) for r in rows]

    def A(scale, x):  # each rank has columns; the product is summed, and its rows are distributed
        y = notoken.allreduce(scale * (columns @ x["x"]))
        return notoken.pvary(y)[rows[RANK]]

    def solve(scale):
        start = {"x": np.zeros(ROWS[RANK], complex)}
        f = lambda x: A(scale, x)
        return linalg.lsmr(f, b[rows[RANK]], start, damp=damp * scale, tol=1e-12)

    def reference(scale):
        stacked = np.concatenate([scale * whole, damp * scale * np.eye(N)])
        return np.linalg.lstsq(stacked, np.concatenate([b, np.zeros(N)]))[0]

    assert sum(counts) == 2 * N
    x, info = jax.jit(solve)(1.0)
    close(x["x"], reference(1.0)[MINE])
    assert info.converged
    close(info.residual_norm, np.linalg.norm(b - whole @ reference(1.0)))
    if not damp:
        return
    step = 1e-6
    slope = (reference(1 + step) - reference(1 - step)) / (2 * step)
    tangent = jax.jvp(lambda s: solve(s)[0]["x"], (1.0,), (1.0,))[1]
    np.testing.assert_allclose(tangent, slope[MINE], rtol=1e-5, atol=1e-7)
    loss = lambda s: jnp.sum(jnp.abs(solve(s)[0]["x"]) ** 2)
    total = COMM.allreduce(float(jax.grad(loss)(1.0)))
    np.testing.assert_allclose(total, 2 * np.vdot(reference(1.0), slope).real, rtol=1e-5)


@pytest.mark.min_ranks(2)
def test_an_iteration_of_lsmr_sends_the_messages_of_two_products(logged):
    """A transpose begins with a product of zeros, whose messages are not sent."""
    (b,) = vectors(1)

    def messages(maxiter):
        run("lsmr", b[MINE], tol=0.0, maxiter=maxiter)
        (_, info), lines = logged(lambda: run("lsmr", b[MINE], tol=0.0, maxiter=maxiter))
        assert info.iterations == maxiter
        return sum("MPI_Sendrecv" in line and " done with " in line for line in lines)

    assert messages(3) - messages(1) == 2 * (2 + 2)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_norm_and_vdot(dtype):
    a, b = vectors(2, np.complex128)
    a, b = (v.astype(dtype) if dtype == np.complex128 else v.real.astype(dtype) for v in (a, b))
    for reproducible in (False, True):
        vdot = jax.jit(lambda a, b, r=reproducible: linalg.vdot([a], [b], reproducible=r))
        np.testing.assert_allclose(vdot(a[MINE], b[MINE]), np.vdot(a, b), rtol=1e-5)
        norm = lambda a, r=reproducible: linalg.norm(a, reproducible=r)
        np.testing.assert_allclose(norm(a[MINE]), np.linalg.norm(a), rtol=1e-5)
        np.testing.assert_allclose(
            jax.grad(norm)(a[MINE]), (a.conj() / np.linalg.norm(a))[MINE], rtol=1e-5
        )
        assert not np.asarray(jax.grad(norm)(0 * a[MINE])).any()
    assert linalg.norm(jnp.full(3, 1000, jnp.float16)).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"^vdot: argument 'b' must have the shapes of 'a'"):
        linalg.vdot(np.ones(3), np.ones(4))


@pytest.mark.parametrize("blocks", [1, 2])
def test_block_jacobi(blocks):
    """Of a matrix of blocks alone, it is the inverse; of another, it saves iterations."""
    rows = 2 * blocks * (RANK + 1) if RANK != 1 else 0  # an empty part
    rng = np.random.default_rng(RANK)
    m = rows // blocks
    own = rng.normal(size=(blocks, m, m)) * 30
    own = own @ own.transpose(0, 2, 1) + np.eye(m)
    M = linalg.block_jacobi(own if blocks > 1 else own[0])
    apply = lambda v: jnp.einsum("kij,kj->ki", own, v.reshape(blocks, m)).ravel()
    x, info = linalg.cg(apply, jnp.ones(rows), tol=1e-9, M=M)
    assert info.iterations <= 2
    assert info.converged
    np.testing.assert_allclose(apply(x), np.ones(rows), atol=1e-6)
    assert M({"a": jnp.ones((rows,), jnp.bfloat16)})["a"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="block_jacobi: the blocks have"):
        M(jnp.ones(rows + 1))
    with pytest.raises(ValueError, match=r"'blocks' must have the shape \(m, m\) or"):
        linalg.block_jacobi(np.ones((2, 3)))


# ---- The same bits on any number of ranks


def stencil(d, upper, comm, lower=1):
    """As `operator`, on any communicator; the products are exact."""
    up = [(rank, rank + 1) for rank in range(comm.size - 1)]
    down = [(b, a) for a, b in up]

    def A(x):
        below = notoken.permute(x[-1:], up, comm=comm)
        above = notoken.permute(x[:1], down, comm=comm)
        z = jnp.concatenate([below, x, above])
        return d * x + (upper * z[2:] - lower * z[:-2])

    return A


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["cg", "bicgstab", "gmres, restarted", "minres", "lsmr"])
def test_bits_of_a_solution(name):
    """The bits of a solve on this rank alone, however the rows are distributed."""
    solver, d, upper = SOLVERS[name]
    rows = 203
    rng = np.random.default_rng(8)
    b = rng.normal(size=rows).astype(np.float32)
    cuts = np.sort(rng.choice(np.arange(1, rows), SIZE - 1, replace=False))

    # Beside a cut, the adjoint is (own + own) + other rank's, elsewhere own + (own + own): the bits
    # of a sum of two terms are the same either way.
    lower = 0 if name == "lsmr" else 1

    def run(b, comm):
        A = stencil(d, upper, comm, lower)
        scaled = lambda v: v * np.float32(0.3)
        solve = lambda b: solver(A, b, comm=comm, reproducible=True, M=scaled, maxiter=9)
        return jax.jit(solve)(b)

    found = jax.tree.map(np.asarray, run(np.split(b, cuts)[RANK], COMM))
    alone = jax.tree.map(np.asarray, run(b, MPI.COMM_SELF)) if RANK == 0 else None
    alone, expected = COMM.bcast(alone)
    x, info = found
    assert x.tobytes() == np.split(alone, cuts)[RANK].tobytes()
    for a, e in zip(info, expected, strict=True):
        assert a.tobytes() == e.tobytes()


def test_least_squares_with_reproducible_sums():
    """Solution, and derivative."""
    (b,) = vectors(1)

    def loss(b):
        x, info = linalg.lsmr(stencil(4.0, 0.5, COMM), b, reproducible=True)
        return jnp.sum(x**2), (x, info.converged)

    slope, (x, converged) = jax.jit(jax.grad(loss, has_aux=True))(b[MINE].astype(np.float32))
    solution = np.linalg.solve(matrix(4.0, 0.5), b)
    assert converged
    np.testing.assert_allclose(x, solution[MINE], atol=1e-4)
    back = np.linalg.solve(matrix(4.0, 0.5).T, 2 * solution)
    np.testing.assert_allclose(slope, back[MINE], atol=1e-4)


def test_wrong_arguments():
    for name in ("bicgstab", "cg", "gmres", "minres"):
        solver = getattr(linalg, name)
        with pytest.raises(TypeError, match=rf"^{name}: argument 'A' must be a function .*ndarray"):
            solver(np.eye(3), np.ones(3))
        with pytest.raises(TypeError, match=rf"^{name}: argument 'M' must be a function .*int"):
            solver(lambda v: v, np.ones(3), M=3)
        with pytest.raises(ValueError, match=rf"^{name}: argument 'x0' must have the shapes of"):
            solver(lambda v: v, np.ones(3), np.ones(4))


def test_a_space_without_dimension():
    for wrong, error in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match=r"^gmres: argument 'restart' must be the dim.*at least 1"):
            linalg.gmres(lambda v: v, np.ones(3), restart=wrong)


def test_what_a_function_of_the_user_returns():
    """Shapes and dtypes of another vector: some of them would give wrong values in silence."""
    for name in ("bicgstab", "cg", "gmres", "lsmr", "minres"):
        solver = getattr(linalg, name)
        for f, got in ((np.transpose, (3, 2)), (jnp.ravel, (6,)), (jnp.sum, ())):
            words = f"{name}: argument 'A' must return a vector of the shapes of 'b', (2, 3), got "
            with pytest.raises(ValueError, match=re.escape(f"{words}{got}")):
                solver(f, np.ones((2, 3)))
        with pytest.raises(TypeError, match=rf"^{name}: argument 'A' returns complex64 for a vec"):
            solver(lambda v: 2j * v, np.ones(3, np.float32))
        if name != "lsmr":
            with pytest.raises(ValueError, match=rf"^{name}: argument 'M' must .*got \(2,\)"):
                solver(lambda v: 2 * v, np.ones(3), M=lambda v: v[1:])
    x, _ = linalg.cg(lambda v: [2 * v[0], 2 * v[1]], (np.ones(2), np.ones(())))
    assert x[0].tolist() == [0.5, 0.5]
