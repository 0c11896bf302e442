"""The functions that start an operation: ``iallreduce`` and the others.

They are made of the functions of `ops`, whose arguments they take: they start what those do, and
return a :class:`Request`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from .. import ops
from .._op.spec import SPECS
from .._requests.request import CompositeRequest, Request
from .._requests.start import start
from .._requests.wait import after, wait, waitall
from . import neighbours

__all__ = [
    "Request",
    "after",
    "iallgather",
    "iallgatherv",
    "iallreduce",
    "ialltoall",
    "ialltoallv",
    "ibarrier",
    "ibcast",
    "iexscan",
    "igather",
    "igatherv",
    "ihalo_exchange",
    "ineighbor_allgather",
    "ineighbor_alltoall",
    "ipermute",
    "iragged_alltoall",
    "irecv",
    "ireduce",
    "ireduce_scatter",
    "ireduce_scatterv",
    "iscan",
    "iscatter",
    "iscatterv",
    "isend",
    "isendrecv",
    "wait",
    "waitall",
]


P = ParamSpec("P")


def _nonblocking(op: Callable[P, Any]) -> Callable[P, Request]:
    """The function that starts what ``op`` does, with the same arguments but for a status."""
    name = op.__name__
    made_of = neighbours.PREPARE.get(op)
    given = inspect.signature(op)
    # A wildcard has no derivative here.
    changed = {"source": inspect.Parameter.empty, "tag": 0, "recvtag": 0}
    signature = inspect.Signature(
        [
            q.replace(default=changed.get(argument, q.default))
            for argument, q in given.parameters.items()
            if argument != "status"
        ]
    )

    def call(*args: P.args, **kwargs: P.kwargs) -> Request:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if made_of is None:
            return start(SPECS[name].prepare(**bound.arguments))
        prepared, end = made_of(**bound.arguments)
        return CompositeRequest([start(prepared), ()], end)

    call.__name__ = call.__qualname__ = f"i{name}"
    call.__module__ = "mpi4jax"
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documentation(op)
    return call


def _documentation(op: Callable[..., Any]) -> str:
    name = op.__name__
    spec = SPECS.get(name)
    # What has no function of MPI that starts it is made of messages.
    function = (spec and spec.started) or "MPI_Isend"
    line, *_ = (op.__doc__ or "").partition("\n")
    summary = line.partition(" (MPI_")[0].rstrip(".")
    first = summary[:1].lower() + summary[1:]
    section = "3.7" if spec is None or spec.started is None or spec.has_peer else "6.12"
    tag = ""
    if spec is not None and spec.has_peer and spec.returns:
        tag = " What it receives has tag 0 by default, not any tag: that has no derivative here."
    return f"""Start to {first}, without waiting ({function}; MPI-4.1, section {section}).

    Takes what :func:`{name}` takes, but for a status.{tag}

    Returns:
        Request: for :func:`wait`, whose result is that of :func:`{name}`.

    Raises:
        TypeError, ValueError: as :func:`{name}`.

    See also: :func:`{name}`, :func:`wait`, :func:`after`.
    """


iallgather = _nonblocking(ops.allgather)
iallgatherv = _nonblocking(ops.allgatherv)
iallreduce = _nonblocking(ops.allreduce)
ialltoall = _nonblocking(ops.alltoall)
ialltoallv = _nonblocking(ops.alltoallv)
ibarrier = _nonblocking(ops.barrier)
ibcast = _nonblocking(ops.bcast)
iexscan = _nonblocking(ops.exscan)
igather = _nonblocking(ops.gather)
igatherv = _nonblocking(ops.gatherv)
ihalo_exchange = _nonblocking(ops.halo_exchange)
ineighbor_allgather = _nonblocking(neighbours.neighbor_allgather)
ineighbor_alltoall = _nonblocking(neighbours.neighbor_alltoall)
ipermute = _nonblocking(ops.permute)
iragged_alltoall = _nonblocking(ops.ragged_alltoall)
irecv = _nonblocking(ops.recv)
ireduce = _nonblocking(ops.reduce)
ireduce_scatter = _nonblocking(ops.reduce_scatter)
ireduce_scatterv = _nonblocking(ops.reduce_scatterv)
iscan = _nonblocking(ops.scan)
iscatter = _nonblocking(ops.scatter)
iscatterv = _nonblocking(ops.scatterv)
isend = _nonblocking(ops.send)
isendrecv = _nonblocking(ops.sendrecv)
