"""gather: the arrays of all ranks, on the root."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .._call.call import run
from .._call.definition import define
from .._compile.lowering import Avals, Lowering, Operands, to_root
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.spec import Call, is_root


def adjoint_with(scatter: str) -> Any:
    """The adjoint of gathering, with the op that scatters."""

    def adjoint(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
        if is_root(low.p):
            return low.call(scatter, *xs, out=out)
        # This rank's result was its own input.
        (y,) = low.call(scatter, out=out)
        return [low.plus(y, xs[0])]

    return adjoint


def _prepare(x: Any, root: int, comm: MPI.Intracomm | None) -> Call:
    c = as_comm("gather", comm)
    return Call("gather", (x,), {"comm": c, "root": rank_of("gather", "root", root, c)})


define(
    "gather",
    prepare=_prepare,
    lower=to_root,
    adjoint=adjoint_with("scatter"),
    self_test=lambda t: (
        lambda: t.ops.gather(t.x, t.last),
        t.all_x if t.rank == t.last else t.x,
    ),
)


def gather(x: Any, root: int = 0, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on the root (MPI_Gather; MPI-4.1, section 6.5).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        root: rank that receives, by default 0.
        comm: communicator of ``n`` ranks; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        tuple: on the root array of shape ``(n, *S)``, row ``j`` from rank ``j``; on other ranks
        ``x``, unchanged; and the new token.

    Raises:
        TypeError: a wrong type of ``root``, ``comm``, ``token`` or dtype.
        ValueError: ``root`` is not a rank of ``comm``.

    Derivative:
        The transpose scatters the root's cotangent; other ranks add that of the ``x`` which they
        returned. Under ``vmap`` the batch axis of the root's result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.gather(jnp.ones(3), root=0)

    See also: :func:`allgather`, :func:`scatter`.
    """
    return run(_prepare(x, root, comm), token)
