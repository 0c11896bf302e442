"""How a global array is cut into blocks, one for each rank; and from one such layout to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from .notoken import alltoallv, default_comm

__all__ = ["Layout", "redistribute"]

Shape = tuple[int, ...]
Interval = tuple[int, int]  # the first index, and the one behind the last


@dataclass(frozen=True)
class Layout:
    """A global array, and which of its axes are cut into how many parts.

    Axes are cut as :func:`numpy.array_split` does: the first parts have an element more where they
    cannot be equal, and the last ones are empty where an axis has fewer elements than parts.
    The blocks are numbered as the ranks of a Cartesian communicator whose dimensions are ``cuts``:
    the last one is fastest. Ranks beyond the last block have an empty one, of shape ``(0, ...)``:
    without cuts, rank 0 has the array. Layouts are equal if these numbers are.

    Args:
        shape: of the global array.
        cuts: how many parts each axis is cut into, of those that are: ``{0: 4}`` are slabs,
            ``{0: 2, 1: 3}`` pencils of an array with three axes. Axes may count from the end.

    Raises:
        TypeError: a number that is none.
        ValueError: an axis that the array lacks, or that is cut twice; less than 1 part.

    Example:
        >>> from mpi4jax import Layout
        >>> pencils = Layout((4, 5, 6), {1: 2, 2: 2})
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
                f"Layout: argument 'shape' must be lengths of one axis or more, got {lengths}"
            )
        pairs = []
        for axis, parts in cuts.items() if isinstance(cuts, Mapping) else cuts:
            axis, parts = _integer("cuts", axis), _integer("cuts", parts)
            if not -len(lengths) <= axis < len(lengths) or parts < 1:
                raise ValueError(
                    f"Layout: argument 'cuts' must be numbers of parts from 1 of axes of an array "
                    f"of shape {lengths}, got {parts} of axis {axis}"
                )
            pairs.append((axis % len(lengths), parts))
        if len({axis for axis, _ in pairs}) < len(pairs):
            raise ValueError(f"Layout: argument 'cuts' cuts an axis twice, got {cuts!r}")
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "cuts", tuple(pair for pair in pairs if pair[1] > 1))

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return math.prod(parts for _, parts in self.cuts)

    def block(self, rank: int) -> tuple[slice, ...]:
        """Which part of the global array a rank has: a slice of each axis."""
        if rank >= self.blocks:
            return tuple(slice(0, 0) for _ in self.shape)
        window = [slice(0, n) for n in self.shape]
        for axis, parts in reversed(self.cuts):
            rank, part = divmod(rank, parts)
            window[axis] = slice(*_part(self.shape[axis], parts, part))
        return tuple(window)

    def block_shape(self, rank: int) -> Shape:
        """The shape of a rank's block."""
        return tuple(s.stop - s.start for s in self.block(rank))


def _integer(name: str, value: Any) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(
            f"Layout: argument '{name}' must be integers, got {type(value).__name__}: {value!r}"
        ) from None


def _part(length: int, parts: int, part: int) -> Interval:
    """One of the parts of an axis, as `numpy.array_split` cuts it."""
    small, more = divmod(length, parts)
    start = part * small + min(part, more)
    return start, start + small + (part < more)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one block of a global array that are in the blocks of a layout.

    They are those of a grid: each axis of the block is split.

    Attributes:
        lengths: of the pieces of each axis.
        ranks: whose blocks they are in, the last axis being fastest.
    """

    lengths: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, block: tuple[slice, ...], layout: Layout) -> _Pieces:
        lengths, parts = [], []
        number = dict(layout.cuts)
        for axis, window in enumerate(block):
            met = []
            for part in range(number.get(axis, 1)):
                start, stop = _part(layout.shape[axis], number.get(axis, 1), part)
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
    def order(self) -> list[int]:
        """The pieces in the order of the ranks."""
        return sorted(range(len(self.ranks)), key=self.ranks.__getitem__)

    def shapes(self, batch: Shape) -> list[Shape]:
        return [(*batch, *lengths) for lengths in itertools.product(*self.lengths)]

    def counts(self, batch: Shape, size: int) -> list[int]:
        """How many elements each rank's pieces have."""
        counts = [0] * size
        for rank, shape in zip(self.ranks, self.shapes(batch), strict=True):
            counts[rank] += math.prod(shape)
        return counts

    def are_in_memory_order(self, batch: Shape) -> bool:
        """Whether the pieces, in the order of the ranks, lie in memory as the block does."""
        split = [axis for axis, lengths in enumerate(self.lengths) if len(lengths) > 1]
        rows = math.prod(batch) * math.prod(n[0] for n in self.lengths[: max(split, default=0)])
        return self.order == [*range(len(self.ranks))] and (not split or rows == 1)

    def pack(self, x: jax.Array, batch: Shape) -> jax.Array:
        """The elements of a block in one dimension, piece by piece, in the order of the ranks."""
        if self.are_in_memory_order(batch):
            return x.ravel()
        pieces = [x]
        for axis, lengths in enumerate(self.lengths, len(batch)):
            ends = list(itertools.accumulate(lengths))[:-1]
            pieces = [p for piece in pieces for p in jnp.split(piece, ends, axis)]
        return jnp.concatenate([pieces[k].ravel() for k in self.order])

    def unpack(self, flat: jax.Array, batch: Shape) -> jax.Array:
        """The block, of which :meth:`pack` has made this."""
        shapes = self.shapes(batch)
        if self.are_in_memory_order(batch):
            return flat.reshape(*batch, *map(sum, self.lengths))
        ends = itertools.accumulate(math.prod(shapes[k]) for k in self.order)
        parts = dict(zip(self.order, jnp.split(flat, list(ends)[:-1]), strict=True))
        pieces = [parts[k].reshape(shape) for k, shape in enumerate(shapes)]
        for axis in reversed(range(len(self.lengths))):
            n = len(self.lengths[axis])
            lines = [pieces[k : k + n] for k in range(0, len(pieces), n)]
            pieces = [jnp.concatenate(line, len(batch) + axis) for line in lines]
        return pieces[0]


def check_layout(op: str, name: str, layout: Any, size: int) -> None:
    """Raise an error if a layout is none, or has more blocks than there are ranks."""
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
    """The axes of an array before those of this rank's block.

    Raises:
        ValueError: its last axes are not those of the block.
    """
    expected = layout.block_shape(rank)
    split = x.ndim - len(expected)
    if split < 0 or x.shape[split:] != expected:
        raise ValueError(
            f"{op}: argument '{name}' has shape {x.shape} on rank {rank}; expected "
            f"{expected}, its block of {layout}, maybe behind other axes"
        )
    return x.shape[:split]


def redistribute(
    x: Any, source: Layout, target: Layout, *, comm: MPI.Intracomm | None = None
) -> Any:
    """Bring a global array from one layout to another. All ranks call it alike.

    Ranks exchange messages only if the old block of one and the new block of the other have
    elements in common: of pencils, those of a row or of a column of the grid of ranks.

    Args:
        x: this rank's block under ``source``, of any dtype; it may have axes before those of the
            layout, which are whole and equal on all ranks. Or a pytree of such arrays.
        source: the layout of ``x``.
        target: another layout of the same global shape.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Returns:
        This rank's block under ``target``, of the dtype of ``x``, behind the same axes.

    Raises:
        TypeError: a layout that is none.
        ValueError: layouts of different shapes, or of more blocks than there are ranks; an ``x``
            that is no block of ``source``.

    Derivative:
        The transpose is ``redistribute(c, target, source)``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> rows, columns = (mpi4jax.Layout((7, 5), {axis: comm.size}) for axis in (0, 1))
        >>> whole = jnp.arange(35).reshape(7, 5)
        >>> y = mpi4jax.redistribute(whole[rows.block(comm.rank)], rows, columns)
        >>> bool((y == whole[columns.block(comm.rank)]).all())
        True

    See also: :class:`Layout`, :func:`scatter_blocks` and :func:`gather_blocks` for ghost cells.
    """
    comm = default_comm() if comm is None else comm
    rank, size = comm.Get_rank(), comm.Get_size()
    for name, layout in (("source", source), ("target", target)):
        check_layout("redistribute", name, layout, size)
    if source.shape != target.shape:
        raise ValueError(
            f"redistribute: arguments 'source' and 'target' have shapes {source.shape} and "
            f"{target.shape}; expected those of one array"
        )
    old, new = source.block(rank), target.block(rank)
    outgoing, incoming = _Pieces.of(old, target), _Pieces.of(new, source)
    stays = all(source.block(r) == target.block(r) for r in range(size))

    def move(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        batch = batch_of("redistribute", "x", leaf, source, rank)
        if stays:
            return leaf
        counts = outgoing.counts(batch, size), incoming.counts(batch, size)
        flat = outgoing.pack(leaf, batch) if leaf.size else leaf.ravel()
        flat = alltoallv(flat, *counts, comm=comm)
        if not flat.size:
            return flat.reshape(*batch, *target.block_shape(rank))
        return incoming.unpack(flat, batch)

    return jax.tree.map(move, x)
