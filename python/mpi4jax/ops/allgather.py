"""allgather: the arrays of all ranks, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.comm import as_comm
from .._op.operation import How, Operation, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Allgather(Operation, name="allgather"):
    is_uniform = True

    def plan(self, how: How) -> Plan:
        if self.adjoint:
            return Plan(None, Result.OPERAND, select=lambda c: c[self.comm.rank])
        return Plan("allgather")


@define(Allgather)
def allgather(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the arrays of all ranks on all ranks (MPI_Allgather; MPI-4.1, section 6.7).

    Args:
        x: array of any dtype, or pytree of arrays. Its shape ``S`` must be the same on all ranks;
            the values may differ.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of shape ``(n, *S)`` and the dtype of ``x``, row ``j`` from rank
        ``j``.

    Raises:
        TypeError: if ``comm`` has the wrong type, or the dtype is not supported.

    Derivative:
        The cotangent of ``x`` is row ``r`` of the result's cotangent. The result is one global
        value, so all ranks have the same cotangent. Under ``vmap`` the batch axis of the result is
        axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.allgather(jnp.ones(3))
        >>> y.shape == (mpi4jax.default_comm().size, 3)
        True

    See also: :func:`gather`, :func:`alltoall`.
    """
    return call(Allgather(as_comm("allgather", comm)), x)
