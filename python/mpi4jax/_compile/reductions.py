"""Reductions that NCCL lacks, as reductions that it has.

NCCL reduces integers of 8, 32 and 64 bits and floats, with SUM, PROD, MAX and MIN, where MAX and
MIN pass over NaN. XLA converts what is reduced before the call and the result after it, so that the
host need not reduce. The page about transports lists the reductions that are left to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native

# A prefix reduction gathers the blocks of all ranks only if they take no more bytes than this.
GATHERED_BYTES = 1 << 20

_INTEGERS: dict[int, Any] = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Converted:
    """A reduction of converted values.

    Attributes:
        dtype: the type that is reduced.
        reduction: name of the reduction.
        to, back: conversions of what is reduced, and of the result.
    """

    dtype: Any
    reduction: str
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]


def are_on_stream(on_gpu: bool) -> bool:
    """Return whether NCCL carries reductions."""
    return on_gpu and _native.select_transports([])[1][0] == "nccl"


def converted(reduction: str, dtype: Any, ranks: int) -> Converted | None:
    """Return the reduction that NCCL has for one that it lacks; None if NCCL has this one, or
    none."""
    dtype = np.dtype(dtype)
    back = lambda y: y.astype(dtype)  # noqa: E731
    is_float, is_bool = jnp.issubdtype(dtype, np.floating), dtype == np.bool_
    is_integer = jnp.issubdtype(dtype, np.integer)
    if is_float and reduction in ("MAX", "MIN"):
        return _by_keys(reduction, dtype)
    if reduction in ("SUM", "PROD", "MAX", "MIN") and is_integer and dtype.itemsize == 2:
        wide = np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
        # Sums and products modulo 2**32 are also correct modulo 2**16.
        return Converted(wide, reduction, lambda x: x.astype(wide), back)
    if reduction[0] == "L" and ranks == 1:
        return None  # MPI leaves the operand unchanged
    if reduction in ("LAND", "LOR") and is_integer:
        extremum = "MIN" if reduction == "LAND" else "MAX"
        return Converted(np.dtype(np.uint8), extremum, lambda x: (x != 0).astype(np.uint8), back)
    if (reduction == "LXOR" and (is_integer or is_bool)) or (reduction == "BXOR" and is_bool):
        to = lambda x: (x != 0).astype(np.int32)  # noqa: E731
        return Converted(np.dtype(np.int32), "SUM", to, lambda y: (y & 1).astype(dtype))
    return None


def _by_keys(reduction: str, dtype: Any) -> Converted | None:
    """Compute MAX and MIN of floats as MAX and MIN of integers of the same order.

    The bits of a float, as an integer, are in the order of floats where the sign is clear, and in
    the reverse order where it is set. NaN is above (MAX) or below (MIN) all others, so the result
    is NaN if an operand is, as with :func:`jax.lax.max`.
    """
    if dtype.itemsize not in _INTEGERS or (dtype.itemsize == 8 and not jax.config.jax_enable_x64):
        return None
    integer = _INTEGERS[dtype.itemsize]
    limits = np.iinfo(integer)
    wide = np.dtype(np.int32 if dtype.itemsize == 2 else integer)
    nan = limits.max if reduction == "MAX" else limits.min

    def reversed_below_zero(i: Any) -> Any:
        return jnp.where(i < 0, i ^ integer(limits.max), i)

    def to(x: Any) -> Any:
        keys = reversed_below_zero(jax.lax.bitcast_convert_type(x, integer))
        return jnp.where(jnp.isnan(x), integer(nan), keys).astype(wide)

    def back(y: Any) -> Any:
        keys = y.astype(integer)
        x = jax.lax.bitcast_convert_type(reversed_below_zero(keys), dtype)
        return jnp.where(keys == nan, jnp.asarray(np.nan, dtype), x)

    return Converted(wide, reduction, to, back)


_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": jnp.add,
    "PROD": jnp.multiply,
    "MAX": jnp.maximum,
    "MIN": jnp.minimum,
    "LAND": lambda a, b: ((a != 0) & (b != 0)).astype(a.dtype),
    "LOR": lambda a, b: ((a != 0) | (b != 0)).astype(a.dtype),
    "LXOR": lambda a, b: ((a != 0) ^ (b != 0)).astype(a.dtype),
}


def can_gather(reduction: str, dtype: Any, elements: int, ranks: int) -> bool:
    """Return whether a prefix reduction gathers the blocks of all ranks, which XLA then reduces: if
    the blocks are small. All ranks decide alike."""
    is_small = elements * np.dtype(dtype).itemsize * ranks <= GATHERED_BYTES and ranks <= 64
    return is_small and reduction in _FOLDS


def folded(reduction: str, blocks: Any, rank: int, *, is_exclusive: bool, reverse: bool) -> Any:
    """Return the prefix reduction on a rank of the blocks of all ranks, along the first axis."""
    blocks = blocks[rank + is_exclusive :] if reverse else blocks[: rank + 1 - is_exclusive]
    # An exclusive reduction of no elements gives zeros. `jnp.sum` is not used, because it adds
    # zero.
    if not blocks.shape[0]:
        return jnp.zeros(blocks.shape[1:], blocks.dtype)
    keys = converted(reduction, blocks.dtype, 2) if reduction in ("MAX", "MIN") else None
    if keys is None:
        return functools.reduce(_FOLDS[reduction], blocks)
    return keys.back(functools.reduce(_FOLDS[reduction], keys.to(blocks)))
