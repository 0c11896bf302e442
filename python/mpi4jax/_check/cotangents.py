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
from .._op.operation import PLAIN, Operation, made
from .._op.plan import Result
from .._op.primitive import bind


def compare_cotangents(op: Operation, cotangents: Sequence[Any], token: list[Any]) -> list[Any]:
    """Warn at run time if ranks have different cotangents of a replicated value, and the difference
    matters to the adjoint. Return the token.
    """
    if not op.is_uniform or op.adjoint or op.comm.size == 1 or not compares_before():
        return token
    xs = [lax.stop_gradient(c) for c in cotangents]
    parts = [part for x in xs for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    values = jnp.concatenate([v.ravel().astype(jnp.float32) for v in parts])
    values = jnp.nan_to_num(values)
    # The adjoint of `allgather` uses this rank's block only, and the adjoint of `bcast` uses the
    # root's cotangent only. If no other rank uses the results, these cotangents are correct without
    # a sum.
    matters = jnp.stack([jnp.any(_not_taken(op, x) != 0) for x in xs])
    matters = jnp.any(matters).astype(jnp.float32)
    sent = jnp.concatenate([values, -values, matters[None]])
    greatest = made("allreduce", op.comm, reduction=as_reduction(op.name, MPI.MAX))
    most, *token = bind(greatest, PLAIN, sent, *token)
    high, low = most[: values.size], -most[values.size : -1]
    scale = jnp.maximum(jnp.abs(high), jnp.abs(low)).max(initial=0)
    rounding = max(1e-3, float(jnp.finfo(xs[0].dtype).eps) ** 0.5)
    differs = (most[-1] > 0) & jnp.any(high - low > rounding * scale)
    _warn_where(differs, op.name, str(op.comm.key), compat.current_line())
    return token


def _not_taken(op: Operation, c: jax.Array) -> Any:
    """Return the part of a cotangent that this rank's adjoint does not take."""
    if op.name == "allreduce":
        return jnp.ones(())
    plan = op.transposed().plan(PLAIN)
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
