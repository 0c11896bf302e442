"""scatter: a block of the root's array to each rank."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.operation import How, Rooted, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Scatter(Rooted, name="scatter"):
    def plan(self, how: How) -> Plan:
        if not self.adjoint:
            return Plan("scatter", sends=self.is_root)
        # The operand of another rank was not read.
        return Plan("gather", Result.RECEIVED if self.is_root else Result.ZEROS)


@define(Scatter)
def scatter(x: T, root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Send block ``j`` of the root's array to rank ``j`` (MPI_Scatter; MPI-4.1, section 6.6).

    Args:
        x: on the root, array of shape ``(n, *S)`` where ``n`` is the communicator's size; on other
            ranks a template of shape ``S``, whose values are not read. Or a pytree of such arrays.
        root: rank whose array is distributed, by default 0.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: this rank's block, of shape ``S``.

    Raises:
        TypeError: if ``root`` or ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if ``root`` is not a rank of ``comm``, or on the root the first axis of ``x``
            does not have length ``n``.

    Derivative:
        The transpose gathers the cotangents on the root. On other ranks, the cotangent of ``x`` is
        zero. Under ``vmap`` the batch axis of the root's operand is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> x = jnp.ones((comm.size, 3)) if comm.rank == 0 else jnp.ones(3)
        >>> y = mpi4jax.scatter(x, root=0)
        >>> y.shape
        (3,)

    See also: :func:`gather`, :func:`alltoall`.
    """
    c = as_comm("scatter", comm)
    return call(Scatter(c, root=rank_of("scatter", "root", root, c)), x)
