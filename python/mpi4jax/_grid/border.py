"""Ghost cells at the border of a grid, where there is no neighbor: filled by the rank itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._op.arguments import from_end
from .._op.comm import Comm
from .._op.packing import as_array
from . import cart

MODES = ("edge", "symmetric", "reflect")
Side = Any  # None, one of the modes, a number, an array, or Dirichlet


@dataclass(frozen=True)
class Dirichlet:
    """A value at the border, and the mode of the mirror images whose sign changes there."""

    value: Any
    mode: str


def neumann(at: str = "face") -> str:
    """Return a Neumann boundary condition (zero flux) for ``border=`` of ``halo_exchange``.

    Args:
        at: location of the boundary: ``"face"`` (the outer face of the outermost cells) or
            ``"node"`` (the outermost grid point).
    """
    return _mirror("neumann", at)


def dirichlet(value: Any, at: str = "face") -> Any:
    """Return a Dirichlet boundary condition, to be passed as ``border=`` to ``halo_exchange``.

    Ghost cells are ``2 * value`` minus the mirror image, so that the mean at the edge is ``value``.

    Args:
        value: number, or array of the shape of the block with its ghost cells; only its values at
            the edge of the grid are used. For a function of the coordinates, pass
            ``block.make(f)``.
        at: as for :func:`neumann`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[False])
        >>> block = mpi4jax.grids.Block((3 * cart.size,), cart, width=1)
        >>> x = block.with_ghosts(jnp.ones(3))
        >>> y = mpi4jax.halo_exchange(x, block, border=mpi4jax.grids.dirichlet(0.0))
        >>> cart.rank > 0 or float(y[0]) == -1.0
        True
    """
    return Dirichlet(value, _mirror("dirichlet", at))


def _mirror(op: str, at: str) -> str:
    modes = {"face": "symmetric", "node": "reflect"}
    if at not in modes:
        raise ValueError(f"{op}: argument 'at' must be one of {tuple(modes)}, got {at!r}")
    return modes[at]


def _mode(side: Side) -> str | None:
    if isinstance(side, Dirichlet):
        return side.mode
    return side if isinstance(side, str) else None


def sides_of(op: str, comm: Comm, border: Any) -> list[tuple[Side, Side]]:
    """Return the border below and above along each dimension of the grid."""
    n = len(cart.topology(comm)[0])
    expected = (
        f"None, one of {MODES}, grids.neumann(), grids.dirichlet(value), a number or an array, or "
        f"a list of {n} of these or of pairs (below, above), one for each dimension of 'cart'"
    )

    def checked(side: Any) -> Side:
        if isinstance(side, str) and side not in MODES:
            raise ValueError(
                f"{op}: argument 'border' must be {expected}, got {side!r}. For a wall, use "
                "grids.neumann() (zero flux) or grids.dirichlet(value); for a periodic axis, pass "
                "periods=True to Create_cart"
            )
        is_number = hasattr(side, "dtype") or isinstance(side, (bool, int, float, complex))
        if not (side is None or is_number or _mode(side)):
            raise TypeError(f"{op}: argument 'border' must be {expected}, got {border!r}")
        return side

    def pair(value: Any, length: int) -> Sequence[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str):
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

    def copy(axis: int, ghosts: slice, side: Side, source: slice) -> Copy:
        mode, own = _mode(side), inner[axis]
        if mode and (source.start < own.start or source.stop > own.stop):
            raise ValueError(
                f"{op}: argument 'x' of shape {shape} has {own.stop - own.start} inner cells along "
                f"axis {axis}, too few for border={side!r}; expected at least "
                f"{source.stop - source.start + (mode == 'reflect')}"
            )
        window = [slice(None)] * len(shape) if corners else inner
        before, after = window[:axis], window[axis:][1:]
        return Copy(axis, (*before, ghosts, *after), side, (*before, source, *after))

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
        first, behind = low, shape[-end] - high
        if is_first and low and below is not None:
            start = first + (_mode(below) == "reflect")
            source = slice(start, start + (1 if below == "edge" else low))
            yield copy(-end, slice(0, low), below, source)
        if is_last and high and above is not None:
            stop = behind - (_mode(above) == "reflect")
            source = slice(stop - (1 if above == "edge" else high), stop)
            yield copy(-end, slice(behind, behind + high), above, source)


def _by_fields(f: Callable[[Any, Any], Any], op: str, x: Any, border: Any) -> Any:
    """Apply a function to arrays and their border, field by field if there are several borders."""
    if not isinstance(border, dict):
        return jax.tree.map(lambda leaf: f(as_array(leaf), border), x)
    if not isinstance(x, dict) or x.keys() != border.keys():
        given = sorted(x) if isinstance(x, dict) else type(x).__name__
        raise ValueError(
            f"{op}: argument 'border' has the fields {sorted(border)}; expected the fields of "
            f"'x', {given}"
        )
    return {name: _by_fields(f, op, part, border[name]) for name, part in x.items()}


def check(op: str, comm: Comm, x: Any, border: Any) -> None:
    """Raise the errors of :func:`sides_of`."""
    _by_fields(lambda leaf, border: sides_of(op, comm, border), op, x, border)


def filled(op: str, comm: Comm, x: Any, border: Any, axes: Any, widths: Any, corners: Any) -> Any:
    """Fill the ghost cells of blocks at the border of the grid, by :func:`_copies`."""

    def fill(leaf: Any, border: Any) -> Any:
        sides, shape = sides_of(op, comm, border), leaf.shape
        for side in (side for pair in sides for side in pair):
            _check_values(op, side, shape)
        for axis, ghosts, side, source in _copies(op, comm, shape, axes, widths, sides, corners):
            value, mode = side, _mode(side)
            if mode:
                cells = leaf[source]
                value = cells if mode == "edge" else jnp.flip(cells, axis)
                if isinstance(side, Dirichlet):
                    value = 2 * _values(side.value, ghosts) - value
            else:
                value = _values(side, ghosts)
            leaf = leaf.at[ghosts].set(value)
        return leaf

    return x if border is None else _by_fields(fill, op, x, border)


def _check_values(op: str, side: Side, shape: tuple[int, ...]) -> None:
    value = side.value if isinstance(side, Dirichlet) else side
    ndim = 0 if isinstance(value, (str, type(None))) else jnp.ndim(value)
    if ndim and jnp.shape(value) != shape[len(shape) - ndim :]:
        raise ValueError(
            f"{op}: argument 'border' has an array of shape {jnp.shape(value)}; expected the "
            f"shape of 'x' with its ghost cells, {shape}"
        )


def _values(value: Any, ghosts: tuple[slice, ...]) -> Any:
    """Return a number, or the part of an array for ghost cells."""
    ndim = jnp.ndim(value)
    return value[ghosts[len(ghosts) - ndim :]] if ndim else value


def added(op: str, comm: Comm, x: Any, border: Any, axes: Any, widths: Any, corners: Any) -> Any:
    """Apply the transpose of :func:`filled`.

    Add ghost cells at the border to the cells that fill them, and set them to zero.
    """

    def add(leaf: Any, border: Any) -> Any:
        sides, shape = sides_of(op, comm, border), leaf.shape
        copies = [*_copies(op, comm, shape, axes, widths, sides, corners)]
        for axis, ghosts, side, source in reversed(copies):
            cells, mode = leaf[ghosts], _mode(side)
            leaf = leaf.at[ghosts].set(0)
            if mode == "edge":
                leaf = leaf.at[source].add(cells.sum(axis, keepdims=True, dtype=cells.dtype))
            elif mode:
                cells = jnp.flip(cells, axis)
                leaf = leaf.at[source].add(-cells if isinstance(side, Dirichlet) else cells)
        return leaf

    return x if border is None else _by_fields(add, op, x, border)
