"""bcast: the root's array, on all ranks."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .._call.call import run
from .._call.definition import define
from .._compile.lowering import Avals, Lowering, Operands
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.spec import Call, is_root


def _lower(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    if is_root(low.p):
        low.call("bcast", *xs)
        return [xs[0][0]]
    return low.call("bcast", out=out)


def _adjoint(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    return [xs[0][0] if is_root(low.p) else low.zeros(out[0])]


def _prepare(x: Any, root: int, comm: MPI.Intracomm | None) -> Call:
    c = as_comm("bcast", comm)
    return Call("bcast", (x,), {"comm": c, "root": rank_of("bcast", "root", root, c)})


define(
    "bcast",
    prepare=_prepare,
    lower=_lower,
    adjoint=_adjoint,
    is_uniform=True,
    self_test=lambda t: (lambda: t.ops.bcast(t.x, t.last), t.all_x[t.last]),
)


def bcast(x: Any, root: int = 0, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Copy the root's array to all ranks (MPI_Bcast; MPI-4.1, section 6.4).

    Args:
        x: array of shape ``S``; its values are read on the root only. Or a pytree of such.
        root: rank whose array is copied, by default 0.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        tuple: the root's array; and the new token.

    Raises:
        TypeError: a wrong type of ``root``, ``comm``, ``token`` or dtype.
        ValueError: ``root`` is not a rank of ``comm``.

    Derivative:
        The result is one global value: the root gets its cotangent, other ranks get zeros.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.bcast(jnp.arange(3), root=0)
        >>> y.tolist()
        [0, 1, 2]

    See also: :func:`scatter`, :func:`pvary`.
    """
    return run(_prepare(x, root, comm), token)
