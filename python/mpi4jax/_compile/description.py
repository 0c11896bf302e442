"""The description of a custom call, in JSON: what it says to the core."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from .. import _native
from .._jax import lines
from .._op import rows
from .._op.comm import MEAN
from .._op.operation import (
    ASKED,
    How,
    Message,
    OfBlocks,
    Operation,
    Ragged,
    Receiving,
    Reducing,
    Rooted,
    WithParts,
)
from .._op.packing import words_of
from .._op.table import ROWS

# Names of the values in an operand, as in `Operand` of `src/call/envelope.rs`.
_OPERANDS: dict[str | None, str] = {"traced": "peers", "recorded": "peers", "call": "call"}

# Placeholder for a value that is in an operand: `Envelope::TRACED` in `src/call/envelope.rs`.
_TRACED = np.iinfo(np.int32).min


def describe(
    ctx: mlir.LoweringRuleContext,
    op: Operation,
    how: How,
    called: str,
    forms: dict[str, str] | None,
    reduction: str | None,
    **attrs: Any,
) -> str:
    """Return the description of a call, which `Description` in `src/xla/description.rs` reads.

    Entries that are None are left out.

    Args:
        ctx: JAX's context of the equation.
        op, how: its parameters.
        called: the name of the op of the core that is called.
        forms: what :func:`forms_of` returns.
        reduction: the name of the reduction, if it is not the operation's own.
        **attrs: what only the description of this op has.
    """
    row, status = ROWS[called], op.status if isinstance(op, Receiving) else None
    # The transpose of an operation that reduces may call an op without a reduction.
    if reduction is None and row.has_reduction and isinstance(op, Reducing):
        reduction = "SUM" if op.reduction is MEAN else op.reduction.name
    peers = op.peers() if row.has_peer and isinstance(op, Message) else None
    fields = {
        "op": called,
        "comm": op.comm.key,
        "operand": _OPERANDS.get(how.operand),
        "reduction": reduction,
        "root": op.root if row.has_root and isinstance(op, Rooted) else None,
        "envelope": peers and {k: _TRACED if x is None else x for k, x in peers.items()},
        "envelope_result": bool(how.env_out) or None,
        "may_be_short": how.env_out == ASKED or None,
        "status": (status is not None and status.address) or None,
        "forms": forms,
        # An eager op is compiled once for all callers, so the line is an operand.
        "line": None if how.eager else line_of(ctx),
        **attrs,
    }
    return json.dumps({name: x for name, x in fields.items() if x is not None}, default=int)


def parts_of(op: Operation, called: str, avals: Sequence[ShapedArray]) -> dict[str, Any]:
    """Return what the call of an op says about the rows of its operand and its result.

    Args:
        op: the operation.
        called: the name of the op of the core that is called.
        avals: the types of what is sent and received; the first one decides.
    """
    if ROWS[called].has_parts:
        assert isinstance(op, WithParts)
        return {"parts": _elements(op, avals[0])}
    if isinstance(op, Ragged):
        rows, capacity = op.rows
        owners = {"has_owners": True} if op.has_owners else {}
        row = math.prod(avals[0].shape[1:])
        return {"ragged": {"rows": rows, "capacity": capacity, "row": row, **owners}}
    return {}


def _elements(op: WithParts, aval: ShapedArray) -> dict[str, Any]:
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
