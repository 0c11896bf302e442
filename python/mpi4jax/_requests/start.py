"""The initiation of a nonblocking operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from .._call.call import with_traced_peers
from .._op.arguments import ANY_SOURCE, ANY_TAG
from .._op.manual import varying_operands
from .._op.operation import PLAIN, Call, How, Operation, Receiving
from .._op.packing import bind_message, check_reducible, pack_arguments
from .._op.primitive import split
from .primitives import start_p
from .request import Request, RequestKind


def start(call: Call) -> Request[Any]:
    """Initiate an operation."""
    op = call.op
    if isinstance(op, Receiving):
        _check_receive(op)
    args = call.arrays + call.counts
    request: Request[Any] | None = op.initiate(args)
    return begin(op, args) if request is None else request


def _check_receive(op: Receiving) -> None:
    name = f"i{op.name}"
    if op.status is not None:
        raise TypeError(
            f"{name}: argument 'status' must be None, because a request has no status; "
            f"use {op.name} for a status"
        )
    traced = any(isinstance(x, jax.core.Tracer) for x in (op.source, op.recvtag))
    if not traced and (op.source, op.recvtag) == (ANY_SOURCE, ANY_TAG):
        raise ValueError(
            f"{name}: source=MPI.ANY_SOURCE with tag=MPI.ANY_TAG would receive the messages of "
            f"derivatives; name the source or the tag, or use {op.name}"
        )


def _bind(op: Operation, how: How, *args: Any) -> list[Any]:
    arrays, numbers, _ = split(op, how, args)
    return list(start_p.bind(*varying_operands(op, arrays), *numbers, op=op, how=how))


def begin(op: Operation, args: Sequence[Any]) -> Request[Any]:
    """Let the core initiate an operation, once per dtype.

    Its counts, if it takes some, are the last of ``args``: how many rows go to each rank, and how
    many come from each.
    """
    n = op.arrays or 0
    op, how, peers = with_traced_peers(op, PLAIN)
    trees, numbers = args[:n], [*args[n:], *peers]
    if not trees:
        (handle,) = start_p.bind(*numbers, op=op, how=how)
        return Request([handle], RequestKind(op, None, ()))
    (tree,) = pack_arguments(op, trees)
    check_reducible(op, tree)
    handles, buffers = [], []
    for dtype in tree.groups:
        handles += bind_message(_bind, op, how, [tree], dtype, numbers)
        # The type is not weak, because a loop may carry a request that was first made for another
        # array.
        buffers.append(tuple(ShapedArray(x.shape, x.dtype) for x in tree.of_dtype(dtype)))
    kind = RequestKind(op, tree.tree_type, tuple(buffers))
    return Request([*handles, *numbers[: op.row.is_ragged]], kind)
