"""scan: a reduction over the ranks up to each."""

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
class Scan(Reducing, name="scan"):
    def plan(self, how: How) -> Plan:
        return Plan("scan", attrs={"reverse": self.adjoint})

    def tangent(self, r: ReductionTangent) -> Any:
        return r.over_first(self.comm.rank + 1)

    def overwrites(self) -> bool:
        return True


@define(Scan)
def scan(x: T, op: MPI.Op = MPI.SUM, *, comm: MPI.Intracomm | None = None) -> T:
    """Reduce over the ranks up to this one (MPI_Scan; MPI-4.1, section 6.11.1).

    Args:
        x: array, or pytree of arrays. Its shape ``S`` must be the same on all ranks; the values may
            differ.
        op: reduction, by default ``MPI.SUM``, or one made with ``MPI.Op.Create``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on rank ``r`` the reduction over ranks ``0`` to ``r``, of the shape
        and dtype of ``x``.

    Raises:
        TypeError: if ``op`` or ``comm`` has the wrong type, or the reduction is not defined for the
            dtype.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        SUM: the transpose sums the cotangents of ranks ``r`` to ``n - 1``. PROD, MAX and MIN: as
        for :func:`allreduce`, over the ranks up to each.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> y = mpi4jax.scan(jnp.ones(3), op=MPI.SUM)
        >>> float(y[0]) == mpi4jax.default_comm().rank + 1
        True

    See also: :func:`allreduce`.
    """
    c = as_comm("scan", comm)
    return call(Scan(c, reduction=as_reduction("scan", op)), x)
