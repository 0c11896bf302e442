"""``time_limit``: a time-out for a part of a program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from .. import _native
from . import flush


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End the job if this rank waits longer for an operation, in a part of the program.

    While the ``with`` block runs, an operation of this rank, in whichever thread, that has not
    ended after so many seconds counts as hung: the job is ended as after ``MPI4JAX_TIMEOUT``, for
    which this stands in. Of limits within each other the innermost holds. Operations that JAX has
    started in the block and not ended belong to it: at its end, :func:`flush` waits for them. That
    is not done after an exception.

    Other ranks need not have the limit, or the same.

    Args:
        seconds (float or None): how long an operation may take; None or 0: as long as it likes,
            whatever ``MPI4JAX_TIMEOUT`` says.

    Raises:
        ValueError: ``seconds`` is negative, or no finite number.
        TypeError: ``seconds`` is no number.

    MPI:
        Nothing is called. A job that is ended is ended with ``MPI_Abort``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import mpi4jax.notoken as mpi4jax
        >>> with mpi4jax.time_limit(60):
        ...     y = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
    """
    if isinstance(seconds, bool) or not (seconds is None or hasattr(seconds, "__float__")):
        raise TypeError(
            "time_limit: argument 'seconds' must be a number or None, "
            f"got {type(seconds).__name__}: {seconds!r}"
        )
    limit = 0.0 if seconds is None else float(seconds)
    if not 0 <= limit < math.inf:
        raise ValueError(
            "time_limit: argument 'seconds' must be a finite, non-negative number or None, "
            f"got {seconds!r}"
        )
    number = _native.limit_enter(limit or math.inf)
    try:
        yield
        flush.flush()
    finally:
        _native.limit_leave(number)
