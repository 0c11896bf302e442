"""Unequal blocks and walls: a finite-volume code on ranks, as one process computes it in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE, assert_equal
from test_halo import grid

import mpi4jax
from mpi4jax import checkpoints, grids, notoken
from mpi4jax.grids import dirichlet, neumann

CELLS = (4 * SIZE + 1, 9)
WHOLE = np.random.default_rng(7).standard_normal((2, *CELLS)).astype(np.float32)


def unequal(width=0, seed=0, periods=(False, True)):
    """Blocks of a grid of ranks, of random lengths."""
    cart = grid(2, list(periods))
    cuts = []
    for k, n in enumerate(cart.dims):
        weights = np.random.default_rng([seed, k]).random(CELLS[k])
        cuts.append(grids.balanced(weights, n) if k == 0 else None)
    return grids.Block(CELLS, cart, width=width, lengths=cuts)


def test_blocks_of_unequal_lengths():
    block = unequal(width=1)
    assert sum(block.lengths[0]) == CELLS[0]
    given = WHOLE[0] if RANK == 0 else jax.ShapeDtypeStruct(CELLS, np.float32)
    x = notoken.scatter_blocks(given, block)
    assert x.shape == block.padded_shape
    assert_equal(x[block.inner], WHOLE[0][block.slices])
    assert_equal(block.with_ghosts(block.without_ghosts(x))[block.inner], x[block.inner])
    whole = notoken.gather_blocks(x, block)
    assert_equal(whole, WHOLE[0] if RANK == 0 else x)
    layout = mpi4jax.Layout(CELLS, block.layout.cuts)
    assert layout.block(RANK) == block.slices
    spectrum = notoken.fft.fftn(x[block.inner], block)
    at = notoken.fft.spectral_layout(block).block(RANK)
    np.testing.assert_allclose(spectrum, np.fft.fftn(WHOLE[0])[at], atol=1e-4)


def test_fields_move_between_decompositions(tmp_path_factory):
    """In one exchange, with its transpose; a checkpoint, too."""
    old, new = unequal(width=1), unequal(width=(1, 2), seed=5)
    fields = {"u": WHOLE[0][old.slices], "both": WHOLE[(..., *old.slices)]}
    padded = old.with_ghosts(fields)
    moved = jax.jit(lambda x: mpi4jax.redistribute(x, old, new))(padded)
    assert moved["both"].shape == (2, *new.padded_shape)
    assert_equal(new.without_ghosts(moved)["both"], WHOLE[(..., *new.slices)])
    bare = jax.jit(lambda x: mpi4jax.redistribute(x, old, new))(fields)  # without ghost cells
    assert_equal(bare["both"], np.asarray(moved["both"]))
    assert_equal(new.without_ghosts(bare["both"][0, *new.inner]), WHOLE[0][new.slices])
    c = new.with_ghosts(WHOLE[1][new.slices])
    _, back = jax.vjp(lambda x: mpi4jax.redistribute(x, old, new), padded["u"])
    assert_equal(back(c)[0], old.with_ghosts(WHOLE[1][old.slices]))
    path = COMM.bcast(str(tmp_path_factory.mktemp("walls")) if RANK == 0 else None)
    checkpoints.save(f"{path}/fields", padded, old)
    found = checkpoints.load(f"{path}/fields", jax.tree.map(jnp.zeros_like, moved), new)
    assert_equal(found["both"], np.asarray(moved["both"]))


def test_weights_are_shared():
    assert grids.balanced([5, 1, 1, 1, 1, 1], 2) == [1, 5]
    assert grids.balanced(np.ones(8), 4) == [2, 2, 2, 2]
    assert grids.balanced([0, 0, 9, 0], 3) in ([2, 0, 2], [2, 1, 1], [3, 0, 1])
    assert grids.balanced(np.zeros(6), 3) == [2, 2, 2]
    for weights, words in (
        (np.ones((3, 2)), r"'weights' must have one axis, got shape \(3, 2\); sum over the axes"),
        ([1, -1, 1], r"'weights' must be finite and not negative, got -1.0 for cell 1"),
        ([1, np.nan], r"'weights' must be finite .*, got nan for cell 1"),
    ):
        with pytest.raises(ValueError, match=f"^balanced: argument {words}"):
            grids.balanced(weights, 2)
    with pytest.raises(ValueError, match=r"^balanced: argument 'parts' must be at least 1, got 0"):
        grids.balanced([1, 1], 0)
    with pytest.raises(TypeError, match=r"^balanced: argument 'parts' must be a number of blocks"):
        grids.balanced([1, 1], 1.5)
    for seed in range(20):
        weights = np.random.default_rng(seed).exponential(size=50)
        lengths = grids.balanced(weights, 7)
        loads = [part.sum() for part in np.split(weights, np.cumsum(lengths)[:-1])]
        assert len(lengths) == 7
        assert max(loads) <= weights.sum() / 7 + weights.max()


def padded_in_numpy(x, k, below, above, inside="face"):
    """One ghost cell at either end of an axis: ("neumann",) or ("dirichlet", values)."""
    ghosts = []
    for end, (kind, *value) in ((0, below), (-1, above)):
        cells = np.take(x, [{"face": 0, "node": 1}[inside] if end == 0 else
                            {"face": -1, "node": -2}[inside]], k)  # fmt: skip
        ghosts.append(2 * value[0] - cells if kind == "dirichlet" else cells)
    return np.concatenate([ghosts[0], x, ghosts[1]], k)


@pytest.mark.parametrize("at", ["face", "node"])
def test_a_step_of_diffusion_between_walls(at):
    """Each field has its own conditions at each wall; one of them depends on the place."""
    block = unequal(width=1)
    _, j = block.indices()
    wall = jnp.sin(1.0 * j) + 0 * block.make(lambda i, j: 1.0 * i)
    border = {
        "heat": [(dirichlet(wall, at), neumann(at)), None],
        "salt": [(neumann(at), dirichlet(3.0, at)), None],
    }
    names = list(border)

    def laplacian(x):
        return x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * x[1:-1, 1:-1]

    @jax.jit
    def step(fields):
        x = block.with_ghosts(fields)
        x = mpi4jax.notoken.halo_exchange(x, block, border=border, corners=False)
        return jax.tree.map(lambda x, u: u + 0.1 * laplacian(x), x, fields)

    def step_of_one(heat, salt):
        of_wall = np.sin(np.arange(CELLS[1]))[None]
        out = []
        for x, below, above in (
            (heat, ("dirichlet", of_wall), ("neumann",)),
            (salt, ("neumann",), ("dirichlet", 3.0)),
        ):
            y = padded_in_numpy(x, 0, below, above, at)
            y = np.pad(y, [(0, 0), (1, 1)], mode="wrap")
            out.append(x + 0.1 * laplacian(y))
        return out

    fields = {name: jnp.asarray(WHOLE[k][block.slices]) for k, name in enumerate(names)}
    expected = [WHOLE[0].astype(float), WHOLE[1].astype(float)]
    for _ in range(3):
        fields, expected = step(fields), step_of_one(*expected)
    for name, whole in zip(names, expected, strict=True):
        np.testing.assert_allclose(fields[name], whole[block.slices], rtol=1e-4, atol=1e-4)

    c = {name: jnp.cos(x) for name, x in fields.items()}
    tangent = jax.jvp(step, (fields,), (c,))[1]
    (g,) = jax.vjp(step, fields)[1](fields)
    dot = lambda a, b: sum(float(jnp.vdot(a[name], b[name])) for name in names)
    both = MPI.COMM_WORLD.allreduce(np.array([dot(tangent, fields), dot(c, g)]))
    np.testing.assert_allclose(both[0], both[1], rtol=1e-4)


def test_halo_add_of_fields_with_walls():
    block = unequal(width=1)
    border = {"a": dirichlet(2.0), "b": neumann()}
    c = {k: np.random.default_rng([3, RANK]).integers(-5, 5, block.padded_shape) for k in "ab"}
    c = {k: x.astype(np.float32) for k, x in c.items()}
    exchange = lambda x: notoken.halo_exchange(x, block, border=border)
    (expected,) = jax.vjp(exchange, jax.tree.map(jnp.zeros_like, c))[1](c)
    found = notoken.halo_add(c, block, border=border)
    for name in c:
        assert_equal(found[name], np.asarray(expected[name]))


BLOCK = unequal(width=1)


def larger_by(n):
    return tuple(cells + n for cells in BLOCK.shape)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: notoken.halo_exchange(jnp.ones(BLOCK.shape), BLOCK),
         r"expected .*with its ghost cells; block.with_ghosts\(x\) adds"),
        (lambda: notoken.halo_add(jnp.ones((1, 1)), BLOCK), r"has shape \(1, 1\); expected"),
        (lambda: notoken.halo_exchange({"a": jnp.ones(BLOCK.padded_shape)}, BLOCK, border={"b": 0}),
         r"'border' has the fields \['b'\]; expected the fields of 'x', \['a'\]"),
        (lambda: dirichlet(1.0, at="corner"), r"'at' must be one of \('face', 'node'\)"),
        (lambda: grids.Block((9, 9), BLOCK.comm, lengths=[None, [8]]),
         "add up to 9|length of each"),
        (lambda: mpi4jax.Layout((3,), {0: [1, 1]}), "lengths that add up to 3, the length of axis"),
        (lambda: mpi4jax.Layout((3,), {0: [4, -1]}), "numbers of blocks, at least 1, or lengths"),
        (lambda: mpi4jax.redistribute(jnp.ones(3), mpi4jax.Layout((3,)), BLOCK), "have shapes"),
        # One row more than the block: without the ghost cells that it does not have, one less.
        (lambda: mpi4jax.redistribute(jnp.ones(larger_by(1)), BLOCK, BLOCK),
         r"redistribute: argument 'x' has .*without ghost cells. or .*with its ghost cells.*Block"),
        (lambda: BLOCK.without_ghosts({"a": jnp.ones(larger_by(3))}), "Block.without_ghosts: arg"),
        (lambda: BLOCK.without_ghosts(jnp.ones(3)), r"has shape \(3,\)"),
        (lambda: BLOCK.with_ghosts(jnp.ones(BLOCK.padded_shape)),
         r"with_ghosts: argument 'x' has .* expected .*without"),
    ],
)  # fmt: skip
def test_wrong_blocks_and_borders(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
