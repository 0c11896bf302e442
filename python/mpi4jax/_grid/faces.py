"""Faces of blocks: which cells the messages of a halo exchange carry; and how XLA packs them.

XLA packs where a halo exchange is started: the request holds the blocks, so only the faces are
copied, where the operand of another operation that is started is copied as a whole; and their
derivatives are those of what XLA does. It also packs what an adjoint exchange sends, and adds up
what comes back. And it packs on a GPU: the processor does not reach the blocks there, and what it
packs would go through the host. Each time, an `alltoallv` carries what is packed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._op import rows
from .._op.packing import Form, exchanged_axes, pack_arguments
from .._op.spec import SPECS, Params
from .._requests.request import CompositeKind, CompositeRequest, Request

# The cells along an axis: the first, the one after the last.
Cells = tuple[int, int]

# The number of a leaf, and the cells along each of its axes.
Box = tuple[int, tuple[Cells, ...]]

# The number of a leaf, its shape, and its exchanged axes, counted from the end.
Leaf = tuple[int, tuple[int, ...], tuple[int, ...]]

# The rank there, the number of the direction that the message is sent to, what of a block is in it.
Face = tuple[int, int, Box]


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box[1])


def _cells_in(boxes: Sequence[Box]) -> int:
    return sum(math.prod(_extents(box)) for box in boxes)


def _along(extent: int, width: Cells, step: int, at_edge: tuple[bool, bool]) -> tuple[Cells, Cells]:
    """The cells along an exchanged axis that go to the neighbour at ``step``, and that come from
    there. An axis has ghost cells, inner cells, ghost cells."""
    low, high = width
    if step < 0:
        return (low, low + high), (0, low)
    if step > 0:
        return (extent - high - low, extent - high), (extent - high, extent)
    # Ghost cells at an edge of the grid belong to the block: no other rank fills them.
    below, above = at_edge
    cells = (0 if below else low, extent if above else extent - high)
    return cells, cells


def faces(leaves: Sequence[Leaf], p: Params) -> tuple[list[Face], list[Face]]:
    """What goes, and what comes, in the order of the messages: by rank, and for each rank in the
    order of the directions that they are sent to."""
    neighbours, widths = p["neighbours"], p["widths"]
    last = len(neighbours) - 1
    goes: list[Face] = []
    comes: list[Face] = []
    # Directions are numbered with the last axis fastest; `last - number` is the opposite one.
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
            goes.append((neighbours[number], number, (leaf, own)))
            comes.append((neighbours[number], last - number, (leaf, ghosts)))
    return sorted(goes), sorted(comes)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def packed(boxes: tuple[Box, ...], leaves: Sequence[Any], like: Any) -> Any:
    """The cells of boxes, one after the other."""
    pieces = [
        jax.lax.slice(leaves[leaf], *zip(*ranges, strict=True)).ravel() for leaf, ranges in boxes
    ]
    return jnp.concatenate(pieces or [like.ravel()[:0]])


@functools.partial(jax.jit, static_argnums=(0, 3), inline=True)
def filled(
    boxes: tuple[Box, ...], leaves: Sequence[Any], cells: Any, add: bool = False
) -> list[Any]:
    """Leaves whose boxes have these cells; or have them added, one box after the other."""
    out, at = list(leaves), 0
    for box in boxes:
        (leaf, ranges), extents = box, _extents(box)
        piece = cells[at : at + math.prod(extents)].reshape(extents)
        at += piece.size
        if add:
            piece += jax.lax.slice(out[leaf], *zip(*ranges, strict=True))
        out[leaf] = jax.lax.dynamic_update_slice(out[leaf], piece, [start for start, _ in ranges])
    return out


@dataclass(frozen=True)
class Message:
    """What the blocks of one dtype send, or receive: their boxes, in the order of `faces`."""

    boxes: tuple[Box, ...]
    parts: tuple[rows.Part, ...]

    @property
    def size(self) -> int:
        return sum(count for _, count in self.parts)


def _message(found: list[Face], ranks: int) -> Message:
    counts = [0] * ranks
    for peer, _, box in found:
        counts[peer] += _cells_in([box])
    return Message(tuple(box for *_, box in found), rows.side_by_side(counts))


def messages(leaves: Sequence[Leaf], p: Params) -> tuple[Message, Message]:
    """What goes to all ranks, and what comes from them, in an `alltoallv`."""
    goes, comes = (_message(found, p["comm"].size) for found in faces(leaves, p))
    return goes, comes


@dataclass(frozen=True)
class _Fill:
    """Puts what has come into the ghost cells."""

    form: Form
    received: tuple[Message, ...]

    def __call__(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        for message, cells in zip(self.received, results, strict=True):
            leaves = filled(message.boxes, leaves, cells)
        return self.form.rebuild(leaves)


def start(start_op: Callable[..., Request], args: Sequence[Any], p: Params) -> CompositeRequest:
    """Start a halo exchange, as one `alltoallv` for each dtype."""
    (given,) = pack_arguments(SPECS["halo_exchange"], args, p)
    requests, received = [], []
    for leaves in given.groups.values():
        shapes = [
            (i, given.form.data[i][0], exchanged_axes("halo_exchange", given.form, i, p))
            for i in leaves
        ]
        goes, comes = messages(shapes, p)
        sides = {"sends": goes.parts, "receives": comes.parts, "rows": (goes.size, comes.size)}
        cells = packed(goes.boxes, given.leaves, given.leaves[leaves[0]])
        requests.append(start_op("alltoallv", (cells,), {"comm": p["comm"], **sides}))
        received.append(comes)
    kind = CompositeKind("halo_exchange", _Fill(given.form, tuple(received)))
    return CompositeRequest([*requests, tuple(given.leaves)], kind)
