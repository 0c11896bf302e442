"""assert_equal: whether all ranks have the same value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from .._compile.lowering import carrier
from .._jax import compat
from .._job.job import rank_names
from .._op.spec import T
from ..ops.allgather import allgather
from ..ops.allreduce import allreduce
from ..ops.bcast import bcast

_SHOWN = 3  # leaves that an error names
_NOWHERE = np.iinfo(np.int32).max


def assert_equal(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Raise an error on all ranks unless all of them have the same value.

    For what ought to be the same everywhere, as parameters of a model after a step. Compared are
    bits, so that 0.0 and -0.0 differ; a NaN is equal to any other one.

    Args:
        x: array of any dtype, of the same shape on all ranks; or a pytree of such arrays.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: ``x``, unchanged.

    Raises:
        AssertionError: ranks have different values. It names the leaf, the first index where one of
            them differs from rank 0, and all ranks' values there. From a compiled function it comes
            as JAX's error of a callback, with these words, when something waits for it.
        TypeError: a wrong type of ``comm`` or dtype.

    Derivative:
        That of the identity. What is compared is the value; nothing compares tangents.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> x = mpi4jax.assert_equal({"w": jnp.ones(3)})
        >>> x = mpi4jax.assert_equal(mpi4jax.default_comm().rank) # doctest: +SKIP
        AssertionError: assert_equal: ranks have different values: rank 0 has 0, rank 1 has 1

    It costs a broadcast of ``x`` and two messages of a few numbers. See also: :func:`bcast`,
    :func:`allgather`.
    """
    y = jax.tree.map(jnp.asarray, x)
    leaves = [
        _Leaf(jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(y)[0]
        if leaf.size
    ]
    mine = [leaf.bits for leaf in leaves]
    root = bcast(mine, 0, comm=comm)
    # Of each leaf, the first element where any rank differs from rank 0.
    first = [_first_difference(a, b) for a, b in zip(mine, root, strict=True)]
    first = allreduce(first, MPI.MIN, comm=comm)
    there = [jnp.take(bits, i, axis=0, mode="clip") for bits, i in zip(mine, first, strict=True)]
    values = allgather(there, comm=comm)
    report = functools.partial(_report, leaves)
    if compat.trace_state_clean():
        report(first, values)
    else:
        differs = functools.reduce(jnp.minimum, first, _NOWHERE) < _NOWHERE
        say = functools.partial(jax.debug.callback, report)
        lax.cond(differs, say, lambda *_: None, first, values)
    return y


class _Leaf:
    """A leaf of the tree, and what is compared of it: a row of unsigned integers for each element.

    Attributes:
        dtype: what a row may be shown as.
    """

    def __init__(self, path: str, value: jax.Array):
        self.path, self.shape = path, value.shape
        x = lax.stop_gradient(value)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x = jax.random.key_data(x)
        else:
            x = x.astype(carrier(jax.typeof(x)).dtype)[..., None]
        self.dtype = x.dtype
        if jnp.issubdtype(x.dtype, np.complexfloating):
            x = jnp.concatenate([x.real, x.imag], axis=-1)
        if jnp.issubdtype(x.dtype, np.inexact):
            x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
        if x.dtype == bool:
            x = x.astype(np.uint8)
        x = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
        self.bits = x.reshape(value.size, x.shape[-1])

    def words(self, place: int, rows: np.ndarray[Any, Any]) -> str:
        """What the ranks have at a place: `['w'] at (0, 1): ranks 0-1 have 1.0, rank 2 has 2.0`."""
        index = tuple(int(i) for i in np.unravel_index(place, self.shape))
        found: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            shown = np.ascontiguousarray(row).view(self.dtype)
            found.setdefault(str(shown[0] if shown.size == 1 else shown), []).append(rank)
        each = (
            f"{rank_names(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
            for value, ranks in found.items()
        )
        where = [f"leaf {self.path}"] * bool(self.path) + [f"index {index}"] * bool(index)
        return f"{' at '.join(where)}{': ' * bool(where)}{', '.join(each)}"


def _first_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """The number of the first row that differs, or _NOWHERE."""
    differs = jnp.any(a != b, axis=1)
    return jnp.where(jnp.any(differs), jnp.argmax(differs), _NOWHERE).astype(np.int32)


def _report(leaves: Sequence[_Leaf], first: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise the error, if there is one. Under `vmap` it is called where there is none."""
    where = [i for i, place in enumerate(first) if place < _NOWHERE]
    if not where:
        return
    words = [leaves[i].words(int(first[i]), np.asarray(values[i])) for i in where[:_SHOWN]]
    more = f"; and in {len(where) - _SHOWN} more leaves" if len(where) > _SHOWN else ""
    raise AssertionError(f"assert_equal: ranks have different values: {'; '.join(words)}{more}")
