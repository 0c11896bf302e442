"""Calls of operations: in a traced function an equation, elsewhere run at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._op.packing import bind_trees
from .._op.spec import OFFSET, PEERS, SPECS, Call, Params
from . import eager


def run(call: Call, with_token: bool = False) -> Any:
    """Run an operation, and return its result or None; with ``with_token``, and a token."""
    if compat.trace_state_clean():
        return eager.run(call, with_token)
    spec, p = SPECS[call.op], call.params
    numbers = [*call.counts, *traced_peers(p)]
    out = bind_trees(spec, call.arrays, {**spec.defaults, **p}, numbers)
    return (out, jnp.zeros((), np.float32)) if with_token else out


def traced_peers(p: Params) -> list[Any]:
    """Return the operand for traced peers, or for invalid ranks in a branch, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), (jax.core.Tracer, np.int32))]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="traced")
    return [numbers]
