"""Many pieces of an array as one message, by transposes: the program does not grow with their
number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]

# Slices of a few pieces run faster than a transpose of all of them. With a slice for each piece,
# programs and the time to compile them would grow with the number of ranks.
FEW = 16


def _runs(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of equal lengths: for each run, the number of lengths and the length."""
    return [(len([*group]), length) for length, group in itertools.groupby(lengths)]


def packed(
    x: jax.Array, lengths: tuple[Shape, ...], axes: tuple[int, ...], done: int = 0
) -> jax.Array:
    """Flatten pieces in the order of ``axes``; the first ``done`` axes of ``x`` number pieces."""
    if not axes:
        return x.reshape(*x.shape[:done], -1)
    at, parts, start = done + axes[0], [], 0
    for n, length in _runs(lengths[axes[0]]):
        part = jax.lax.slice_in_dim(x, start, start + n * length, axis=at)
        start += n * length
        part = part.reshape(*x.shape[:at], n, length, *x.shape[at + 1 :])
        part = packed(jnp.moveaxis(part, at, done), lengths, axes[1:], done + 1)
        parts.append(part.reshape(*x.shape[:done], -1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def unpacked(
    message: jax.Array,
    lengths: tuple[Shape, ...],
    axes: tuple[int, ...],
    shape: Shape,
    done: int = 0,
) -> jax.Array:
    """Return the inverse of :func:`packed`.

    Args:
        shape: shape of the result without its first ``done`` axes.
    """
    before = message.shape[:done]
    if not axes:
        return message.reshape(*before, *shape)
    axis, parts, start = axes[0], [], 0
    row = math.prod(shape) // shape[axis]
    for n, length in _runs(lengths[axis]):
        end = start + n * length * row
        part = jax.lax.slice_in_dim(message, start, end, axis=done).reshape(*before, n, -1)
        start = end
        inner = (*shape[:axis], length, *shape[axis + 1 :])
        part = unpacked(part, lengths, axes[1:], inner, done + 1)
        part = jnp.moveaxis(part, done, done + axis)
        parts.append(part.reshape(*before, *shape[:axis], n * length, *shape[axis + 1 :]))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, done + axis)
