"""gather: the arrays of all ranks, on the root."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.operation import How, Rooted, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Gather(Rooted, name="gather"):
    def plan(self, how: How) -> Plan:
        if not self.adjoint:
            return Plan("gather", Result.RECEIVED if self.is_root else Result.OPERAND)
        # The result of another rank was its operand, whose cotangent is added to what it receives.
        return Plan("scatter") if self.is_root else Plan("scatter", Result.SUM, sends=False)


@define(Gather)
def gather(x: T, root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the arrays of all ranks on the root (MPI_Gather; MPI-4.1, section 6.5).

    Args:
        x: array, or pytree of arrays. Its shape ``S`` must be the same on all ranks; the values may
            differ.
        root: rank that receives, by default 0.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on the root, an array of shape ``(n, *S)``, row ``j`` from rank ``j``;
        on other ranks, ``x`` unchanged.

    Raises:
        TypeError: if ``root`` or ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if ``root`` is not a rank of ``comm``.

    Derivative:
        The transpose scatters the root's cotangent. On other ranks, the cotangent is passed
        through. Under ``vmap`` the batch axis of the root's result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.gather(jnp.ones(3), root=0)

    See also: :func:`allgather`, :func:`scatter`.
    """
    c = as_comm("gather", comm)
    return call(Gather(c, root=rank_of("gather", "root", root, c)), x)
