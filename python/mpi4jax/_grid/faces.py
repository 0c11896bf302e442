"""Faces of blocks: the cells in the messages of a halo exchange, and their packing by XLA.

XLA packs where a halo exchange is started: the request holds the blocks, so only the faces are
copied, whereas the operand of another nonblocking operation is copied as a whole; and XLA's
operations have derivatives. And it packs on a GPU: the processor does not reach the blocks there,
and what it packs would go through the host. Each time, an `alltoallv` carries what is packed. In
the adjoint on a GPU, XLA adds what comes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._op import rows
from .._op.comm import AnyComm, Comm
from .._op.operation import OfBlocks, made
from .._op.packing import TreeType, exchanged_axes, pack_arguments
from .._requests.request import CompositeKind, CompositeRequest
from .._requests.start import begin

# The cells along an axis: the first one, and the one after the last.
Cells = tuple[int, int]

# The number of a leaf, and the cells along each of its axes.
Box = tuple[int, tuple[Cells, ...]]

# The number of a leaf, its shape, and its exchanged axes, counted from the end.
Leaf = tuple[int, tuple[int, ...], tuple[int, ...]]

# Rank at the other end, direction of the message (steps along the axes), and its cells.
Face = tuple[int, tuple[int, ...], Box]


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box[1])


def _size(box: Box) -> int:
    return math.prod(_extents(box))


def _along(extent: int, width: Cells, step: int, at_edge: tuple[bool, bool]) -> tuple[Cells, Cells]:
    """Return the cells along an exchanged axis that are sent to the neighbor at ``step``, and those
    that are received from it. An axis consists of ghost cells, inner cells, ghost cells.
    """
    low, high = width
    if step < 0:
        return (low, low + high), (0, low)
    if step > 0:
        return (extent - high - low, extent - high), (extent - high, extent)
    # Ghost cells at an edge of the grid belong to the block: no other rank fills them.
    below, above = at_edge
    cells = (0 if below else low, extent if above else extent - high)
    return cells, cells


def faces(leaves: Sequence[Leaf], op: OfBlocks) -> tuple[list[Face], list[Face]]:
    """Return the cells to send and to receive, in the order of the messages.

    By rank, and for each rank by the direction in which they are sent.
    """
    neighbours, widths = op.neighbors, op.widths
    last = len(neighbours) - 1
    goes: list[Face] = []
    comes: list[Face] = []
    # Directions are numbered with the last axis fastest.
    weights = [3 ** (len(widths) - 1 - k) for k in range(len(widths))]
    beside = [(neighbours[last // 2 - w] < 0, neighbours[last // 2 + w] < 0) for w in weights]
    for number, steps in enumerate(itertools.product((-1, 0, 1), repeat=len(widths))):
        if neighbours[number] < 0 or not any(steps):
            continue
        for leaf, shape, axes in leaves:
            boxes = [[(0, extent) for extent in shape] for _ in range(2)]
            for axis, width, step, at_edge in zip(axes, widths, steps, beside, strict=True):
                cells = _along(shape[-axis], width, step, at_edge)
                boxes[0][-axis], boxes[1][-axis] = cells
            own, ghosts = (tuple(box) for box in boxes)
            goes.append((neighbours[number], steps, (leaf, own)))
            comes.append((neighbours[number], tuple(-step for step in steps), (leaf, ghosts)))
    return sorted(goes), sorted(comes)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def packed(boxes: tuple[Box, ...], leaves: Sequence[Any], like: Any) -> Any:
    """Return the cells of boxes, one after the other."""
    pieces = [
        jax.lax.slice(leaves[leaf], *zip(*ranges, strict=True)).ravel() for leaf, ranges in boxes
    ]
    return jnp.concatenate(pieces or [like.ravel()[:0]])


def _pieces(boxes: Sequence[Box], cells: Any) -> list[Any]:
    """Return the cells of each box, in its shape, from the cells of all boxes."""
    ends = itertools.pairwise(itertools.accumulate(map(_size, boxes), initial=0))
    return [cells[slice(*at)].reshape(_extents(box)) for at, box in zip(ends, boxes, strict=True)]


def joined(pieces: Sequence[tuple[Box, Any]]) -> list[tuple[Box, Any]]:
    """Join boxes that are side by side, with their cells, along one axis after the other.

    The last axis comes first. For all ghost cells of a block of d axes, 2 d boxes remain.
    """
    out = list(pieces)
    for axis in range(1, 1 + max((len(ranges) for (_, ranges), _ in out), default=0)):
        beside: dict[Box, list[tuple[Box, Any]]] = {}
        for (leaf, ranges), piece in out:
            others = tuple(it for k, it in enumerate(ranges) if k != len(ranges) - axis)
            beside.setdefault((leaf, others), []).append(((leaf, ranges), piece))
        out = [it for each in beside.values() for it in _runs(each, axis)]
    return out


def _runs(pieces: Sequence[tuple[Box, Any]], axis: int) -> list[tuple[Box, Any]]:
    """Join boxes that differ along one axis, counted from the end, where one follows another."""
    if axis > len(pieces[0][0][1]):
        return list(pieces)
    runs: list[list[tuple[Box, Any]]] = []
    for box, piece in sorted(pieces, key=lambda it: it[0][1][-axis]):
        if runs and runs[-1][-1][0][1][-axis][1] == box[1][-axis][0]:
            runs[-1].append((box, piece))
        else:
            runs.append([(box, piece)])
    return [_as_one(run, axis) if len(run) > 1 else run[0] for run in runs]


def _as_one(run: Sequence[tuple[Box, Any]], axis: int) -> tuple[Box, Any]:
    (leaf, ranges), (_, last) = run[0][0], run[-1][0]
    at = len(ranges) - axis
    whole = (*ranges[:at], (ranges[at][0], last[at][1]), *ranges[at + 1 :])
    return (leaf, whole), jnp.concatenate([piece for _, piece in run], axis=at)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def filled(boxes: tuple[Box, ...], leaves: Sequence[Any], cells: Any) -> Sequence[Any]:
    """Write the cells into the boxes of the leaves. The boxes do not overlap.

    Each update of a leaf waits for the one before, so boxes that are side by side are one update.
    """
    pieces = zip(boxes, _pieces(boxes, cells), strict=True)
    out = list(leaves)
    for (leaf, ranges), piece in joined([it for it in pieces if it[1].size]):
        starts = [start for start, _ in ranges]
        out[leaf] = jax.lax.dynamic_update_slice(out[leaf], piece, starts)
    return out


@functools.partial(jax.jit, static_argnums=0, inline=True)
def added(found: tuple[Face, ...], leaves: Sequence[Any], cells: Any) -> Sequence[Any]:
    """Add the cells to the boxes of the leaves. The boxes may overlap.

    XLA goes over a whole leaf to update a box that it reads. So what is read and what is written is
    apart, by a barrier, and all boxes at one end of an axis are one update.
    """
    out = list(leaves)
    at_ends: dict[Any, list[tuple[Box, Any]]] = {}
    pieces = _pieces([box for *_, box in found], cells)
    for (_, steps, box), piece in zip(found, pieces, strict=True):
        end = next((axis, step) for axis, step in enumerate(steps) if step)
        at_ends.setdefault((box[0], end), []).append((box, piece))
    for (leaf, _), boxes in at_ends.items():
        ranges = np.array([box[1] for box, _ in boxes])
        starts, ends = ranges[..., 0].min(0), ranges[..., 1].max(0)
        total = jax.lax.slice(out[leaf], starts, ends)
        for (_, along), piece in boxes:
            low, high = np.transpose(along)
            total += jnp.pad(piece, list(zip(low - starts, ends - high, strict=True)))
        total = jax.lax.optimization_barrier(total)
        out[leaf] = jax.lax.dynamic_update_slice(out[leaf], total, starts)
    return out


@dataclass(frozen=True)
class Message:
    """The boxes that the blocks of one dtype send or receive, in the order of `faces`."""

    boxes: tuple[Box, ...]
    parts: tuple[rows.Part, ...]

    @property
    def size(self) -> int:
        return sum(count for *_, count in self.parts)


def message(found: Sequence[Face], comm: Comm | AnyComm) -> Message:
    counts = [0] * comm.size
    for peer, _, box in found:
        counts[peer] += _size(box)
    return Message(tuple(box for *_, box in found), rows.side_by_side(counts))


@dataclass(frozen=True)
class _Fill:
    """Writes received cells into the ghost cells."""

    tree_type: TreeType
    received: tuple[Message, ...]

    def __call__(self, *cells_and_leaves: Any) -> Any:
        n = len(self.received)
        leaves: Sequence[Any] = cells_and_leaves[n:]
        for message, cells in zip(self.received, cells_and_leaves[:n], strict=True):
            leaves = filled(message.boxes, leaves, cells)
        return self.tree_type.from_leaves(leaves)


def initiate(op: OfBlocks, args: Sequence[Any]) -> CompositeRequest[Any]:
    """Initiate a halo exchange, as one `alltoallv` for each dtype."""
    (blocks,) = pack_arguments(op, args)
    requests, received = [], []
    for leaves in blocks.groups.values():
        shapes = [
            (i, blocks.tree_type.data[i][0], exchanged_axes(op, blocks.tree_type, i))
            for i in leaves
        ]
        goes, comes = (message(found, op.comm) for found in faces(shapes, op))
        cells = packed(goes.boxes, blocks.leaves, blocks.leaves[leaves[0]])
        carried = made(
            "alltoallv",
            op.comm,
            rows=(goes.size, comes.size),
            send_parts=goes.parts,
            recv_parts=comes.parts,
        )
        requests.append(begin(carried, (cells,)))
        received.append(comes)
    kind = CompositeKind(op.name, _Fill(blocks.tree_type, tuple(received)))
    return CompositeRequest([*requests, tuple(blocks.leaves)], kind)
