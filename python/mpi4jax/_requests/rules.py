"""The rules of initiations and waits: types, batching and derivatives.

To JAX, what is linear in an operand is linear in the handle: a handle's tangent is the
handle of the same op on the tangents. The transpose of a wait starts the adjoint, and gives its
handle as the cotangent of the handle that was waited for; the transpose of the start waits for it.
JAX adds zeros to cotangents, which changes no handle, and the handle of nothing is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching
from mpi4py import MPI

from .._call.eager import implementation
from .._diff.derivative import adjoint_of, linear_only
from .._jax import compat
from .._op.manual import handle_type
from .._op.operation import How, Message, Operation, Receiving, Reducing
from .._op.primitive import (
    TOKEN,
    abstract_eval,
    batched_operands,
    batched_results,
    common_numbers,
    effect,
    first_of_batch,
    has_derivative,
    is_unbatched,
    result_avals,
    split,
)
from .primitives import HANDLE, split_wait, start_p, wait_p

# ---- Types


@start_p.def_effectful_abstract_eval
def _start_types(*args: Any, op: Operation, how: How) -> tuple[list[Any], set[Any]]:
    abstract_eval(*args, op=op, how=how)  # raises an error if a type is wrong
    arrays, _, token = split(op, how, args)
    handle = handle_type(op, compat.array_type(HANDLE.shape, [*arrays, HANDLE]))
    return [handle, *(TOKEN for _ in token)], {effect}


def _like(buffers: Sequence[ShapedArray], handle: Any) -> list[ShapedArray]:
    """Return the types of buffers, which vary over the axes that the handle varies over."""
    return [compat.array_type(x.shape, [handle, x]) for x in buffers]


@wait_p.def_effectful_abstract_eval
def _wait_types(*args: Any, op: Operation, how: How) -> tuple[list[Any], set[Any]]:
    (handle,), _, token = split_wait(op, how, args)
    results = result_avals(op, how, _like(how.buffers, handle))
    return [*results, *(TOKEN for _ in token)], {effect}


# ---- Batching: one handle for the whole batch, which says to the wait that there is one


def _start_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, op: Operation, how: How
) -> tuple[list[Any], list[Any]]:
    if is_unbatched(axis_data, dims, how):
        out = start_p.bind(*args, op=op, how=how)
        return out, [None] * len(out)
    size = axis_data.size
    operands, _ = batched_operands(op, how, size, args, dims)
    if size == 0:  # an empty batch has no handle, on any rank, so nothing is initiated
        *_, token = split(op, how, operands)
        handles = jnp.zeros((0, *HANDLE.shape), HANDLE.dtype)
    else:
        handle, *token = start_p.bind(*operands, op=op, how=how)
        handles = jnp.broadcast_to(handle, (size, *handle.shape))
    return batched_results(size, [handles, *token], 1, 0, split(op, how, dims)[2])


def _wait_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, op: Operation, how: How
) -> tuple[list[Any], list[Any]]:
    pairs = split_wait(op, how, list(zip(args, dims, strict=True)))
    ((handle, dim),), numbers, tokens = pairs
    numbers = [x if d is None else common_numbers(x, d) for x, d in numbers]
    token = [first_of_batch(t, d) for t, d in tokens]
    token_dims = [d for _, d in tokens]
    size, axis = axis_data.size, None
    if dim is not None:  # otherwise, the operation was initiated outside the vmap
        before, after = op.lead()
        handle, axis = first_of_batch(handle, dim), after
        shapes = [(*x.shape[:before], size, *x.shape[before:]) for x in how.buffers]
        buffers = tuple(map(compat.array_type, shapes, ([x] for x in how.buffers)))
        how = how._replace(buffers=buffers)
        if size == 0:
            results = [jnp.zeros(x.shape, x.dtype) for x in result_avals(op, how, buffers)]
            return batched_results(size, [*results, *token], len(results), axis, token_dims)
    out = wait_p.bind(handle, *numbers, *token, op=op, how=how)
    return batched_results(size, list(out), len(out) - len(token), axis, token_dims)


# ---- Derivatives


def _refuse_derivative(op: Operation, how: How) -> None:
    name = f"i{op.name}"
    if isinstance(op, Reducing) and not op.is_linear:
        raise NotImplementedError(
            f"{name}: reduction {op.reduction.name} has no derivative here; expected SUM or MEAN, "
            f"or use {op.name}, or jax.lax.stop_gradient on the input"
        )
    if (isinstance(op, Message) and op.has_wildcard()) or how.operand is not None:
        raise NotImplementedError(
            f"{name}: has no derivative if its source, destination or tag is MPI.ANY_SOURCE, "
            f"MPI.ANY_TAG or traced; expected static integers, or use {op.name}"
        )


@compat.allows_transfers
def _start_jvp(
    primals: Any, tangents: Any, *, op: Operation, how: How
) -> tuple[list[Any], list[Any]]:
    arrays, numbers, _ = split(op, how, primals)
    ts, _, token_ts = split(op, how, tangents)
    token_ts = [ad.instantiate_zeros(t) for t in token_ts]
    is_linear = not isinstance(op, Reducing) or op.is_linear
    constant = not is_linear and all(type(t) is ad.Zero for t in ts)
    if constant or not all(map(has_derivative, arrays)):
        out = start_p.bind(*primals, op=op, how=how)
        return out, [compat.zero_tangent(out[0]), *token_ts]
    _refuse_derivative(op, how)
    out = start_p.bind(*primals, op=op, how=how)
    ts = [ad.instantiate_zeros(t) for t in ts]
    return out, start_p.bind(*ts, *numbers, *token_ts, op=op.on_tangents(), how=how)


@compat.allows_transfers
def _wait_jvp(
    primals: Any, tangents: Any, *, op: Operation, how: How
) -> tuple[list[Any], list[Any]]:
    out = wait_p.bind(*primals, op=op, how=how)
    _, numbers, _ = split_wait(op, how, primals)
    (t,), _, token_ts = split_wait(op, how, tangents)
    token_ts = [ad.instantiate_zeros(t) for t in token_ts]
    if type(t) is ad.Zero:
        results = out[: len(out) - len(token_ts)]
        return out, [*map(compat.zero_tangent, results), *token_ts]
    derived = how._replace(derived=True)
    return out, wait_p.bind(t, *numbers, *token_ts, op=op.on_tangents(), how=derived)


def _adjoint(op: Operation, how: How) -> tuple[Operation, How]:
    """Return the adjoint of an operation, and how it is called."""
    if isinstance(op, Receiving) and op.source == MPI.PROC_NULL:
        return op, how  # without a sender, the result is the template
    return adjoint_of(op, how)


@compat.allows_transfers
def _start_transpose(cts: Sequence[Any], *args: Any, op: Operation, how: How) -> list[Any]:
    arrays, numbers, token = split(op, how, args)
    handle, *token_ct = map(ad.instantiate_zeros, cts)
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in arrays]
    buffers = result_avals(op, how, avals) if op.returns else avals
    other, other_how = _adjoint(op, how)
    other_how = other_how._replace(buffers=tuple(buffers), derived=True)
    out = wait_p.bind(handle, *numbers, *token_ct, op=other, how=other_how)
    n = len(out) - len(token_ct)
    found = out[:n] or [jnp.zeros(x.shape, x.dtype) for x in avals]
    return [
        *linear_only(arrays, found),
        *(None for _ in numbers),
        *linear_only(token, out[n:]),
    ]


@compat.allows_transfers
def _wait_transpose(cts: Sequence[Any], *args: Any, op: Operation, how: How) -> list[Any]:
    handle, numbers, token = split_wait(op, how, args)
    cts = [ad.instantiate_zeros(c) for c in cts]
    n = len(cts) - len(token)
    other, other_how = _adjoint(op, how)
    arrays = cts[:n]
    if not arrays:  # templates of the cotangents of what was sent
        arrays = [compat.vary_as(jnp.zeros(x.shape, x.dtype), x) for x in how.buffers]
    other_how = other_how._replace(buffers=(), derived=False)
    found, *token_ct = start_p.bind(*arrays, *numbers, *cts[n:], op=other, how=other_how)
    return [
        *linear_only(handle, [found]),
        *(None for _ in numbers),
        *linear_only(token, token_ct),
    ]


for _primitive, _batch, _jvp, _transpose in (
    (start_p, _start_batch, _start_jvp, _start_transpose),
    (wait_p, _wait_batch, _wait_jvp, _wait_transpose),
):
    _primitive.def_impl(implementation(_primitive))
    batching.fancy_primitive_batchers[_primitive] = _batch
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
