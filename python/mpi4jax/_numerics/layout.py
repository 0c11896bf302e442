"""Layouts: how a global array is partitioned into blocks, one per rank, and blocks into pieces."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .pieces import FEW, packed, unpacked

Shape = tuple[int, ...]
Interval = tuple[int, int]  # the first index, and the last index plus one


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Describe which block of a global array each rank has, by how its axes are decomposed.

    Axes are partitioned as by :func:`numpy.array_split`, unless lengths are given: if the parts
    cannot be equal, the first ones have one more element, and if an axis has fewer elements than
    parts, the last parts are empty. Blocks are numbered like the ranks of a Cartesian communicator
    with the dimensions ``cuts``: the last dimension varies fastest. Ranks beyond the last block
    have an empty block, of shape ``(0, ...)``. Without decomposed axes, rank 0 has the whole array.

    Args:
        shape: shape of the global array.
        cuts: for each decomposed axis, the number of its blocks, or their lengths: ``{0: 4}`` are
            slabs, ``{0: 2, 1: 3}`` pencils of an array with three axes, ``{0: [5, 1]}`` two slabs
            of 5 and 1 elements. Axes may count from the end.

    Raises:
        TypeError: if a length, an axis or a number of blocks is not an integer.
        ValueError: if the array does not have the axis, if an axis is named twice, if a number of
            blocks is less than 1, or if lengths do not add up to the length of the axis.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> pencils = mpi4jax.Layout((4, 5, 6), {1: 2, 2: [4, 2]})
        >>> pencils.block(1)
        (slice(0, 4, None), slice(0, 3, None), slice(4, 6, None))
        >>> pencils.block_shape(3)
        (4, 2, 2)

    See also: :class:`mpi4jax.sharding.NamedSharding`, :func:`redistribute`, :mod:`mpi4jax.fft`.
    """

    #: Shape of the global array.
    shape: Shape
    #: Number of ranks along each dimension of their grid.
    grid: Shape
    #: For each axis, the dimensions of the grid along which it is decomposed, beginning with the
    #: most significant one.
    dimensions: tuple[tuple[int, ...], ...]
    #: For each axis, the lengths of its blocks; None if `numpy.array_split` determines the lengths.
    lengths: tuple[tuple[int, ...] | None, ...]

    def __init__(
        self,
        shape: Sequence[int],
        cuts: Mapping[int, int | Sequence[int]] | Iterable[tuple[int, int | Sequence[int]]] = (),
    ):
        sizes = tuple(_integer("shape", n) for n in shape)
        if not sizes or min(sizes) < 0:
            raise ValueError(
                f"Layout: argument 'shape' must be the lengths of one axis or more, got {sizes}"
            )
        grid: list[int] = []
        dimensions: list[tuple[int, ...]] = [()] * len(sizes)
        lengths: list[tuple[int, ...] | None] = [None] * len(sizes)
        for axis, parts in cuts.items() if isinstance(cuts, Mapping) else cuts:
            axis = _integer("cuts", axis)
            is_lengths = isinstance(parts, (Sequence, np.ndarray))
            each = tuple(_integer("cuts", n) for n in (parts if is_lengths else [parts]))  # type: ignore[union-attr]
            if not -len(sizes) <= axis < len(sizes) or min(each, default=0) < 1 - is_lengths:
                raise ValueError(
                    f"Layout: argument 'cuts' must map axes of an array of shape {sizes} to "
                    f"numbers of blocks, at least 1, or lengths; got {parts} for axis {axis}"
                )
            if dimensions[axis]:
                raise ValueError(f"Layout: argument 'cuts' cuts an axis twice, got {cuts!r}")
            if is_lengths and sum(each) != sizes[axis]:
                raise ValueError(
                    f"Layout: argument 'cuts' must have lengths that add up to {sizes[axis]}, the "
                    f"length of axis {axis}; got {parts}"
                )
            dimensions[axis], lengths[axis] = (len(grid),), each if is_lengths else None
            grid.append(len(each) if is_lengths else each[0])
        self._set(sizes, grid, dimensions, lengths)

    @classmethod
    def on_grid(
        cls,
        shape: Shape,
        grid: Sequence[int],
        dimensions: Sequence[tuple[int, ...]],
        lengths: Sequence[tuple[int, ...] | None] | None = None,
    ) -> Layout:
        """Make a layout on any grid of ranks.

        An axis may be decomposed along several of its dimensions. Along a dimension that decomposes
        no axis, all ranks have the same block.
        """
        self = object.__new__(cls)
        self._set(tuple(shape), grid, dimensions, lengths or [None] * len(shape))
        return self

    def _set(self, shape: Shape, grid: Any, dimensions: Any, lengths: Any) -> None:
        kept = [d for d, n in enumerate(grid) if n > 1]
        at = tuple(tuple(kept.index(d) for d in each if d in kept) for each in dimensions)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "grid", tuple(grid[d] for d in kept))
        object.__setattr__(self, "dimensions", at)
        known = []
        for axis, each in enumerate(lengths):
            split = _ends(shape[axis], self.parts(axis))
            ends = split if each is None else (0, *itertools.accumulate(each))
            known.append(None if ends == split else tuple(each))
        object.__setattr__(self, "lengths", tuple(known))

    @property
    def cuts(self) -> tuple[tuple[int | None, int | tuple[int, ...]], ...]:
        """For each dimension of the process grid, a pair: the array axis that it decomposes (or
        None), and the number (or lengths) of the blocks."""
        cut = {d: axis for axis, each in enumerate(self.dimensions) for d in each}
        return tuple(
            (cut.get(d), n if d not in cut else self.lengths[cut[d]] or n)
            for d, n in enumerate(self.grid)
        )

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, cuts={self.cuts})"

    @property
    def blocks(self) -> int:
        """The number of different blocks."""
        return math.prod(map(self.parts, range(len(self.shape))))

    @property
    def ranks(self) -> int:
        """The number of ranks that have a block."""
        return math.prod(self.grid)

    @property
    def free(self) -> tuple[int, ...]:
        """The dimensions of the grid along which all ranks have the same block."""
        used = {d for each in self.dimensions for d in each}
        return tuple(d for d in range(len(self.grid)) if d not in used)

    def parts(self, axis: int) -> int:
        """Return the number of blocks along an axis."""
        return math.prod(self.grid[d] for d in self.dimensions[axis])

    def ends(self, axis: int) -> tuple[int, ...]:
        """Return where the blocks along an axis begin, and where the last one ends."""
        lengths = self.lengths[axis]
        if lengths is None:
            return _ends(self.shape[axis], self.parts(axis))
        return (0, *itertools.accumulate(lengths))

    def place(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Return the index of the rank's block along each axis, and the index of the replica that
        the rank holds."""
        at = []
        for n in reversed(self.grid):
            rank, k = divmod(rank, n)
            at.append(k)
        at.reverse()

        def number(dimensions: Iterable[int]) -> int:
            k = 0
            for d in dimensions:
                k = k * self.grid[d] + at[d]
            return k

        return tuple(map(number, self.dimensions)), number(self.free)

    def rank_of(self, part: Sequence[int], copy: int = 0) -> int:
        """Return the rank of a block, from its numbers along the axes: the inverse of
        :meth:`place`."""
        at = [0] * len(self.grid)
        for dimensions, k in zip((*self.dimensions, self.free), (*part, copy), strict=True):
            for d in reversed(dimensions):
                k, at[d] = divmod(k, self.grid[d])
        rank = 0
        for n, k in zip(self.grid, at, strict=True):
            rank = rank * n + k
        return rank

    def block(self, rank: int) -> tuple[slice, ...]:
        """Return a rank's block of the global array: a slice of each axis."""
        if rank >= self.ranks:
            return tuple(slice(0, 0) for _ in self.shape)
        return tuple(
            slice(*self.ends(axis)[k : k + 2]) for axis, k in enumerate(self.place(rank)[0])
        )

    def block_shape(self, rank: int) -> Shape:
        """Return the shape of a rank's block."""
        return tuple(s.stop - s.start for s in self.block(rank))

    def owner(self, *index: Any) -> jax.Array:
        """Return the rank that has an element of the global array; the lowest one if several have
        it.

        Args:
            index: for each axis of the array an integer, or an array of integers; they may be
                traced.

        Returns:
            int32 array: the rank, or -1 if an index is out of bounds. Negative indices are out of
                bounds.

        Example:
            >>> import mpi4jax.notoken as mpi4jax
            >>> mpi4jax.Layout((6,), {0: [5, 1]}).owner([0, 4, 5, 6]).tolist()
            [0, 0, 1, -1]
        """
        at = [jnp.asarray(i) for i in index]
        if len(at) != len(self.shape) or not all(jnp.issubdtype(i.dtype, np.integer) for i in at):
            raise TypeError(
                f"Layout.owner: argument 'index' must be {len(self.shape)} integers, one for each "
                f"axis of the array, got {len(at)} of {[str(i.dtype) for i in at]}"
            )
        rank, is_inside = jnp.int32(0), jnp.bool(True)
        for axis, i in enumerate(at):
            i = i.astype(jnp.promote_types(i.dtype, np.int32))
            is_inside &= (i >= 0) & (i < self.shape[axis])
            part = self._part_at(axis, i).astype(np.int32)
            for d in reversed(self.dimensions[axis]):
                rank += part % self.grid[d] * math.prod(self.grid[d + 1 :])
                part //= self.grid[d]
        return jnp.where(is_inside, rank, -1)

    def _part_at(self, axis: int, i: jax.Array) -> jax.Array:
        """Return the block along an axis that has an index. The program does not grow with the
        number of blocks, unless their lengths are given."""
        parts = self.parts(axis)
        if self.lengths[axis] is not None:
            return jnp.searchsorted(jnp.array(self.ends(axis)[1:]), i, side="right")
        small, more = divmod(self.shape[axis], parts)
        longer = more * (small + 1)
        behind = more + (i - longer) // max(small, 1)
        return jnp.where(i < longer, i // (small + 1), behind)

    def of_shape(self, shape: Shape) -> Layout:
        """Return the layout of an array of another shape, on the same ranks."""
        same = zip(shape, self.shape, self.lengths, strict=True)
        lengths = [known if n == old else None for n, old, known in same]
        return Layout.on_grid(shape, self.grid, self.dimensions, lengths)

    def moved(self, axis: int, to: int) -> Layout:
        """Return the layout in which an axis is whole, and another one is decomposed in its
        place."""
        each = [*self.dimensions]
        each[to], each[axis] = tuple(sorted((*each[to], *each[axis]))), ()
        return Layout.on_grid(self.shape, self.grid, each)

    def without_copies(self) -> Layout:
        """Return the layout on those ranks whose coordinates along the free dimensions are the
        same."""
        used = [d for d in range(len(self.grid)) if d not in self.free]
        each = [tuple(map(used.index, dimensions)) for dimensions in self.dimensions]
        return Layout.on_grid(self.shape, [self.grid[d] for d in used], each, self.lengths)


def _integer(name: str, value: Any) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(
            f"Layout: argument '{name}' must be integers, got {type(value).__name__}: {value!r}"
        ) from None


def part_of(length: int, parts: int, part: int) -> Interval:
    """Return one of the parts of an axis, as `numpy.array_split` partitions it."""
    small, more = divmod(length, parts)
    start = part * small + min(part, more)
    return start, start + small + (part < more)


@functools.lru_cache(maxsize=1024)
def _ends(length: int, parts: int) -> tuple[int, ...]:
    return (0, *(part_of(length, parts, k)[1] for k in range(parts)))


@dataclass(frozen=True)
class Pieces:
    """The pieces of an array that is a block of one layout, partitioned by the blocks of another.

    The pieces form a grid: each axis is split.

    Attributes:
        lengths: lengths of the pieces along each axis.
        ranks: ranks in whose blocks the pieces lie; the last axis varies fastest.
    """

    lengths: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, batch: Shape, block: tuple[slice, ...], layout: Layout, copy: int = 0) -> Pieces:
        """Return the pieces of a block with leading axes, which are whole.

        Each piece is in one of the copies of a block of ``layout``.
        """
        lengths, parts = [(n,) for n in batch], []
        for axis, window in enumerate(block):
            met = []
            for part, (start, stop) in enumerate(itertools.pairwise(layout.ends(axis))):
                length = min(stop, window.stop) - max(start, window.start)
                if length > 0:
                    met.append((part, length))
            parts.append([part for part, _ in met])
            lengths.append(tuple(length for _, length in met))
        ranks = tuple(layout.rank_of(part, copy) for part in itertools.product(*parts))
        return cls(tuple(lengths), ranks)

    @property
    def shape(self) -> Shape:
        return tuple(map(sum, self.lengths))

    @property
    def _order(self) -> list[int]:
        """Return the numbers of the pieces in the order of the ranks."""
        return sorted(range(len(self.ranks)), key=self.ranks.__getitem__)

    @property
    def shapes(self) -> list[Shape]:
        """Return the shapes of the pieces in the order of the ranks."""
        grid = [*itertools.product(*self.lengths)]
        return [grid[k] for k in self._order]

    def counts(self, size: int) -> list[int]:
        """Return the number of elements of each rank's piece."""
        counts = [0] * size
        for rank, shape in zip(sorted(self.ranks), self.shapes, strict=True):
            counts[rank] = math.prod(shape)
        return counts

    @property
    def are_in_memory_order(self) -> bool:
        """Return whether the pieces, in the order of the ranks, are the array's memory order."""
        split = [axis for axis, lengths in enumerate(self.lengths) if len(lengths) > 1]
        rows = math.prod(n[0] for n in self.lengths[: max(split)]) if split else 1
        return rows == 1 and self._order == [*range(len(self.ranks))]

    def cut(self, x: jax.Array) -> list[jax.Array]:
        """Return the pieces of an array, in the order of the ranks."""
        pieces = [x]
        for axis, lengths in enumerate(self.lengths):
            if len(lengths) > 1:
                ends = list(itertools.accumulate(lengths))[:-1]
                pieces = [p for piece in pieces for p in jnp.split(piece, ends, axis)]
        return [pieces[k] for k in self._order]

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """Return the array that consists of these pieces."""
        placed = dict(zip(self._order, parts, strict=True))
        pieces = [placed[k] for k in range(len(parts))]
        for axis in reversed(range(len(self.lengths))):
            if (n := len(self.lengths[axis])) > 1:
                lines = [pieces[k : k + n] for k in range(0, len(pieces), n)]
                pieces = [jnp.concatenate(line, axis) for line in lines]
        return pieces[0]

    @property
    def are_few(self) -> bool:
        """Return whether a program may have an instruction for each piece."""
        return len(self.ranks) <= FEW

    @property
    def split_axes(self) -> tuple[int, ...] | None:
        """Return the axes that are split, the one whose ranks vary slowest first.

        None if the ranks of the pieces are not in the order of any such grid.
        """
        split = [axis for axis, lengths in enumerate(self.lengths) if len(lengths) > 1]
        ranks = np.array(self.ranks).reshape([*map(len, self.lengths)])
        whole = [axis for axis in range(len(self.lengths)) if axis not in split]
        for axes in itertools.permutations(split):
            if (np.diff(ranks.transpose(*whole, *axes).ravel()) > 0).all():
                return axes
        return None

    def pack(self, x: jax.Array) -> jax.Array:
        """Return the elements in one dimension, piece by piece."""
        if not x.size or self.are_in_memory_order:
            return x.ravel()
        if not self.are_few and (axes := self.split_axes) is not None:
            return packed(x, self.lengths, axes)
        return jnp.concatenate([piece.ravel() for piece in self.cut(x)])

    def unpack(self, message: jax.Array) -> jax.Array:
        """Return the inverse of :meth:`pack`."""
        if not message.size or self.are_in_memory_order:
            return message.reshape(self.shape)
        if not self.are_few and (axes := self.split_axes) is not None:
            return unpacked(message, self.lengths, axes, self.shape)
        ends = itertools.accumulate(map(math.prod, self.shapes))
        parts = jnp.split(message, list(ends)[:-1])
        return self.join([p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)])


@dataclass(frozen=True)
class Windows:
    """The parts of a block that ranks need, in the order of the ranks. They may overlap.

    Attributes:
        of_ranks: for each rank that needs a part, a slice of each axis.
    """

    of_ranks: Mapping[int, tuple[slice, ...]]

    @classmethod
    def of(cls, batch: Shape, source: Layout, rank: int, target: Layout, size: int) -> Windows:
        """Return the windows of a rank's block of ``source`` for the blocks of ``target``."""
        found, block = {}, source.block(rank)
        copy = source.place(rank)[1]
        for other in range(size if rank < source.ranks else 0):
            if source.place(other % source.ranks)[1] == copy:
                meet = [
                    (max(mine.start, its.start), min(mine.stop, its.stop), mine.start)
                    for mine, its in zip(block, target.block(other), strict=True)
                ]
                if all(start < stop for start, stop, _ in meet):
                    inner = (slice(start - at, stop - at) for start, stop, at in meet)
                    found[other] = (*(slice(0, n) for n in batch), *inner)
        return cls(found)

    def counts(self, size: int) -> list[int]:
        """Return how many elements each rank needs."""
        shapes = {r: [s.stop - s.start for s in window] for r, window in self.of_ranks.items()}
        return [math.prod(shapes[r]) if r in shapes else 0 for r in range(size)]

    def pack(self, x: jax.Array) -> jax.Array:
        """Flatten the elements, rank by rank."""
        parts = [x[window].ravel() for window in self.of_ranks.values()]
        return jnp.concatenate(parts) if parts else x[:0].ravel()


class HasLayout(Protocol):
    """What has a layout: a `sharding.NamedSharding` or a `grids.Block`."""

    def layout_of(self, op: str, name: str, block: Shape | None) -> Layout:
        """Return the layout for an argument of a function, and the shape of this rank's block."""
        ...


AnyLayout = Layout | HasLayout


def as_layout(op: str, name: str, given: Any, size: int, block: Shape | None = None) -> Layout:
    """Return the :class:`Layout` of an argument, for a block of this shape."""
    layout = given.layout_of(op, name, block) if hasattr(given, "layout_of") else given
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{op}: argument '{name}' must be a Layout, a NamedSharding or a grids.Block, got "
            f"{type(given).__name__}: {given!r}"
        )
    if layout.ranks > size:
        raise ValueError(
            f"{op}: argument '{name}' has {layout.ranks} blocks; expected {size} at most, the "
            "number of ranks"
        )
    return layout


def batch_of(op: str, name: str, x: jax.Array, layout: Layout, rank: int) -> Shape:
    """Return the axes of an array in front of the axes of this rank's block."""
    expected = layout.block_shape(rank)
    split = x.ndim - len(expected)
    if split < 0 or x.shape[split:] != expected:
        raise ValueError(
            f"{op}: argument '{name}' has shape {x.shape} on rank {rank}; expected "
            f"{expected}, the shape of its block of {layout}, after any leading axes"
        )
    return x.shape[:split]
