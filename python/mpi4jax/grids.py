"""The position of a rank's block in a global array, and its interface cells.

A Cartesian communicator partitions a global array into blocks, as :func:`numpy.array_split` does:
if the blocks cannot be equal, the first ones have one more cell. :func:`mpi4jax.scatter_blocks`,
:func:`mpi4jax.gather_blocks` and :func:`mpi4jax.halo_exchange` use the same blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from ._grid.border import dirichlet as dirichlet, neumann as neumann
from ._numerics.arrays import T, as_array
from ._numerics.base import Uncopied, cart as _cart, rank_of, static_int
from ._numerics.blocks import Cuts
from ._numerics.layout import Layout
from ._requests.wait import after, wait
from .ops import ihalo_exchange

__all__ = ["Block", "balanced", "dirichlet", "neumann", "overlapped", "regions"]

Window = tuple[slice, ...]
R = TypeVar("R")  # the result of a stencil


class Block(Uncopied):
    """A rank's block of a global array.

    Args:
        shape: shape of the global array.
        cart: communicator with a Cartesian topology.
        axes: the array's axis that each dimension of ``cart`` decomposes, by default the last axes.
        width: number of ghost cells around the block, as for :func:`mpi4jax.halo_exchange`; by
            default 0.
        rank: rank that has the block, by default this rank.
        lengths: for each dimension of ``cart``, the lengths of its blocks, or None for blocks of
            nearly equal length (the default). See :func:`balanced`.

    Attributes:
        global_shape: shape of the global array.
        shape: shape of the block, without ghost cells.
        comm, axes, width, lengths: as in the arguments; ``comm`` is ``cart``.
        layout: the blocks of all ranks, without ghost cells: a :class:`mpi4jax.Layout`.
        offset: index of its first cell in the global array.
        slices: the block in the global array: ``whole[block.slices]``.
        padded_shape: shape with ghost cells.
        inner: the block in the array with ghost cells: ``x[block.inner]``.
        neighbors: for each dimension of ``cart``, the ranks of the blocks below and above, or None
            at an edge of the grid that is not periodic.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a decomposed axis is not named, if the array does not have it, or if
            ``lengths`` does not fit ``cart`` or ``shape``.

    Operations that take ``cart``, ``axes`` and ``width``, such as :func:`mpi4jax.halo_exchange` and
    :func:`mpi4jax.gather_blocks`, take a block in place of ``cart``. Arrays may have further axes
    in front of the axes of the block, such as the components of a vector; ``axes`` are axes of the
    block.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> n = MPI.COMM_WORLD.size
        >>> cart = MPI.COMM_WORLD.Create_cart([n], periods=[False])
        >>> last = mpi4jax.grids.Block((2 * n + 1,), cart, width=1, rank=n - 1)
        >>> last.offset == (2 * n + 1 - last.shape[0],), last.padded_shape == (last.shape[0] + 2,)
        (True, True)
        >>> last.neighbors[0][1] is None
        True

    See also: :class:`mpi4jax.layouts.Layout`, without a communicator.
    """

    def __init__(
        self,
        shape: Sequence[int],
        cart: MPI.Cartcomm,
        *,
        axes: int | Sequence[int | None] | None = None,
        width: int | Sequence[int | tuple[int, int]] = 0,
        rank: int | None = None,
        lengths: Sequence[Sequence[int] | None] | None = None,
    ):
        self.comm, self.axes, self.width, self.lengths = cart, axes, width, lengths
        known = Cuts("Block", cart, axes, width, lengths)
        self.rank = known.comm.rank if rank is None else rank_of("Block", "rank", rank, known.comm)
        self.global_shape = tuple(int(n) for n in shape)
        self.layout = known.layout(self.global_shape)
        self._has_wide_blocks = False
        self.slices = self.layout.block(self.rank)
        self.shape = tuple(s.stop - s.start for s in self.slices)
        self.offset = tuple(s.start for s in self.slices)
        self._around = known.around(len(self.shape))
        self._wraps = [False] * len(self.shape)
        periods = _cart.topology(known.comm)[1]
        for axis, k in zip(known.positions(len(self.shape)), known.dimensions, strict=True):
            self._wraps[axis] = bool(periods[k])
        self.padded_shape = tuple(
            n + low + high for n, (low, high) in zip(self.shape, self._around, strict=True)
        )
        self.inner = tuple(
            slice(low, low + n) for n, (low, _) in zip(self.shape, self._around, strict=True)
        )
        coords = MPI.Cartcomm(known.comm.mpi).Get_coords(self.rank)

        def beside(k: int, step: int) -> int | None:
            found = _cart.rank_beside(known.comm, coords, {k: step})
            return None if found < 0 else found

        self.neighbors = tuple((beside(k, -1), beside(k, 1)) for k in range(len(periods)))

    def __repr__(self) -> str:
        parts = ", ".join(f"{s.start}:{s.stop}" for s in self.slices)
        return f"Block([{parts}] of {self.global_shape}, rank {self.rank})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: its communicator belongs to this process. Pickle the "
            "arguments of grids.Block other than 'cart', or its 'layout'"
        )

    def layout_of(self, op: str, name: str, block: tuple[int, ...] | None) -> Layout:
        return self.layout

    def with_ghosts(self, x: T) -> T:
        """Add ghost cells, filled with zeros, to an array of ``shape`` or a pytree of such arrays.

        Raises:
            ValueError: if the last axes of an array do not have the lengths of ``shape``.
        """

        def padded(x: Any) -> jax.Array:
            before = self._axes_before("Block.with_ghosts", x, [self.shape])
            return jnp.pad(x, [(0, 0)] * before + self._around)

        return jax.tree.map(padded, x)

    def without_ghosts(self, x: T) -> T:
        """Remove the ghost cells of an array of ``padded_shape`` or a pytree of such arrays.

        An array of ``shape``, which has no ghost cells, is returned as it is.

        Raises:
            ValueError: if the last axes of an array have neither of the two shapes.
        """
        return jax.tree.map(lambda x: self.inner_of("Block.without_ghosts", x), x)

    def inner_of(self, op: str, x: Any) -> Any:
        before = self._axes_before(op, x, [self.shape, self.padded_shape])
        return x if x.shape[before:] == self.shape else x[(..., *self.inner)]

    def check_widths(self, op: str) -> None:
        # All ranks know the lengths of all blocks, so all raise the error.
        if not self._has_wide_blocks:
            Cuts(op, self, None, None).check_widths(self.layout)
            self._has_wide_blocks = True

    def _axes_before(self, op: str, x: Any, expected: Sequence[tuple[int, ...]]) -> int:
        """Return the number of axes of an array in front of the axes of the block."""
        shape = jnp.shape(x)
        before = max(len(shape) - len(self.shape), 0)
        if shape[before:] not in expected:
            words = {self.padded_shape: "with its ghost cells", self.shape: "without ghost cells"}
            told = " or ".join(f"{each} ({words[each]})" for each in dict.fromkeys(expected))
            raise ValueError(
                f"{op}: argument 'x' has shape {shape}; expected {told}, a shape of {self!r}, "
                "after any leading axes"
            )
        return before

    def indices(self) -> tuple[jax.Array, ...]:
        """Return the indices of the block's cells, including ghost cells, in the global array.

        Returns:
            For each axis, an int32 array that broadcasts to ``padded_shape``. Beyond a periodic
            edge, indices wrap around. Beyond another edge they continue: -1 is below the first
            cell.
        """
        out = []
        for axis, (n, (low, high)) in enumerate(zip(self.shape, self._around, strict=True)):
            line = self.offset[axis] + jnp.arange(-low, n + high, dtype=jnp.int32)
            if self._wraps[axis]:
                line = line % max(self.global_shape[axis], 1)
            out.append(line.reshape([-1 if k == axis else 1 for k in range(len(self.shape))]))
        return tuple(out)

    def make(self, f: Callable[..., Any]) -> Any:
        """Make this rank's block of an array whose elements are a function of their indices.

        Args:
            f: function of one index array for each axis, as :meth:`indices` returns them.

        Returns:
            The result of ``f``, broadcast to ``padded_shape``; a pytree if ``f`` returns one.

        Example:
            >>> import mpi4jax.notoken as mpi4jax
            >>> from mpi4py import MPI
            >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
            >>> block = mpi4jax.grids.Block((cart.size, 3), cart, axes=0, width=1)
            >>> x = block.make(lambda i, j: 10 * i + j)
            >>> x[1].tolist() == [10 * cart.rank + j for j in range(3)]
            True
        """
        fill = lambda v: jnp.broadcast_to(v, self.padded_shape)  # noqa: E731
        return jax.tree.map(fill, f(*self.indices()))


def balanced(weights: Any, parts: int) -> list[int]:
    """Choose lengths of blocks along an axis so that their weights are nearly equal.

    Block boundaries are placed where the cumulative weight is closest to a multiple of
    ``sum(weights) / parts``.

    Args:
        weights: one-dimensional array of the work of each cell along the axis. Weights are not
            negative, and the same on all ranks. For a grid of several axes, pass the sum over the
            other axes. If all weights are zero, cells count equally.
        parts: number of blocks.

    Returns:
        The lengths, for ``lengths`` of :class:`Block` or ``cuts`` of :class:`mpi4jax.Layout`.

    Raises:
        TypeError: if ``parts`` is not an integer.
        ValueError: if ``weights`` is not one-dimensional, if a weight is negative, infinite or NaN,
            or if ``parts`` is less than 1.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.grids.balanced([5, 1, 1, 1, 1, 1], 2)
        [1, 5]
    """
    parts = static_int("balanced", "parts", parts, "a number of blocks, at least 1")
    if parts < 1:
        raise ValueError(f"balanced: argument 'parts' must be at least 1, got {parts}")
    work = np.asarray(weights, float)
    if work.ndim != 1:
        raise ValueError(
            f"balanced: argument 'weights' must have one axis, got shape {work.shape}; sum over "
            "the axes that these blocks do not decompose"
        )
    wrong = ~(np.isfinite(work) & (work >= 0))
    if wrong.any():
        raise ValueError(
            "balanced: argument 'weights' must be finite and not negative, got "
            f"{work[wrong][0]} for cell {np.argmax(wrong)}"
        )
    sums = np.concatenate([[0.0], np.cumsum(work if work.any() else np.ones_like(work))])
    shares = sums[-1] * np.arange(1, parts) / parts
    above = np.searchsorted(sums, shares).clip(1, max(len(sums) - 1, 1))
    ends = np.where(shares - sums[above - 1] <= sums[above] - shares, above - 1, above)
    return [int(n) for n in np.diff([0, *ends, len(sums) - 1])]


def regions(
    shape: Sequence[int], widths: Sequence[tuple[int, int]]
) -> tuple[Window, tuple[Window, ...]]:
    """Return the cells of a block that do not depend on ghost cells, and the interface cells around
    them.

    Args:
        shape: shape of a block without its ghost cells.
        widths: for each axis, the number of cells below and above on which a cell depends.

    Returns:
        The interior, and the windows of interface cells, as slices of the block. They are disjoint,
        and together make up the whole block. The window ``slice(a, b)`` of an axis is computed from
        ``slice(a, b + below + above)`` of the array with ghost cells. The interior is empty if the
        block has no more cells than the widths.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> interior, rim = mpi4jax.grids.regions((5, 4), [(1, 1), (0, 1)])
        >>> interior
        (slice(1, 4, None), slice(0, 3, None))
        >>> len(rim)
        3
    """
    inside = [slice(0, n) for n in shape]
    rim = []
    for axis, (n, (low, high)) in enumerate(zip(shape, widths, strict=True)):
        low = min(low, n)
        end = max(n - high, low)
        for part in (slice(0, low), slice(end, n)):
            if part.start < part.stop:
                rim.append((*inside[:axis], part, *inside[axis + 1 :]))
        inside[axis] = slice(low, end)
    return tuple(inside), tuple(rim)


def overlapped(
    f: Callable[[T], R],
    x: T,
    cart: MPI.Cartcomm | Block,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 1,
    corners: bool = True,
    border: Any = None,
) -> R:
    """Apply a stencil to a block while its ghost cells are exchanged.

    It computes the inner cells while the messages are under way, and the interface cells after the
    messages have arrived.

    Args:
        f: function that takes an array with ghost cells, of any length along the decomposed axes,
            and returns an array without them. Each element of the result depends on cells within
            ``width``. ``axes`` are the decomposed axes of the result too. If ``x`` is a pytree,
            ``f`` takes a pytree, and it may return one. It must not communicate.
        x: block with its ghost cells; or a pytree of blocks of one shape.
        cart, axes, width, corners, border: as for :func:`mpi4jax.halo_exchange`.

    Returns:
        The same as ``f(halo_exchange(x))``.

    Raises:
        ValueError: if leaves of ``x`` have different shapes.

    Derivative:
        The derivatives of :func:`mpi4jax.ihalo_exchange`, which it uses, and of ``f``.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> sums = lambda x: x[:-2] + x[1:-1] + x[2:]
        >>> mpi4jax.grids.overlapped(sums, jnp.ones(6), cart).tolist()
        [3.0, 3.0, 3.0, 3.0]

    See also: :func:`regions`.
    """
    name = "overlapped"
    x = jax.tree.map(functools.partial(as_array, name, "x"), x)
    shapes = {leaf.shape for leaf in jax.tree.leaves(x)}
    if len(shapes) != 1:
        raise ValueError(f"{name}: argument 'x' must have arrays of one shape, got {shapes}")
    (shape,) = shapes
    cuts = Cuts(name, cart, axes, width)
    around = cuts.around(len(shape))
    cells = [n - low - high for n, (low, high) in zip(shape, around, strict=True)]
    request = ihalo_exchange(x, cart, axes=axes, width=width, corners=corners, border=border)
    interior, rim = regions(cells, around)

    def computed(x: Any, window: Window) -> Any:
        seen = tuple(
            slice(s.start, s.stop + low + high)
            for s, (low, high) in zip(window, around, strict=True)
        )
        return f(jax.tree.map(lambda leaf: leaf[seen], x))

    if math.prod(s.stop - s.start for s in interior) == 0:
        return f(wait(request))
    inside = computed(after(request, x), interior)
    x = wait(request, after=inside)
    edges = [computed(x, window) for window in rim]

    cut = cuts.positions(len(shape))

    def joined(*parts: Any) -> Any:
        places = list(zip(cuts.positions(parts[0].ndim), cut, strict=True))
        whole = [*parts[0].shape]
        for place, axis in places:
            whole[place] = cells[axis]
        out = jnp.zeros(whole, parts[0].dtype)
        for window, part in zip((interior, *rim), parts, strict=True):
            at = [slice(None)] * out.ndim
            for place, axis in places:
                at[place] = window[axis]
            out = out.at[tuple(at)].set(part)
        return out

    return jax.tree.map(joined, inside, *edges)
