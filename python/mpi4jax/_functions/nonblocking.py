"""The functions that start an operation: ``iallreduce`` and the others.

They are made of the functions of `ops`, whose arguments they take but for the token: they start
what those do, and return a :class:`Request`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import ops
from .._op.spec import SPECS, Call
from .._requests.request import End, Joint, Request
from .._requests.start import start
from .._requests.wait import after, wait, waitall
from . import neighbours

if TYPE_CHECKING:  # they see the arguments, and `token` among them: no type takes one away
    from ..ops import allgather as iallgather
    from ..ops import allgatherv as iallgatherv
    from ..ops import allreduce as iallreduce
    from ..ops import alltoall as ialltoall
    from ..ops import alltoallv as ialltoallv
    from ..ops import barrier as ibarrier
    from ..ops import bcast as ibcast
    from ..ops import exscan as iexscan
    from ..ops import gather as igather
    from ..ops import gatherv as igatherv
    from ..ops import halo_exchange as ihalo_exchange
    from ..ops import permute as ipermute
    from ..ops import ragged_alltoall as iragged_alltoall
    from ..ops import recv as irecv
    from ..ops import reduce as ireduce
    from ..ops import reduce_scatter as ireduce_scatter
    from ..ops import scan as iscan
    from ..ops import scatter as iscatter
    from ..ops import scatterv as iscatterv
    from ..ops import send as isend
    from ..ops import sendrecv as isendrecv
    from .neighbours import neighbor_allgather as ineighbor_allgather
    from .neighbours import neighbor_alltoall as ineighbor_alltoall

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
    "iscan",
    "iscatter",
    "iscatterv",
    "isend",
    "isendrecv",
    "wait",
    "waitall",
]


def _started(
    op: Callable[..., Any], begin: Callable[..., Request], mpi: str | None = None
) -> Callable[..., Any]:
    """The function that starts an op, by an MPI function, MPI_Isend by default.

    Args:
        op: the function that waits for it.
        begin: starts it, given the arguments of that function by their names.
        mpi: the MPI function.
    """
    left_out = {"token", "status"}
    given = inspect.signature(op)
    # A wildcard has no derivative here.
    changed = {"source": inspect.Parameter.empty, "tag": 0, "recvtag": 0}
    parameters = [
        q.replace(default=changed.get(name, q.default))
        for name, q in given.parameters.items()
        if name not in left_out
    ]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return begin(**bound.arguments)

    call.__name__ = call.__qualname__ = f"i{op.__name__}"
    call.__module__ = "mpi4jax"
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documentation(op, mpi or "MPI_Isend")
    return call


def _documentation(op: Callable[..., Any], function: str) -> str:
    name = op.__name__
    summary, *_ = (op.__doc__ or "").partition(" (MPI_")
    first = summary[:1].lower() + summary[1:]
    section = "3.7" if function in ("MPI_Irecv", "MPI_Isend") else "6.12"
    return f"""Start to {first}, without waiting ({function}; MPI-4.1, section {section}).

    Takes what :func:`{name}` takes, without a token.

    Returns:
        Request: for :func:`wait`, whose result is that of :func:`{name}`.

    Raises:
        TypeError, ValueError: as :func:`{name}`.

    See also: :func:`{name}`, :func:`wait`, :func:`after`.
    """


def _starts(prepare: Callable[..., Call]) -> Callable[..., Request]:
    return lambda **arguments: start(prepare(**arguments))


def _starts_made_of(prepare: Callable[..., tuple[Call, End]]) -> Callable[..., Request]:
    """The same of a function that is made of an op."""

    def begin(**arguments: Any) -> Request:
        call, end = prepare(**arguments)
        return Joint([start(call), ()], end)

    return begin


_FUNCTIONS = [
    *(
        _started(getattr(ops, op), _starts(spec.prepare), spec.started)
        for op, spec in SPECS.items()
        if spec.starts
    ),
    *(_started(op, _starts_made_of(prepare)) for op, prepare in neighbours.PREPARE.items()),
]
STARTED = {function.__name__: function for function in _FUNCTIONS}
globals().update(STARTED)
