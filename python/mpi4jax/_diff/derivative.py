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
from .._op.primitive import bind, has_derivative, split
from .._op.spec import OFFSET, SPECS, Params, Spec, wildcard
from .reductions import derivative_of_reduction


@compat.allows_transfers  # of its own constants
def jvp(spec: Spec, primals: Any, tangents: Any, **p: Any) -> tuple[list[Any], list[Any]]:
    """Return the forward derivative: an operation on the values, then one on the tangents."""
    arrays, numbers, token = split(spec, p, primals)
    array_tangents, _, token_tangent = split(spec, p, tangents)
    token_tangent = [ad.instantiate_zeros(t) for t in token_tangent]
    reduction = p.get("reduction")
    is_linear = reduction is None or reduction.name in ("SUM", "MEAN")
    if not is_linear and has_derivative(arrays[0]):
        arrays = list(map(compat.as_value, arrays))
        ts = list(map(ad.instantiate_zeros, array_tangents))
        return derivative_of_reduction(spec, arrays, ts, token, token_tangent, p)

    q = {**p, "status": None} if "status" in p else dict(p)
    n = spec.count_results(p)
    if wildcard(p) and p.get("operand") != "recorded":
        # The tangent's message must come from where the primal's came from, and its transpose
        # must go back there: the primal op records it.
        results = bind(spec, *arrays, *numbers, *token, **{**p, "env_out": p["env_out"] or True})
        envelope = results[n]
        if not p["env_out"]:
            del results[n]
        dest = [n[2:] for n in numbers] or [np.zeros(2, np.int32)]
        numbers = [jnp.concatenate([envelope[:2], *dest])]
    else:
        results = bind(spec, *arrays, *numbers, *token, **p)
    if spec.is_ragged:
        # With the rows received from each rank, so that no counts are exchanged.
        numbers = [jnp.concatenate([*numbers, results[n]])] if p["env_out"] else numbers
    elif numbers:
        numbers, q["operand"] = [_peers_of_derivative(*numbers)], "recorded"
    q = of_derivative(q)
    if "env_out" in q:
        q["env_out"] = False

    out = token_tangent
    if all(map(has_derivative, arrays)):  # they are of one dtype
        ts = list(map(ad.instantiate_zeros, array_tangents))
        out = bind(spec, *ts, *numbers, *token_tangent, **q)
    remaining = iter(out)
    return results, [
        next(remaining) if has_derivative(r) else compat.zero_tangent(r) for r in results
    ]


@compat.allows_transfers
def transpose(spec: Spec, cotangents: Sequence[Any], *args: Any, **p: Any) -> list[Any]:
    """Return the backward derivative: an operation on the cotangents."""
    if p.get("spmd") and all(type(c) is ad.Zero for c in cotangents):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    arrays, numbers, token = split(spec, p, args)
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    token_ct = [cotangents[-1]] if token else []
    cs = cotangents[: spec.count_results(p)]
    token_ct = compare_cotangents(spec, cs, token_ct, p)

    n = spec.arity(p)[0] if spec.sends else 0  # of what was sent; templates follow
    other, q = adjoint_of(spec, p)
    if spec.has_peer:
        operands = [*cs, *zeros(arrays[:n])]
        out = bind(other, *operands, *map(_reversed, numbers), *token_ct, **q)
        templates = _of_templates(p, numbers, cs, arrays[n:])
    else:
        out, templates = bind(other, *cs, *numbers, *token_ct, **q), []
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


_REVERSED = {"send": "recv", "recv": "send", "sendrecv": "sendrecv"}


def adjoint_of(spec: Spec, p: Params) -> tuple[Spec, Params]:
    """Return the op that is the transpose of one, and its parameters.

    That of a message is one with its ends exchanged: what was sent is received from where it went,
    and what was received is sent to where it came from.
    """
    p = {k: v for k, v in p.items() if k not in ("threaded", "derived")}
    if not spec.has_peer:
        adjoint = {} if spec.adjoint is None else {"adjoint": not p["adjoint"]}
        return spec, {**p, **adjoint, **({"env_out": False} if spec.is_ragged else {})}
    operand = p.get("operand")
    if operand != "recorded" and p.get("source") == MPI.ANY_SOURCE:
        raise NotImplementedError(
            f"{spec.name}: cannot be transposed with source=MPI.ANY_SOURCE, because the sender "
            "is not recorded; name the source, or differentiate with jax.grad or jax.vjp, "
            "which record the sender"
        )
    received_tag = 0 if p.get("recvtag") == MPI.ANY_TAG else p.get("recvtag")
    q = {
        **p,
        "dest": p.get("source"),
        "source": p.get("dest"),
        "sendtag": tag_of_derivative(received_tag),
        "recvtag": tag_of_derivative(p.get("sendtag")),
        "status": None,
        "env_out": False,
        "operand": operand and "recorded",
    }
    other, arity = SPECS[_REVERSED[spec.name]], p.get("arity", ())
    names = other.params | {"operand", "spmd"}
    q = {k: v for k, v in q.items() if k in names}
    return other, {**q, "arity": arity[::-1]} if arity else q


def zeros(xs: Sequence[Any]) -> list[Any]:
    """Zeros like operands, which may be unknown."""
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
    return [ad.instantiate_zeros(ad.Zero(aval)) for aval in avals]


def _of_templates(p: Params, peers: list[Any], cs: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """The cotangents of the templates ``xs`` of a receive: they were the result if there was no
    sender, and else they were not read."""
    if p.get("source") == MPI.PROC_NULL:
        return list(cs)
    if p.get("source") is not None or not peers:
        # Zeros that JAX has nothing to add to.
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]
    is_result = peers[0][0] == MPI.PROC_NULL + OFFSET
    return [jnp.where(is_result, c, zero) for c, zero in zip(cs, zeros(xs), strict=True)]


def tag_of_derivative(tag: int | None) -> int | None:
    """Return the tag of a message of a derivative, which no receive of the program matches."""
    return tag if tag is None or tag == MPI.ANY_TAG else tag | DERIVATIVE


def of_derivative(p: Params) -> Params:
    """Return the parameters of an operation on tangents: the same, with such tags."""
    tags = {"sendtag", "recvtag"} & p.keys()
    return {**p, **{tag: tag_of_derivative(p[tag]) for tag in tags}}


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
