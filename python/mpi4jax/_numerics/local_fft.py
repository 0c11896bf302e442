"""Fourier transforms of what a rank has of an array, without copies of all of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .layout import Pieces

# Elements that are transformed at once: as many as fit into a cache of the second level.
TILE = 1 << 14
LARGE_TILE = 1 << 18


def _transform(inverse: bool) -> Any:
    return jnp.fft.ifftn if inverse else jnp.fft.fftn


def _linear(run: Any, default: Any, transposed: Any, undo: Any, x: jax.Array) -> jax.Array:
    """A linear function of an array that has as many elements as its result.

    As the solution of a linear equation, it has the derivatives of one in all modes, not those of
    the loop that computes it.
    """

    def on_any(run: Any, default: Any) -> Any:
        return lambda _, x: lax.platform_dependent(x, cpu=run, default=default)

    solve, back = on_any(run, default), on_any(*transposed)
    return lax.custom_linear_solve(undo, x, solve, transpose_solve=back)


class _Planes(NamedTuple):
    """A transform of a message, or of an array, into another: plane by plane.

    XLA transforms what lies side by side, and anything else would be transposed before it and
    after it, as a whole; messages are packed and unpacked as wholes. That takes several times as
    long as to transform. A plane fits into a cache, where all of it is done at once.

    Attributes:
        incoming: the pieces of which the operand consists.
        outgoing: those of the result.
        axes: are transformed.
        inverse: whether they are transformed back.
    """

    incoming: Pieces
    outgoing: Pieces
    axes: tuple[int, ...]
    inverse: bool

    @property
    def first_axes(self) -> int:
        """How many axes there are before those of a plane: none of them is cut or transformed."""
        for axis, pair in enumerate(zip(self.incoming.lengths, self.outgoing.lengths, strict=True)):
            if axis in self.axes or max(map(len, pair)) > 1:
                return axis
        return len(self.incoming.lengths)

    def is_worth_it(self) -> bool:
        shape = self.incoming.shape
        plane = math.prod(shape[self.first_axes :])
        elements = math.prod(shape)
        in_order = self.incoming.are_in_memory_order and self.outgoing.are_in_memory_order
        return plane <= LARGE_TILE and 2 * TILE < elements < 2**31 and not in_order

    def reversed(self, inverse: bool) -> _Planes:
        return _Planes(self.outgoing, self.incoming, self.axes, inverse)

    def as_a_whole(self, x: jax.Array) -> jax.Array:
        x = self.incoming.unpack(x)
        return self.outgoing.pack(_transform(self.inverse)(x, axes=self.axes))

    def one_by_one(self, x: jax.Array) -> jax.Array:
        first, shape = self.first_axes, self.incoming.shape
        planes, size = math.prod(shape[:first]), math.prod(shape[first:])
        tiles = -(-planes // max(1, TILE // size))
        axes = tuple(axis - first + 1 for axis in self.axes)

        def some(at_once: int, start: int, k: Any, y: jax.Array) -> jax.Array:
            at = start + k * at_once
            (old, slices), (new, places) = (
                self._tile(pieces, first, planes, at_once)
                for pieces in (self.incoming, self.outgoing)
            )
            tile = old.join(
                [
                    lax.dynamic_slice(x, (begin + at * n,), (at_once * n,)).reshape(shape)
                    for (begin, n), shape in zip(slices, old.shapes, strict=True)
                ]
            )
            parts = new.cut(_transform(self.inverse)(tile, axes=axes))
            for (begin, n), part in zip(places, parts, strict=True):
                y = lax.dynamic_update_slice(y, part.ravel(), (begin + at * n,))
            return y

        y, at_once = jnp.zeros_like(x), planes // tiles
        y = lax.fori_loop(0, tiles, functools.partial(some, at_once, 0), y)
        done = tiles * at_once
        return lax.fori_loop(0, planes - done, functools.partial(some, 1, done), y)

    @staticmethod
    def _tile(
        pieces: Pieces, first: int, planes: int, at_once: int
    ) -> tuple[Pieces, list[tuple[int, int]]]:
        """The pieces of so many planes, and of each where it begins and how many elements of it
        a plane has."""
        tile = Pieces(((at_once,), *pieces.lengths[first:]), pieces.ranks)
        lengths = [math.prod(shape[1:]) for shape in tile.shapes]
        ends = itertools.accumulate(planes * n for n in lengths)
        return tile, [(end - planes * n, n) for end, n in zip(ends, lengths, strict=True)]

    def __call__(self, x: jax.Array) -> jax.Array:
        back, undo = self.reversed(self.inverse), self.reversed(not self.inverse)
        transposed = back.one_by_one, back.as_a_whole
        return _linear(self.one_by_one, self.as_a_whole, transposed, undo.as_a_whole, x)


def _in_place(x: jax.Array, axis: int, inverse: bool) -> jax.Array:
    """A transform along an axis that is not the last one, of some columns at a time."""
    direct = jnp.fft.ifft if inverse else jnp.fft.fft
    shape, n = x.shape, x.shape[axis]
    x = x.reshape(math.prod(shape[:axis]), n, math.prod(shape[axis + 1 :]))
    planes, _, width = x.shape
    tiles = -(-width // max(1, TILE // n))
    at_once = width // tiles

    def some(columns: int, start: int, steps: int, k: Any, x: jax.Array) -> jax.Array:
        at = (k // steps, 0, start + k % steps * columns)
        tile = lax.dynamic_slice(x, at, (1, n, columns))
        return lax.dynamic_update_slice(x, direct(tile, axis=1), at)

    x = lax.fori_loop(0, planes * tiles, functools.partial(some, at_once, 0, tiles), x)
    done = tiles * at_once
    if done < width:
        rest = functools.partial(some, width - done, done, 1)
        x = lax.fori_loop(0, planes, rest, x)
    return x.reshape(shape)


def _along(x: jax.Array, axis: int, inverse: bool) -> jax.Array:
    """A transform along an axis that is not the last one."""
    direct, undo = (functools.partial(_transform(i), axes=[axis]) for i in (inverse, not inverse))
    if x.size <= 2 * TILE:
        return direct(x)
    run = functools.partial(_in_place, axis=axis, inverse=inverse)
    return _linear(run, direct, (run, direct), undo, x)  # its matrix is its own transpose


def _local(x: jax.Array, axes: Sequence[int], inverse: bool) -> jax.Array:
    """A transform along axes that are whole: at once, of those that lie side by side."""
    last: list[int] = []
    for axis in range(x.ndim - 1, max(-1, x.ndim - 4), -1):
        if axis not in axes:
            break
        last.insert(0, axis)
    if last:
        x = _transform(inverse)(x, axes=last)
    for axis in axes:
        if axis not in last:
            x = _along(x, axis, inverse)
    return x


def local_fft(
    x: jax.Array, incoming: Pieces, axes: tuple[int, ...], outgoing: Pieces, inverse: bool
) -> jax.Array:
    """A message, from another: what it brings, transformed along axes that are whole."""
    planes = _Planes(incoming, outgoing, axes, inverse)
    if axes and x.size and planes.is_worth_it():
        return planes(x)
    x = incoming.unpack(x)
    return outgoing.pack(_local(x, axes, inverse) if x.size else x)
