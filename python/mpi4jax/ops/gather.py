"""gather: the arrays of all ranks, on the root."""

from __future__ import annotations

from mpi4py import MPI

from .._call.definition import define
from .._op.arguments import rank_of
from .._op.comm import as_comm
from .._op.plan import from_root_added, to_root
from .._op.spec import T, call


@define(plan=to_root("gather"), adjoint=from_root_added("scatter"))
def gather(x: T, root: int = 0, *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the arrays of all ranks on the root (MPI_Gather; MPI-4.1, section 6.5).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        root: rank that receives, by default 0.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: on the root, an array of shape ``(n, *S)``, row ``j`` from rank ``j``;
        on other ranks, ``x`` unchanged.

    Raises:
        TypeError: if ``root`` or ``comm`` has a wrong type, or the dtype is not supported.
        ValueError: if ``root`` is not a rank of ``comm``.

    Derivative:
        The transpose scatters the root's cotangent; elsewhere the cotangent
        passes through. Under ``vmap`` the batch axis of the root's result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> y = mpi4jax.gather(jnp.ones(3), root=0)

    See also: :func:`allgather`, :func:`scatter`.
    """
    c = as_comm("gather", comm)
    return call("gather", (x,), {"comm": c, "root": rank_of("gather", "root", root, c)})
