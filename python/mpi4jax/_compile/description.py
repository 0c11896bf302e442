"""What the description of a custom call says besides the names of the operation's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray
from jax.interpreters import mlir

from .. import _native
from .._jax import lines
from .._op import rows
from .._op.operation import How, Message, OfBlocks, Operation, Receiving, Reducing, WithParts
from .._op.packing import words_of


def parts_of(op: WithParts, aval: ShapedArray) -> dict[str, Any]:
    """Return the elements that are sent to ranks, and received from them."""
    sends, receives = op.send_parts, op.recv_parts
    if op.adjoint:
        sends, receives = receives, sends
    row = math.prod(aval.shape[int(op.rows[0] is not None) :])

    def elements(parts: Sequence[rows.Part]) -> list[rows.Part]:
        return [(rank, row * start, row * count) for rank, start, count in parts]

    whole = {} if op.whole is None else {"whole": row * op.whole}
    return {"sends": elements(sends), "receives": elements(receives), **whole}


def line_of(ctx: mlir.LoweringRuleContext) -> str | None:
    """Return the name of the user's line, which the native module resolves in this process.

    Not the line itself: a program whose lines have moved is the same, for JAX's compilation cache.
    """
    function, line = lines.user_place(ctx)
    return _native.name_line(function, line) if line else None


def check_exportable(op: Operation) -> None:
    """Raise an error for exporting names that other processes do not know."""
    key = op.comm.key or ""
    if "#" in key:
        raise ValueError(
            f"{op.name}: communicator {key} has no name, and an exported program finds its "
            "communicators by name; call comm.Set_name(...) before its first use"
        )
    if isinstance(op, Reducing) and op.reduction.user:
        raise ValueError(
            f"{op.name}: a reduction made with MPI.Op.Create cannot be exported; expected a "
            "predefined one such as MPI.SUM"
        )
    if isinstance(op, Receiving) and op.status is not None:
        raise ValueError(
            f"{op.name}: argument 'status' cannot be exported, because it is memory of this "
            "process; expected None"
        )


def forms_of(op: Operation, how: How, avals: list[Any]) -> dict[str, str] | None:
    """Return what ranks compare about operands besides their bytes: `Forms` in `src/ops/forms.rs`.

    For a collective this includes the shape of an array. The two ends of a message may have
    different shapes, and so may the blocks of a grid.
    """
    sent, received = how.tree
    if not sent and avals and not isinstance(op, Message | OfBlocks):
        sent = words_of([""], [avals[0].shape[op.lead()[0] :]])
    words = {"sent": sent, "received": received}
    if isinstance(how.spmd, str):
        words["boundary"] = how.spmd
    if isinstance(op, OfBlocks):
        words["ghosts"] = _ghosts_in_words(op)
    return words if any(words.values()) else None


def _ghosts_in_words(op: OfBlocks) -> str:
    """Return the ghost cells of a halo exchange, which all ranks have alike."""
    widths = " and ".join(f"{low}+{high}" for low, high in op.widths)
    each = [" and ".join(f"-{axis}" for axis in axes) for axes in op.leaf_axes]  # from the end
    words = f"widths {widths} along axes {' or '.join(dict.fromkeys(each))}"
    return words + ", added to the cells that they are copies of" * op.adjoint
