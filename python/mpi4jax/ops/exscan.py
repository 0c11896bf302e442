"""exscan: a reduction over the ranks before each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op.comm import as_comm, as_reduction
from .._op.operation import How, Reducing, T, call
from .._op.plan import Plan


@dataclass(frozen=True)
class Exscan(Reducing, name="exscan"):
    def plan(self, how: How) -> Plan:
        return Plan("exscan", attrs={"reverse": self.adjoint})

    def tangent(self, r: ReductionTangent) -> Any:
        return r.over_first(self.comm.rank)


@define(Exscan)
def exscan(x: T, op: MPI.Op = MPI.SUM, *, comm: MPI.Intracomm | None = None) -> T:
    """Reduce over the ranks before this one (MPI_Exscan; MPI-4.1, section 6.11.2).

    Args:
        x: array, or pytree of arrays. Its shape ``S`` must be the same on all ranks; the values may
            differ.
        op: reduction, by default ``MPI.SUM``, or one made with ``MPI.Op.Create``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on rank ``r`` the reduction over ranks ``0`` to ``r - 1``, of the
        shape and dtype of ``x``. On rank 0, the result is zero for every reduction.

    Raises:
        TypeError: if ``op`` or ``comm`` has the wrong type, or the reduction is not defined for the
            dtype.
        ValueError: if ``op`` is MINLOC or MAXLOC, and the array does not hold pairs.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        SUM: the transpose sums the cotangents of ranks ``r + 1`` to ``n - 1`` (zero on the last
            rank). PROD, MAX and MIN: as for :func:`allreduce`, over the ranks before each.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> offset = mpi4jax.exscan(jnp.ones(3), op=MPI.SUM)
        >>> float(offset[0]) == mpi4jax.default_comm().rank
        True

    See also: :func:`scan`.
    """
    c = as_comm("exscan", comm)
    return call(Exscan(c, reduction=as_reduction("exscan", op)), x)
