"""`linalg.multigrid`: the same on any number of ranks, and iterations that do not grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, SIZE, enable_x64

from mpi4jax import notoken
from mpi4jax.grids import Block

linalg = notoken.linalg
PAIR = MPI.Compute_dims(SIZE, 2)


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True):
        yield


def cartesian(comm, dims):
    return comm.Create_cart(dims, periods=[False] * len(dims))


def operator(block, k):
    """-div(k grad u), with zero at the walls."""
    k = notoken.halo_exchange(block.with_ghosts(k), block, border="edge")
    inner = (slice(1, -1),) * k.ndim

    def moved(x, axis, step):
        at = [slice(1, -1)] * x.ndim
        at[axis] = slice(1 + step, x.shape[axis] - 1 + step)
        return x[tuple(at)]

    scale = block.global_shape[0] ** 2
    steps = [(axis, step) for axis in range(k.ndim) for step in (-1, 1)]
    faces = [scale * (k[inner] + moved(k, *at)) / 2 for at in steps]
    border = notoken.grids.dirichlet(0.0)

    def apply(u):
        u = notoken.halo_exchange(block.with_ghosts(u), block, border=border)
        return sum(f * (u[inner] - moved(u, *at)) for f, at in zip(faces, steps, strict=True))

    return apply, sum(faces)


def coefficients(block):
    n = block.global_shape[0]
    k = block.make(lambda *i: 1 + sum(jnp.cos(3 * (j + 0.5) / n) for j in i) ** 2)
    return block.without_ghosts(k)


@pytest.mark.parametrize(
    "shape, dims, cuts",
    [
        ((24 * SIZE, 8), [SIZE, 1], [[24] * SIZE, None]),
        ((8, 16 * SIZE), [1, SIZE], "uneven"),
        ((8, 8, 16), [1, *PAIR], None),
    ],
    ids=["slabs", "blocks that cannot be halved", "three axes"],
)
def test_a_cycle_is_that_of_one_process_and_symmetric(shape, dims, cuts):
    if cuts == "uneven":
        cuts = [None, [16 + (-1) ** r * (r < SIZE // 2 * 2) for r in range(SIZE)]]
    block = Block(shape, cartesian(COMM, dims), width=1, lengths=cuts)
    alone = Block(shape, cartesian(MPI.COMM_SELF, [1] * len(shape)), width=1)
    x, y = np.random.default_rng(0).normal(size=(2, *shape))

    def run(block, x, y):
        M = linalg.multigrid(block, operator, coefficients(block), levels=2)
        products = [linalg.vdot(M(x), y, comm=block.comm), linalg.vdot(x, M(y), comm=block.comm)]
        return M(x), *products, linalg.vdot(M(x), x, comm=block.comm)

    own = block.slices
    z, left, right, size = jax.jit(lambda x, y: run(block, x, y))(x[own], y[own])
    expected, *_ = jax.jit(lambda x, y: run(alone, x, y))(x, y)
    np.testing.assert_allclose(z, expected[own], atol=1e-12 * np.abs(expected).max())
    np.testing.assert_allclose(left, right, rtol=1e-10)
    assert size > 0


def test_iterations_do_not_depend_on_the_cells():
    counts = []
    for n in (32, 128):
        block = Block((n, n), cartesian(COMM, PAIR), width=1)

        @jax.jit
        def solve(b, block=block):
            k = coefficients(block)
            M = linalg.multigrid(block, operator, k)
            return linalg.cg(operator(block, k)[0], b, M=M, tol=1e-8, comm=block.comm)[1]

        info = solve(jnp.ones(block.shape))
        assert info.converged
        counts.append(int(info.iterations))
    assert max(counts) < 12
    assert counts[1] - counts[0] <= 2


WRONG = [
    (lambda b, g: linalg.multigrid(g, operator), "'block' must have width=1 along all axes"),
    (lambda b, g: linalg.multigrid(b, operator, levels=9), r"'levels' must be from 1 to \d for a"),
    (lambda b, g: linalg.multigrid(b, operator, np.ones(3)), r"'fields' must have .* got \(3,\)"),
]


@pytest.mark.parametrize("call, words", WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments(call, words):
    cart = cartesian(COMM, [SIZE])
    with pytest.raises(ValueError, match=f"multigrid: argument {words}"):
        call(Block((8 * SIZE,), cart, width=1), Block((8 * SIZE,), cart))
