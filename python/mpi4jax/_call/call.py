"""Calls of ops: in a function that is traced, an equation; elsewhere carried out at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._op.packing import bind_trees
from .._op.spec import OFFSET, PEERS, SPECS, Call, Params
from . import eager


def run(call: Call) -> Any:
    """The result of an op; None if it has none."""
    if compat.trace_state_clean():
        return eager.run(call)
    spec, p = SPECS[call.op], call.params
    numbers = [*call.counts, *traced_peers(p)]
    return bind_trees(spec, call.arrays, {**spec.defaults, **p}, numbers)


def traced_peers(p: Params) -> list[Any]:
    """The operand for the peers that are traced, or no ranks in a branch, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), (jax.core.Tracer, np.int32))]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="traced")
    return [numbers]
