"""Receives that also return source, tag and length of the message, as traced values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from mpi4py import MPI

from .._call.call import run
from .._op.arguments import ANY_SOURCE, ANY_TAG
from .._op.operation import ASKED, OFFSET, OPERATIONS, How, T
from .._op.other_names import rename


class Received(NamedTuple):
    """Source, tag and length of a received message: int32 scalars, traced or not.

    Attributes:
        source: rank of the sender; ``MPI.PROC_NULL`` if there was no sender.
        tag: tag of the message.
        elements: number of elements in the message.
    """

    source: jax.Array
    tag: jax.Array
    elements: jax.Array


def _run(op: str, arguments: dict[str, Any]) -> Any:
    try:
        call = OPERATIONS[op].prepare(**arguments)
        y, envelope = run(call._replace(how=How(env_out=ASKED)))
    except (TypeError, ValueError) as error:
        rename(error, op, f"{op}_with_status")
        raise
    return y, Received(*(envelope - OFFSET))


def recv_with_status(
    x: T,
    source: int = ANY_SOURCE,
    *,
    tag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
) -> tuple[T, Received]:
    """Receive an array, with its source, tag and length (MPI_Recv; MPI-4.1, section 3.2).

    Use it in programs whose ranks react to messages from any source and with any tag, in a
    ``while_loop``.

    Args:
        x: template with the dtype and the maximum shape of the message; or a pytree of templates of
            one dtype, which are received as one message.
        source, tag, comm: as for :func:`recv`; they may be traced.

    Returns:
        The received array or pytree, and a :class:`Received`. If the message is shorter than the
        template, the remaining elements are zero. Under ``vmap``, the :class:`Received` describes
        the message with the whole batch.

    Raises:
        TypeError: as for :func:`recv`, or if the template has several dtypes.
        ValueError: if ``source`` or ``tag`` is out of range.

    Derivative:
        The array has the derivative of :func:`recv`. A message that is shorter than the template
        has no derivative.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> x, received = mpi4jax.recv_with_status(jnp.ones(3), source=MPI.PROC_NULL)
        >>> x.tolist(), int(received.elements)
        ([1.0, 1.0, 1.0], 0)

    See also: :func:`recv`, :func:`sendrecv_with_status`.
    """
    return _run("recv", {"x": x, "source": source, "tag": tag, "comm": comm})


def sendrecv_with_status(
    sendbuf: Any,
    recvbuf: T,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
) -> tuple[T, Received]:
    """Send one array and receive another, with its status (MPI_Sendrecv; MPI-4.1, section 3.10).

    Args:
        sendbuf: array that is sent; or a pytree of arrays.
        recvbuf: template, as for :func:`recv_with_status`.
        source, dest, sendtag, recvtag, comm: as for :func:`sendrecv`; they may be traced.

    Returns:
        As :func:`recv_with_status`.

    Raises:
        TypeError: as for :func:`sendrecv`, or if the template has several dtypes.
        ValueError: if a rank or a tag is out of range.

    Derivative:
        The array has the derivative of :func:`sendrecv`. A message that is shorter than the
        template has no derivative.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> rank = mpi4jax.default_comm().rank
        >>> x = jnp.ones(3)
        >>> y, received = mpi4jax.sendrecv_with_status(x, x, source=rank, dest=rank, sendtag=7)
        >>> int(received.source) == rank, int(received.tag), int(received.elements)
        (True, 7, 3)

    See also: :func:`sendrecv`, :func:`recv_with_status`.
    """
    arguments = {"sendbuf": sendbuf, "recvbuf": recvbuf, "source": source, "dest": dest}
    return _run("sendrecv", {**arguments, "sendtag": sendtag, "recvtag": recvtag, "comm": comm})
