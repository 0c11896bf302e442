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
from .._diff.derivative import adjoint_of, linear_only, of_derivative
from .._jax import compat
from .._op.manual import handle_type
from .._op.primitive import (
    TOKEN,
    abstract_eval,
    batched_operands,
    effect,
    first_of_batch,
    has_derivative,
    is_unbatched,
    of_batch,
    result_avals,
    split,
)
from .._op.spec import SPECS, Params, Spec, first_axes, wildcard
from .primitives import HANDLE, split_wait, start_p, wait_p

# ---- Types


@start_p.def_effectful_abstract_eval
def _start_types(*args: Any, of: str, **p: Any) -> tuple[list[Any], set[Any]]:
    spec = SPECS[of]
    abstract_eval(spec, *args, **{**p, "env_out": False})  # raises an error if a type is wrong
    arrays, _, token = split(spec, p, args)
    handle = handle_type(spec, p, compat.array_type(HANDLE.shape, [*arrays, HANDLE]))
    return [handle, *(TOKEN for _ in token)], {effect}


def _like(buffers: Sequence[ShapedArray], handle: Any) -> list[ShapedArray]:
    """Return the types of buffers, which vary over the axes that the handle varies over."""
    return [compat.array_type(x.shape, [handle, x]) for x in buffers]


@wait_p.def_effectful_abstract_eval
def _wait_types(*args: Any, of: str, buffers: Any, **p: Any) -> tuple[list[Any], set[Any]]:
    (handle,), _, token = split_wait({"of": of, **p}, args)
    results = result_avals(SPECS[of], p, _like(buffers, handle))
    return [*results, *(TOKEN for _ in token)], {effect}


# ---- Batching: one handle for the whole batch, which says to the wait that there is one


def _start_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, of: str, **p: Any
) -> tuple[list[Any], list[Any]]:
    if is_unbatched(axis_data, dims, p):
        out = start_p.bind(*args, of=of, **p)
        return out, [None] * len(out)
    size = axis_data.size
    operands, _ = batched_operands(SPECS[of], size, args, dims, p)
    if size == 0:  # no handle is in a batch of none, on any rank: nothing is started
        *_, token = split(SPECS[of], p, operands)
        return _batched(size, [jnp.zeros((0, *HANDLE.shape), HANDLE.dtype)], 0, token, dims)
    handle, *token = start_p.bind(*operands, of=of, **p)
    return _batched(size, [jnp.broadcast_to(handle, (size, *handle.shape))], 0, token, dims)


def _batched(
    size: int, out: list[Any], axis: int | None, token: list[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return results and their axes, with a token, which is batched if the given one is."""
    axes = [axis for _ in out]
    if token and dims[-1] is not None:
        return [*out, jnp.broadcast_to(token[0], (size,))], [*axes, 0]
    return [*out, *token], [*axes, *(None for _ in token)]


def _wait_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, of: str, buffers: Any, **p: Any
) -> tuple[list[Any], list[Any]]:
    pairs = split_wait({"of": of, **p}, list(zip(args, dims, strict=True)))
    ((handle, dim),), numbers, token = pairs
    numbers = [x if d is None else of_batch(x, d, False) for x, d in numbers]
    token = [first_of_batch(t, d) for t, d in token]
    size, axis = axis_data.size, None
    if dim is not None:  # else it was started outside of the vmap
        before, after = (int(length is not None) for length in first_axes(SPECS[of], p))
        handle, axis = first_of_batch(handle, dim), after
        shapes = [(*x.shape[:before], size, *x.shape[before:]) for x in buffers]
        buffers = tuple(map(compat.array_type, shapes, ([x] for x in buffers)))
        if size == 0:
            results = [jnp.zeros(x.shape, x.dtype) for x in result_avals(SPECS[of], p, buffers)]
            return _batched(size, results, axis, token, dims)
    out = wait_p.bind(handle, *numbers, *token, of=of, buffers=buffers, **p)
    n = len(out) - len(token)
    return _batched(size, out[:n], axis, out[n:], dims)


# ---- Derivatives


def _refuse_derivative(spec: Spec, p: Params) -> None:
    name, reduction = f"i{spec.name}", p.get("reduction")
    if reduction is not None and reduction.name not in ("SUM", "MEAN"):
        raise NotImplementedError(
            f"{name}: reduction {reduction.name} has no derivative here; expected SUM or MEAN, or "
            f"use {spec.name}, or jax.lax.stop_gradient on the input"
        )
    if wildcard(p) or p.get("operand") is not None:
        raise NotImplementedError(
            f"{name}: has no derivative if its source, destination or tag is MPI.ANY_SOURCE, "
            f"MPI.ANY_TAG or traced; expected static integers, or use {spec.name}"
        )


@compat.allows_transfers
def _start_jvp(primals: Any, tangents: Any, *, of: str, **p: Any) -> tuple[list[Any], list[Any]]:
    spec = SPECS[of]
    arrays, numbers, _ = split(spec, p, primals)
    ts, _, token_ts = split(spec, p, tangents)
    token_ts = [ad.instantiate_zeros(t) for t in token_ts]
    sums = p.get("reduction") is None or p["reduction"].name in ("SUM", "MEAN")
    constant = not sums and all(type(t) is ad.Zero for t in ts)
    if constant or not all(map(has_derivative, arrays)):
        out = start_p.bind(*primals, of=of, **p)
        return out, [compat.zero_tangent(out[0]), *token_ts]
    _refuse_derivative(spec, p)
    out = start_p.bind(*primals, of=of, **p)
    ts = [ad.instantiate_zeros(t) for t in ts]
    return out, start_p.bind(*ts, *numbers, *token_ts, of=of, **of_derivative(p))


@compat.allows_transfers
def _wait_jvp(
    primals: Any, tangents: Any, *, of: str, buffers: Any, **p: Any
) -> tuple[list[Any], list[Any]]:
    out = wait_p.bind(*primals, of=of, buffers=buffers, **p)
    _, numbers, _ = split_wait({"of": of, **p}, primals)
    (t,), _, token_ts = split_wait({"of": of, **p}, tangents)
    token_ts = [ad.instantiate_zeros(t) for t in token_ts]
    if type(t) is ad.Zero:
        results = out[: len(out) - len(token_ts)]
        return out, [*map(compat.zero_tangent, results), *token_ts]
    q = {**of_derivative(p), "derived": True}
    return out, wait_p.bind(t, *numbers, *token_ts, of=of, buffers=buffers, **q)


def _adjoint(spec: Spec, p: Params) -> tuple[Spec, Params]:
    """Return the adjoint of an operation, with its parameters."""
    # Without a sender, the result is the template.
    return (spec, p) if p.get("source") == MPI.PROC_NULL else adjoint_of(spec, p)


@compat.allows_transfers
def _start_transpose(cts: Sequence[Any], *args: Any, of: str, **p: Any) -> list[Any]:
    spec = SPECS[of]
    arrays, numbers, token = split(spec, p, args)
    handle, *token_ct = map(ad.instantiate_zeros, cts)
    other, q = _adjoint(spec, p)
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in arrays]
    buffers = result_avals(spec, p, avals) if spec.returns else avals
    q = {**q, "buffers": tuple(buffers), "derived": True}
    out = wait_p.bind(handle, *numbers, *token_ct, of=other.name, **q)
    n = len(out) - len(token_ct)
    found = out[:n] or [jnp.zeros(x.shape, x.dtype) for x in avals]
    return [
        *linear_only(arrays, found),
        *(None for _ in numbers),
        *linear_only(token, out[n:]),
    ]


@compat.allows_transfers
def _wait_transpose(cts: Sequence[Any], *args: Any, of: str, buffers: Any, **p: Any) -> list[Any]:
    spec = SPECS[of]
    handle, numbers, token = split_wait({"of": of, **p}, args)
    cts = [ad.instantiate_zeros(c) for c in cts]
    n = len(cts) - len(token)
    other, q = _adjoint(spec, p)
    arrays = cts[:n]
    if not arrays:  # templates of the cotangents of what was sent
        arrays = [compat.vary_as(jnp.zeros(x.shape, x.dtype), x) for x in buffers]
    found, *token_ct = start_p.bind(*arrays, *numbers, *cts[n:], of=other.name, **q)
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
