"""pvary, the adjoint of allreduce; and ipvary, whose adjoint is an iallreduce."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._jax import compat
from .._op import manual
from .._op.comm import as_comm
from .._op.operation import Operation, T
from .._op.packing import as_array, bind_trees
from .._op.primitive import sum_over_ranks
from .._requests.request import Request
from .._requests.start import begin


def _operation(name: str, comm: MPI.Intracomm | None) -> Operation:
    """Return the adjoint of an allreduce with SUM."""
    return sum_over_ranks(name, as_comm(name, comm), adjoint=True)


def pvary(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Return a replicated value that each rank uses differently; its cotangents are summed.

    The result of allreduce, allgather and bcast is one global value, with one cotangent. If the
    ranks then use it differently, their cotangents differ, and the gradient needs their sum:
    ``pvary`` adds this sum. Its derivative is the identity, and its transpose is an allreduce SUM.

    Args:
        x: array whose values are the same on all ranks, or a pytree of such arrays. Arrays of
            integers have no derivative, and are returned unchanged.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        ``x``.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> f = lambda x: (comm.rank + 1) * mpi4jax.pvary(x)
        >>> float(jax.grad(f)(1.0)) == sum(range(1, comm.size + 1))
        True
    """
    op = _operation("pvary", comm)
    leaves, tree = jax.tree.flatten(jax.tree.map(as_array, x))
    inside = [manual.pvary(op.comm, leaf) for leaf in leaves]
    if all(leaf is not None for leaf in inside):
        return cast(T, jax.tree.unflatten(tree, inside))
    # Leaves without a derivative are unchanged.
    varying = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.inexact)]
    if varying and not compat.trace_state_clean():
        varied = bind_trees(op, ([leaves[i] for i in varying],))
        for i, leaf in zip(varying, varied, strict=True):
            leaves[i] = leaf
    return cast(T, jax.tree.unflatten(tree, leaves))


def ipvary(x: T, *, comm: MPI.Intracomm | None = None) -> Request[T]:
    """Like :func:`pvary`, but the allreduce of the backward pass is nonblocking.

    The forward pass sends nothing. In the backward pass, the transpose of ``wait`` initiates an
    :func:`iallreduce` of the cotangents, and the transpose of ``ipvary`` waits for it. If each
    layer begins with the ``wait`` for its parameters, the gradients of a layer are summed while the
    gradients of the layers before it are computed.

    Args:
        x: array of a floating-point or complex dtype, whose values are the same on all ranks; or a
            pytree of such arrays, whose cotangents are summed in one reduction for each dtype.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        Request: for :func:`wait`, whose result is ``x``. With ``wait(request, after=y)``, where
        ``y`` is the layer's input, the cotangent of ``y`` is used once the iallreduce has started.

    Raises:
        TypeError: if a leaf of ``x`` has another dtype.
        NotImplementedError: if it is called in a :func:`shard_map`, where JAX sums the cotangents
            itself.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> def loss(layers):
        ...     y = jnp.float32(comm.rank + 1)
        ...     for request in [mpi4jax.ipvary(w) for w in layers]:
        ...         y = y * mpi4jax.wait(request, after=y)
        ...     return mpi4jax.allreduce(y)
        >>> gradients = jax.grad(loss)([jnp.float32(1), jnp.float32(2)])
        >>> float(gradients[1]) == sum(range(1, comm.size + 1))
        True

    See also: :func:`pvary`, :func:`after`.
    """
    if manual.is_inside():
        raise NotImplementedError(
            "ipvary: inside of mpi4jax.shard_map, JAX inserts pvary itself; call it only "
            "outside, in a function of operations"
        )
    op = _operation("ipvary", comm)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        dtype = as_array(leaf).dtype
        if not jnp.issubdtype(dtype, np.inexact):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"ipvary: argument 'x' has dtype {dtype}{where}; expected floating-point or "
                "complex numbers: only these have derivatives"
            )
    return begin(op, (x,))
