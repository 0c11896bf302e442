"""Sums of floating-point numbers whose bits depend only on the numbers.

Each number is split at exponents that all ranks have in common, counted from the exponent of the
largest number (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013). The
pieces are integers in units of their bin, and integers are added without rounding (Hallberg and
Adcroft, "An order-invariant real-to-integer conversion sum", Parallel Computing 40, 2014): in any
order, on any rank. Only the sum is rounded, once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from ..ops import allreduce
from .arrays import T, as_array
from .base import as_comm

Bins = list[jax.Array]  # integers, beginning with the largest unit


class _Format(NamedTuple):
    """How numbers of one dtype are split: bins are an even number of ``bits`` apart."""

    integer: Any
    mantissa: int  # number of bits, without the implicit leading bit
    bias: int
    bits: int
    bins: int

    @property
    def first(self) -> int:
        """The number of bits in the first bin; the other bins also have a sign."""
        return self.bits - 1

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa


# 512 pieces can be added before carries have to be propagated. The smallest unit is 2^-65, 2^-99 of
# the power of two above the largest number.
_FLOAT32 = _Format(jnp.int32, 23, 127, 22, 3)
_FLOAT64 = _Format(jnp.int64, 52, 1023, 50, 2)


def _format(dtype: Any) -> _Format:
    return _FLOAT64 if dtype == jnp.float64 else _FLOAT32


def _power(form: _Format, exponent: jax.Array) -> jax.Array:
    """Return a power of two, made of its bits."""
    float_type = jnp.float64 if form is _FLOAT64 else jnp.float32
    bits = (exponent + form.bias).astype(form.integer) << form.mantissa
    return lax.bitcast_convert_type(bits, float_type)


def _folded(
    f: Callable[[jax.Array], Bins], x: Any, add: Callable[[Any, Any], Any], times: int
) -> Bins:
    """Return the sum of ``f`` of ``times`` pieces of the last axis, then ``f`` of the remainder.

    This is one loop without a reduction, which every version of XLA compiles to vector
    instructions, if its threads get parts of equal length.
    """
    length = jax.tree.leaves(x)[0].shape[-1] // times
    length -= length % 32 if length > 32 else 0
    cut = lambda start, end: f(jax.tree.map(lambda v: v[..., start:end], x))  # noqa: E731
    pieces = [cut(i * length, (i + 1) * length) for i in range(times)]
    sums = functools.reduce(lambda a, b: list(map(add, a, b)), pieces)
    return [jnp.concatenate(pair, -1) for pair in zip(sums, cut(times * length, None), strict=True)]


def _same(x: Any) -> Any:
    return x


@functools.partial(jax.jit, static_argnums=1)
def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the bits of the largest absolute value. As integers, the bits of a NaN are larger than
    the bits of infinity."""
    rows = _rows(x, axes)
    form = _format(rows.dtype)

    def bits(v: jax.Array) -> Bins:
        return [lax.bitcast_convert_type(v, form.integer) & jnp.iinfo(form.integer).max]

    if rows.shape[-1] > 4096:
        found = _folded(_same, _folded(bits, rows, jnp.maximum, 16), jnp.maximum, 16)
    else:
        found = bits(rows)
    return jnp.max(found[0], -1, initial=0)


def _rows(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the array with the terms of each sum along the last axis."""
    rest = [n for k, n in enumerate(x.shape) if k not in axes]
    last = range(x.ndim - len(axes), x.ndim)
    rows = jnp.moveaxis(x, axes, last).reshape(*rest, -1 if x.size else 0)
    return rows.astype(jnp.promote_types(x.dtype, jnp.float32))


def _exponent(form: _Format, largest: jax.Array) -> jax.Array:
    """Return the biased exponent of the largest number, or the least that can be scaled by."""
    return jnp.maximum(largest >> form.mantissa, form.first - 1)


def _carried(bins: Bins, bits: int) -> Bins:
    """Return the same number with all bins except the first in 0 to ``2**bits - 1``."""
    out, carry = [], jnp.zeros((), bins[0].dtype)
    for bin_ in reversed(bins[1:]):
        bin_ = bin_ + carry
        carry = bin_ >> bits
        out.append(bin_ - (carry << bits))
    return [bins[0] + carry, *reversed(out)]


@functools.partial(jax.jit, static_argnums=1)
def _split(x: jax.Array, axes: tuple[int, ...], largest: jax.Array) -> jax.Array:
    """Return this rank's sum as integers that can be added between ranks, and the number of
    infinities.
    """
    rows = _rows(x, axes)
    form = _format(rows.dtype)
    scale = _power(form, form.first + form.bias - 1 - _exponent(form, largest))[..., None]
    # Adding 1.5 * 2**mantissa leaves an integer in the lowest bits. This number is computed from an
    # operand, because XLA would simplify the addition and subtraction of a constant.
    nothing = largest >> (jnp.iinfo(form.integer).bits - 1)
    offset = 1.5 * _power(form, form.mantissa + nothing)[..., None]

    def pieces(v: jax.Array) -> Bins:
        out = []
        rest = v * scale
        for _ in range(form.bins):
            moved = rest + offset
            integer = lax.bitcast_convert_type(moved, form.integer)
            out.append(integer - lax.bitcast_convert_type(offset, form.integer))
            rest = (rest - (moved - offset)) * 2.0**form.bits  # both without rounding
        return out

    if rows.shape[-1] > 4096:
        # With 32 slices side by side, the processor's prefetcher does not follow the loop.
        bins = _folded(_same, _folded(pieces, rows, operator.add, 8), operator.add, 16)
    else:
        bins = pieces(rows)
    bins = [jnp.zeros_like(bins[0])] * 2 + bins
    while bins[0].shape[-1] > 256:
        bins = _carried(bins, form.bits)
        bins = _folded(_same, _folded(_same, bins, operator.add, 16), operator.add, 16)
    bins = [jnp.sum(b, -1, dtype=b.dtype) for b in _carried(bins, form.bits)]
    # Each bin is split into two halves, so that the bins of a million ranks can be added.
    half = form.bits // 2
    halves = [h for b in _carried(bins, form.bits) for h in (b >> half, b & (2**half - 1))]

    def infinities() -> Bins:
        signs = (rows != jnp.inf, rows != -jnp.inf)
        isnan = jnp.isnan(rows)
        return [jnp.any(isnan | ~s, -1).astype(form.integer) for s in signs]

    special = lax.cond(
        jnp.any(largest >= form.infinity), infinities, lambda: [jnp.zeros_like(halves[0])] * 2
    )
    return jnp.stack([*special, *halves])


@functools.partial(jax.jit, static_argnums=2)
def _rounded(sums: jax.Array, largest: jax.Array, dtype: Any) -> jax.Array:
    """Return the number of this dtype that is nearest to a sum."""
    form = _format(dtype)
    bits, half = form.bits, form.bits // 2
    plus, minus, *halves = sums
    halves = _carried(halves, half)
    bins = [(high << half) + low for high, low in zip(halves[::2], halves[1::2], strict=True)]
    negative = bins[0] < 0
    bins = _carried([jnp.where(negative, -b, b) for b in bins], bits)
    # Shift the leading 1 to the top of the first bin: first by whole bins, then by bits.
    exponent = _exponent(form, largest) - (form.bias - 1) - form.first + 2 * bits
    for _ in bins[1:]:
        empty = bins[0] == 0
        shifted = [*bins[1:], jnp.zeros_like(bins[0])]
        bins = [jnp.where(empty, s, b) for s, b in zip(shifted, bins, strict=True)]
        exponent = exponent - jnp.where(empty, bits, 0)
    width = jnp.iinfo(form.integer).bits
    up = jnp.maximum(lax.clz(bins[0]) - (width - bits), 0)
    exponent = exponent - up
    after = [*bins[1:], jnp.zeros_like(bins[0])]
    mask = 2**bits - 1
    first, second, *rest = (
        ((b << up) & mask) | (a >> (bits - up)) for b, a in zip(bins, after, strict=True)
    )
    # Narrower types are rounded from float32, so float32 must hold the value exactly.
    more = 0 if jnp.finfo(dtype).bits < 32 else width - 2 - bits
    left = [second & (2 ** (bits - more) - 1), *rest]
    is_inexact = functools.reduce(operator.or_, left) != 0
    integer = (first << more) | (second >> (bits - more)) | is_inexact.astype(form.integer)
    exponent = exponent - more
    near = exponent // 2  # multiplied in two steps, because the power of two itself may overflow
    magnitude = integer.astype(jnp.float64 if form is _FLOAT64 else jnp.float32)
    value = magnitude * _power(form, near) * _power(form, exponent - near)
    value = jnp.where(negative, -value, value)
    infinite = jnp.where(plus > 0, jnp.where(minus > 0, jnp.nan, jnp.inf), -jnp.inf)
    return jnp.where(plus + minus > 0, infinite, value).astype(dtype)


def _axes(x: jax.Array, axis: Any) -> tuple[int, ...]:
    given = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else [axis]
    axes = []
    for k in map(operator.index, given):
        if not -x.ndim <= k < x.ndim:
            raise ValueError(
                f"reproducible_sum: argument 'axis' names axis {k}, which an array of shape "
                f"{x.shape} does not have"
            )
        axes.append(k % x.ndim)
    if len({*axes}) < len(axes):
        raise ValueError(f"reproducible_sum: argument 'axis' names one axis twice, got {axis!r}")
    return tuple(axes)


def reproducible_sum(x: T, axis: Any = None, comm: MPI.Intracomm | None = None) -> T:
    """Sum the elements of all ranks' arrays, with the same bits on any number of ranks.

    The bits do not depend on the distribution or the order of the elements: each element is split
    into integers of a few fixed exponents, which are added without rounding. The sum is rounded
    once. This takes two reductions, the first of one number for each sum.

    Args:
        x: array, or pytree of arrays. Its shape may differ between ranks, and it may be empty.
            ``S`` is the shape of the result: the shape of ``x`` without the summed axes.
        axis: axis or axes that are summed over, as well as the ranks; by default all.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        Array of shape ``S`` and the dtype of ``x`` (for integers and booleans, the dtype of
        ``jnp.sum``), the same on all ranks. The sum is NaN if an element is NaN or if there are
        infinities of both signs.

        Apart from the final rounding, the error is at most ``n max(abs(x)) 2**-65`` for ``n``
        numbers of 32 bits or less, and ``n max(abs(x)) 2**-99`` for float64. The error of a plain
        sum may be ``n sum(abs(x)) 2**-24`` for float32, and ``n sum(abs(x)) 2**-53`` for float64.
        As in all programs that XLA compiles for CPUs, float32 numbers below ``2**-126`` count as
        zero.

    Raises:
        ValueError: if ``axis`` names an axis that ``x`` does not have, or one axis twice.

    Derivative:
        The derivative of :func:`allreduce` with ``MPI.SUM``: the tangents are summed (in floating
        point), and the cotangent goes to all elements on all ranks.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> x = jnp.array([1e8, 1.0, -1e8]) * (1 if mpi4jax.default_comm().rank == 0 else 0)
        >>> float(mpi4jax.reproducible_sum(x)), float(jnp.sum(x[jnp.array([0, 1, 2])])) in (0, 1)
        (1.0, True)

    See also: :func:`allreduce`, and the option ``reproducible`` of :mod:`mpi4jax.linalg`.
    """
    comm = as_comm("reproducible_sum", comm).mpi
    leaves, tree = jax.tree.flatten(x)
    arrays = [as_array("reproducible_sum", "x", leaf) for leaf in leaves]
    axes = [_axes(v, axis) for v in arrays]
    inexact = [i for i, v in enumerate(arrays) if jnp.issubdtype(v.dtype, jnp.inexact)]
    others = [i for i in range(len(arrays)) if i not in inexact]
    if inexact or not leaves:
        sums = _total([arrays[i] for i in inexact], [axes[i] for i in inexact], comm)
        for i, total in zip(inexact, sums, strict=True):
            arrays[i] = total
    if others:
        sums = allreduce([jnp.sum(arrays[i], axes[i]) for i in others], comm=comm)
        for i, total in zip(others, sums, strict=True):
            arrays[i] = total
    return jax.tree.unflatten(tree, arrays)


def _total(
    arrays: list[jax.Array], axes: list[tuple[int, ...]], comm: MPI.Intracomm | None
) -> list[jax.Array]:
    """Return the sums of inexact numbers."""

    def parts(v: jax.Array) -> list[jax.Array]:
        return [v.real, v.imag] if jnp.iscomplexobj(v) else [v]

    each = [a for a, v in zip(axes, arrays, strict=True) for _ in parts(v)]

    @jax.custom_jvp
    def total(values: list[jax.Array]) -> list[jax.Array]:
        mine = [_largest(v, a) for v, a in zip(values, each, strict=True)]
        largest = allreduce(mine, op=MPI.MAX, comm=comm)
        split = [_split(v, a, most) for v, a, most in zip(values, each, largest, strict=True)]
        sums = allreduce(split, comm=comm)
        dtypes = [v.dtype for v in values]
        return [_rounded(*args) for args in zip(sums, largest, dtypes, strict=True)]

    def of_tangents(primals: Any, tangents: Any) -> Any:
        (ts,) = tangents
        plain = allreduce([jnp.sum(t, a) for t, a in zip(ts, each, strict=True)], comm=comm)
        return total(*primals), plain

    total.defjvp(of_tangents)
    out = iter(total([part for v in arrays for part in parts(v)]))
    return [lax.complex(next(out), next(out)) if jnp.iscomplexobj(v) else next(out) for v in arrays]
