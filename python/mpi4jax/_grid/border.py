"""Ghost cells at the border of a grid, where there is no neighbor: filled by the rank itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._op.arguments import from_end
from .._op.comm import Comm
from .._op.packing import as_array
from . import cart

MODES = ("edge", "reflect")
Side = Any  # None, one of the modes, or a number


def sides_of(op: str, comm: Comm, border: Any) -> list[tuple[Side, Side]]:
    """Return the border below and above along each dimension of the grid.

    Raises:
        TypeError: if ``border`` has a wrong type.
        ValueError: if a mode is unknown, or there is not one for each dimension.
    """
    n = len(cart.topology(comm)[0])
    expected = (
        f"None, 'edge', 'reflect' or a number, or a list of {n} of these or of pairs (below, "
        "above), one for each dimension of 'cart'"
    )

    def checked(side: Any) -> Side:
        if isinstance(side, str) and side not in MODES:
            raise ValueError(
                f"{op}: argument 'border' must be {expected}, got {side!r}; at a wall, 'edge' "
                "repeats the value of the cell beside the border (of a cell-centered quantity "
                "without flux), 'reflect' mirrors at the outermost points (of a quantity at grid "
                "points), a number is a fixed value; periodic axes are those of Create_cart"
            )
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


class Copy(NamedTuple):
    """The source of ghost cells at the border: slices of a block, and a side."""

    axis: int
    ghosts: tuple[slice, ...]
    side: Side
    source: tuple[slice, ...]


def _copies(
    op: str,
    comm: Comm,
    shape: tuple[int, ...],
    axes: Sequence[int | None],
    widths: Sequence[tuple[int, int]],
    sides: Sequence[tuple[Side, Side]],
    corners: bool,
) -> Iterator[Copy]:
    """Return the copies that fill a block of this shape, one dimension after the other.

    Without ``corners``, ghost cells at corners keep their values.
    """
    cut = [
        (axis, width, pair, not period and at == 0, not period and at == size - 1)
        for axis, width, pair, size, period, at in zip(
            axes, widths, sides, *cart.topology(comm), strict=True
        )
        if axis is not None
    ]
    places, around = [axis for axis, *_ in cut], [width for _, width, *_ in cut]
    ends = from_end(op, places, around, shape)
    inner = [slice(None)] * len(shape)
    for end, (low, high) in zip(ends, around, strict=True):
        inner[-end] = slice(low, shape[-end] - high)
    for end, (_, (low, high), (below, above), is_first, is_last) in zip(ends, cut, strict=True):
        window = [slice(None)] * len(shape) if corners else inner
        first, behind = low, shape[-end] - high
        if is_first and low and below is not None:
            mirrored = slice(first + 1, first + low + 1)
            source = slice(first, first + 1) if below == "edge" else mirrored
            yield _copy(op, shape, window, -end, slice(0, low), below, source, inner)
        if is_last and high and above is not None:
            mirrored = slice(behind - high - 1, behind - 1)
            source = slice(behind - 1, behind) if above == "edge" else mirrored
            ghosts = slice(behind, behind + high)
            yield _copy(op, shape, window, -end, ghosts, above, source, inner)


def _copy(
    op: str,
    shape: tuple[int, ...],
    window: list[slice],
    axis: int,
    ghosts: slice,
    side: Side,
    source: slice,
    inner: list[slice],
) -> Copy:
    def along(part: slice) -> tuple[slice, ...]:
        parts = [*window]
        parts[axis] = part
        return tuple(parts)

    is_copied = isinstance(side, str)
    if is_copied and (source.start < inner[axis].start or source.stop > inner[axis].stop):
        raise ValueError(
            f"{op}: argument 'x' of shape {shape} has "
            f"{inner[axis].stop - inner[axis].start} inner cells along axis {axis}, too few for "
            f"border={side!r}; expected at least {source.stop - source.start + 1}"
        )
    return Copy(axis, along(ghosts), side, along(source))


def filled(op: str, comm: Comm, x: Any, *how: Any) -> Any:
    """Fill the ghost cells of blocks at the border of the grid, by :func:`_copies`."""

    def fill(leaf: Any) -> Any:
        leaf = as_array(leaf)
        for axis, ghosts, side, source in _copies(op, comm, leaf.shape, *how):
            value = side
            if isinstance(side, str):
                cells = leaf[source]
                value = jnp.flip(cells, axis) if side == "reflect" else cells
            leaf = leaf.at[ghosts].set(value)
        return leaf

    return jax.tree.map(fill, x)


def added(op: str, comm: Comm, x: Any, *how: Any) -> Any:
    """Apply the transpose of :func:`filled`.

    Add ghost cells at the border to the cells that fill them, and set them to zero.
    """

    def add(leaf: Any) -> Any:
        leaf = as_array(leaf)
        for axis, ghosts, side, source in reversed([*_copies(op, comm, leaf.shape, *how)]):
            cells = leaf[ghosts]
            leaf = leaf.at[ghosts].set(0)
            if side == "reflect":
                leaf = leaf.at[source].add(jnp.flip(cells, axis))
            elif side == "edge":
                leaf = leaf.at[source].add(cells.sum(axis, keepdims=True, dtype=cells.dtype))
        return leaf

    return jax.tree.map(add, x)
