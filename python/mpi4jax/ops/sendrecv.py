"""sendrecv: an array to one rank and one from another, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import ANY_TAG, peer_of, tag_of
from .._op.comm import as_comm, as_status
from .._op.operation import How, Operation, SendingAndReceiving, T, call
from .._op.packing import check_template, pack_arguments
from .._op.plan import Plan, Result
from .._requests.request import CompositeKind, CompositeRequest
from .._requests.start import begin


def _received(received: Any, sent: None) -> Any:
    return received


@dataclass(frozen=True)
class Sendrecv(SendingAndReceiving, name="sendrecv"):
    def plan(self, how: How) -> Plan:
        return Plan("sendrecv", Result.TEMPLATE)

    def transposed(self) -> Operation:
        return replace(self, **self.sent_back(), **self.received_back(), status=None)

    def initiate(self, args: Sequence[Any]) -> CompositeRequest[Any]:
        # An error about the send buffer comes before a receive is under way.
        pack_arguments(self, args)
        sendbuf, recvbuf = args
        requests = [begin(self.recv(), (recvbuf,)), begin(self.send(), (sendbuf,)), ()]
        return CompositeRequest(requests, CompositeKind(self.name, _received))


@define(Sendrecv)
def sendrecv(
    sendbuf: Any,
    recvbuf: T,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
) -> T:
    """Send to one rank and receive from another, at once (MPI_Sendrecv; MPI-4.1, section 3.10).

    Args:
        sendbuf: array that is sent, of any shape and dtype; or a pytree of arrays.
        recvbuf: template, with the shape and dtype of the message to receive; or a pytree of
            templates. Its values are not read, but they are the result if ``source`` is
            ``MPI.PROC_NULL``.
        source: rank to receive from, ``MPI.ANY_SOURCE`` or ``MPI.PROC_NULL``.
        dest: rank to send to, or ``MPI.PROC_NULL``.
        sendtag: tag of the message that is sent.
        recvtag: tag of the message that is received, or ``MPI.ANY_TAG``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        status: if given, it is filled when the message has arrived.

    Returns:
        jax.Array, or pytree: the received array.

    Raises:
        TypeError: if an argument has the wrong type, or the dtype is not supported.
        ValueError: if a rank or a tag is out of range.

    Derivative:
        Cotangents are sent in the opposite direction: to ``source``, from ``dest``. Under ``vmap``,
        if only one of the two buffers is batched, the other one is broadcast.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        >>> x = jnp.full(3, comm.rank)
        >>> y = mpi4jax.sendrecv(x, x, source=left, dest=right)
        >>> int(y[0]) == left
        True

    See also: :func:`send`, :func:`recv`, :func:`sendrecv_with_status` for a traced status.
    """
    check_template("sendrecv", "recvbuf", recvbuf)
    c = as_comm("sendrecv", comm)
    op = Sendrecv(
        c,
        source=peer_of("sendrecv", "source", source, c),
        dest=peer_of("sendrecv", "dest", dest, c),
        sendtag=tag_of("sendrecv", "sendtag", sendtag),
        recvtag=tag_of("sendrecv", "recvtag", recvtag, wildcard=True),
        status=as_status("sendrecv", status),
    )
    return call(op, sendbuf, recvbuf)
