"""Calls of ops, in a function that is traced or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._op.packing import bind_trees
from .._op.spec import OFFSET, PEERS, SPECS, Call, Params
from . import eager


def run(call: Call) -> Any:
    """Run an op; its result, None if it has none."""
    if eager.clean():
        return eager.run(call)
    spec, p = SPECS[call.op], call.params
    numbers = [*call.counts, *traced_peers(p)]
    return bind_trees(spec, call.arrays, {**spec.defaults, **p}, numbers)


def traced_peers(p: Params) -> list[Any]:
    """The operand for the peers that are traced, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), jax.core.Tracer)]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="given")
    return [numbers]
