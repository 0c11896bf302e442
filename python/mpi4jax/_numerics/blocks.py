"""Partition a global array into the blocks of a Cartesian communicator, and assemble it again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from ..ops import gatherv, halo_exchange, scatterv
from .arrays import T
from .base import as_arrays, cart as _cart, rank_of, static_int
from .layout import Layout, Pieces

Shape = tuple[int, ...]


class Cuts:
    """The positions of the blocks of a Cartesian communicator in an array."""

    def __init__(self, op: str, cart: Any, axes: Any, width: Any, lengths: Any = None):
        self.op, self.lengths = op, lengths
        self.known: Shape | None = None  # the shape of the whole array
        if hasattr(cart, "lengths"):  # a block
            self.lengths, self.known = cart.lengths, cart.global_shape
        self.comm, chosen, widths = _cart.grid_of(op, cart, axes, width)
        sizes = _cart.topology(self.comm)[0]
        for axis, size in zip(chosen, sizes, strict=True):
            if axis is None and size > 1:
                raise ValueError(
                    f"{op}: argument 'axes' must name an axis for each dimension of 'cart' that "
                    f"is decomposed ({sizes}), got {axes!r}"
                )
        cut = [k for k, axis in enumerate(chosen) if axis is not None]
        self.dimensions = cut
        self.axes = [axis for axis in chosen if axis is not None]
        self.sizes, self.widths = [sizes[k] for k in cut], [widths[k] for k in cut]

    def positions(self, ndim: int) -> list[int]:
        return _cart.positions(self.op, self.axes, ndim)

    def around(self, ndim: int) -> list[tuple[int, int]]:
        """Return the ghost cells below and above along each axis of an array."""
        widths = [(0, 0)] * ndim
        for axis, width in zip(self.positions(ndim), self.widths, strict=True):
            widths[axis] = width
        return widths

    def check_whole(self, shape: Shape) -> None:
        """Raise an error unless a global array has the shape that a `grids.Block` has."""
        if self.known is not None and shape[max(len(shape) - len(self.known), 0) :] != self.known:
            raise ValueError(
                f"{self.op}: argument 'x' has shape {shape}; expected {self.known}, the global "
                "shape of the block, after any leading axes"
            )

    def layout(self, shape: Shape) -> Layout:
        """Return the layout of the blocks of all ranks in an array of this shape."""
        each = [None] * len(self.dimensions)
        if self.lengths is not None:
            each = [self.lengths[k] for k in self.dimensions]
        cuts = [n if known is None else known for n, known in zip(self.sizes, each, strict=True)]
        layout = Layout(shape, zip(self.positions(len(shape)), cuts, strict=True))
        if layout.ranks != math.prod(self.sizes):
            raise ValueError(
                f"{self.op}: argument 'lengths' must have the length of each of the {self.sizes} "
                f"blocks along the dimensions of 'cart', got {self.lengths}"
            )
        return layout

    def check_widths(self, layout: Layout) -> None:
        """Raise an error, on all ranks alike, if a block has too few cells for its neighbors."""
        axes = self.positions(len(layout.shape))
        for axis, most in zip(axes, map(max, self.widths), strict=True):
            fewest = min(b - a for a, b in itertools.pairwise(layout.ends(axis)))
            if fewest < most:
                raise ValueError(
                    f"{self.op}: argument 'x' of shape {layout.shape} has a block of {fewest} "
                    f"cells along axis {axis}; expected at least {most}, as argument 'width' says"
                )

    def pieces(self, shape: Shape) -> Pieces:
        """Return an array of this shape, partitioned into the blocks of all ranks."""
        return Pieces.of((), tuple(slice(0, n) for n in shape), self.layout(shape))

    def whole(self, block: Shape, cells: Sequence[int] | None) -> Shape:
        """Return the shape of the global array whose block on this rank has this shape."""
        out = list(block)
        for k, axis in enumerate(self.positions(len(block))):
            out[axis] = block[axis] * self.sizes[k] if cells is None else cells[k]
        if cells is None and self.known is not None:
            out[len(block) - len(self.known) :] = self.known
        expected = self.layout(tuple(out)).block_shape(self.comm.rank)
        if block != expected:
            raise ValueError(
                f"{self.op}: argument 'x' has {block} inner cells on rank {self.comm.rank}; "
                f"expected {expected}, a block of an array of shape {tuple(out)} (argument 'cells')"
            )
        return tuple(out)

    def cells_of(self, cells: Any) -> tuple[int, ...] | None:
        """Return the numbers of cells along the decomposed axes."""
        if cells is None:
            return None
        expected = f"one number of cells per decomposed axis ({len(self.axes)})"
        given = cells if isinstance(cells, Sequence) else [cells]
        known = tuple(static_int(self.op, "cells", n, expected) for n in given)
        if len(known) != len(self.axes) or min(known, default=0) < 0:
            raise ValueError(f"{self.op}: argument 'cells' must be {expected}, got {cells!r}")
        return known

    def inner(self, x: jax.Array) -> jax.Array:
        """Return the array without its ghost cells."""
        window = []
        for axis, (low, high) in enumerate(self.around(x.ndim)):
            if x.shape[axis] < low + high:
                raise ValueError(
                    f"{self.op}: argument 'x' of shape {x.shape} has fewer cells along axis "
                    f"{axis} than the ghost cells of 'width', {low} below and {high} above"
                )
            window.append(slice(low, x.shape[axis] - high))
        return x[tuple(window)]


def scatter_blocks(
    x: T,
    cart: MPI.Cartcomm | _cart.Block,
    root: int = 0,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 0,
) -> T:
    """Partition the root's array into blocks, one for each rank of a Cartesian communicator.

    Blocks are as equal as possible, as with `numpy.array_split`: of 7 cells on 3 ranks, the first
    rank has 3, and the others 2.

    Args:
        x: on the root, the whole array; on other ranks anything of its shape and dtype, also a
            ``jax.ShapeDtypeStruct``: values are not read there. Or a pytree of such.
        cart: communicator with a Cartesian topology; or a :class:`mpi4jax.grids.Block`, with its
            axes, width and lengths; or a :class:`mpi4jax.sharding.NamedSharding`, whose blocks have
            no ghost cells.
        root: rank that has the array.
        axes: the array's axis that each dimension of ``cart`` decomposes, by default the last axes.
        width: number of ghost cells around a block, as for :func:`halo_exchange`, by default none.
            They are filled; at an edge of the grid that is not periodic with zeros.

    Returns:
        jax.Array, or pytree: this rank's block.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a decomposed axis is not named, or a block has fewer cells than ``width``.

    Derivative:
        The transpose gathers on the root (the derivatives of :func:`scatterv` and
        :func:`halo_exchange`).

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> n = MPI.COMM_WORLD.size
        >>> cart = MPI.COMM_WORLD.Create_cart([n, 1], periods=[False, True])
        >>> block = mpi4jax.scatter_blocks(jnp.ones((2 * n, 3)), cart, width=1)
        >>> block.shape
        (4, 5)
        >>> whole = mpi4jax.gather_blocks(block, cart, width=1)
        >>> cart.rank > 0 or whole.shape == (2 * n, 3)
        True

    See also: :func:`gather_blocks`, :func:`halo_exchange`, :func:`scatterv`.
    """
    name = "scatter_blocks"
    if hasattr(cart, "cut"):  # a sharding
        return jax.tree.map(lambda leaf: cart.cut(leaf, root), x)  # type: ignore[no-any-return]
    cuts = Cuts(name, cart, axes, width)
    root = rank_of(name, "root", root, cuts.comm)

    leaves, structure = jax.tree.flatten(x)
    is_root = cuts.comm.rank == root
    if is_root or not all(hasattr(leaf, "dtype") for leaf in leaves):
        leaves, _ = as_arrays(name, "x", x, template=not is_root)

    def block_of(leaf: Any) -> jax.Array:
        cuts.check_whole(leaf.shape)
        pieces, layout = cuts.pieces(leaf.shape), cuts.layout(leaf.shape)
        cuts.check_widths(layout)
        own = layout.block_shape(cuts.comm.rank)
        cells = pieces.pack(leaf) if is_root else jnp.zeros(math.prod(own), leaf.dtype)
        return scatterv(cells, pieces.counts(cuts.comm.size), root, comm=cuts.comm.mpi).reshape(own)

    y = structure.unflatten(map(block_of, leaves))
    if any(width != (0, 0) for width in cuts.widths):
        y = jax.tree.map(lambda leaf: jnp.pad(leaf, cuts.around(leaf.ndim)), y)
        y = halo_exchange(y, cart, axes=axes, width=width)
    return y


def gather_blocks(
    x: T,
    cart: MPI.Cartcomm | _cart.Block,
    root: int = 0,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 0,
    cells: int | Sequence[int] | None = None,
) -> T:
    """Assemble the blocks of all ranks of a Cartesian communicator on the root.

    Args:
        x: this rank's block, of the same shape on all ranks unless ``cells`` is given; or a pytree
            of blocks.
        cart: communicator with a Cartesian topology; or a :class:`mpi4jax.grids.Block`, with its
            axes, width and lengths; or a :class:`mpi4jax.sharding.NamedSharding`, whose blocks have
            no ghost cells.
        root: rank that gets the whole array.
        axes: the array's axis that each dimension of ``cart`` decomposes, by default the last axes.
        width: number of ghost cells around the block, which are left out: as for
            :func:`halo_exchange`, by default none.
        cells: number of cells of the whole array along each decomposed axis, in the order of the
            dimensions of ``cart``. It is needed if the blocks are not all equal: they are those
            that :func:`scatter_blocks` makes of it.

    Returns:
        jax.Array, or pytree: the whole array on the root, and ``x``, unchanged, on other ranks.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a decomposed axis is not named or has fewer cells than ghost cells, or if the
            block does not have the shape of this rank's block of an array with these ``cells``.

    Derivative:
        The transpose scatters from the root (the derivative of :func:`gatherv`).

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> y = mpi4jax.gather_blocks(jnp.full(2, cart.rank), cart)
        >>> cart.rank > 0 or [int(v) for v in y] == [r for r in range(cart.size) for _ in "ab"]
        True

    See also: :func:`scatter_blocks`, :func:`gatherv`.
    """
    name = "gather_blocks"
    if hasattr(cart, "join"):  # a sharding
        return jax.tree.map(lambda leaf: cart.join(leaf, root), x)  # type: ignore[no-any-return]
    cuts = Cuts(name, cart, axes, width)
    root = rank_of(name, "root", root, cuts.comm)
    known = cuts.cells_of(cells)
    leaves, structure = as_arrays(name, "x", x)
    inner = structure.unflatten(map(cuts.inner, leaves))
    # Errors of the core name the leaf.
    what = "blocks" if known or cuts.known else "blocks of one shape (unequal blocks need 'cells')"
    pieces = jax.tree.map(lambda leaf: cuts.pieces(cuts.whole(leaf.shape, known)), inner)

    def whole_of(leaf: Any, inner: jax.Array, pieces: Pieces) -> jax.Array:
        named, counts = {what: inner.ravel()}, pieces.counts(cuts.comm.size)
        message = gatherv(named, counts, root, comm=cuts.comm.mpi)[what]
        return pieces.unpack(message) if cuts.comm.rank == root else leaf

    return jax.tree.map(whole_of, x, inner, pieces)
