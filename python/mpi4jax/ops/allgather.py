"""allgather: the arrays of all ranks, on all ranks."""

from __future__ import annotations

from mpi4py import MPI

from .._call.definition import define
from .._op.comm import as_comm
from .._op.plan import Plan, Result
from .._op.spec import Params, T, call


def _adjoint(p: Params) -> Plan:
    return Plan(None, Result.OPERAND, select=lambda c: c[p["comm"].rank])


@define(adjoint=_adjoint, is_uniform=True)
def allgather(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the arrays of all ranks on all ranks (MPI_Allgather; MPI-4.1, section 6.7).

    Args:
        x: array of shape ``S``, equal on all ranks, of any dtype; or a pytree of such arrays.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of shape ``(n, *S)`` and the dtype of ``x``, row ``j`` from rank
        ``j``.

    Raises:
        TypeError: if ``comm`` has a wrong type, or the dtype is not supported.

    Derivative:
        Row ``r`` of the cotangent of the result. The result is one global value, so all ranks have
        the same cotangent. Under ``vmap`` the batch axis of the result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.allgather(jnp.ones(3))
        >>> y.shape == (mpi4jax.default_comm().size, 3)
        True

    See also: :func:`gather`, :func:`alltoall`.
    """
    return call("allgather", (x,), {"comm": as_comm("allgather", comm)})
