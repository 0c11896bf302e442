"""Layouts: how a global array is partitioned into blocks, one per rank, and these into pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]
Interval = tuple[int, int]  # the first index, and the one behind the last


@dataclass(frozen=True)
class Layout:
    """The shape of a global array, its decomposed axes and the number of blocks along each.

    Axes are partitioned as by :func:`numpy.array_split`: if the parts cannot be equal, the first
    ones have one element more, and if an axis has fewer elements than parts, the last parts are
    empty. Blocks are numbered like the ranks of a Cartesian communicator with the dimensions
    ``cuts``: the last dimension varies fastest. Ranks beyond the last block have an empty block, of
    shape ``(0, ...)``. Without decomposed axes, rank 0 has the whole array. Layouts compare by
    these numbers.

    Args:
        shape: of the global array.
        cuts: number of blocks along each decomposed axis: ``{0: 4}`` are slabs,
            ``{0: 2, 1: 3}`` pencils of an array with three axes. Axes may count from the end.

    Raises:
        TypeError: if a length, an axis or a number of blocks is not an integer.
        ValueError: if the array does not have the axis, an axis is named twice, or a number of
            blocks is less than 1.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> pencils = mpi4jax.Layout((4, 5, 6), {1: 2, 2: 2})
        >>> pencils.block(1)
        (slice(0, 4, None), slice(0, 3, None), slice(3, 6, None))
        >>> pencils.block_shape(3)
        (4, 2, 3)

    See also: :func:`redistribute`, :mod:`mpi4jax.fft`.
    """

    shape: Shape
    cuts: tuple[tuple[int, int], ...] = ()

    def __init__(
        self, shape: Sequence[int], cuts: Mapping[int, int] | Iterable[tuple[int, int]] = ()
    ):
        lengths = tuple(_integer("shape", n) for n in shape)
        if not lengths or min(lengths) < 0:
            raise ValueError(
                f"Layout: argument 'shape' must be the lengths of one axis or more, got {lengths}"
            )
        pairs = []
        for axis, parts in cuts.items() if isinstance(cuts, Mapping) else cuts:
            axis, parts = _integer("cuts", axis), _integer("cuts", parts)
            if not -len(lengths) <= axis < len(lengths) or parts < 1:
                raise ValueError(
                    f"Layout: argument 'cuts' must map axes of an array of shape {lengths} to "
                    f"numbers of parts, at least 1; got {parts} for axis {axis}"
                )
            pairs.append((axis % len(lengths), parts))
        if len({axis for axis, _ in pairs}) < len(pairs):
            raise ValueError(f"Layout: argument 'cuts' cuts an axis twice, got {cuts!r}")
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "cuts", tuple(pair for pair in pairs if pair[1] > 1))

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return math.prod(parts for _, parts in self.cuts)

    def block(self, rank: int) -> tuple[slice, ...]:
        """Return a rank's block of the global array: a slice of each axis."""
        if rank >= self.blocks:
            return tuple(slice(0, 0) for _ in self.shape)
        window = [slice(0, n) for n in self.shape]
        for axis, parts in reversed(self.cuts):
            rank, part = divmod(rank, parts)
            window[axis] = slice(*part_of(self.shape[axis], parts, part))
        return tuple(window)

    def block_shape(self, rank: int) -> Shape:
        """Return the shape of a rank's block."""
        return tuple(s.stop - s.start for s in self.block(rank))


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
    def of(cls, batch: Shape, block: tuple[slice, ...], layout: Layout) -> Pieces:
        """Return the pieces of a block with leading axes, which are whole."""
        lengths, parts = [(n,) for n in batch], []
        number = dict(layout.cuts)
        for axis, window in enumerate(block):
            met = []
            for part in range(number.get(axis, 1)):
                start, stop = part_of(layout.shape[axis], number.get(axis, 1), part)
                length = min(stop, window.stop) - max(start, window.start)
                if length > 0:
                    met.append((part, length))
            parts.append([part for part, _ in met])
            lengths.append(tuple(length for _, length in met))
        ranks = []
        for place in itertools.product(*parts):
            rank = 0
            for axis, n in layout.cuts:
                rank = rank * n + place[axis]
            ranks.append(rank)
        return cls(tuple(lengths), tuple(ranks))

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

    def pack(self, x: jax.Array) -> jax.Array:
        """Return the elements in one dimension, piece by piece."""
        if not x.size or self.are_in_memory_order:
            return x.ravel()
        return jnp.concatenate([piece.ravel() for piece in self.cut(x)])

    def unpack(self, message: jax.Array) -> jax.Array:
        """Return the inverse of :meth:`pack`."""
        if not message.size or self.are_in_memory_order:
            return message.reshape(self.shape)
        ends = itertools.accumulate(map(math.prod, self.shapes))
        parts = jnp.split(message, list(ends)[:-1])
        return self.join([p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)])


def check_layout(op: str, name: str, layout: Any, size: int) -> None:
    """Raise an error unless it is a layout with at most one block per rank."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{op}: argument '{name}' must be a Layout, got {type(layout).__name__}: {layout!r}"
        )
    if layout.blocks > size:
        raise ValueError(
            f"{op}: argument '{name}' has {layout.blocks} blocks; expected {size} at most, the "
            "number of ranks"
        )


def batch_of(op: str, name: str, x: jax.Array, layout: Layout, rank: int) -> Shape:
    """Return the axes of an array before those of this rank's block.

    Raises:
        ValueError: if the last axes of the array are not those of the block.
    """
    expected = layout.block_shape(rank)
    split = x.ndim - len(expected)
    if split < 0 or x.shape[split:] != expected:
        raise ValueError(
            f"{op}: argument '{name}' has shape {x.shape} on rank {rank}; expected "
            f"{expected}, the shape of its block of {layout}, after any leading axes"
        )
    return x.shape[:split]
