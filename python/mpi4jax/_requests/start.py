"""Starting an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from .._call.call import traced_peers
from .._call.eager import clean, run_program
from .._job.flush import started_here
from .._op.arguments import ANY_SOURCE, ANY_TAG
from .._op.comm import MEAN
from .._op.packing import check_no_keys, flatten, pack_arguments
from .._op.primitive import start_p, sum_of_mean
from .._op.spec import SPECS, Call, Params, Spec, first_axes
from .request import Request, RequestKind


def _start(spec: Spec, args: Sequence[Any], p: Params) -> Request:
    """Bind the start once per dtype, with the same numbers, which are behind the trees."""
    n = spec.arrays or 0
    trees, numbers = args[:n], args[n:]
    known = tuple(sorted((k, v) for k, v in p.items() if k not in ("eager", "operand")))
    if not trees:
        (handle,) = start_p.bind(*numbers, of=spec.name, **p)
        return Request([handle], RequestKind(spec.name, known, None))
    (packed,) = pack_arguments(spec, trees, p)
    check_no_keys(spec, p, packed)
    before, _ = first_axes(spec, p)
    handles = []
    for dtype in packed.groups:
        x = packed.pack(dtype, before, spec)
        q = sum_of_mean(spec, p, x) if p.get("reduction") is MEAN else p
        handles += start_p.bind(x, *numbers, of=spec.name, **q)
    return Request(
        [*handles, *numbers[: spec.is_ragged]], RequestKind(spec.name, known, packed.form)
    )


def _start_program(spec: Spec, p: Params) -> Callable[..., Any]:
    def call(*args: Any) -> Request:
        return _start(spec, args, p)

    call.__name__ = f"i{spec.name}"
    return jax.jit(call)


def start(call: Call) -> Request:
    """Start an op."""
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
        return spec.start(_begin, args, p)
    return _begin(spec.name, args, p)


def _begin(op: str, args: Sequence[Any], p: Params) -> Request:
    """Start an op by what starts it in MPI. Its counts, if it takes some, are the last of ``args``:
    how many rows go to each rank, and how many come from each."""
    spec = SPECS[op]
    p = {**spec.defaults, **p}
    if not clean():
        return _start(spec, [*args, *traced_peers(p)], p)
    started_here()
    n = spec.arrays or 0
    trees = [flatten(tree) for tree in args[:n]]
    leaves = [leaves for leaves, _ in trees]
    try:
        request = run_program(_start_program, spec, dict(p), [*leaves, *args[n:]])
    except TypeError:
        # Says which argument is no array, if that is why.
        pack_arguments(spec, args[:n], p)
        raise
    kind = replace(request._kind, params=tuple(sorted(p.items())))
    for _, structure in trees:
        kind = replace(kind, form=replace(kind.form, tree=structure))
    return Request(request._children, kind)
