"""Reductions of arrays of one rank, where nothing is communicated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI

from .._op.comm import Reduction, as_reduction
from .._op.primitive import check_reduction

_FUNCTIONS = {
    **{"SUM": jnp.add, "PROD": jnp.multiply, "MAX": jnp.maximum, "MIN": jnp.minimum},
    **{"LAND": jnp.logical_and, "LOR": jnp.logical_or, "LXOR": jnp.logical_xor},
    **{"BAND": jnp.bitwise_and, "BOR": jnp.bitwise_or, "BXOR": jnp.bitwise_xor},
}


def _wide(dtype: Any) -> Any:
    """What a type is computed in: those of less than 16 bits have no arithmetic of their own."""
    if jnp.issubdtype(dtype, jnp.floating) and ml_dtypes.finfo(dtype).bits < 16:
        return jnp.float32
    return dtype


def _located(name: str, x: Any, y: Any) -> Any:
    """Of pairs (value, index) the one with the extremum, a NaN if there is one; of equal values
    the one with the lower index."""
    (a, i), (b, j) = ((v[..., 0], v[..., 1]) for v in (x, y))
    better = a > b if name == "MAXLOC" else a < b
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    wins = jnp.where(same, i < j, better | jnp.isnan(a))
    return jnp.where(wins[..., None], x, y)


def _by_user(reduction: Reduction, x: Any, y: Any) -> Any:
    from mpi4py.util.dtlib import from_numpy_dtype  # few need it: not when mpi4jax is imported

    try:
        from_numpy_dtype(x.dtype)
    except ValueError:
        raise TypeError(
            f"reduce_local: mpi4py has no MPI datatype for dtype {x.dtype}, which a reduction made "
            "with MPI.Op.Create needs; convert the arrays, for instance to float32"
        ) from None

    def on_host(a: Any, b: Any) -> Any:
        inbuf, inoutbuf = np.array(a, order="C"), np.array(b, order="C")
        reduction.mpi.Reduce_local(inbuf, inoutbuf)
        return inoutbuf

    @jax.custom_jvp
    def call(x: Any, y: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(on_host, shape, x, y, vmap_method="sequential")

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "reduce_local: a reduction made with MPI.Op.Create has no derivative; expected a "
            "predefined one such as MPI.SUM, or use a function of jax.numpy"
        )

    return call(x, y)


def _reduced(reduction: Reduction, x: Any, y: Any) -> Any:
    x, y = jnp.asarray(x), jnp.asarray(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
            "reduce_local: argument 'y' must be of the shape and dtype of 'x', "
            f"{x.dtype}{list(x.shape)}, got {y.dtype}{list(y.shape)}"
        )
    check_reduction("reduce_local", reduction, x)
    if reduction.user:
        return _by_user(reduction, x, y)
    wide = _wide(x.dtype)
    a, b = x.astype(wide), y.astype(wide)
    if reduction.name in ("MAXLOC", "MINLOC"):
        return _located(reduction.name, a, b).astype(x.dtype)
    return _FUNCTIONS[reduction.name](a, b).astype(x.dtype)


def reduce_local(x: Any, y: Any, op: MPI.Op = MPI.SUM) -> Any:
    """Reduce two arrays of this rank: ``x op y`` (MPI_Reduce_local; MPI-4.1, section 6.9.7).

    It communicates nothing, takes no token and gives none. For algorithms of one's own that
    combine what ranks have sent as the reductions of MPI do.

    Args:
        x: array of any shape; or a pytree of arrays.
        y: array of the same shape and dtype, or a pytree of such arrays.
        op: reduction, by default ``MPI.SUM``; or one made with ``MPI.Op.Create``, which Python
            then calls on the host. ``MPI.MINLOC`` and ``MPI.MAXLOC`` reduce pairs (value, index)
            along a last axis of length 2.

    Returns:
        The reduction, of the shape and dtype of ``x``.

    Raises:
        TypeError: not a reduction, or one that is not defined for the dtype.
        ValueError: ``x`` and ``y`` differ in shape, dtype or structure; MINLOC or MAXLOC of an
            array that does not hold pairs.
        NotImplementedError: differentiated with a reduction of the user's.

    Derivative:
        That of the function of ``jax.numpy``. MAX and MIN: ties share equally.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> mpi4jax.reduce_local(jnp.array([1, 5]), jnp.array([4, 2]), op=MPI.MAX).tolist()
        [4, 5]

    See also: :func:`allreduce`.
    """
    reduction = as_reduction("reduce_local", op)
    leaves, tree = jax.tree.flatten(x)
    others, other_tree = jax.tree.flatten(y)
    if tree != other_tree:
        raise ValueError(
            f"reduce_local: argument 'y' must have the structure of 'x', {tree}, got {other_tree}"
        )
    return tree.unflatten([_reduced(reduction, a, b) for a, b in zip(leaves, others, strict=True)])
