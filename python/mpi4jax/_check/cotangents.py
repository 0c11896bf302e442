"""Comparison, at run time, of cotangents that should be the same on all ranks, or should differ.

With `MPI4JAX_CHECK=1`, ranks compare the cotangents of each replicated result, and those that a
`pvary` sums. If the former differ, a `pvary` may be missing (`missing_pvary.py` reads the jaxpr for
the same mistake); if the latter are equal, a `pvary` may be one too many.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from .._jax import compat, lines
from .._job.watch import compares_before
from .._op.comm import as_reduction
from .._op.operation import PLAIN, How, Operation, made
from .._op.plan import Result
from .._op.primitive import bind
from .missing_pvary import lines_of_whole_cotangents


def compare_cotangents(
    op: Operation, how: How, cotangents: Sequence[Any], token: list[Any]
) -> list[Any]:
    """Warn at run time if the ranks' cotangents show that a `pvary` is missing, or one too many.

    Return the token.
    """
    if op.comm.size == 1 or not op.is_uniform or not compares_before():
        return token
    xs = [lax.stop_gradient(c) for c in cotangents]
    if not op.adjoint:
        return _warn_if_different(op, xs, token)
    if op.name == "allreduce" and not how.derived and not how.spmd:
        return _warn_if_equal(op, xs, token)
    return token


def _warn_if_different(op: Operation, xs: Sequence[jax.Array], token: list[Any]) -> list[Any]:
    """Warn if ranks have different cotangents of a replicated value, and the difference matters to
    the adjoint.
    """
    # The adjoint of `allgather` uses this rank's block only, and the adjoint of `bcast` uses the
    # root's cotangent only. If no other rank uses the results, these cotangents are correct without
    # a sum.
    matters = jnp.stack([jnp.any(_not_taken(op, x) != 0) for x in xs])
    low, high, matters, token = _range(op, xs, jnp.any(matters), token)
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


def _warn_if_equal(op: Operation, xs: Sequence[jax.Array], token: list[Any]) -> list[Any]:
    """Warn if ranks have equal cotangents of the result of a `pvary`, whose sum is a multiple.

    In a compiled function only: the jaxpr shows whether they come from a loss that is itself a sum
    over ranks, which is right even if the ranks' summands are equal.
    """
    is_nonzero = jnp.any(jnp.stack([jnp.any(x != 0) for x in xs]))
    low, high, is_nonzero, token = _range(op, xs, is_nonzero, token)
    n = op.comm.size
    _warn_where(
        (is_nonzero > 0) & jnp.all(low == high),
        f"in a backward pass, all ranks of {op.comm.key} have the same cotangent of the result of "
        f"this pvary, and its gradient is {n} times this cotangent. That is right if the loss is a "
        "sum over ranks whose terms have the same derivative. If instead all ranks compute the "
        f"same term of the loss from this result, the gradient is {n} times too large: compute "
        "that term from the value before the pvary",
        lines_of_whole_cotangents,
    )
    return token


def _range(
    op: Operation, xs: Sequence[jax.Array], flag: Any, token: list[Any]
) -> tuple[Any, Any, Any, list[Any]]:
    """Return the least and the greatest values over ranks, whether any rank has the flag, and the
    token."""
    parts = [part for x in xs for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    values = jnp.nan_to_num(jnp.concatenate([v.ravel().astype(wide) for v in parts]))
    sent = jnp.concatenate([values, -values, flag.astype(wide)[None]])
    greatest = made("allreduce", op.comm, reduction=as_reduction(op.name, MPI.MAX))
    most, *token = bind(greatest, PLAIN, sent, *token)
    return -most[values.size : -1], most[: values.size], most[-1], token


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


def _warn_where(condition: Any, words: str, of: Container[str] | None = None) -> None:
    """Warn when a backward pass runs, if the condition is true; only in lines ``of`` if given."""
    line = lines.current_line()
    words = f"{line}: {words}" if line else words

    def warn(condition: Any) -> None:
        if condition and (of is None or line in of):
            compat.warn(words)

    if compat.trace_state_clean():
        warn(condition)
    else:
        jax.debug.callback(warn, condition)
