"""reduce_scatterv: a reduction over all ranks; each rank gets some rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op import rows as _rows
from .._op.comm import Reduction, as_comm, as_reduction
from .._op.operation import How, Reducing, T, WithParts, call
from .._op.plan import Plan


@dataclass(frozen=True)
class ReduceScatterv(WithParts, Reducing, name="reduce_scatterv"):
    def plan(self, how: How) -> Plan:
        return Plan("allgatherv" if self.adjoint else "reduce_scatterv")

    def tangent(self, r: ReductionTangent) -> Any:
        return r.of_own_block()


@define(ReduceScatterv)
def reduce_scatterv(
    x: T,
    counts: Sequence[int],
    op: MPI.Op | Reduction = MPI.SUM,
    *,
    comm: MPI.Intracomm | None = None,
) -> T:
    """Reduce rows over all ranks, some for each rank (MPI_Reduce_scatter; MPI-4.1, section 6.10.2).

    Args:
        x: array of shape ``(sum(counts), *S)``, the rows for each rank in the order of the ranks;
            or a pytree of such arrays.
        counts: number of rows of each rank, the same on all ranks: static integers.
        op: reduction, by default ``MPI.SUM``; also ``mpi4jax.MEAN``, or one made with
            ``MPI.Op.Create``.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: the reduction of all ranks' rows for this one, of shape
        ``(counts[r], *S)`` and the dtype of ``x``.

    Raises:
        TypeError: if ``counts``, ``op`` or ``comm`` has the wrong type, or the reduction is not
            defined for the dtype.
        ValueError: if ``counts`` does not have one entry per rank, ``x`` does not have
            ``sum(counts)`` rows, or ``op`` is MINLOC or MAXLOC and the array does not hold pairs.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    If the counts differ between ranks, all ranks raise an error, and the job is aborted: the ranks
    compare the counts in each call.

    Derivative:
        SUM: the transpose gathers the cotangents of all ranks on all ranks. PROD, MAX and MIN: as
        for :func:`allreduce`, over all ranks' rows for this one. Under ``vmap`` the batch axis is
        axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> counts = [rank + 1 for rank in range(comm.size)]
        >>> y = mpi4jax.reduce_scatterv(jnp.ones((sum(counts), 3)), counts)
        >>> y.shape == (comm.rank + 1, 3) and float(y[0, 0]) == comm.size
        True

    See also: :func:`reduce_scatter`, :func:`allgatherv`.
    """
    c = as_comm("reduce_scatterv", comm)
    row_counts = _rows.counts_of("reduce_scatterv", "counts", counts, c)
    own = row_counts[c.rank]
    operation = ReduceScatterv(
        c,
        reduction=as_reduction("reduce_scatterv", op),
        rows=(sum(row_counts), own),
        send_parts=_rows.side_by_side(row_counts),
        recv_parts=tuple((rank, 0, own) for rank in range(c.size) if own),
    )
    return call(operation, x)
