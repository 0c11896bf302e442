"""Which axes of a global array are transformed in which layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .base import static_int
from .layout import Layout, Shape


class Lengths(NamedTuple):
    """Lengths along an axis that is transformed.

    Attributes:
        points: length of the transform. The array is padded with zeros, or truncated, to it.
        modes: number of modes that are kept, as in the spectrum of an array of this length.
    """

    points: int
    modes: int


class Stage(NamedTuple):
    """Transforms of whole axes.

    Attributes:
        before: the layout of their operand.
        axes: the axes that are transformed.
        after: the layout of their result.
        real: whether the transform along the last of the axes is real.
    """

    before: Layout
    axes: tuple[int, ...]
    after: Layout
    real: bool = False


def as_axes(op: str, layout: Layout, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the axes of an argument, by default all, counted from the first axis."""
    n = len(layout.shape)
    given = range(n) if axes is None else axes
    known = tuple(axis % n for axis in given if -n <= axis < n)
    if not known or len(known) < len(given) or len(set(known)) < len(known):
        raise ValueError(
            f"{op}: argument 'axes' must be different axes of an array of shape {layout.shape}, "
            f"got {axes!r}"
        )
    if min(layout.shape[axis] for axis in known) < 1:
        raise ValueError(f"{op}: argument 'axes' has an axis of length 0 of {layout.shape}")
    return known


def as_lengths(op: str, name: str, given: Any, default: Sequence[int]) -> tuple[int, ...]:
    """Return one positive length for each of the axes."""
    if given is None:
        return tuple(default)
    expected = f"{len(default)} lengths, at least 1, one for each of the axes that are transformed"
    if not isinstance(given, Sequence):
        raise TypeError(f"{op}: argument '{name}' must be {expected}, got {given!r}")
    known = tuple(static_int(op, name, n, expected) for n in given)
    if len(known) != len(default) or min(known) < 1:
        raise ValueError(f"{op}: argument '{name}' must be {expected}, got {given!r}")
    return known


@functools.lru_cache(maxsize=256)
def stages_of(
    op: str, layout: Layout, axes: tuple[int, ...], modes: Shape, real: bool
) -> tuple[Stage, ...]:
    """Return the stages of a transform.

    Args:
        modes: number of modes that are kept along each of the axes.
        real: whether the transform along the last of the axes is real.
    """
    left = set(axes)
    kept = dict(zip(axes, modes, strict=True))
    stages: list[Stage] = []
    while left:
        decomposed = {axis for axis, dimensions in enumerate(layout.dimensions) if dimensions}
        # The real transform comes first, so its axis has to be whole before any other transform.
        whole = left - decomposed if not real or axes[-1] not in decomposed else set()
        is_real = real and axes[-1] in whole
        shape = list(layout.shape)
        for axis in whole:
            shape[axis] = kept[axis] // 2 + 1 if is_real and axis == axes[-1] else kept[axis]
        after = layout.of_shape(tuple(shape))
        real = real and not is_real
        if whole or not stages:
            done = tuple(axis for axis in axes if axis in whole)
            stages.append(Stage(layout, done, after, is_real))
        left -= whole
        layout = after
        if left:
            layout = _with_one_whole(op, layout, axes[-1] if real else max(left), left)
    return tuple(stages)


def _with_one_whole(op: str, layout: Layout, axis: int, left: set[int]) -> Layout:
    """Return the layout in which this axis is whole, and another one is decomposed in its place.

    An axis that has been transformed already is preferred, then an axis with at least one element
    per block, then the next axis: its pieces are received in the order of memory.
    """
    cut = [b for b, dimensions in enumerate(layout.dimensions) if dimensions]
    free = [b for b in range(len(layout.shape)) if b not in cut]
    if free:
        parts = layout.parts(axis)
        new = min(free, key=lambda b: (b in left, layout.shape[b] < parts, b < axis, abs(b - axis)))
        return layout.moved(axis, new)
    cut.remove(axis)
    if not cut:
        raise ValueError(
            f"{op}: argument 'layout' decomposes the only axis of an array of shape "
            f"{layout.shape}; expected an array with at least two axes"
        )
    return layout.moved(axis, min(cut, key=lambda b: (b in left, -b)))


def last_layout(stages: tuple[Stage, ...], layout: Layout, natural: bool) -> Layout:
    """Return the layout of the spectrum of an array with this layout."""
    after = stages[-1].after
    return layout.of_shape(after.shape) if natural else after
