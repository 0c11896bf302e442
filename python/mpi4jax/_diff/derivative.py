"""Derivatives of operations.

One convention holds for all: a result that is the same on all ranks (of allreduce, allgather and
bcast) is one global value, whose cotangent is the same on all ranks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from mpi4py import MPI

from .._check.cotangents import compare_cotangents
from .._jax import compat
from .._op.arguments import DERIVATIVE
from .._op.operation import OFFSET, How, Message, Operation, Receiving, Reducing
from .._op.primitive import bind, has_derivative, split
from .reductions import derivative_of_reduction


@compat.allows_transfers  # JAX transfers constants of the derivative to the device
def jvp(primals: Any, tangents: Any, *, op: Operation, how: How) -> tuple[list[Any], list[Any]]:
    """Return the forward derivative: an operation on the values, then one on the tangents."""
    arrays, numbers, token = split(op, how, primals)
    array_tangents, _, token_tangent = split(op, how, tangents)
    token_tangent = [ad.instantiate_zeros(t) for t in token_tangent]
    if isinstance(op, Reducing) and not op.is_linear and has_derivative(arrays[0]):
        arrays = list(map(compat.as_value, arrays))
        ts = list(map(ad.instantiate_zeros, array_tangents))
        return derivative_of_reduction(op, how, arrays, ts, token, token_tangent)

    on_tangents = how._replace(env_out=False)
    n = op.count_results(how)
    if isinstance(op, Message) and op.has_wildcard() and how.operand != "recorded":
        # The tangent's message must come from where the primal's came from, and its transpose
        # must go back there: the primal op records it.
        recording = how._replace(env_out=how.env_out or True)
        results = bind(op, recording, *arrays, *numbers, *token)
        envelope = results[n]
        if not how.env_out:
            del results[n]
        dest = [n[2:] for n in numbers] or [np.zeros(2, np.int32)]
        numbers = [jnp.concatenate([envelope[:2], *dest])]
    else:
        results = bind(op, how, *arrays, *numbers, *token)
    if op.row.is_ragged:
        # The number of rows received from each rank is passed, so that no counts are exchanged.
        numbers = [jnp.concatenate([*numbers, results[n]])] if how.env_out else numbers
    elif numbers:
        numbers = [_peers_of_derivative(*numbers)]
        on_tangents = on_tangents._replace(operand="recorded")

    out = token_tangent
    if all(map(has_derivative, arrays)):  # they are of one dtype
        ts = list(map(ad.instantiate_zeros, array_tangents))
        out = bind(op.on_tangents(), on_tangents, *ts, *numbers, *token_tangent)
    remaining = iter(out)
    return results, [
        next(remaining) if has_derivative(r) else compat.zero_tangent(r) for r in results
    ]


@compat.allows_transfers
def transpose(cotangents: Sequence[Any], *args: Any, op: Operation, how: How) -> list[Any]:
    """Return the backward derivative: an operation on the cotangents."""
    if how.spmd and all(type(c) is ad.Zero for c in cotangents):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    arrays, numbers, token = split(op, how, args)
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    token_ct = [cotangents[-1]] if token else []
    cs = cotangents[: op.count_results(how)]
    token_ct = compare_cotangents(op, how, cs, token_ct)

    n = op.arity(how)[0] if op.sends else 0  # number of arrays that were sent; templates follow
    other, other_how = adjoint_of(op, how)
    if isinstance(op, Message):
        operands = [*cs, *zeros(arrays[:n])]
        out = bind(other, other_how, *operands, *map(_reversed, numbers), *token_ct)
        templates = _of_templates(op, numbers, cs, arrays[n:])
    else:
        out, templates = bind(other, other_how, *cs, *numbers, *token_ct), []
    m = len(out) - len(token_ct)
    array_cts, token_ct = [*out[:m], *templates], out[m:]
    return [
        *linear_only(arrays, array_cts),
        *(None for _ in numbers),
        *linear_only(token, token_ct),
    ]


def linear_only(operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Return the cotangents of operands, None for known ones. A known token orders nothing."""
    return [
        c
        if type(c) is ad.Zero
        else compat.vary_as(c, x.aval)
        if ad.is_undefined_primal(x)
        else None
        for x, c in zip(operands, cotangents, strict=True)
    ]


def adjoint_of(op: Operation, how: How) -> tuple[Operation, How]:
    """Return the operation that is the transpose of one, and how it is called.

    The transpose of a message has its ends exchanged: what was sent is received from its
    destination, and what was received is sent to its source.
    """
    if not isinstance(op, Message):
        return op.transposed(), how._replace(threaded=False, derived=True, env_out=False)
    if how.operand != "recorded" and isinstance(op, Receiving) and op.source == MPI.ANY_SOURCE:
        raise NotImplementedError(
            f"{op.name}: cannot be transposed with source=MPI.ANY_SOURCE, because the sender "
            "is not recorded; name the source, or differentiate with jax.grad or jax.vjp, "
            "which record the sender"
        )
    operand: Any = how.operand and "recorded"
    return op.transposed(), How(operand=operand, spmd=how.spmd, arity=how.arity[::-1])


def zeros(xs: Sequence[Any]) -> list[Any]:
    """Return zeros like operands, which may be unknown."""
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
    return [ad.instantiate_zeros(ad.Zero(aval)) for aval in avals]


def _of_templates(op: Message, peers: list[Any], cs: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Return the cotangents of the templates ``xs`` of a receive, which were the result if there
    was no sender, and otherwise were not read."""
    source = op.peers()["source"]
    if source == MPI.PROC_NULL:
        return list(cs)
    if source is not None or not peers:
        # The cotangents are symbolic zeros, so that JAX adds nothing to them.
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]
    is_result = peers[0][0] == MPI.PROC_NULL + OFFSET
    return [jnp.where(is_result, c, zero) for c, zero in zip(cs, zeros(xs), strict=True)]


def _peers_of_derivative(peers: Any) -> Any:
    """Return the numbers of a message of a derivative, with tags from DERIVATIVE on."""
    tags = jnp.array([False, True, False, True])
    shifted = (peers - OFFSET | DERIVATIVE) + OFFSET
    return jnp.where(tags & (peers >= OFFSET), shifted, peers)


def _reversed(peers: Any) -> Any:
    """Return the numbers of the reversed message.

    A message received with any tag is sent with tag 0.
    """
    tag = jnp.where(peers[1] == MPI.ANY_TAG + OFFSET, OFFSET, peers[1])
    return _peers_of_derivative(jnp.concatenate([peers[2:], peers[:1], tag[None]]))
