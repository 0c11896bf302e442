"""Blocks on Cartesian communicators: their axes, ghost cells and neighbors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._op.arguments import from_end
from .._op.comm import Comm, as_comm, check_not_null, static_int


class Block(Protocol):
    """What operations read of a :class:`mpi4jax.grids.Block`, which is defined above this layer."""

    comm: MPI.Cartcomm
    axes: int | Sequence[int | None] | None
    width: int | Sequence[int | tuple[int, int]]
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]

    def check_widths(self, op: str) -> None: ...


def as_cart(op: str, cart: Any) -> Comm:
    """Return the :class:`Comm` of a Cartesian communicator."""
    check_not_null(op, "cart", cart)
    if not isinstance(cart, MPI.Intracomm) or cart.Get_topology() != MPI.CART:
        raise TypeError(
            f"{op}: argument 'cart' must be a communicator with a Cartesian topology, such as "
            f"MPI.COMM_WORLD.Create_cart(dims, periods), or a grids.Block, got "
            f"{type(cart).__name__}: {cart!r}"
        )
    return as_comm(op, cart)


def topology(comm: Comm) -> tuple[list[int], list[int], list[int]]:
    """Return the number of blocks, periodicity and this rank's position along each dimension."""
    return MPI.Cartcomm(comm.mpi).Get_topo()  # type: ignore[return-value]


def _dimensions(comm: Comm) -> int:
    if "dimensions" not in comm.cache:
        comm.cache["dimensions"] = len(topology(comm)[0])
    return comm.cache["dimensions"]  # type: ignore[no-any-return]


def rank_beside(comm: Comm, coords: Sequence[int], steps: dict[int, int]) -> int:
    """Return the rank at some distance along dimensions of the grid, or -1 beyond its border."""
    sizes, periods, _ = topology(comm)
    there = [at + steps.get(k, 0) for k, at in enumerate(coords)]
    inside = (p or 0 <= at < n for at, n, p in zip(there, sizes, periods, strict=True))
    return MPI.Cartcomm(comm.mpi).Get_cart_rank(there) if all(inside) else -1


def neighbours(comm: Comm, dimensions: tuple[int, ...], corners: bool) -> tuple[int, ...]:
    """Return the rank at each step of -1, 0 or 1 blocks along some dimensions, or -1 if there is
    none. The last dimension varies fastest. Without ``corners``, only steps along one dimension
    count.
    """
    key = ("neighbours", dimensions, corners)
    if key not in comm.cache:
        coords, ranks = topology(comm)[2], []
        for steps in itertools.product((-1, 0, 1), repeat=len(dimensions)):
            far = sum(map(abs, steps))
            wanted = far == 1 or (far > 1 and corners)
            moves = dict(zip(dimensions, steps, strict=True))
            ranks.append(rank_beside(comm, coords, moves) if wanted else -1)
        comm.cache[key] = tuple(ranks)
    return comm.cache[key]  # type: ignore[no-any-return]


def _sequence(op: str, name: str, value: Any, length: int, expected: str) -> Sequence[Any]:
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, (str, bytes)):
        raise TypeError(
            f"{op}: argument '{name}' must be {expected}, got {type(value).__name__}: {value!r}"
        )
    if len(value) != length:
        raise ValueError(f"{op}: argument '{name}' must be {expected}, got {value!r}")
    return list(value)


def axes_of(op: str, comm: Comm, axes: Any) -> list[int | None]:
    """Return the array's axis for each dimension of the grid, None for one that is not
    exchanged."""
    n = _dimensions(comm)
    expected = f"None or a list of {n} axes, one (an integer or None) for each dimension of 'cart'"
    if axes is None:
        return list(range(-n, 0))
    if hasattr(axes, "__index__"):
        axes = (axes,)
    axes = _sequence(op, "axes", axes, n, expected)
    return [axis if axis is None else static_int(op, "axes", axis, expected) for axis in axes]


def positions(op: str, axes: Sequence[int], ndim: int) -> list[int]:
    """Return axes of an array counted from its first axis."""
    counted = from_end(op, axes, [(0, 0)] * len(axes), (0,) * ndim)
    return [ndim - axis for axis in counted]


def widths_of(op: str, comm: Comm, width: Any) -> list[tuple[int, int]]:
    """Return the ghost cells below and above along each dimension of the grid."""
    n = _dimensions(comm)
    expected = (
        f"an integer from 0, or a list of {n} integers or pairs (below, above), one for each "
        "dimension of 'cart'"
    )
    whole = (
        [width] * n if hasattr(width, "__index__") else _sequence(op, "width", width, n, expected)
    )
    pairs = []
    for w in whole:
        pair = [w, w] if hasattr(w, "__index__") else _sequence(op, "width", w, 2, expected)
        low, high = (static_int(op, "width", side, expected) for side in pair)
        if low < 0 or high < 0:
            raise ValueError(f"{op}: argument 'width' must be {expected}, got {width!r}")
        pairs.append((low, high))
    return pairs


def grid_of(
    op: str, cart: Any, axes: Any, width: Any, x: Any = None
) -> tuple[Comm, list[int | None], list[tuple[int, int]]]:
    """Return the communicator, axes and widths of arguments, or of a `grids.Block`.

    The axes of a block are counted from the end here, because an array may have further axes in
    front.
    """
    n = None
    if hasattr(cart, "padded_shape"):
        n = len(cart.padded_shape)
        if x is not None:
            cart.check_widths(op)
        for leaf in jax.tree.leaves(x):
            shape = jnp.shape(leaf)
            if shape[len(shape) - n :] != cart.padded_shape:
                hint = ""
                if shape[len(shape) - n :] == cart.shape:
                    hint = "; block.with_ghosts(x) adds the ghost cells that it lacks"
                raise ValueError(
                    f"{op}: argument 'x' has shape {shape}; expected {cart.padded_shape}, the "
                    f"shape of {cart!r} with its ghost cells{hint}"
                )
        cart, axes, width = cart.comm, cart.axes, cart.width
    comm = as_cart(op, cart)
    chosen = axes_of(op, comm, axes)
    if n is not None:
        chosen = [axis if axis is None or axis < 0 else axis - n for axis in chosen]
    return comm, chosen, widths_of(op, comm, width)
