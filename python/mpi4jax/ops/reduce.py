"""reduce: a reduction over all ranks, on the root."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._diff.reductions import ReductionTangent
from .._op.arguments import rank_of
from .._op.comm import Reduction, as_comm, as_reduction
from .._op.plan import Plan, Result, from_root_added, to_root
from .._op.spec import Params, T, call, is_root


def _adjoint(p: Params) -> Plan:
    return Plan("bcast", Result.OPERAND) if is_root(p) else from_root_added("bcast")(p)


def _derivative(r: ReductionTangent) -> Any:
    share = r.product_of_others() if r.name == "PROD" else r.share_of_extremum(r.extremum())
    ty = r.reduce_tangent("reduce", r.t * share)
    return ty if is_root(r.p) else r.t  # elsewhere the result is the input


@define(
    plan=to_root("reduce"), adjoint=_adjoint, derivative=_derivative, only_for_its_result=is_root
)
def reduce(
    x: T, op: MPI.Op | Reduction = MPI.SUM, root: int = 0, *, comm: MPI.Intracomm | None = None
) -> T:
    """Reduce over all ranks, result on the root (MPI_Reduce; MPI-4.1, section 6.9.1).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        op: reduction, by default ``MPI.SUM``; also ``mpi4jax.MEAN``, or one made with
            ``MPI.Op.Create``.
        root: rank that gets the result, by default 0.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on the root the reduction, of the shape and dtype of ``x``; on other
        ranks, ``x`` unchanged.

    Raises:
        TypeError: if ``op``, ``root`` or ``comm`` has a wrong type, or the reduction is not defined
            for the dtype.
        ValueError: if ``root`` is not a rank of ``comm``.
        NotImplementedError: if it is differentiated, and the reduction has no derivative.

    Derivative:
        SUM: the transpose broadcasts the root's cotangent; elsewhere the cotangent
        passes through. PROD, MAX and MIN: as for :func:`allreduce`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> y = mpi4jax.reduce(jnp.ones(3), op=MPI.SUM, root=0)

    See also: :func:`allreduce`, :func:`scan`.
    """
    c = as_comm("reduce", comm)
    p = {
        "comm": c,
        "reduction": as_reduction("reduce", op),
        "root": rank_of("reduce", "root", root, c),
    }
    return call("reduce", (x,), p)
