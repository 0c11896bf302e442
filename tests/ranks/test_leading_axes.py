"""Arrays with axes before the axes of a block or layout: each function does to each component what
it does to the component alone, and so do its gradient and the same function of a tree."""

import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import COMM, RANK, SIZE
from test_halo import cart_of

import mpi4jax.notoken as m
from mpi4jax import grids

CELLS = (3 * SIZE + 1, 4 * SIZE, 4)

# The dimensions of the grid of ranks, and the axes of a block that they decompose.
GRIDS = {
    "first axis": ((SIZE,), 0),
    "middle axis": ((SIZE,), 1),
    "axes in another order": ((SIZE, 1), (1, 0)),
    "from the end": ((1, SIZE), (None, -3)),
    "last axes": ((1, SIZE, 1), None),
}

BORDERS = {
    "edge": lambda s: "edge",
    "symmetric": lambda s: grids.neumann(),
    "reflect": lambda s: grids.neumann("node"),
    "a number": lambda s: 2.5,
    "one side": lambda s: [("edge", None)] * len(s.block.neighbors),
    "dirichlet": lambda s: grids.dirichlet(1.5),
    "an array": lambda s: s.block.make(lambda i, j, k: i + 10.0 * j - k),
    "dirichlet array": lambda s: grids.dirichlet(s.block.make(lambda i, j, k: i + 10.0 * j - k)),
}


class Setting:
    """The block of this rank with one ghost cell below and two above, and without ghost cells."""

    def __init__(self, dims, axes):
        cart = cart_of(dims, (False, True, False)[: len(dims)])
        width = [(1, 2)] * len(dims)
        self.block = grids.Block(CELLS, cart, axes=axes, width=width)
        self.bare = grids.Block(CELLS, cart, axes=axes)
        self.slabs = m.Layout(CELLS, {1: SIZE})
        # The same with the communicator: axes count from the end of each array.
        axes = range(-len(dims), 0) if axes is None else [axes] if isinstance(axes, int) else axes
        from_end = [k if k is None or k < 0 else k - len(CELLS) for k in axes]
        self.cart = {"cart": cart, "axes": from_end, "width": width}
        self.decomposed = [CELLS[k] for k in from_end if k is not None]
        self.shapes = {
            "padded": self.block.padded_shape,
            "bare": self.block.shape,
            "slab": self.slabs.block_shape(RANK),
            "whole": CELLS,
        }


def stencil(x):
    """Each cell with those below and above it along the first axis of the blocks."""
    return x[..., 1:-2, :, :] + 2 * x[..., :-3, :, :] - x[..., 3:, :, :]


def leaves(f):
    """The function of one array, of each leaf."""
    return lambda x: jax.tree.map(f, x)


def exchanges():
    """Functions of a setting that return a function of a block, by the kind of the block."""
    found = {
        ("halo_exchange", "padded"): lambda s: lambda x: m.halo_exchange(x, s.block),
        ("no corners", "padded"): lambda s: lambda x: m.halo_exchange(x, s.block, corners=False),
        ("halo_exchange, axes", "padded"): lambda s: lambda x: m.halo_exchange(x, **s.cart),
        ("ihalo_exchange", "padded"): lambda s: lambda x: m.wait(m.ihalo_exchange(x, s.block)),
        ("ihalo_exchange, axes", "padded"): lambda s: (
            lambda x: m.wait(m.ihalo_exchange(x, **s.cart, border="edge"))
        ),
        ("halo_add", "padded"): lambda s: lambda x: m.halo_add(x, s.block),
        ("halo_add, axes", "padded"): lambda s: lambda x: m.halo_add(x, **s.cart),
        ("without_ghosts", "padded"): lambda s: s.block.without_ghosts,
        ("with_ghosts", "bare"): lambda s: s.block.with_ghosts,
        ("gather_blocks", "padded"): lambda s: lambda x: m.gather_blocks(x, s.block, SIZE - 1),
        ("scatter_blocks", "whole"): lambda s: lambda x: m.scatter_blocks(x, s.block, SIZE - 1),
        ("gather_blocks, axes", "padded"): lambda s: (
            lambda x: m.gather_blocks(x, **s.cart, cells=s.decomposed)
        ),
        ("scatter_blocks, axes", "whole"): lambda s: lambda x: m.scatter_blocks(x, **s.cart),
        ("a mask", "padded"): lambda s: leaves(
            lambda x: jnp.where(s.block.make(lambda i, j, k: i + j > k), x, 0)
        ),
        ("from a block", "padded"): lambda s: lambda x: m.redistribute(x, s.block, s.slabs),
        ("to a block", "slab"): lambda s: lambda x: m.redistribute(x, s.slabs, s.bare),
        ("fftn", "slab"): lambda s: leaves(lambda x: m.fft.fftn(x, s.slabs)),
        ("fftn, a block", "bare"): lambda s: leaves(
            lambda x: m.fft.fftn(x, s.bare, (0, -1), natural=True)
        ),
        ("ifftn", "slab"): lambda s: leaves(lambda x: m.fft.ifftn(x, s.slabs, natural=True)),
        ("rfftn and irfftn", "bare"): lambda s: leaves(
            lambda x: m.fft.irfftn(2 * m.fft.rfftn(x, s.bare), s.bare)
        ),
    }
    for name in ("dctn", "dstn", "idctn", "idstn"):
        found[name, "slab"] = lambda s, name=name: leaves(
            lambda x: getattr(m.fft, name)(x, s.slabs, natural=True)
        )
    for name, border in BORDERS.items():
        found[f"border {name}", "padded"] = lambda s, border=border: (
            lambda x: m.halo_exchange(x, s.block, border=border(s))
        )
        found[f"add, border {name}", "padded"] = lambda s, border=border: (
            lambda x: m.halo_add(x, s.block, border=border(s))
        )
    return found


EXCHANGES = exchanges()


def components(shape, seed=0):
    """A tree of arrays with no, one and two axes before the axes of the block."""
    make = np.random.default_rng([RANK, seed]).standard_normal
    batches = {"none": (), "one": (3,), "two": (2, 2)}
    return {name: jnp.asarray(make((*b, *shape)), "float32") for name, b in batches.items()}


def each_alone(f, tree, ndim):
    """The function of each component of each array."""

    def of_leaf(x):
        batch = x.shape[: x.ndim - ndim]
        found = [f(v) for v in x.reshape(-1, *x.shape[len(batch) :])]
        return jax.tree.map(lambda *v: np.stack(v).reshape(*batch, *v[0].shape), *found)

    return {name: of_leaf(x) for name, x in tree.items()}


def with_gradient(f):
    """The value of a linear function, and the gradient of a sum of squares of it."""

    def loss(x):
        y = f(x)
        return sum(jnp.sum(jnp.abs(v) ** 2) for v in jax.tree.leaves(y)), y

    def both(x):
        gradient, y = jax.grad(loss, has_aux=True)(x)
        return {"value": y, "gradient": gradient}

    return jax.jit(both)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", EXCHANGES, ids=" ".join)
def test_axes_before_those_of_a_block(case, grid):
    setting = Setting(*GRIDS[grid])
    f = with_gradient(EXCHANGES[case](setting))
    tree = components(setting.shapes[case[1]])
    alone = each_alone(f, tree, len(CELLS))
    found = f(tree)
    for name in tree:
        for part in ("value", "gradient"):
            expected = alone[name][part]
            assert found[part][name].shape == expected.shape, (name, part)
            np.testing.assert_allclose(found[part][name], expected, 1e-4, 1e-3, err_msg=name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("border", [*BORDERS, None])
def test_a_stencil_beside_an_exchange_of_components(border):
    setting = Setting((SIZE,), 0)
    block, of_cells = setting.block, BORDERS[border](setting) if border else None
    f = with_gradient(leaves(lambda x: grids.overlapped(stencil, x, block, border=of_cells)))
    tree = components(block.padded_shape)
    alone, found = each_alone(f, tree, len(CELLS)), f(tree)
    for name in tree:
        for part in ("value", "gradient"):
            np.testing.assert_allclose(found[part][name], alone[name][part], 1e-5, 1e-5)


@pytest.mark.parametrize("grid", ["first axis", "from the end"])
def test_files_of_components(grid):
    """What is stored of a block, and read into one: its cells, not the ghost cells."""
    tensorstore = pytest.importorskip("tensorstore")
    setting = Setting(*GRIDS[grid])
    tree = components(setting.shapes["padded"])
    whole = m.gather_blocks(tree, setting.block)
    path = COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    m.checkpoints.save(f"{path}/state", tree, setting.block, comm=COMM)
    inner = setting.block.without_ghosts(tree)
    zeros = jax.tree.map(jnp.zeros_like, inner)
    found = m.checkpoints.load(f"{path}/state", zeros, setting.bare, comm=COMM)
    jax.tree.map(np.testing.assert_array_equal, found, inner)
    dims = {"none": "xyz", "one": "axyz", "two": "bcxyz"}
    m.output.append(f"{path}/out", tree, setting.block, time=0.0, dims=dims, comm=COMM)
    if RANK == 0:
        for name, x in whole.items():
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/out/{name}"}}
            stored = tensorstore.open(spec).result()[0].read().result()
            np.testing.assert_array_equal(stored, x)
        shutil.rmtree(path)
