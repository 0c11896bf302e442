"""gatherv: the rows of all ranks, on the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op import rows
from .._op.operation import How, Rooted, T, WithParts, call
from .._op.plan import Plan, from_root_added, to_root


@dataclass(frozen=True)
class Gatherv(WithParts, Rooted, name="gatherv"):
    def plan(self, how: How) -> Plan:
        if self.adjoint:
            return from_root_added("scatterv", self.is_root)
        return to_root("gatherv", self.is_root)


@define(Gatherv)
def gatherv(x: T, counts: Sequence[int], root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the rows of all ranks on the root (MPI_Gatherv; MPI-4.1, section 6.5).

    Args:
        x: array of shape ``(counts[r], *S)``, of any dtype; or a pytree of such arrays.
        counts: number of rows of each rank, the same on all ranks: static integers.
        root: rank that receives, by default 0.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on the root, an array of shape ``(sum(counts), *S)``, the rows in the
        order of the ranks; on other ranks, ``x`` unchanged.

    Raises:
        TypeError: if ``counts``, ``root`` or ``comm`` has the wrong type, or the dtype is not
            supported.
        ValueError: if ``root`` is not a rank of ``comm``, ``counts`` does not have one entry per
            rank, or ``x`` does not have ``counts[r]`` rows.

    Derivative:
        The transpose scatters the root's cotangent. On other ranks, the cotangent is passed
        through. Under ``vmap`` the batch axis is axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> counts = [rank + 1 for rank in range(comm.size)]
        >>> y = mpi4jax.gatherv(jnp.ones((comm.rank + 1, 3)), counts, root=0)

    See also: :func:`gather`, :func:`allgatherv`, :func:`scatterv`.
    """
    to = rows.to_root("gatherv", counts, root, comm)
    op = Gatherv(
        to.comm,
        root=to.root,
        rows=(to.own, to.all),
        send_parts=to.own_parts,
        recv_parts=to.all_parts,
        whole=to.whole,
    )
    return call(op, x)
