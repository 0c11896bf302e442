"""migrate: rows to the ranks that own them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._op.comm import as_comm
from .._op.operation import T
from .._op.packing import as_array
from ..ops.ragged_alltoall import rows_to_owners


def migrate(
    x: T,
    owners: Any,
    capacity: int,
    *,
    count: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[T, jax.Array]:
    """Send each row to its owner, such as each particle to the rank of its cell. Collective.

    It sorts the rows by their owners for :func:`ragged_alltoall`, which sends them. Rows that stay
    on their rank are sorted too.

    Args:
        x: array of shape ``(rows, *S)``; or a pytree of such arrays.
        owners: integer array of shape ``(rows,)``: the rank that gets each row, such as the result
            of :meth:`Layout.owner`. It may be traced.
        capacity: maximum number of rows that this rank can receive: a static integer. It may differ
            between ranks.
        count: number of valid rows; only the first ``count`` rows are sent. It may be traced. By
            default all rows are sent.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        tuple: a pair: array of shape ``(capacity, *S)``, or a pytree of such arrays, and the number
        of rows that have arrived, an int32 array of shape ``()``. Rows are sorted by source rank;
        rows from one rank keep their order. The remaining rows are zero.

    Raises:
        TypeError: if ``owners`` does not hold integers, or ``count`` is not an integer.
        ValueError: if ``owners`` does not have one entry per row of ``x``, or ``count`` is negative
            or more than the rows of ``x``.
        jax.errors.JaxRuntimeError: when it runs, on all ranks: if a rank would receive more than
            its ``capacity`` rows, an owner is not a valid rank, or a traced ``count`` is out of
            range. No row is dropped. A compiled function may raise a ValueError instead.

    Derivative:
        With respect to ``x`` only: the transpose sends the rows back.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> cells = mpi4jax.Layout((2 * comm.size,), {0: comm.size})
        >>> place = jnp.arange(2.0 * comm.size)  # each rank has a particle in each cell
        >>> owners = cells.owner(place.astype(int))
        >>> found, count = mpi4jax.migrate(place, owners, 3 * comm.size)
        >>> int(count) == 2 * comm.size, bool((found[:2] == 2 * comm.rank + jnp.arange(2)).all())
        (True, True)

    See also: :func:`redistribute` for arrays, :class:`mpi4jax.ghosts.Plan` for rows that several
    ranks need.
    """
    op = "migrate"
    known = as_comm(op, comm)
    size = known.size
    owners = as_array(owners)
    if not jnp.issubdtype(owners.dtype, np.integer):
        raise TypeError(f"{op}: argument 'owners' must be an array of integers, got {owners.dtype}")
    x = jax.tree.map(as_array, x)
    for leaf in jax.tree.leaves(x):
        if owners.ndim != 1 or leaf.shape[:1] != owners.shape:
            raise ValueError(
                f"{op}: argument 'owners' must have one entry per row of 'x', got shapes "
                f"{owners.shape} and {leaf.shape}"
            )
    rows = owners.size if count is None else count
    if jnp.shape(rows) or not jnp.issubdtype(jnp.result_type(rows), np.integer):
        raise TypeError(
            f"{op}: argument 'count' must be an integer, or a traced scalar of an integer type; "
            f"got {jnp.result_type(rows)} of shape {jnp.shape(rows)}"
        )
    # A traced count is checked together with the counts, because reading it here would wait for it.
    if not isinstance(rows, jax.Array) and not 0 <= rows <= owners.size:
        raise ValueError(
            f"{op}: argument 'count' must be from 0 to {owners.size}, the number of rows of 'x', "
            f"got {rows}"
        )
    owners, rows = _small(owners), _small(jnp.asarray(rows))
    is_sent = jnp.arange(owners.size) < rows
    is_rank = (owners >= 0) & (owners < size)
    keys = jnp.where(is_sent & is_rank, owners, size)
    # A negative count encodes what is wrong: `Wrong` in `src/ops/ragged.rs` lists the codes.
    codes = 8 * jnp.abs(owners) + jnp.where(owners < 0, 3, 2)
    wrong = jnp.max(jnp.where(is_sent & ~is_rank, codes, 0), initial=0)
    code = 8 * jnp.abs(rows) + jnp.where(rows < 0, 5, 4)
    wrong = jnp.where((rows < 0) | (rows > owners.size), code, wrong)
    counts = jnp.where(wrong > 0, -wrong, jnp.bincount(keys, length=size))
    order = jnp.argsort(keys)  # stable
    ordered = jax.tree.map(lambda leaf: leaf[order], x)
    found, received = rows_to_owners(ordered, counts, capacity, known.mpi)
    return found, received.sum(dtype=np.int32)


def _small(numbers: jax.Array) -> jax.Array:
    """Return integers as int32, clipped to 28 bits and a sign."""
    limits, limit = np.iinfo(numbers.dtype), 2**28 - 1
    return numbers.clip(max(-limit, limits.min), min(limit, limits.max)).astype(np.int32)
