"""Checks of the arguments of operations other than arrays: ranks, tags and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .. import _native
from .._jax import compat
from .comm import Comm, static_int

ANY_SOURCE, ANY_TAG, PROC_NULL = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.PROC_NULL
# Half of MPI's tags are reserved for derivatives, so that their messages never match messages of
# the program.
DERIVATIVE = _native.set_tag_limit(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767))


def rank_of(op: str, name: str, value: Any, comm: Comm, *special: str) -> int:
    """Return the rank of ``comm`` in an argument, or a constant of MPI.

    Raises:
        TypeError: if it is not an integer, or traced.
        ValueError: if it is neither a rank nor one of the ``special`` constants.
    """
    if type(value) is int and 0 <= value < comm.size:
        return value
    expected = f"a rank from 0 to {comm.size - 1}" + "".join(f" or MPI.{n}" for n in special)
    value = static_int(op, name, value, expected)
    if 0 <= value < comm.size or any(value == getattr(MPI, n) for n in special):
        return value
    alone = ""
    if MPI.COMM_WORLD.size == 1:
        alone = "; MPI.COMM_WORLD has 1 rank: start the program with mpiexec -n 2 python program.py"
    raise ValueError(
        f"{op}: argument '{name}' must be {expected} (communicator {comm.key} has size "
        f"{comm.size}), got {_shown(value)}{alone}"
    )


def _traced(op: str, name: str, value: Any) -> Any:
    """Return a traced integer as int32."""
    if value.shape != () or not jnp.issubdtype(value.dtype, np.integer):
        raise TypeError(
            f"{op}: argument '{name}' must be an integer, or a traced scalar of an integer type; "
            f"got a traced value: {value}"
        )
    limits = np.iinfo(np.int32)
    if not np.can_cast(value.dtype, np.int32):  # a tag that is out of range must stay out of range
        value = jnp.clip(value, max=limits.max)
        if jnp.issubdtype(value.dtype, np.signedinteger):
            value = jnp.clip(value, min=limits.min)
    return value.astype(np.int32)


def peer_of(op: str, name: str, value: Any, comm: Comm) -> Any:
    """Return the source or destination of a message, which may be traced.

    In a branch of a `cond`, an invalid rank raises an error only if the branch is taken: as a
    NumPy scalar, it is handled as a traced one.
    """
    if isinstance(value, jax.core.Tracer):
        return _traced(op, name, value)
    wildcard = ("ANY_SOURCE",) if name == "source" else ()
    try:
        return rank_of(op, name, value, comm, *wildcard, "PROC_NULL")
    except ValueError:
        if not compat.in_branch():
            raise
        limits = np.iinfo(np.int32)
        return np.int32(min(max(int(value), limits.min), limits.max - 3))


def tag_of(op: str, name: str, value: Any, *, wildcard: bool = False) -> Any:
    """Return the tag of a message, which may be traced, or a wildcard for a receive.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is not a tag.
    """
    if isinstance(value, jax.core.Tracer):
        value = _traced(op, name, value)
        # The tag is invalid for the native module, whose error recovers the given number from it.
        return jnp.where(value >= DERIVATIVE, value - DERIVATIVE + np.iinfo(np.int32).min, value)
    if type(value) is int and (0 <= value < DERIVATIVE or (wildcard and value == ANY_TAG)):
        return value
    expected = f"an integer from 0 to {DERIVATIVE - 1}" + (" or MPI.ANY_TAG" if wildcard else "")
    value = static_int(op, name, value, expected)
    if 0 <= value < DERIVATIVE or (wildcard and value == ANY_TAG):
        return value
    raise ValueError(f"{op}: argument '{name}' must be {expected}, got {_shown(value)}")


def _shown(value: int) -> str:
    """Return a number with the names of MPI's constants that have this value."""
    names = [n for n in ("ANY_SOURCE", "ANY_TAG", "PROC_NULL") if value == getattr(MPI, n)]
    return f"{value} ({' or '.join(f'MPI.{n}' for n in names)})" if names else str(value)


def from_end(
    op: str, axes: Sequence[int], widths: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> list[int]:
    """Return the exchanged axes of an array, counted from its end (1 is the last axis)."""
    counted: dict[int, int] = {}
    out = []
    for axis, (low, high) in zip(axes, widths, strict=True):
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{op}: argument 'axes' has axis {axis}, which an array of shape {shape} lacks"
            )
        position = axis % len(shape)
        if position in counted:
            raise ValueError(
                f"{op}: argument 'axes' names one axis twice, as {counted[position]} and {axis}, "
                f"of an array of shape {shape}"
            )
        counted[position] = axis
        inner = shape[position] - low - high
        if inner < max(low, high):
            raise ValueError(
                f"{op}: argument 'x' of shape {shape} has {max(inner, 0)} inner cells along axis "
                f"{axis}, between ghost cells of width {low} below and {high} above; expected at "
                f"least {max(low, high)}"
            )
        out.append(len(shape) - position)
    return out
