"""reduce_scatter: a reduction over all ranks; each rank gets a block of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op.comm import Reduction, as_comm, as_reduction
from .._op.operation import How, Reducing, T, call
from .._op.plan import Plan


@dataclass(frozen=True)
class ReduceScatter(Reducing, name="reduce_scatter"):
    def plan(self, how: How) -> Plan:
        return Plan("allgather" if self.adjoint else "reduce_scatter")

    def tangent(self, r: ReductionTangent) -> Any:
        return r.of_own_block()


@define(ReduceScatter)
def reduce_scatter(
    x: T, op: MPI.Op | Reduction = MPI.SUM, *, comm: MPI.Intracomm | None = None
) -> T:
    """Reduce block ``j`` on rank ``j`` (MPI_Reduce_scatter_block; MPI-4.1, section 6.10.1).

    Args:
        x: array of shape ``(n, *S)``, the same shape on all ranks, where ``n`` is the
            communicator's size; or a pytree of such arrays.
        op: reduction, by default ``MPI.SUM``; also ``mpi4jax.MEAN``, or one made with
            ``MPI.Op.Create``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on rank ``r`` the reduction of all ranks' ``x[r]``, of shape ``S`` and
        the dtype of ``x``.

    Raises:
        TypeError: if ``op`` or ``comm`` has the wrong type, or the reduction is not defined for the
            dtype.
        ValueError: if the first axis of ``x`` does not have length ``n``, or ``op`` is MINLOC or
            MAXLOC and the array does not hold pairs.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        SUM: the transpose gathers the cotangents of all ranks on all ranks. PROD, MAX and MIN: as
        for :func:`allreduce`, over all ranks' blocks for this one. Under ``vmap`` the batch axis
        of the operand is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> n = mpi4jax.default_comm().size
        >>> y = mpi4jax.reduce_scatter(jnp.ones((n, 3)), op=MPI.SUM)
        >>> y.shape == (3,) and float(y[0]) == n
        True

    See also: :func:`allreduce`, :func:`allgather`.
    """
    c = as_comm("reduce_scatter", comm)
    return call(ReduceScatter(c, reduction=as_reduction("reduce_scatter", op)), x)
