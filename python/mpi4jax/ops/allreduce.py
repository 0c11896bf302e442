"""allreduce: a reduction over all ranks, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op.comm import Reduction, as_comm, as_reduction
from .._op.operation import How, Reducing, T, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Allreduce(Reducing, name="allreduce"):
    is_uniform = True

    def plan(self, how: How) -> Plan:
        return Plan(None, Result.OPERAND) if self.adjoint else Plan("allreduce")

    def tangent(self, r: ReductionTangent) -> Any:
        share = r.product_of_others() if r.name == "PROD" else r.share_of_extremum(r.y)
        return r.reduce_tangent(r.t * share)

    def overwrites(self) -> bool:
        return not self.adjoint


@define(Allreduce)
def allreduce(x: T, op: MPI.Op | Reduction = MPI.SUM, *, comm: MPI.Intracomm | None = None) -> T:
    """Reduce over all ranks, result on all ranks (MPI_Allreduce; MPI-4.1, section 6.9.6).

    Args:
        x: array, or pytree of arrays. Its shape ``S`` must be the same on all ranks; the values may
            differ.
        op: reduction, by default ``MPI.SUM``; also ``mpi4jax.MEAN``, the sum divided by the number
            of ranks, or one made with ``MPI.Op.Create``. ``MPI.MINLOC`` and ``MPI.MAXLOC`` reduce
            pairs (value, index) along a last axis of length 2.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: the reduction, of the shape and dtype of ``x``, the same on all ranks.

    Raises:
        TypeError: if ``op`` or ``comm`` has the wrong type, or the reduction is not defined for the
            dtype (MAX of complex numbers, MEAN of integers).
        ValueError: if ``op`` is MINLOC or MAXLOC, and the array does not hold pairs.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        The result is one global value, so all ranks have the same cotangent. SUM: the cotangent
        itself. MEAN: the cotangent divided by the number of ranks. PROD: the cotangent times the
        product of the other ranks' factors, exact at zeros. MAX and MIN: the cotangent where this
        rank attains the extremum, shared equally between ties.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> y = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
        >>> float(y[0]) == mpi4jax.default_comm().size
        True
        >>> loss = mpi4jax.allreduce(jnp.ones(()), op=mpi4jax.MEAN)
        >>> float(loss)
        1.0

    See also: :func:`reduce`, :func:`scan`, :func:`pvary`.
    """
    c = as_comm("allreduce", comm)
    return call(Allreduce(c, reduction=as_reduction("allreduce", op)), x)
