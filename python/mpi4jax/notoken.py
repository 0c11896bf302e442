"""The operations without tokens.

Each function is the one of the same name in :mod:`mpi4jax`, takes no token and returns its
result alone (``None`` for ``send`` and ``barrier``). Order is the same: program order. The rest of
the interface is here too, so that ``import mpi4jax.notoken as mpi4jax`` runs programs written for
packages of this kind without tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from . import _blocks, _ops
from ._comm import default_comm
from ._flush import flush
from ._jit import jit
from ._ops import NO_TOKEN, auto_tokenize, pvary
from ._transport import has_cuda_support

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "auto_tokenize",
    "barrier",
    "bcast",
    "default_comm",
    "flush",
    "gather",
    "gather_blocks",
    "halo_exchange",
    "has_cuda_support",
    "jit",
    "pvary",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "scatter_blocks",
    "send",
    "sendrecv",
]


def _without_token(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, token=NO_TOKEN, **kwargs)

    summary = (op.__doc__ or "").split("\n", 1)[0]
    call.__doc__ = (
        f"{summary}\n\n    Like :func:`mpi4jax.{op.__name__}`, without tokens: returns the result "
        "alone.\n    "
    )
    call.__module__ = __name__
    signature = inspect.signature(op)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for name, p in signature.parameters.items() if name != "token"]
    )
    return call


allgather = _without_token(_ops.allgather)
allreduce = _without_token(_ops.allreduce)
alltoall = _without_token(_ops.alltoall)
barrier = _without_token(_ops.barrier)
bcast = _without_token(_ops.bcast)
gather = _without_token(_ops.gather)
gather_blocks = _without_token(_blocks.gather_blocks)
halo_exchange = _without_token(_ops.halo_exchange)
recv = _without_token(_ops.recv)
reduce = _without_token(_ops.reduce)
scan = _without_token(_ops.scan)
scatter = _without_token(_ops.scatter)
scatter_blocks = _without_token(_blocks.scatter_blocks)
send = _without_token(_ops.send)
sendrecv = _without_token(_ops.sendrecv)
