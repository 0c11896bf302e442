"""A halo exchange that is started: XLA packs the faces of blocks into messages, and unpacks them.

The request holds the blocks. So only the faces are copied, where the operand of another operation
that is started is copied as a whole; and their derivatives are those of what XLA does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import _native, _rows
from ._packing import Form, exchanged_axes, pack_arguments
from ._request import End, Joint, Request
from ._spec import SPECS, Params

# The number of a leaf, and the cells along each of its axes: the first, the one after the last.
Box = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class _Message:
    """What the blocks of one dtype send, or receive: their boxes, in the order of the ranks."""

    boxes: tuple[Box, ...]
    parts: tuple[_rows.Part, ...]

    @property
    def size(self) -> int:
        return sum(count for _, count in self.parts)


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box[1])


def _messages(form: Form, leaves: Sequence[int], p: Params) -> tuple[_Message, _Message]:
    """What goes, and what comes. Between two ranks, boxes are in the order of the directions that
    they are sent to."""
    last = len(p["neighbours"]) - 1
    goes: list[tuple[int, int, Box]] = []
    comes: list[tuple[int, int, Box]] = []
    for leaf in leaves:
        shape, _ = form.data[leaf]
        axes = [len(shape) - axis for axis in exchanged_axes("halo_exchange", form, leaf, p)]
        extents = [shape[axis] for axis in axes]
        for direction, peer, out, into in _native.halo_cells(p["neighbours"], p["widths"], extents):
            for found, number, cells in ((goes, direction, out), (comes, last - direction, into)):
                ranges = dict(zip(axes, cells, strict=True))
                box = tuple(ranges.get(k, (0, extent)) for k, extent in enumerate(shape))
                found.append((peer, number, (leaf, box)))
    return _message(goes, p["comm"].size), _message(comes, p["comm"].size)


def _message(found: list[tuple[int, int, Box]], ranks: int) -> _Message:
    found = sorted(found)
    counts = [0] * ranks
    for peer, _, box in found:
        counts[peer] += math.prod(_extents(box))
    return _Message(tuple(box for *_, box in found), _rows.side_by_side(counts))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _packed(boxes: tuple[Box, ...], leaves: Sequence[Any], like: Any) -> Any:
    pieces = [
        jax.lax.slice(leaves[leaf], *zip(*ranges, strict=True)).ravel() for leaf, ranges in boxes
    ]
    return jnp.concatenate(pieces or [like.ravel()[:0]])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _filled(boxes: tuple[Box, ...], leaves: Sequence[Any], cells: Any) -> list[Any]:
    out, at = list(leaves), 0
    for box in boxes:
        (leaf, ranges), extents = box, _extents(box)
        piece = cells[at : at + math.prod(extents)].reshape(extents)
        out[leaf] = jax.lax.dynamic_update_slice(out[leaf], piece, [start for start, _ in ranges])
        at += piece.size
    return out


@dataclass(frozen=True)
class _Fill:
    """Puts what has come into the ghost cells."""

    form: Form
    received: tuple[_Message, ...]

    def __call__(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        for message, cells in zip(self.received, results, strict=True):
            leaves = _filled(message.boxes, leaves, cells)
        return self.form.rebuild(leaves)


def start(start_op: Callable[..., Request], args: Sequence[Any], p: Params) -> Joint:
    """Start a halo exchange, as one `alltoallv` for each dtype."""
    (packed,) = pack_arguments(SPECS["halo_exchange"], args, p)
    requests, received = [], []
    for leaves in packed.groups.values():
        goes, comes = _messages(packed.form, leaves, p)
        sides = {"sends": goes.parts, "receives": comes.parts, "rows": (goes.size, comes.size)}
        cells = _packed(goes.boxes, packed.leaves, packed.leaves[leaves[0]])
        requests.append(start_op("alltoallv", (cells,), {"comm": p["comm"], **sides}))
        received.append(comes)
    end = End("halo_exchange", _Fill(packed.form, tuple(received)))
    return Joint([*requests, tuple(packed.leaves)], end)
