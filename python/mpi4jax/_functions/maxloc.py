"""maxloc and minloc over ranks: the extremum of values, and the index that belongs to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from .._op.comm import check_not_null
from .._op.packing import as_array
from ..ops.allreduce import allreduce


def maxloc(x: Any, index: Any, *, comm: MPI.Intracomm | None = None) -> tuple[jax.Array, jax.Array]:
    """Find the maximum over all ranks, and its index.

    It is the reduction ``MPI.MAXLOC`` (MPI-4.1, section 6.9.4). That reduces pairs of one dtype: in
    float32, indices above 2**24 are rounded. Here the index is an integer of its own. Elements of
    an array are reduced one by one.

    Args:
        x: array of booleans, integers or floats: the values. Its shape ``S`` must be the same on
            all ranks.
        index: integer, or array of integers whose shape broadcasts to ``S``: what belongs to each
            value, such as its place in a global array. The same dtype on all ranks.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        tuple: the maximum, of the shape and dtype of ``x``, and its index, of the shape of ``x``
        and the dtype of ``index``; the same on all ranks. Among equal values, the lowest index is
        returned. NaN is larger than all other values, as in ``jnp.argmax``.

    Raises:
        TypeError: if ``x`` is complex, if ``index`` does not hold integers, or if ``comm`` has the
            wrong type.
        ValueError: if ``index`` does not broadcast to the shape of ``x``; if a NumPy array of
            64-bit integers does not fit into 32 bits, and ``jax_enable_x64`` is not set.

    Derivative:
        The maximum has the derivative of ``allreduce(x, MPI.MAX)``: ties share the cotangent
        equally. The index is not differentiable.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> rank = mpi4jax.default_comm().rank
        >>> local = jnp.array([3.0, 5.0, 4.0])  # a block of a global array
        >>> place = jnp.argmax(local)
        >>> value, index = mpi4jax.maxloc(local[place], len(local) * rank + place)
        >>> float(value), int(index)
        (5.0, 1)

    It costs two reductions. See also: :func:`minloc`, :func:`allreduce`.
    """
    return _extremum("maxloc", x, index, MPI.MAX, comm)


def minloc(x: Any, index: Any, *, comm: MPI.Intracomm | None = None) -> tuple[jax.Array, jax.Array]:
    """Find the minimum over all ranks, and its index.

    Like :func:`maxloc`, but for the minimum. Among equal values, the lowest index is returned. NaN
    is smaller than all other values, as in ``jnp.argmin``.

    Args:
        x: array of booleans, integers or floats: the values. Its shape ``S`` must be the same on
            all ranks.
        index: integer, or array of integers whose shape broadcasts to ``S``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        tuple: the minimum, and its index; the same on all ranks.

    Raises:
        TypeError, ValueError: as :func:`maxloc`.

    Derivative:
        The minimum has the derivative of ``allreduce(x, MPI.MIN)``: ties share the cotangent
        equally. The index is not differentiable.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> rank = mpi4jax.default_comm().rank
        >>> value, index = mpi4jax.minloc(2.0, 10**8 + 1 + rank)
        >>> int(index)
        100000001

    See also: :func:`maxloc`.
    """
    return _extremum("minloc", x, index, MPI.MIN, comm)


def _extremum(
    name: str, x: Any, index: Any, op: MPI.Op, comm: MPI.Intracomm | None
) -> tuple[jax.Array, jax.Array]:
    check_not_null(name, "comm", comm)
    x, index = as_array(x), _integers(name, index)
    if jnp.issubdtype(x.dtype, np.complexfloating):
        raise TypeError(f"{name}: argument 'x' must have ordered values, got {x.dtype}")
    try:
        index = jnp.broadcast_to(index, x.shape)
    except ValueError as error:
        raise ValueError(
            f"{name}: argument 'index' must have a shape that broadcasts to the shape of 'x'; "
            f"expected {x.shape}, got {index.shape}"
        ) from error
    extremum = allreduce(x, op, comm=comm)
    is_extremum = _same(lax.stop_gradient(x), lax.stop_gradient(extremum))
    none = np.array(jnp.iinfo(index.dtype).max, index.dtype)
    return extremum, allreduce(jnp.where(is_extremum, index, none), MPI.MIN, comm=comm)


def _integers(name: str, index: Any) -> jax.Array:
    array = as_array(index)
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: argument 'index' must be of integers, got {array.dtype}")
    if isinstance(index, np.ndarray | np.generic) and not np.array_equal(array, index):
        raise ValueError(
            f"{name}: argument 'index' has values of {index.dtype} that do not fit into "
            f"{array.dtype}; set JAX_ENABLE_X64=1 on all ranks"
        )
    return array


def _same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return whether values are equal: by their bits, since XLA on CPUs takes denormals for
    zeros."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x == y
    if x.dtype.itemsize < 2:  # all are normal numbers of float32
        x, y = x.astype(np.float32), y.astype(np.float32)
    bits = [lax.bitcast_convert_type(v, f"uint{8 * v.dtype.itemsize}") for v in (x, y)]
    are_zero = (bits[0] | bits[1]) << 1 == 0
    return (bits[0] == bits[1]) | are_zero | (jnp.isnan(x) & jnp.isnan(y))
