"""bcast: the root's array, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.operation import How, Rooted, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Bcast(Rooted, name="bcast"):
    is_uniform = True

    def plan(self, how: How) -> Plan:
        if self.adjoint:
            return Plan(None, Result.OPERAND if self.is_root else Result.ZEROS)
        return Plan("bcast", Result.OPERAND) if self.is_root else Plan("bcast", sends=False)


@define(Bcast)
def bcast(x: T, root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Broadcast the root's array to all ranks (MPI_Bcast; MPI-4.1, section 6.4).

    Args:
        x: array of shape ``S``, or pytree of arrays. Its values are read on the root only.
        root: rank whose array is broadcast, by default 0.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: the root's array.

    Raises:
        TypeError: if ``root`` or ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if ``root`` is not a rank of ``comm``.

    Derivative:
        The result is one global value with one cotangent: on the root it is the cotangent of ``x``,
            and on other ranks the cotangent of ``x`` is zero.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.bcast(jnp.arange(3), root=0)
        >>> y.tolist()
        [0, 1, 2]

    See also: :func:`scatter`, :func:`pvary`.
    """
    c = as_comm("bcast", comm)
    return call(Bcast(c, root=rank_of("bcast", "root", root, c)), x)
