"""reduce: a reduction over all ranks, on the root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op.arguments import rank_of
from .._op.comm import Reduction, as_comm, as_reduction
from .._op.operation import How, Reducing, Rooted, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Reduce(Reducing, Rooted, name="reduce"):
    def plan(self, how: How) -> Plan:
        if not self.adjoint:
            return Plan("reduce", Result.RECEIVED if self.is_root else Result.OPERAND)
        if self.is_root:
            return Plan("bcast", Result.OPERAND)
        # The result of another rank was its operand, whose cotangent is added to what it receives.
        return Plan("bcast", Result.SUM, sends=False)

    def tangent(self, r: ReductionTangent) -> Any:
        share = r.product_of_others() if r.name == "PROD" else r.share_of_extremum(r.extremum())
        ty = r.reduce_tangent(r.t * share)
        return ty if self.is_root else r.t  # elsewhere the result is the input

    def only_for_its_result(self) -> bool:
        return self.is_root


@define(Reduce)
def reduce(
    x: T, op: MPI.Op | Reduction = MPI.SUM, root: int = 0, *, comm: MPI.Intracomm | None = None
) -> T:
    """Reduce over all ranks, result on the root (MPI_Reduce; MPI-4.1, section 6.9.1).

    Args:
        x: array, or pytree of arrays. Its shape ``S`` must be the same on all ranks; the values may
            differ.
        op: reduction, by default ``MPI.SUM``; also ``mpi4jax.MEAN``, or one made with
            ``MPI.Op.Create``.
        root: rank that gets the result, by default 0.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on the root the reduction, of the shape and dtype of ``x``; on other
        ranks, ``x`` unchanged.

    Raises:
        TypeError: if ``op``, ``root`` or ``comm`` has the wrong type, or if the reduction is not
            defined for the dtype.
        ValueError: if ``root`` is not a rank of ``comm``.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        SUM: the transpose broadcasts the root's cotangent. On other ranks, the cotangent is passed
        through. PROD, MAX and MIN: as for :func:`allreduce`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> y = mpi4jax.reduce(jnp.ones(3), op=MPI.SUM, root=0)

    See also: :func:`allreduce`, :func:`scan`.
    """
    c = as_comm("reduce", comm)
    reduction = as_reduction("reduce", op)
    return call(Reduce(c, reduction=reduction, root=rank_of("reduce", "root", root, c)), x)
