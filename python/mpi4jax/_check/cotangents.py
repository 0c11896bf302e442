"""Comparison, at run time, of cotangents that should be the same on all ranks.

That is where ranks are compared before they run (`MPI4JAX_CHECK`). Where they differ, a `pvary` may
be missing: `missing_pvary.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from .._jax import compat
from .._job.watch import compares_before
from .._op.comm import as_reduction
from .._op.plan import Result, plan_of
from .._op.primitive import bind
from .._op.spec import SPECS, Params, Spec


def compare_cotangents(
    spec: Spec, cotangents: Sequence[Any], token: list[Any], p: Params
) -> list[Any]:
    """Warn at run time if ranks have different cotangents of a replicated value, and the difference
    matters to the adjoint. Return the token.
    """
    if not spec.is_uniform or p["adjoint"] or p["comm"].size == 1 or not compares_before():
        return token
    xs = [lax.stop_gradient(c) for c in cotangents]
    parts = [part for x in xs for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    values = jnp.concatenate([v.ravel().astype(jnp.float32) for v in parts])
    values = jnp.nan_to_num(values)
    # The adjoint of allgather takes this rank's block alone, that of bcast the root's cotangent. If
    # no other rank uses them, they are right as they are.
    matters = jnp.stack([jnp.any(_not_taken(spec, x, p) != 0) for x in xs])
    matters = jnp.any(matters).astype(jnp.float32)
    sent = jnp.concatenate([values, -values, matters[None]])
    params = {"comm": p["comm"], "reduction": as_reduction(spec.name, MPI.MAX), "adjoint": False}
    most, *token = bind(SPECS["allreduce"], sent, *token, **params)
    high, low = most[: values.size], -most[values.size : -1]
    scale = jnp.maximum(jnp.abs(high), jnp.abs(low)).max(initial=0)
    rounding = max(1e-3, float(jnp.finfo(xs[0].dtype).eps) ** 0.5)
    differs = (most[-1] > 0) & jnp.any(high - low > rounding * scale)
    _warn_where(differs, spec.name, p["comm"].key, compat.current_line())
    return token


def _not_taken(spec: Spec, c: jax.Array, p: Params) -> Any:
    """Return the part of a cotangent that this rank's adjoint does not take."""
    if spec.name == "allreduce":
        return jnp.ones(())
    plan = plan_of(spec, {**p, "adjoint": True})
    if plan.result is Result.ZEROS:
        return c
    if plan.select is None:
        return jnp.zeros(())
    return c - jax.linear_transpose(plan.select, c)(plan.select(c))[0]


def _warn_where(differs: Any, name: str, comm: str, line: str) -> None:
    words = (
        f"{line + ': ' if line else ''}in a backward pass, the ranks of {comm} have different "
        f"cotangents of the result of this {name}. Unless this is intended, their gradients lack "
        "the contributions of other ranks: pass the result through mpi4jax.pvary before ranks use "
        "it differently"
    )

    def warn(differs: Any) -> None:
        if differs:
            compat.warn(words)

    if compat.trace_state_clean():
        warn(differs)
    else:
        jax.debug.callback(warn, differs)
