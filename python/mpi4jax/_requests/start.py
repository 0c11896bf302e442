"""The initiation of a nonblocking operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from .._call.call import with_traced_peers
from .._op.arguments import ANY_SOURCE, ANY_TAG
from .._op.manual import varying_operands
from .._op.operation import PLAIN, Call, Operation, Receiving
from .._op.packing import arity_of, check_reducible, compared, name_leaf, pack_arguments
from .primitives import start_p
from .request import Request, RequestKind


def start(call: Call) -> Request[Any]:
    """Initiate an operation."""
    op = call.op
    if isinstance(op, Receiving):
        _check_receive(op)
    request: Request[Any] = op.initiate(begin, call.arrays + call.counts)
    return request


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


def begin(op: Operation, args: Sequence[Any]) -> Request[Any]:
    """Initiate an operation once per dtype, by MPI's own nonblocking operation.

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
    before, _ = op.first_axes()
    handles, buffers = [], []
    for dtype in tree.groups:
        xs = varying_operands(op, tree.of_dtype(dtype))
        # The type is not weak, because a loop may carry a request that was first made for another
        # array.
        buffers.append(tuple(ShapedArray(x.shape, x.dtype) for x in xs))
        words = compared(op, [tree], dtype, int(before is not None))
        q = how._replace(arity=arity_of([xs]), tree=words)
        try:
            handles += start_p.bind(*xs, *numbers, op=op, how=q)
        except (TypeError, ValueError) as error:
            name_leaf(op, q, [tree], dtype, error)
            raise
    kind = RequestKind(op, tree.tree_type, tuple(buffers))
    return Request([*handles, *numbers[: op.row.is_ragged]], kind)
