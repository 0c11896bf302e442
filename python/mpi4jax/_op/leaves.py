"""The leaves of a tree, packed into one message and unpacked from it: two linear primitives.

Each is one custom call that copies memory on the host. XLA would compile a kernel for each leaf,
which takes many times as long as the operations themselves. On a GPU, and in exported programs,
XLA packs.

A message has ``lead`` axes in common with its leaves (of blocks or rows, and of batches), and then
one of all their other elements, leaf after leaf. Batch axes are put in at position ``at``, where
operations have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _native
from .._jax import compat

Shape = tuple[int, ...]

pack_p = Primitive("mpi4jax_pack")
unpack_p = Primitive("mpi4jax_unpack")
unpack_p.multiple_results = True


def pack(leaves: Sequence[Any], lead: int) -> jax.Array:
    """The message of leaves of one dtype that have their first ``lead`` axes in common."""
    types = [jax.typeof(x) for x in leaves]
    message = compat.array_type(types[0].shape, types)
    return pack_p.bind(*(compat.vary_as(x, message) for x in leaves), lead=lead, at=lead)


def unpack(message: jax.Array, payloads: Sequence[Shape], lead: int) -> list[jax.Array]:
    """The leaves of a message, whose shapes end with these."""
    return list(unpack_p.bind(message, payloads=tuple(payloads), lead=lead, at=lead))


@pack_p.def_abstract_eval
def _packed_type(*leaves: Any, lead: int, at: int) -> ShapedArray:
    del at
    size = sum(math.prod(x.shape[lead:]) for x in leaves)
    return compat.array_type((*leaves[0].shape[:lead], size), leaves)


@unpack_p.def_abstract_eval
def _unpacked_types(
    message: Any, *, payloads: tuple[Shape, ...], lead: int, at: int
) -> list[ShapedArray]:
    del at
    shape = message.shape[:lead]
    return [compat.array_type((*shape, *payload), [message]) for payload in payloads]


pack_p.def_impl(compat.eval_primitive(pack_p))
unpack_p.def_impl(compat.eval_primitive(unpack_p))


# ---- Lowering


def _pack_by_xla(*leaves: Any, lead: int, at: int) -> Any:
    del at
    flat = [x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in leaves]
    return jnp.concatenate(flat, axis=lead)


def _unpack_by_xla(message: Any, *, payloads: tuple[Shape, ...], lead: int, at: int) -> list[Any]:
    del at
    ends = np.cumsum([math.prod(payload) for payload in payloads])[:-1]
    pieces = jnp.split(message, ends, axis=lead)
    shape = message.shape[:lead]
    return [x.reshape(*shape, *p) for x, p in zip(pieces, payloads, strict=True)]


def _copies(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the native module copies: not what a program for other processes would have to find
    there, and not values of less than a byte, several of which XLA keeps in one."""
    is_narrow = ctx.avals_in[0].dtype.name in _NARROW
    return not (ctx.module_context.lowering_parameters.for_export or is_narrow)


_NARROW = {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}


def _lowering(target: str, by_xla: Callable[..., Any], several: bool) -> Callable[..., Any]:
    of_xla = mlir.lower_fun(by_xla, multiple_results=several)
    copy = jax.ffi.ffi_lowering(target, has_side_effect=False)

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **p: Any) -> Any:
        return copy(ctx, *args) if _copies(ctx) else of_xla(ctx, *args, **p)

    mlir.register_lowering(unpack_p if several else pack_p, of_xla)
    return lower


for _primitive, _target, _by_xla in (
    (pack_p, "mpi4jax_pack", _pack_by_xla),
    (unpack_p, "mpi4jax_unpack", _unpack_by_xla),
):
    _rule = _lowering(_target, _by_xla, _primitive is unpack_p)
    if not _native.is_gpu_on_cpu():
        mlir.register_lowering(_primitive, _rule, platform="cpu")


# ---- Batches and derivatives


def _pack_batch(args: Sequence[Any], dims: Sequence[Any], *, lead: int, at: int) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    def batched(x: Any, d: int | None) -> Any:
        if d is None:
            x, d = jnp.broadcast_to(x, (size, *x.shape)), 0
        return jnp.moveaxis(x, d, at)

    leaves = [batched(x, d) for x, d in zip(args, dims, strict=True)]
    return pack_p.bind(*leaves, lead=lead + 1, at=at), at


def _unpack_batch(
    args: Sequence[Any], dims: Sequence[Any], *, payloads: tuple[Shape, ...], lead: int, at: int
) -> tuple[Any, Any]:
    message = jnp.moveaxis(args[0], dims[0], at)
    out = unpack_p.bind(message, payloads=payloads, lead=lead + 1, at=at)
    return out, [at for _ in out]


@compat.allows_transfers
def _pack_jvp(primals: Sequence[Any], tangents: Sequence[Any], **p: Any) -> tuple[Any, Any]:
    out = pack_p.bind(*primals, **p)
    if all(type(t) is ad.Zero for t in tangents):
        return out, compat.zero_tangent(out)
    return out, pack_p.bind(*map(ad.instantiate_zeros, tangents), **p)


@compat.allows_transfers
def _unpack_jvp(primals: Sequence[Any], tangents: Sequence[Any], **p: Any) -> tuple[Any, Any]:
    out = unpack_p.bind(*primals, **p)
    if type(tangents[0]) is ad.Zero:
        return out, [compat.zero_tangent(x) for x in out]
    return out, unpack_p.bind(*tangents, **p)


@compat.allows_transfers
def _pack_transpose(c: Any, *leaves: Any, lead: int, at: int) -> list[Any]:
    if type(c) is ad.Zero:
        return [None for _ in leaves]
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in leaves]
    payloads = tuple(x.shape[lead:] for x in avals)
    out = unpack_p.bind(c, payloads=payloads, lead=lead, at=at)
    return [y if ad.is_undefined_primal(x) else None for x, y in zip(leaves, out, strict=True)]


@compat.allows_transfers
def _unpack_transpose(
    cts: Sequence[Any], message: Any, *, payloads: tuple[Shape, ...], lead: int, at: int
) -> list[Any]:
    del message, payloads
    if all(type(c) is ad.Zero for c in cts):
        return [None]
    return [pack_p.bind(*map(ad.instantiate_zeros, cts), lead=lead, at=at)]


batching.primitive_batchers[pack_p] = _pack_batch
batching.primitive_batchers[unpack_p] = _unpack_batch
ad.primitive_jvps[pack_p] = _pack_jvp
ad.primitive_jvps[unpack_p] = _unpack_jvp
ad.primitive_transposes[pack_p] = _pack_transpose
ad.primitive_transposes[unpack_p] = _unpack_transpose
