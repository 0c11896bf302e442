"""recv: an array from another rank."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import ANY_SOURCE, ANY_TAG, peer_of, tag_of
from .._op.comm import as_comm, as_status
from .._op.operation import How, Operation, Receiving, T, call, made
from .._op.packing import check_template
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Recv(Receiving, name="recv"):
    def plan(self, how: How) -> Plan:
        is_unread = self.status is None and not how.env_out
        if self.source == MPI.PROC_NULL and is_unread:
            return Plan(None, Result.OPERAND)
        return Plan("recv", Result.TEMPLATE, sends=False)

    def transposed(self) -> Operation:
        return made("send", self.comm, **self.sent_back())


@define(Recv)
def recv(
    x: T,
    source: int = ANY_SOURCE,
    *,
    tag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
) -> T:
    """Receive an array from another rank (MPI_Recv; MPI-4.1, section 3.2).

    Args:
        x: template, with the shape and dtype of the message to receive; its values are not read
            (they are the result if ``source`` is ``MPI.PROC_NULL``). A pytree of templates receives
            a pytree.
        source: rank to receive from, ``MPI.ANY_SOURCE`` or ``MPI.PROC_NULL``.
        tag: tag of the message; by default ``MPI.ANY_TAG``, any tag (for :func:`irecv`, tag 0).
        comm: communicator; by default a duplicate of ``COMM_WORLD``, on which no message arrives
            that mpi4py has sent on ``COMM_WORLD``.
        status: if given, it is filled when the message has arrived.

    Returns:
        jax.Array, or pytree: the received array.

    Raises:
        TypeError: if ``source``, ``tag``, ``comm`` or ``status`` has the wrong type, if the dtype
            is not supported, or if ``x`` is a shape instead of an array.
        ValueError: if ``source`` or ``tag`` is out of range.

    If a message is shorter than the template, the job is aborted with an error. If ``status`` is
    given, the rest of the result is zero instead.

    Derivative:
        The cotangent is sent back to the rank, and with the tag, that the message came from.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> x = mpi4jax.recv(jnp.ones(3), source=MPI.PROC_NULL)
        >>> x.tolist()
        [1.0, 1.0, 1.0]

    See also: :func:`send`, :func:`sendrecv`, :func:`recv_with_status` for a traced status.
    """
    check_template("recv", "x", x)
    c = as_comm("recv", comm)
    op = Recv(
        c,
        source=peer_of("recv", "source", source, c),
        recvtag=tag_of("recv", "tag", tag, wildcard=True),
        status=as_status("recv", status),
    )
    return call(op, x)
