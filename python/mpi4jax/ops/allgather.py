"""allgather: the arrays of all ranks, on all ranks."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .._call.call import run
from .._call.definition import define
from .._compile.lowering import Avals, Lowering, Operands
from .._op.comm import as_comm
from .._op.spec import Call


def _adjoint(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    return [low.local(lambda c: c[low.p["comm"].rank], out[0], *xs)]


def _prepare(x: Any, comm: MPI.Intracomm | None) -> Call:
    return Call("allgather", (x,), {"comm": as_comm("allgather", comm)})


define(
    "allgather",
    prepare=_prepare,
    adjoint=_adjoint,
    is_uniform=True,
    self_test=lambda t: (lambda: t.ops.allgather(t.x), t.all_x),
)


def allgather(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on all ranks (MPI_Allgather; MPI-4.1, section 6.7).

    Args:
        x: array of shape ``S``, equal on all ranks, of any dtype; or a pytree of such arrays.
        comm: communicator of ``n`` ranks; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        tuple: array of shape ``(n, *S)`` and the dtype of ``x``, row ``j`` from rank ``j``; and
        the new token.

    Raises:
        TypeError: a wrong type of ``comm``, ``token`` or dtype.

    Derivative:
        Row ``r`` of the result's cotangent, which is that of one global value. Under ``vmap`` the
        batch axis of the result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.allgather(jnp.ones(3))
        >>> y.shape == (mpi4jax.default_comm().size, 3)
        True

    See also: :func:`gather`, :func:`alltoall`.
    """
    return run(_prepare(x, comm), token)
