"""send: an array to another rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import peer_of, tag_of
from .._op.comm import as_comm
from .._op.operation import Operation, Sending, call, made


@dataclass(frozen=True)
class Send(Sending, name="send"):
    def transposed(self) -> Operation:
        return made("recv", self.comm, **self.received_back())


@define(Send)
def send(x: Any, dest: int, *, tag: int = 0, comm: MPI.Intracomm | None = None) -> None:
    """Send an array to another rank (MPI_Send; MPI-4.1, section 3.2).

    Args:
        x: array of any shape and dtype; or a pytree of arrays.
        dest: rank to send to, or ``MPI.PROC_NULL``.
        tag: tag of the message.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        None.

    Raises:
        TypeError: if ``dest``, ``tag`` or ``comm`` has the wrong type, or if the dtype is not
            supported.
        ValueError: if ``dest`` or ``tag`` is out of range.

    Derivative:
        The cotangent of ``x`` is received from ``dest``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> mpi4jax.send(jnp.ones(3), dest=MPI.PROC_NULL)

    See also: :func:`recv`, :func:`sendrecv`.
    """
    c = as_comm("send", comm)
    op = Send(c, dest=peer_of("send", "dest", dest, c), sendtag=tag_of("send", "tag", tag))
    return call(op, x)  # type: ignore[no-any-return]
