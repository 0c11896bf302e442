"""`scatter_blocks` and `gather_blocks`: a global array, cut and put together, in NumPy's slices."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, assert_equal
from test_halo import cart_of, grid

import mpi4jax
from mpi4jax import grids, notoken


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize(("dims", "axes"), [(1, (1,)), (2, None), (2, (2, 0)), (3, (1, 0, 2))])
def test_blocks_of_a_global_array(dims, axes, root):
    """Cut with the model's windows of the whole array, and put together again."""
    periods = [True, False, True][:dims]
    cart = grid(dims, periods)
    places = [-dims + k for k in range(dims)] if axes is None else list(axes)
    shape = [2, 2, 2]
    for k, axis in enumerate(places):
        shape[axis] = 2 * cart.dims[k]
    whole = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    given = whole if root == RANK else jax.ShapeDtypeStruct(whole.shape, whole.dtype)

    padded = whole
    for k, axis in enumerate(places):
        around = [(1, 1) if a == axis % 3 else (0, 0) for a in range(3)]
        padded = np.pad(padded, around, mode="wrap" if periods[k] else "constant")
    coords = cart.Get_coords(RANK)
    window = [slice(None)] * 3
    for k, axis in enumerate(places):
        window[axis] = slice(2 * coords[k], 2 * coords[k] + 4)

    def f(x):
        block = notoken.scatter_blocks(x, cart, root, axes=axes, width=1)
        return block, notoken.gather_blocks(block, cart, root, axes=axes, width=1)

    block, again = f(given) if root != RANK else mpi4jax.jit(f)(given)
    assert_equal(block, padded[tuple(window)])
    assert_equal(again, whole if root == RANK else padded[tuple(window)])
    bare, token = mpi4jax.scatter_blocks(given, cart, root, axes=axes)
    assert token.shape == ()
    assert bare.shape == tuple(
        2 if axis in [a % 3 for a in places] else n for axis, n in enumerate(shape)
    )


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("width", [0, 1])
def test_blocks_that_are_not_equal(dims, width):
    """As numpy.array_split; beside leaves whose blocks are, and of another type."""
    cart = grid(dims, [True] * dims)
    cells = [2 * n + k + 1 for k, n in enumerate(cart.dims)]
    whole = {
        "u": np.random.default_rng(4).standard_normal(cells).astype(np.float32),
        "equal": np.arange(np.prod(cart.dims), dtype=np.float32).reshape(cart.dims),
        "i": np.arange(3 * np.prod(cells), dtype=np.int32).reshape(3, *cells),
    }
    if width:
        del whole["equal"]  # its blocks are too small

    def block_of(x):
        places = range(x.ndim - dims, x.ndim)
        window = [slice(None)] * x.ndim
        for axis, n, at in zip(places, cart.dims, cart.Get_coords(RANK), strict=True):
            sizes = [len(part) for part in np.array_split(range(x.shape[axis]), n)]
            x = np.pad(x, [(width, width) if a == axis else (0, 0) for a in range(x.ndim)], "wrap")
            window[axis] = slice(sum(sizes[:at]), sum(sizes[: at + 1]) + 2 * width)
        return x[tuple(window)]

    root = SIZE - 1
    given = whole if root == RANK else jax.eval_shape(lambda: whole)
    blocks = notoken.scatter_blocks(given, cart, root, width=width)
    for name, x in whole.items():
        assert_equal(blocks[name], block_of(x))
    for name in ("u", "i"):
        again = jax.jit(lambda x: notoken.gather_blocks(x, cart, root, width=width, cells=cells))(
            blocks[name]
        )
        assert_equal(again, whole[name] if root == RANK else block_of(whole[name]))

    def loss(x):
        blocks = notoken.scatter_blocks(x, cart, root, width=width)
        again = notoken.gather_blocks(blocks, cart, root, width=width, cells=cells)
        return jnp.sum(again**2) if root == RANK else 0.0

    gradient = jax.grad(loss)(jnp.asarray(whole["u"]))
    assert_equal(gradient, 2 * whole["u"] if root == RANK else 0 * whole["u"])


def test_errors_of_cells():
    cart = cart_of((SIZE, 1), (True, True))
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"gather_blocks: argument 'cells' must be one number"):
        notoken.gather_blocks(x, cart, cells=3)
    with pytest.raises(TypeError, match=r"gather_blocks: argument 'cells' must be one number"):
        notoken.gather_blocks(x, cart, cells=(2.5, 3))
    with pytest.raises(ValueError, match=r"gather_blocks: argument 'x' has \(2, 3\) inner cells"):
        notoken.gather_blocks(x, cart, cells=(3 * SIZE, 3))


def test_errors_of_blocks():
    cart = cart_of((SIZE, 1), (True, True))
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"gather_blocks: argument 'axes' must name"):
            notoken.gather_blocks(np.zeros((2, 2)), cart, axes=(None, 0))
    with pytest.raises(TypeError, match="scatter_blocks: argument 'cart'"):
        notoken.scatter_blocks(np.zeros(2), MPI.COMM_WORLD)
    with pytest.raises(ValueError, match="gather_blocks: argument 'root' must be a rank"):
        notoken.gather_blocks(np.zeros((2, 2)), cart, SIZE)
    with pytest.raises(ValueError, match=r"gather_blocks: .* fewer cells along axis 1"):
        notoken.gather_blocks(np.zeros((2, 2)), cart, width=[0, 2])
    # On all ranks alike, also where the block of this rank has enough cells.
    with pytest.raises(ValueError, match=r"scatter_blocks: .* a block of 2 cells along axis 0"):
        notoken.scatter_blocks(np.zeros((3 * SIZE - 1, 5)), cart, width=[3, 0])


@pytest.mark.skipif(SIZE == 1, reason="one rank has the largest block")
@pytest.mark.parametrize("f", [notoken.halo_exchange, notoken.halo_add, notoken.ihalo_exchange])
def test_a_narrow_block_is_an_error_on_all_ranks(f):
    """Also where the block of this rank has enough cells."""
    block = grids.Block((3 * SIZE + 1,), cart_of((SIZE,), (True,)), width=4)
    with pytest.raises(ValueError, match=rf"^{f.__name__}: .* a block of 3 cells along axis 0"):
        f(jnp.zeros(block.padded_shape), block)


def test_copies_of_a_block():
    block = grids.Block((2 * SIZE,), cart_of((SIZE,), (True,)), width=1)
    assert copy.copy(block) is copy.deepcopy({"block": block})["block"] is block
    with pytest.raises(TypeError, match=r"^Block\(.*cannot be pickled: .* or its 'layout'"):
        pickle.dumps(block)
    assert pickle.loads(pickle.dumps(block.layout)) == block.layout


# ---- The geometry


@pytest.mark.parametrize(("dims", "axes"), [(1, (1,)), (2, None), (2, (2, 0)), (2, (0, None))])
@pytest.mark.parametrize("extra", [0, 1, -1])
def test_geometry_of_blocks(dims, axes, extra):
    """Against the parts of `numpy.array_split`, as many cells as ranks, one more and one less."""
    if axes == (0, None):
        cart = cart_of((SIZE, 1), (True, False))
    else:
        cart = grid(dims, [True, False][:dims])
    places = [-dims + k for k in range(dims)] if axes is None else list(axes)
    cut = {a % 3: k for k, a in enumerate(places) if a is not None}
    shape = [3, 3, 3]
    for axis, k in cut.items():
        shape[axis] = cart.dims[k] + extra
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for rank in range(SIZE):
        block = grids.Block(shape, cart, axes=axes, width=1, rank=rank)
        coords = cart.Get_coords(rank)
        part = whole
        for axis, k in cut.items():
            part = np.array_split(part, cart.dims[k], axis)[coords[k]]
        assert_equal(whole[block.slices], part)
        assert block.shape == part.shape
        assert block.offset == tuple(s.start for s in block.slices)
        for k, (below, above) in enumerate(block.neighbors):
            around = []
            for step in (-1, 1):
                there = [*coords]
                there[k] += step
                inside = cart.periods[k] or 0 <= there[k] < cart.dims[k]
                around.append(cart.Get_cart_rank(there) if inside else None)
            assert [below, above] == around
    block = grids.Block(shape, cart, axes=axes, width=1)
    strides = [shape[1] * shape[2], shape[2], 1]
    made = jax.jit(lambda: block.make(lambda *at: sum(map(lambda i, s: i * s, at, strides))))()
    assert made.shape == block.padded_shape
    assert_equal(made[block.inner], whole[block.slices])
    for axis, line in enumerate(block.indices()):
        k = cut.get(axis)
        expected = np.arange(block.shape[axis] + 2 * (k is not None))
        expected = expected + block.offset[axis] - (k is not None)
        if k is not None and cart.periods[k]:
            expected = expected % max(shape[axis], 1)
        np.testing.assert_array_equal(np.ravel(line), expected)


def test_blocks_of_fewer_cells_than_ranks():
    """Some are empty."""
    cart = grid(1, [True])
    whole = np.arange(6.0, dtype=np.float32).reshape(3, 2) if SIZE > 3 else np.ones((SIZE - 1, 2))
    whole = whole.astype(np.float32)
    block = notoken.scatter_blocks(whole, cart, axes=0)
    assert_equal(block, whole[grids.Block(whole.shape, cart, axes=0).slices])
    again = notoken.gather_blocks(block, cart, axes=0, cells=len(whole))
    assert_equal(again, whole if RANK == 0 else block)


@pytest.mark.parametrize("shape", [(5, 4), (3, 2), (1, 1), (0, 3)])
def test_regions(shape):
    """Each cell is in one of them, and the interior needs no ghost cell."""
    widths = [(1, 2), (0, 1)]
    interior, rim = grids.regions(shape, widths)
    count = np.zeros(shape, int)
    for window in (interior, *rim):
        count[window] += 1
    assert (count == 1).all()
    for axis, (s, n, (low, high)) in enumerate(zip(interior, shape, widths, strict=True)):
        assert s.start == s.stop or (s.start >= low and s.stop + high <= n), axis


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cells", [2, 3, 6])
@pytest.mark.parametrize("border", [None, "edge", (3.0, None)])
def test_a_stencil_beside_an_exchange(cells, border):
    """As after the exchange, with its derivative; also for blocks of boundary cells only."""
    cart = grid(2, [False, True])
    x = np.random.default_rng(RANK).normal(size=(2, cells + 2, cells + 3)).astype(np.float32)
    options = {"width": [1, (1, 2)], "border": border}

    def f(t):
        x, y = t
        near = x[1, 1:-1, :-3] * x[0, 2:, 3:] + y[0, :-2, 1:-2]
        return {"a": near, "b": jnp.stack([near, x[0, 1:-1, 2:-1], near], 0)}

    both = lambda x: grids.overlapped(f, (x, 2 * x), cart, **options)
    after = lambda x: f(notoken.halo_exchange((x, 2 * x), cart, **options))
    for run in (both, jax.jit(both)):
        jax.tree.map(assert_equal, run(x), jax.tree.map(np.asarray, after(x)))
    loss = lambda g: lambda x: sum(jnp.sum(v**2) for v in jax.tree.leaves(g(x)))
    found, expected = (jax.jit(jax.grad(loss(g)))(x) for g in (both, after))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="overlapped: argument 'x' must have arrays of one shape"):
        grids.overlapped(f, (x, x[:, 1:]), cart)
