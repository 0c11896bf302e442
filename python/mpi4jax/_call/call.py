"""Calls of ops, in a function that is traced or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._check.misuse import warn_of_used_token
from .._op.packing import bind_trees
from .._op.spec import OFFSET, PEERS, SPECS, Call, Params
from .._tokens.tokens import NO_TOKEN, check_token, create_token, note_call, token_operand
from . import eager


def run(call: Call, token: Any) -> Any:
    """Run an op; its result, with the new token unless the caller is of `notoken`."""
    name, p = call.op, call.params
    with_token = token is not NO_TOKEN
    if with_token:
        note_call(name, token)
        check_token(name, token)
    if eager.clean():
        return eager.run(call, with_token)
    spec = SPECS[name]
    operand = token_operand(token)
    if operand:
        warn_of_used_token(name, token)
    numbers = [*call.counts, *traced_peers(p)]
    y, new = bind_trees(spec, call.arrays, {**spec.defaults, **p}, operand, numbers)
    if not with_token:
        return y
    if not new:
        new = [token if token is not None else create_token()]
    return (y, new[0]) if spec.returns else new[0]


def traced_peers(p: Params) -> list[Any]:
    """The operand for the peers that are traced, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), jax.core.Tracer)]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="given")
    return [numbers]
