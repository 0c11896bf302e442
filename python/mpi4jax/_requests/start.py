"""The initiation of a nonblocking operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from .._call.call import traced_peers
from .._op.arguments import ANY_SOURCE, ANY_TAG
from .._op.manual import varying_operands
from .._op.packing import arity_of, check_reducible, compared, pack_arguments
from .._op.spec import SPECS, Call, Params, first_axes
from .primitives import start_p
from .request import Request, RequestKind


def start(call: Call) -> Request[Any]:
    """Initiate an operation."""
    spec, p = SPECS[call.op], call.params
    name = f"i{spec.name}"
    if p.get("status") is not None:
        raise TypeError(
            f"{name}: argument 'status' must be None, because a request has no status; "
            f"use {spec.name} for a status"
        )
    source, tag = p.get("source"), p.get("recvtag")
    traced = isinstance(source, jax.core.Tracer) or isinstance(tag, jax.core.Tracer)
    if not traced and (source, tag) == (ANY_SOURCE, ANY_TAG):
        raise ValueError(
            f"{name}: source=MPI.ANY_SOURCE with tag=MPI.ANY_TAG would receive the messages of "
            f"derivatives; name the source or the tag, or use {spec.name}"
        )
    args = call.arrays + call.counts
    if spec.start is not None:
        return spec.start(begin, args, p)
    return begin(spec.name, args, p)


def begin(op: str, args: Sequence[Any], p: Params) -> Request[Any]:
    """Initiate an operation once per dtype, by MPI's own nonblocking operation.

    Its counts, if it takes some, are the last of ``args``: how many rows go to each rank, and how
    many come from each.
    """
    spec = SPECS[op]
    p = {**spec.defaults, **p}
    n = spec.arrays or 0
    trees, numbers = args[:n], [*args[n:], *traced_peers(p)]
    params = tuple(sorted((k, v) for k, v in p.items() if k != "operand"))
    if not trees:
        (handle,) = start_p.bind(*numbers, of=op, **p)
        return Request([handle], RequestKind(op, params, None, ()))
    (tree,) = pack_arguments(spec, trees, p)
    check_reducible(spec, p, tree)
    before, _ = first_axes(spec, p)
    handles, buffers = [], []
    for dtype in tree.groups:
        xs = varying_operands(spec, p, tree.of_dtype(dtype))
        # Not weak: a loop may carry a request that another array was started with first.
        buffers.append(tuple(ShapedArray(x.shape, x.dtype) for x in xs))
        q = {**p, **arity_of([xs]), **compared(spec, [tree], dtype, int(before is not None))}
        handles += start_p.bind(*xs, *numbers, of=op, **q)
    kind = RequestKind(op, params, tree.tree_type, tuple(buffers))
    return Request([*handles, *numbers[: spec.is_ragged]], kind)
