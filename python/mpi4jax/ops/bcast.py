"""bcast: the root's array, on all ranks."""

from __future__ import annotations

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.plan import Plan, Result
from .._op.spec import Params, T, call, is_root


def _plan(p: Params) -> Plan:
    return Plan("bcast", Result.OPERAND) if is_root(p) else Plan("bcast", sends=False)


def _adjoint(p: Params) -> Plan:
    return Plan(None, Result.OPERAND if is_root(p) else Result.ZEROS)


@define(plan=_plan, adjoint=_adjoint, is_uniform=True)
def bcast(x: T, root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Copy the root's array to all ranks (MPI_Bcast; MPI-4.1, section 6.4).

    Args:
        x: array of shape ``S``; its values are read on the root only. Or a pytree of such arrays.
        root: rank whose array is copied, by default 0.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: the root's array.

    Raises:
        TypeError: if ``root`` or ``comm`` has a wrong type, or the dtype is not supported.
        ValueError: if ``root`` is not a rank of ``comm``.

    Derivative:
        The result is one global value: the root gets its cotangent, other ranks get zeros.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.bcast(jnp.arange(3), root=0)
        >>> y.tolist()
        [0, 1, 2]

    See also: :func:`scatter`, :func:`pvary`.
    """
    c = as_comm("bcast", comm)
    return call("bcast", (x,), {"comm": c, "root": rank_of("bcast", "root", root, c)})
