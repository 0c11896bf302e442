"""Local Fourier transforms, from a received message to the next one to send.

XLA transforms axes that lie side by side at the end of an array. For any others it would transpose
the whole array before and after, and it would pack and unpack whole messages, which takes several
times as long as the transform itself. On a CPU, tiles that fit into the cache are read from the
message received, transformed, and written to the message that is sent.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .layout import Pieces

# Number of elements that are transformed at once. They fit into a second-level cache.
TILE = 1 << 14
LARGE_TILE = 1 << 18

AT_ONCE = 3  # axes that XLA transforms


def transform(
    x: jax.Array, axes: tuple[int, ...], inverse: bool, length: int | None, in_columns: bool
) -> jax.Array:
    """Return a transform along different axes.

    Args:
        x: array that is not empty.
        length: length of the last of ``axes`` for a real transform, None for a complex one.
        in_columns: whether to transform an axis that XLA would first move to the end some columns
            at a time, in place.
    """
    # The axes that XLA transforms together: the last ones, and the axis of the real transform.
    together = list(axes[-1:]) if length else []
    end = x.ndim - 1
    while end in axes and len({*together, end}) <= AT_ONCE:
        together = together if end in together else [end, *together]
        end -= 1
    steps = [[axis] for axis in axes if axis not in together]
    if together:
        steps.insert(0, together)
    for step in reversed(steps) if inverse else steps:
        if length and step is together:
            if inverse:
                x = jnp.fft.irfftn(x, [*(x.shape[axis] for axis in step[:-1]), length], step)
            else:
                x = jnp.fft.rfftn(x, axes=step)
        elif step is together or not in_columns or x.size <= 2 * TILE:
            x = (jnp.fft.ifftn if inverse else jnp.fft.fftn)(x, axes=step)
        else:
            x = _columns(x, step[0], inverse)
    return x


def _columns(x: jax.Array, axis: int, inverse: bool) -> jax.Array:
    """Return a transform along an axis that is not the last one, of some columns at a time, in
    place."""
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


# ---- An array whose values do not matter, since a loop writes all of it
#
# It takes the first element of the operand so that XLA does not allocate it earlier, beside the
# message that is being sent.
empty_p = Primitive("mpi4jax_empty")


@empty_p.def_abstract_eval
def _empty_type(x: Any, *, size: int, dtype: Any) -> Any:
    return x.update(shape=(size,), dtype=dtype)


def _full(x: jax.Array, *, size: int, dtype: Any) -> jax.Array:
    return jnp.full(size, x.real.astype(dtype))


def _lower_empty(ctx: mlir.LoweringRuleContext, x: Any, **p: Any) -> Any:
    # An exported program would need the native module in the process that runs it.
    if ctx.module_context.lowering_parameters.for_export:
        return mlir.lower_fun(_full, multiple_results=False)(ctx, x, **p)
    return jax.ffi.ffi_lowering("mpi4jax_empty", has_side_effect=False)(ctx, x)


mlir.register_lowering(empty_p, _lower_empty)


class _Local(NamedTuple):
    """A transform of the array in one message, into another message.

    Attributes:
        incoming: pieces of the operand.
        axes: axes to transform.
        outgoing: pieces of the result.
        inverse: whether to apply the inverse transform.
        length: length of the last of ``axes``, for a real transform.
        transposed: whether this is the transposed function, from ``outgoing`` to ``incoming``.
    """

    incoming: Pieces
    axes: tuple[int, ...]
    outgoing: Pieces
    inverse: bool
    length: int | None
    transposed: bool = False

    @property
    def operand(self) -> Pieces:
        return self.outgoing if self.transposed else self.incoming

    @property
    def result(self) -> Pieces:
        return self.incoming if self.transposed else self.outgoing

    def dtype(self, of: Any) -> Any:
        """Return the dtype of the result."""
        if self.length is None:
            return of
        to_real = self.inverse != self.transposed
        return jnp.finfo(of).dtype if to_real else jnp.result_type(of, jnp.complex64)

    def transform(
        self, x: jax.Array, like: tuple[int, ...], first: int = 0, in_columns: bool = False
    ) -> jax.Array:
        """Transform an array that lacks the first axes of the whole array.

        Args:
            like: shape of the result.
            first: number of axes that the array lacks.
            in_columns: as for :func:`transform`.
        """
        axes = tuple(axis - first for axis in self.axes)
        f = functools.partial(
            transform, axes=axes, inverse=self.inverse, length=self.length, in_columns=in_columns
        )
        if not self.transposed or self.length is None:
            return f(x)  # the matrix of a complex transform is symmetric
        (x,) = jax.linear_transpose(f, jax.ShapeDtypeStruct(like, self.dtype(x.dtype)))(x)
        return x

    def as_a_whole(self, x: jax.Array, in_columns: bool = False) -> jax.Array:
        """Unpack the whole message, transform the array, and pack the result."""
        y = self.transform(self.operand.unpack(x), self.result.shape, in_columns=in_columns)
        return self.result.pack(y)

    @property
    def first_axes(self) -> int:
        """The number of axes before a plane, which are neither decomposed nor transformed."""
        for axis, pair in enumerate(zip(self.incoming.lengths, self.outgoing.lengths, strict=True)):
            if axis in self.axes or max(map(len, pair)) > 1:
                return axis
        return len(self.incoming.lengths)

    def on_cpu(self, x: jax.Array) -> jax.Array:
        """Transform a message on a CPU: in tiles that fit into the cache, if that saves copies."""
        in_order = self.incoming.are_in_memory_order and self.outgoing.are_in_memory_order
        plane = math.prod(self.operand.shape[self.first_axes :])
        if plane > LARGE_TILE or not 2 * TILE < x.size < 2**31 or in_order:
            return self.as_a_whole(x, in_columns=self.length is None or not self.transposed)
        return self.plane_by_plane(x)

    def plane_by_plane(self, x: jax.Array) -> jax.Array:
        """Read some planes at a time from the message, transform them, and write the result."""
        first, shape = self.first_axes, self.operand.shape
        planes, size = math.prod(shape[:first]), math.prod(shape[first:])
        tiles = -(-planes // max(1, TILE // size))

        def some(at_once: int, start: int, k: Any, y: jax.Array) -> jax.Array:
            at = start + k * at_once
            old, new = (
                Pieces(((at_once,), *pieces.lengths[first:]), pieces.ranks)
                for pieces in (self.operand, self.result)
            )
            tile = self.transform(_read(x, old, planes, at), new.shape, first - 1)
            return _write(y, tile, new, planes, at)

        y = empty_p.bind(x[:1], size=math.prod(self.result.shape), dtype=self.dtype(x.dtype))
        at_once = planes // tiles
        y = lax.fori_loop(0, tiles, functools.partial(some, at_once, 0), y)
        done = tiles * at_once
        return lax.fori_loop(0, planes - done, functools.partial(some, 1, done), y)


def _runs(tile: Pieces, planes: int) -> list[tuple[int, int, int]]:
    """Return runs of equal pieces of all planes: the start of a run, the number of its pieces, and
    the elements that each has in a plane. Few pieces are runs of their own."""
    lengths = [math.prod(shape[1:]) for shape in tile.shapes]
    if tile.are_few:
        runs = [(1, n) for n in lengths]
    else:
        runs = [(len([*group]), n) for n, group in itertools.groupby(lengths)]
    ends = itertools.accumulate(count * planes * n for count, n in runs)
    return [
        (end - count * planes * n, count, n) for end, (count, n) in zip(ends, runs, strict=True)
    ]


def _read(x: jax.Array, tile: Pieces, planes: int, at: Any) -> jax.Array:
    """Return a number of planes, from ``at`` on, of a message of all planes."""
    at_once = tile.shape[0]
    parts = []
    for begin, count, n in _runs(tile, planes):
        if count == 1:
            parts.append(lax.dynamic_slice(x, (begin + at * n,), (at_once * n,)))
            continue
        run = x[begin : begin + count * planes * n].reshape(count, planes * n)
        parts.append(lax.dynamic_slice(run, (0, at * n), (count, at_once * n)).ravel())
    if tile.are_few:
        return tile.join([p.reshape(s) for p, s in zip(parts, tile.shapes, strict=True)])
    return tile.unpack(parts[0] if len(parts) == 1 else jnp.concatenate(parts))


def _write(y: jax.Array, block: jax.Array, tile: Pieces, planes: int, at: Any) -> jax.Array:
    """Return a message of all planes with the planes of a block from ``at`` on."""
    at_once, runs = tile.shape[0], _runs(tile, planes)
    if len(runs) == 1:
        ((_, count, n),) = runs
        part = tile.pack(block).reshape(count, at_once * n)
        return lax.dynamic_update_slice(y.reshape(count, -1), part, (0, at * n)).ravel()
    if tile.are_few:
        for (begin, _, n), part in zip(runs, tile.cut(block), strict=True):
            y = lax.dynamic_update_slice(y, part.ravel(), (begin + at * n,))
        return y
    # Writing to a view of a part of the message would copy the whole message.
    message, done = tile.pack(block), 0
    for begin, count, n in runs:
        parts = message[done : done + count * at_once * n].reshape(count, at_once * n)
        done += parts.size
        place = functools.partial(_place, parts, begin + at * n, planes * n)
        y = lax.fori_loop(0, count, place, y)
    return y


def _place(parts: jax.Array, start: Any, step: int, k: Any, y: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(y, parts[k], (start + k * step,))


# The derivative that JAX makes of the loops would add to an array as large as the operand in each
# step. A primitive has the rules of a linear function instead.
local_fft_p = Primitive("mpi4jax_local_fft")
_compiled = jax.jit(local_fft_p.bind, static_argnames="of")


@local_fft_p.def_impl
def _eager(x: Any, *, of: _Local) -> Any:
    with jax.disable_jit(False):
        return _compiled(x, of=of)


@local_fft_p.def_abstract_eval
def _type(x: Any, *, of: _Local) -> Any:
    return x.update(shape=(math.prod(of.result.shape),), dtype=of.dtype(x.dtype))


def _transpose(c: Any, x: Any, *, of: _Local) -> list[Any]:
    if type(c) is ad.Zero:
        return [ad.Zero(x.aval)]
    return [local_fft_p.bind(c, of=of._replace(transposed=not of.transposed))]


def _batch(args: Any, dims: Any, *, of: _Local) -> Any:
    return jax.vmap(of.as_a_whole, dims)(*args), 0


ad.deflinear2(local_fft_p, _transpose)
batching.primitive_batchers[local_fft_p] = _batch
mlir.register_lowering(
    local_fft_p, mlir.lower_fun(lambda x, of: of.as_a_whole(x), multiple_results=False)
)
mlir.register_lowering(
    local_fft_p, mlir.lower_fun(lambda x, of: of.on_cpu(x), multiple_results=False), platform="cpu"
)


def local_fft(
    x: jax.Array,
    incoming: Pieces,
    axes: tuple[int, ...],
    outgoing: Pieces,
    inverse: bool,
    length: int | None = None,
) -> jax.Array:
    """Return the pieces of a message, transformed along axes that are whole, as another message.

    Args:
        length: length of the last of ``axes``, for a real transform.
    """
    of = _Local(incoming, axes, outgoing, inverse, length)
    if not x.size:
        return x.astype(of.dtype(x.dtype))
    if not axes:
        return outgoing.pack(incoming.unpack(x))
    return local_fft_p.bind(x, of=of)
