"""scatterv: rows of the root's array to each rank."""

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
class Scatterv(WithParts, Rooted, name="scatterv"):
    def plan(self, how: How) -> Plan:
        if not self.adjoint:
            return Plan("scatterv", sends=self.is_root)
        # The operand of another rank was not read.
        return Plan("gatherv", Result.RECEIVED if self.is_root else Result.ZEROS)


@define(Scatterv)
def scatterv(x: T, counts: Sequence[int], root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Send rows of the root's array to each rank (MPI_Scatterv; MPI-4.1, section 6.6).

    Args:
        x: on the root, array of shape ``(sum(counts), *S)``: the rows, sorted by destination rank;
            on other ranks a template of shape ``(counts[r], *S)``, whose values are not read. Or a
            pytree of such arrays.
        counts: number of rows of each rank, the same on all ranks: static integers.
        root: rank whose array is distributed, by default 0.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: this rank's rows, of shape ``(counts[r], *S)``.

    Raises:
        TypeError: if ``counts``, ``root`` or ``comm`` has the wrong type, or the dtype is not
            supported.
        ValueError: if ``root`` is not a rank of ``comm``, ``counts`` does not have one entry per
            rank, or ``x`` does not have ``counts[r]`` rows.

    Derivative:
        The transpose gathers the cotangents on the root. On other ranks, the cotangent of ``x`` is
        zero. Under ``vmap`` the batch axis is axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> counts = [rank + 1 for rank in range(comm.size)]
        >>> rows = sum(counts) if comm.rank == 0 else counts[comm.rank]
        >>> y = mpi4jax.scatterv(jnp.ones((rows, 3)), counts, root=0)
        >>> y.shape == (comm.rank + 1, 3)
        True

    See also: :func:`scatter`, :func:`gatherv`.
    """
    c = as_comm("scatterv", comm)
    row_counts = rows.counts_of("scatterv", "counts", counts, c)
    root = rank_of("scatterv", "root", root, c)
    own, whole, is_root = row_counts[c.rank], sum(row_counts), root == c.rank
    op = Scatterv(
        c,
        root=root,
        rows=(whole if is_root else own, own),
        send_parts=rows.side_by_side(row_counts) if is_root else (),
        recv_parts=((root, 0, own),) if own else (),
        whole=whole,
    )
    return call(op, x)
