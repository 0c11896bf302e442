"""pvary: the adjoint of allreduce."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._jax import compat
from .._op.comm import as_comm, as_reduction
from .._op.packing import bind_trees
from .._op.spec import SPECS


def pvary(x: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Mark a value that is equal on all ranks as used differently by each: the identity.

    The result of allreduce, allgather and bcast is one global value, with one cotangent. Where
    the ranks go on to use it differently, their cotangents differ, and the gradient needs their
    sum: ``pvary`` adds it. Its derivative is the identity, its transpose an allreduce SUM.

    Args:
        x: array, equal on all ranks, of any shape and of a floating-point or complex dtype; or a
            pytree of such arrays.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Returns:
        ``x``.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> f = lambda x: (comm.rank + 1) * mpi4jax.pvary(x)
        >>> float(jax.grad(f)(1.0)) == sum(range(1, comm.size + 1))
        True
    """
    c, total = as_comm("pvary", comm), as_reduction("pvary", MPI.SUM)
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    # What has no derivative stays as it is.
    varying = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.inexact)]
    if varying and not compat.trace_state_clean():
        p = {"comm": c, "reduction": total, "adjoint": True}
        marked = bind_trees(SPECS["allreduce"], ([leaves[i] for i in varying],), p)
        for i, leaf in zip(varying, marked, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)
