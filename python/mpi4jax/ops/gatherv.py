"""gatherv: the rows of all ranks, on the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op import rows
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.operation import How, Rooted, T, WithParts, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Gatherv(WithParts, Rooted, name="gatherv"):
    def plan(self, how: How) -> Plan:
        if not self.adjoint:
            return Plan("gatherv", Result.RECEIVED if self.is_root else Result.OPERAND)
        # The result of another rank was its operand, whose cotangent is added to what it receives.
        return Plan("scatterv") if self.is_root else Plan("scatterv", Result.SUM, sends=False)


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
    c = as_comm("gatherv", comm)
    row_counts = rows.counts_of("gatherv", "counts", counts, c)
    root = rank_of("gatherv", "root", root, c)
    own, whole, is_root = row_counts[c.rank], sum(row_counts), root == c.rank
    op = Gatherv(
        c,
        root=root,
        rows=(own, whole if is_root else own),
        send_parts=((root, 0, own),) if own else (),
        recv_parts=rows.side_by_side(row_counts) if is_root else (),
        whole=whole,
    )
    return call(op, x)
