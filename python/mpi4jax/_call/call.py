"""Calls of operations: in a traced function an equation, elsewhere run at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._op.operation import OFFSET, Call, How, Message, Operation
from .._op.packing import bind_trees
from . import eager


def run(call: Call, with_token: bool = False) -> Any:
    """Run an operation, and return its result or None; with ``with_token``, and a token."""
    if compat.trace_state_clean():
        return eager.run(call, with_token)
    op, how, numbers = with_traced_peers(call.op, call.how)
    out = bind_trees(op, call.arrays, how, [*call.counts, *numbers])
    return (out, jnp.zeros((), np.float32)) if with_token else out


def with_traced_peers(op: Operation, how: How) -> tuple[Operation, How, list[Any]]:
    """Return an operation whose traced peers, or invalid ranks in a branch, are in an operand, with
    this operand, if there are any."""
    if not isinstance(op, Message):
        return op, how, []
    # What is traced has the place of an integer until it is an operand.
    peers: dict[str, Any] = dict(op.peers())
    traced = [name for name, x in peers.items() if isinstance(x, (jax.core.Tracer, np.int32))]
    if not traced:
        return op, how, []
    numbers = jnp.stack([x + OFFSET if name in traced else 0 for name, x in peers.items()])
    unset: dict[str, Any] = dict.fromkeys(traced)
    return replace(op, **unset), how._replace(operand="traced"), [numbers]
