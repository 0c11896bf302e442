"""ragged_alltoall: rows from each rank to each rank, with counts in an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._call.call import run
from .._call.definition import define
from .._op.comm import Comm, as_comm, static_int
from .._op.operation import PLAIN, Call, How, Ragged, T, call
from .._op.plan import Plan
from .._requests.request import Request
from .._requests.start import begin

_WITH_COUNTS = PLAIN._replace(env_out=True)


def _with_counts(rows: Any, received: Any) -> Any:
    return rows, received


def _without_rows(received: Any, x: Any) -> Any:
    return x, received


@dataclass(frozen=True)
class RaggedAlltoall(Ragged, name="ragged_alltoall"):
    def plan(self, how: How) -> Plan:
        return Plan("ragged_alltoall", attrs={"reverse": True} if self.adjoint else {})

    def initiate(self, args: Sequence[Any]) -> Request[Any]:
        """Exchange the counts, which waits for all ranks, and start what sends the rows."""
        x, counts = args
        if not jax.tree.leaves(x):
            return begin(self.of_counts(), (counts,)).then(_without_rows, x, name=self.name)
        nothing = jnp.zeros((self.rows[0] or 0, 0), np.int8)
        _, received = run(Call(self, (nothing,), (counts,), _WITH_COUNTS))
        both = jnp.concatenate([counts, received])
        return begin(self, (x, both)).then(_with_counts, received)


def _counts_of(counts: Any, comm: Comm) -> Any:
    """Return the counts as int32: those that it does not hold stay too large, or negative."""
    expected = f"{comm.size} integers, a number of rows for each rank"
    try:
        array = counts if isinstance(counts, np.ndarray) else jnp.asarray(counts)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"ragged_alltoall: argument 'send_counts' must be {expected}, got "
            f"{type(counts).__name__}: {counts!r}"
        ) from e
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"ragged_alltoall: argument 'send_counts' must be {expected}, got {array.dtype}"
        )
    if array.shape != (comm.size,):
        raise ValueError(
            f"ragged_alltoall: argument 'send_counts' must be {expected}, got shape {array.shape}"
        )
    if array.dtype == np.int32:
        return array
    if not np.can_cast(array.dtype, np.int32):
        # `migrate` encodes what is wrong in negative counts, and JAX takes -1 for the largest
        # number of an unsigned type.
        limit = np.iinfo(np.int32).max
        array = array.clip(max(-limit, np.iinfo(array.dtype).min), limit)
    return array.astype(np.int32)


def _rows_of(x: Any) -> int:
    """Return the length of the first axis of the first leaf; of no leaves, 0."""
    leaf = next(iter(jax.tree.leaves(x)), np.empty(0))
    is_array = hasattr(leaf, "shape") or isinstance(leaf, Number)
    # It is not an array; a later check raises the error.
    shape = np.shape(leaf) if is_array else (0,)
    if not shape:
        raise ValueError(
            "ragged_alltoall: argument 'x' must have a first axis, of rows; expected (rows, ...), "
            "got ()"
        )
    return int(shape[0])


@define(RaggedAlltoall)
def ragged_alltoall(
    x: T, send_counts: Any, capacity: int, *, comm: MPI.Intracomm | None = None
) -> tuple[T, jax.Array]:
    """Send rows to each rank, with counts in an array (MPI_Alltoallv; MPI-4.1, section 6.8).

    The counts are data: they may be computed in the compiled function, and differ between calls
    and between ranks. Ranks exchange their counts, and then send the rows.

    Args:
        x: array of shape ``(rows, *S)``, of any dtype; the rows to send, sorted by destination
            rank. Rows beyond the sum of ``send_counts`` are not sent. ``rows`` may differ between
            ranks. Or a pytree of such arrays.
        send_counts: number of rows to send to each rank: ``n`` integers, which may be traced.
        capacity: maximum number of rows that this rank can receive: a static integer. It may differ
            between ranks.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        tuple: two arrays. The first has shape ``(capacity, *S)`` and the dtype of ``x``: the
        received rows, sorted by source rank, followed by zeros. The second is an int32 array of
        shape ``(n,)``: the number of rows from each rank.

    Raises:
        TypeError: if ``send_counts``, ``capacity`` or ``comm`` has the wrong type, or if the dtype
            is not supported.
        ValueError: if ``send_counts`` does not have one entry per rank, ``capacity`` is negative,
            or the leaves of ``x`` have different numbers of rows.
        jax.errors.JaxRuntimeError: when it runs, on all ranks: if a rank would receive more rows
            than its ``capacity``, or the counts of a rank are negative, exceed the rows of ``x``,
            or differ within a batch under ``vmap``. No row is dropped. A compiled function may
            raise a ValueError instead.

    Derivative:
        With respect to ``x`` only: the transpose sends the rows back, and the cotangents of rows
        that were not sent are zero. Under ``vmap`` the batch axis is axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> send_counts = jnp.zeros(comm.size, int).at[-1].set(2)  # to the last rank
        >>> pair = mpi4jax.ragged_alltoall(jnp.ones((5, 3)), send_counts, 2 * comm.size)
        >>> rows, recv_counts = pair
        >>> rows.shape == (2 * comm.size, 3)
        True
        >>> int(recv_counts.sum()) == (2 * comm.size if comm.rank == comm.size - 1 else 0)
        True

    See also: :func:`alltoallv`, whose counts are known when it is traced; :func:`alltoall`.
    """
    return _checked(x, send_counts, capacity, comm)  # type: ignore[no-any-return]


def rows_to_owners(x: T, send_counts: Any, capacity: int, comm: Any) -> tuple[T, jax.Array]:
    """Return the same for `migrate`, whose arguments its errors name."""
    return run(_checked(x, send_counts, capacity, comm, has_owners=True))  # type: ignore[no-any-return]


def _checked(x: Any, send_counts: Any, capacity: int, comm: Any, has_owners: bool = False) -> Any:
    """Check the arguments, and return the call."""
    c = as_comm("ragged_alltoall", comm)
    counts = _counts_of(send_counts, c)
    expected = "a number of rows, known when it is traced"
    room = static_int("ragged_alltoall", "capacity", capacity, expected)
    if room < 0:
        raise ValueError(f"ragged_alltoall: argument 'capacity' must be {expected}, got {room}")
    op = RaggedAlltoall(c, rows=(_rows_of(x), room), has_owners=has_owners)
    return call(op, x, counts=(counts,), how=_WITH_COUNTS)
