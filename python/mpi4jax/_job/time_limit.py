"""``time_limit``: a timeout for a part of a program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from .. import _native
from . import flush


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Abort the job if an operation takes longer than ``seconds`` in a part of the program.

    While the ``with`` block runs, an operation of this rank that takes longer, in any thread,
    aborts the job. The limit replaces ``MPI4JAX_TIMEOUT``. In nested blocks, the innermost limit
    applies. Operations that JAX has started in the block belong to it: at its end, :func:`flush`
    waits for them, except after an exception.

    Other ranks may have another limit, or none.

    Args:
        seconds (float or None): the time limit of each operation; None or 0: no limit.

    Raises:
        ValueError: ``seconds`` is negative or not finite.
        TypeError: ``seconds`` is not a number.

    MPI:
        No MPI function is called. The job is aborted with ``MPI_Abort``.

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
