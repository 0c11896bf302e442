"""alltoallv: rows from each rank to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op import rows
from .._op.comm import as_comm
from .._op.operation import T, WithParts, call


@dataclass(frozen=True)
class Alltoallv(WithParts, name="alltoallv"):
    """The adjoint is an alltoallv with the parts exchanged."""


@define(Alltoallv)
def alltoallv(
    x: T,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    comm: MPI.Intracomm | None = None,
) -> T:
    """Send rows to each rank, for all ranks at once (MPI_Alltoallv; MPI-4.1, section 6.8).

    Args:
        x: array of shape ``(sum(send_counts), *S)``, of any dtype: the rows to send, sorted by
            destination rank. Or a pytree of such arrays.
        send_counts: number of rows to send to each rank: static integers.
        recv_counts: number of rows to receive from each rank. It must equal the number that the
            other rank sends to this one.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of shape ``(sum(recv_counts), *S)`` and the dtype of ``x``, the
        received rows, sorted by source rank.

    Raises:
        TypeError: if ``send_counts``, ``recv_counts`` or ``comm`` has the wrong type, or if the
            dtype is not supported.
        ValueError: if ``send_counts`` or ``recv_counts`` does not have one entry per rank, ``x``
            does not have ``sum(send_counts)`` rows, or the two counts for this rank itself differ.

    Derivative:
        The transpose sends the rows back. Under ``vmap`` the batch axis is axis 1 of operand and
        result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> send_counts = [comm.rank + 1] * comm.size
        >>> recv_counts = [rank + 1 for rank in range(comm.size)]
        >>> y = mpi4jax.alltoallv(jnp.ones(sum(send_counts)), send_counts, recv_counts)
        >>> y.shape == (sum(recv_counts),)
        True

    See also: :func:`alltoall`, :func:`allgatherv`, :func:`scatterv`.
    """
    c = as_comm("alltoallv", comm)
    sent = rows.counts_of("alltoallv", "send_counts", send_counts, c)
    received = rows.counts_of("alltoallv", "recv_counts", recv_counts, c)
    if sent[c.rank] != received[c.rank]:
        raise ValueError(
            f"alltoallv: arguments 'send_counts' and 'recv_counts' have rank {c.rank} send "
            f"itself {sent[c.rank]} rows and receive {received[c.rank]}; expected the same number"
        )
    op = Alltoallv(
        c,
        rows=(sum(sent), sum(received)),
        send_parts=rows.side_by_side(sent),
        recv_parts=rows.side_by_side(received),
    )
    return call(op, x)
