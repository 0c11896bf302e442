"""assert_equal: whether all ranks have the same value."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from .._compile.wire import carrier
from .._jax import compat
from .._job.job import rank_names
from .._op.comm import check_not_null
from .._op.operation import T
from .._op.packing import as_arrays, leaf_paths, words_of
from ..ops.allgather import allgather
from ..ops.allreduce import allreduce
from ..ops.bcast import bcast

_SHOWN = 3  # leaves that an error names
_FORM = 200  # maximum number of characters of a tree in an error
_NOWHERE = np.iinfo(np.int32).max
_SEEDS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F  # odd; the primes of xxHash


def assert_equal(x: T, *, comm: MPI.Intracomm | None = None) -> T:
    """Raise an error on all ranks if they have different values.

    For values that should be the same on all ranks, such as the parameters of a model after a step.
    The bits are compared, so 0.0 and -0.0 differ. All NaNs are equal.

    Args:
        x: array of any dtype, of the same shape on all ranks; or a pytree of such arrays.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: ``x``, unchanged.

    Raises:
        AssertionError: if ranks have different values or different trees. The error names the leaf,
            the first index at which a rank differs from rank 0, and the values of all ranks there.
            In a compiled function, JAX raises it as the error of a callback when the program waits
            for a result.
        TypeError: if ``comm`` has the wrong type, or the dtype is not supported.

    Derivative:
        The derivative is the identity. Only the primal values are compared, not the tangents.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> x = mpi4jax.assert_equal({"w": jnp.ones(3)})
        >>> x = mpi4jax.assert_equal(mpi4jax.default_comm().rank) # doctest: +SKIP
        AssertionError: assert_equal: ranks have different values: rank 0 has 0, rank 1 has 1

    Ranks compare a hash of ``x`` by one reduction of 40 bytes. Only where it differs, rank 0
    broadcasts ``x``. See also: :func:`bcast`, :func:`allgather`.
    """
    check_not_null("assert_equal", "comm", comm)
    arrays, structure = as_arrays("assert_equal", "x", x)
    names = [f"leaf {path}" if path else "" for path in leaf_paths(x, structure)]
    assert_alike("assert_equal", names, arrays, comm)
    return jax.tree.unflatten(structure, arrays)  # type: ignore[no-any-return]


def assert_alike(
    op: str, names: Sequence[str], arrays: Sequence[Any], comm: MPI.Intracomm | None
) -> None:
    """Compare arrays as :func:`assert_equal`: an error names ``op`` and the array."""
    leaves = [_Leaf(name, leaf) for name, leaf in zip(names, arrays, strict=True) if leaf.size]
    compare = functools.partial(_compare_values, op, leaves, comm)
    # Values with other shapes, or in another order, cannot be compared.
    form = words_of(
        [
            f"{name.removeprefix('leaf ')} {leaf.dtype}"
            for name, leaf in zip(names, arrays, strict=True)
        ],
        [leaf.shape for leaf in arrays],
        _FORM,
    ).encode()
    digests = jnp.concatenate([jnp.full(1, zlib.crc32(form), np.uint32), _digest(leaves)])
    low, high = jnp.split(allreduce(jnp.concatenate([digests, ~digests]), MPI.MIN, comm=comm), 2)
    differs = low != ~high
    refuse = functools.partial(_compare_forms, op, form, comm)
    if compat.trace_state_clean():
        if differs[0]:
            refuse()
        elif differs.any():
            compare()
    else:
        compare = functools.partial(lax.cond, differs.any(), compare, lambda: None)
        lax.cond(differs[0], refuse, compare)


def _mixed(x: Any) -> Any:
    """Return 32 bits for each 32 bits, one to one, in which each bit depends on all others: the
    last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _digest(leaves: Sequence[_Leaf]) -> jax.Array:
    """Return a hash of 16 bytes of the values: sums of a hash of each word with its place.

    Values that differ in one word have different hashes; others by chance of 2**-128.
    """
    total = jnp.zeros(4, np.uint32)
    for number, leaf in enumerate(leaves):
        words = leaf.bits
        if words.dtype.itemsize == 8:
            words = lax.bitcast_convert_type(words, np.uint32)
        words = words.astype(np.uint32).reshape(-1)
        places = lax.iota(np.uint32, words.size) + np.uint32(zlib.crc32(b"%d" % number))
        sums = [
            jnp.sum(_mixed(_mixed(words + seed) ^ _mixed(places * seed)), dtype=np.uint32)
            for seed in map(np.uint32, _SEEDS)
        ]
        total += jnp.stack(sums)
    return total


def _compare_forms(op: str, form: bytes, comm: MPI.Intracomm | None) -> None:
    mine = np.frombuffer(form[:_FORM].ljust(_FORM), np.uint8)
    _call_now_or_when_run(functools.partial(_report_forms, op), allgather(mine, comm=comm))


def _call_now_or_when_run(report: Callable[..., None], *arrays: Any) -> None:
    """Call a function with arrays at once, or when a traced function runs."""
    if compat.trace_state_clean():
        report(*arrays)
    else:
        jax.debug.callback(report, *arrays)


def _report_forms(op: str, everyones: Any) -> None:
    """Raise the error, if there is one. Under `vmap`, this is also called without an error."""
    found = [np.asarray(form).tobytes().decode(errors="replace").strip() for form in everyones]
    if len(set(found)) > 1:
        words = _by_rank(found)
        raise AssertionError(f"{op}: ranks have different trees or shapes: {words}")


def _by_rank(found: Sequence[str]) -> str:
    """Return what the ranks have: `ranks 0-1 have 1.0, rank 2 has 2.0`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(found):
        ranks.setdefault(value, []).append(rank)
    each = (
        f"{rank_names(who)} {'has' if len(who) == 1 else 'have'} {value}"
        for value, who in ranks.items()
    )
    return ", ".join(each)


def _compare_values(op: str, leaves: Sequence[_Leaf], comm: MPI.Intracomm | None) -> None:
    mine = [leaf.bits for leaf in leaves]
    root = bcast(mine, 0, comm=comm)
    # For each leaf, the first element in which any rank differs from rank 0.
    first = [_first_difference(a, b) for a, b in zip(mine, root, strict=True)]
    first = allreduce(first, MPI.MIN, comm=comm)
    there = [jnp.take(bits, i, axis=0, mode="clip") for bits, i in zip(mine, first, strict=True)]
    values = allgather(there, comm=comm)
    _call_now_or_when_run(functools.partial(_report, op, leaves), first, values)


class _Leaf:
    """A leaf of the tree, and the unsigned integers that are compared: a row for each element.

    Attributes:
        dtype: what a row may be shown as.
    """

    def __init__(self, name: str, value: jax.Array):
        self.name, self.shape = name, value.shape
        x = lax.stop_gradient(value)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x = jax.random.key_data(x)
        else:
            x = x.astype(carrier(x.dtype))[..., None]
        self.dtype = x.dtype
        if jnp.issubdtype(x.dtype, np.complexfloating):
            x = jnp.concatenate([x.real, x.imag], axis=-1)
        if x.dtype == bool:
            x = x.astype(np.uint8)
        bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
        if jnp.issubdtype(x.dtype, np.inexact):
            # All NaNs get the same bits. Under `jax_debug_nans`, no array may contain a NaN.
            nan = np.full((), np.nan, x.dtype).view(bits.dtype)
            bits = jnp.where(jnp.isnan(x), nan, bits)
        self.bits = bits.reshape(value.size, x.shape[-1])

    def words(self, place: int, rows: np.ndarray[Any, Any]) -> str:
        """Return what the ranks have at a place: `['w'] at (0, 1): ranks 0-1 have 1.0, rank 2 has
        2.0`."""
        index = tuple(int(i) for i in np.unravel_index(place, self.shape))
        shown = [np.ascontiguousarray(row).view(self.dtype) for row in rows]
        each = _by_rank([str(x[0] if x.size == 1 else x) for x in shown])
        where = [self.name] * bool(self.name) + [f"index {index}"] * bool(index)
        return f"{' at '.join(where)}{': ' * bool(where)}{each}"


def _first_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the number of the first row that differs, or _NOWHERE."""
    differs = jnp.any(a != b, axis=1)
    return jnp.where(jnp.any(differs), jnp.argmax(differs), _NOWHERE).astype(np.int32)


def _report(op: str, leaves: Sequence[_Leaf], first: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise the error, if there is one. Under `vmap`, this is also called without an error."""
    where = [i for i, place in enumerate(first) if place < _NOWHERE]
    if not where:
        return
    words = [leaves[i].words(int(first[i]), np.asarray(values[i])) for i in where[:_SHOWN]]
    more = f"; and in {len(where) - _SHOWN} more leaves" if len(where) > _SHOWN else ""
    raise AssertionError(f"{op}: ranks have different values: {'; '.join(words)}{more}")
