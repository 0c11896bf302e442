"""alltoall: a block from each rank to each rank."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.comm import as_comm
from .._op.operation import Operation, T, call


@dataclass(frozen=True)
class Alltoall(Operation, name="alltoall"):
    def transposed(self) -> Operation:
        return self


@define(Alltoall)
def alltoall(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Send block ``j`` to rank ``j``, for all ranks at once (MPI_Alltoall; MPI-4.1, section 6.8).

    Args:
        x: array of shape ``(n, *S)``, the same shape on all ranks, where ``n`` is the
            communicator's size; or a pytree of such arrays.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of the shape and dtype of ``x``, block ``j`` from rank ``j``.

    Raises:
        TypeError: if ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if the first axis of ``x`` does not have length ``n``.

    Derivative:
        The transpose is another ``alltoall``. Under ``vmap`` the batch axis is axis 1 of operand
        and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> n = mpi4jax.default_comm().size
        >>> y = mpi4jax.alltoall(jnp.ones((n, 2)))
        >>> y.shape == (n, 2)
        True

    See also: :func:`allgather`, :func:`scatter`.
    """
    return call(Alltoall(as_comm("alltoall", comm)), x)
