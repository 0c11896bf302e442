"""Comparison of cotangents at run time, where ranks are compared before they run (`MPI4JAX_CHECK`).

Where cotangents differ that should be the same on all ranks, a `pvary` may be missing:
`missing_pvary.py`. Where the cotangents of a `pvary` are the same, there may be one too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from .._jax import compat, lines
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
    # The adjoint of `allgather` uses this rank's block only, and the adjoint of `bcast` uses the
    # root's cotangent only. If no other rank uses the results, these cotangents are correct without
    # a sum.
    matters = jnp.stack([jnp.any(_not_taken(op, x) != 0) for x in xs])
    matters = jnp.any(matters).astype(jnp.float32)
    high, low, matters, token = _extremes(op, xs, matters, token)
    scale = jnp.maximum(jnp.abs(high), jnp.abs(low)).max(initial=0)
    rounding = max(1e-3, float(jnp.finfo(xs[0].dtype).eps) ** 0.5)
    differs = (matters > 0) & jnp.any(high - low > rounding * scale)
    _warn_where(
        differs,
        f"in a backward pass, the ranks of {op.comm.key} have different cotangents of the result "
        f"of this {op.name}. Unless this is intended, their gradients lack the contributions of "
        "other ranks: pass the result through mpi4jax.pvary before ranks use it differently",
    )
    return token


def compare_varied(op: Operation, cotangents: Sequence[Any], token: list[Any]) -> list[Any]:
    """Warn at run time if a `pvary` sums cotangents that are equal on all ranks and not zero.

    All ranks have then used the value alike. The sum is right if an allreduce has summed what they
    made of it, and otherwise ``size`` times too large. Return the token.
    """
    if op.comm.size == 1 or not compares_before():
        return token
    xs = [lax.stop_gradient(c) for c in cotangents]
    high, low, _, token = _extremes(op, xs, jnp.zeros((), jnp.float32), token)
    _warn_where(
        jnp.all(high == low) & jnp.any(high != 0),
        f"in a backward pass, all ranks of {op.comm.key} have the same cotangents of this pvary, "
        f"and their sum is {op.comm.size} times the cotangent of each. If the ranks use the result "
        "of pvary alike, and no allreduce sums what they make of it, use the value without pvary",
    )
    return token


def _extremes(
    op: Operation, xs: Sequence[jax.Array], flag: jax.Array, token: list[Any]
) -> tuple[jax.Array, jax.Array, jax.Array, list[Any]]:
    """Return the largest and smallest values over the ranks, the largest flag, and the token."""
    parts = [part for x in xs for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    values = jnp.nan_to_num(jnp.concatenate([v.ravel().astype(jnp.float32) for v in parts]))
    sent = jnp.concatenate([values, -values, flag[None]])
    greatest = made("allreduce", op.comm, reduction=as_reduction(op.name, MPI.MAX))
    most, *token = bind(greatest, PLAIN, sent, *token)
    return most[: values.size], -most[values.size : -1], most[-1], token


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


def _warn_where(condition: Any, words: str) -> None:
    line = lines.current_line()
    words = f"{line + ': ' if line else ''}{words}"

    def warn(condition: Any) -> None:
        if condition:
            compat.warn(words)

    if compat.trace_state_clean():
        warn(condition)
    else:
        jax.debug.callback(warn, condition)
