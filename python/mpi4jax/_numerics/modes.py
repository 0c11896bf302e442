"""Change lengths of axes: of arrays at their end, of spectra where frequencies are high."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def of_length(x: jax.Array, axis: int, n: int) -> jax.Array:
    """Return the first ``n`` elements along an axis; zeros follow if it has fewer."""
    x = lax.slice_in_dim(x, 0, min(n, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, n - x.shape[axis])
    return jnp.pad(x, widths) if n > x.shape[axis] else x


def of_modes(y: jax.Array, axis: int, old: int, new: int, half: bool) -> jax.Array:
    """Return the spectrum of an array of ``new`` points, from the spectrum of ``old`` points.

    If the smaller number is even, its spectrum has one element for the highest frequency of both
    signs. The longer spectrum has two elements for it, each of half the value.

    Args:
        half: whether the spectrum has no negative frequencies, as in a real transform.
    """
    if old == new:
        return y
    fewer = min(old, new)
    highest = fewer // 2
    factor = 0.5 if new > old else 2.0
    if half:
        y = of_length(y, axis, highest + 1)
        if fewer % 2 == 0:
            y = y * _at(y, axis, highest, factor)
        return of_length(y, axis, new // 2 + 1)
    # Frequencies that are not negative are first, and the negative ones are last.
    upper, lower = (fewer + 1) // 2, fewer // 2  # without, and with the highest negative one
    first = lax.slice_in_dim(y, 0, upper, axis=axis)
    last = lax.slice_in_dim(y, old - lower, old, axis=axis)
    if fewer % 2 == 0 and new > old:
        last = last * _at(last, axis, 0, 0.5)
        first = jnp.concatenate([first, lax.slice_in_dim(last, 0, 1, axis=axis)], axis)
    elif fewer % 2 == 0:
        both = lax.slice_in_dim(y, highest, highest + 1, axis=axis)
        last = jnp.concatenate(
            [
                lax.slice_in_dim(last, 0, 1, axis=axis) + both,
                lax.slice_in_dim(last, 1, lower, axis=axis),
            ],
            axis,
        )
    shape = list(y.shape)
    shape[axis] = new - first.shape[axis] - last.shape[axis]
    return jnp.concatenate([first, jnp.zeros(shape, y.dtype), last], axis)


def _at(y: jax.Array, axis: int, k: int, factor: float) -> jax.Array:
    """Return factors along an axis: one, and another one for element ``k``."""
    shape = [1] * y.ndim
    shape[axis] = -1
    return jnp.ones(y.shape[axis], y.real.dtype).at[k].set(factor).reshape(shape)
