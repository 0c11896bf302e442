"""Ghost cells at the border of a grid: nobody's copies, and filled on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._op.arguments import from_end
from .._op.comm import Comm
from . import cart

MODES = ("edge", "reflect")
Side = Any  # None, one of the modes, or a number


def sides_of(op: str, comm: Comm, border: Any) -> list[tuple[Side, Side]]:
    """What the border is below and above along each dimension of the grid.

    Raises:
        TypeError: nothing of that.
        ValueError: an unknown mode, or not one for each dimension.
    """
    n = len(cart.topology(comm)[0])
    expected = (
        f"None, 'edge', 'reflect' or a number, or a list of {n} of these or of pairs (below, "
        "above), one for each dimension of 'cart'"
    )

    def checked(side: Any) -> Side:
        if isinstance(side, str) and side not in MODES:
            raise ValueError(f"{op}: argument 'border' must be {expected}, got {side!r}")
        is_number = hasattr(side, "dtype") or isinstance(side, (bool, int, float, complex))
        if not (side is None or isinstance(side, str) or (is_number and jnp.shape(side) == ())):
            raise TypeError(f"{op}: argument 'border' must be {expected}, got {border!r}")
        return side

    def is_several(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str)

    def pair(value: Any, length: int) -> Sequence[Any]:
        if not is_several(value):
            return [value] * length
        if len(value) != length:
            raise ValueError(f"{op}: argument 'border' must be {expected}, got {border!r}")
        return value  # type: ignore[no-any-return]

    each = [pair(side, 2) for side in pair(border, n)]
    return [(checked(below), checked(above)) for below, above in each]


def filled(
    op: str,
    comm: Comm,
    x: Any,
    axes: Sequence[int | None],
    widths: Sequence[tuple[int, int]],
    sides: Sequence[tuple[Side, Side]],
    corners: bool,
) -> Any:
    """Blocks whose ghost cells at the border of the grid are filled, one dimension after the other.

    Without ``corners``, those beyond several axes are left.
    """
    cut = [
        (axis, width, pair, not period and at == 0, not period and at == size - 1)
        for axis, width, pair, size, period, at in zip(
            axes, widths, sides, *cart.topology(comm), strict=True
        )
        if axis is not None
    ]
    places, around = [axis for axis, *_ in cut], [width for _, width, *_ in cut]

    def fill(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        ends = from_end(op, places, around, leaf.shape)
        inner = [slice(None)] * leaf.ndim
        for end, (low, high) in zip(ends, around, strict=True):
            inner[-end] = slice(low, leaf.shape[-end] - high)
        for end, (_, (low, high), (below, above), is_first, is_last) in zip(ends, cut, strict=True):
            window = [slice(None)] * leaf.ndim if corners else [*inner]
            first, behind = low, leaf.shape[-end] - high
            if is_first and low and below is not None:
                mirrored = slice(first + 1, first + low + 1)
                source = slice(first, first + 1) if below == "edge" else mirrored
                leaf = _put(op, leaf, window, -end, slice(0, low), below, source, inner)
            if is_last and high and above is not None:
                mirrored = slice(behind - high - 1, behind - 1)
                source = slice(behind - 1, behind) if above == "edge" else mirrored
                ghosts = slice(behind, behind + high)
                leaf = _put(op, leaf, window, -end, ghosts, above, source, inner)
        return leaf

    return jax.tree.map(fill, x)


def _put(
    op: str,
    leaf: jax.Array,
    window: list[slice],
    axis: int,
    ghosts: slice,
    side: Side,
    source: slice,
    inner: list[slice],
) -> jax.Array:
    """A block whose ghost cells, of a window of it, are filled from its cells there."""

    def along(part: slice) -> tuple[slice, ...]:
        parts = [*window]
        parts[axis] = part
        return tuple(parts)

    if not isinstance(side, str):
        return leaf.at[along(ghosts)].set(side)
    if source.start < inner[axis].start or source.stop > inner[axis].stop:
        raise ValueError(
            f"{op}: argument 'x' of shape {leaf.shape} has "
            f"{inner[axis].stop - inner[axis].start} inner cells along axis {axis}, too few for a "
            f"border that is {side!r}; expected at least {source.stop - source.start + 1}"
        )
    cells = leaf[along(source)]
    return leaf.at[along(ghosts)].set(jnp.flip(cells, axis) if side == "reflect" else cells)
