"""Cutting a global array into the blocks of a Cartesian communicator, and putting it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from . import _cart
from ._arguments import rank_of
from ._tokens import NO_TOKEN, with_token
from .ops import gather, halo_exchange, scatter


class _Cuts:
    """How the blocks of a Cartesian communicator lie in an array."""

    def __init__(self, op: str, cart: Any, axes: Any, width: Any):
        self.op, self.comm = op, _cart.as_cart(op, cart)
        sizes = _cart.topology(self.comm)[0]
        chosen, widths = _cart.axes_of(op, self.comm, axes), _cart.widths_of(op, self.comm, width)
        for axis, size in zip(chosen, sizes, strict=True):
            if axis is None and size > 1:
                raise ValueError(
                    f"{op}: argument 'axes' must name an axis for each dimension of 'cart' that "
                    f"is cut into blocks ({sizes}), got {axes!r}"
                )
        cut = [k for k, axis in enumerate(chosen) if axis is not None]
        self.axes = [axis for axis in chosen if axis is not None]
        self.sizes, self.widths = [sizes[k] for k in cut], [widths[k] for k in cut]

    def _positions(self, ndim: int) -> list[int]:
        counted = _cart.from_end(self.op, self.axes, [(0, 0)] * len(self.axes), (0,) * ndim)
        return [ndim - axis for axis in counted]

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one block, without ghost cells, of an array of this shape."""
        out = list(shape)
        for axis, size in zip(self._positions(len(shape)), self.sizes, strict=True):
            if shape[axis] % size:
                raise ValueError(
                    f"{self.op}: argument 'x' of shape {shape} cannot be cut into {size} equal "
                    f"blocks along axis {axis}; expected a multiple of {size} cells"
                )
            out[axis] //= size
        return tuple(out)

    def stack(self, x: jax.Array) -> jax.Array:
        """All blocks along a new first axis; the last dimension of the grid is fastest."""
        axes, block = self._positions(x.ndim), self.block(x.shape)
        split: list[int] = []
        places = {}
        for axis, cells in enumerate(block):
            if axis in axes:
                places[axis] = len(split)
                split.append(self.sizes[axes.index(axis)])
            split.append(cells)
        x = x.reshape(split)
        x = jnp.moveaxis(x, [places[axis] for axis in axes], range(len(axes)))
        return x.reshape(self.comm.size, *block)

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `stack`."""
        axes, block = self._positions(blocks.ndim - 1), blocks.shape[1:]
        x = blocks.reshape(*self.sizes, *block)
        places = [axis + sum(other < axis for other in axes) for axis in axes]
        x = jnp.moveaxis(x, range(len(axes)), places)
        whole = list(block)
        for axis, size in zip(axes, self.sizes, strict=True):
            whole[axis] *= size
        return x.reshape(whole)

    def pad(self, x: jax.Array) -> jax.Array:
        """With ghost cells of zeros."""
        widths = [(0, 0)] * x.ndim
        for axis, width in zip(self._positions(x.ndim), self.widths, strict=True):
            widths[axis] = width
        return jnp.pad(x, widths)

    def inner(self, x: jax.Array) -> jax.Array:
        """Without ghost cells."""
        window = [slice(None)] * x.ndim
        for axis, (low, high) in zip(self._positions(x.ndim), self.widths, strict=True):
            if x.shape[axis] < low + high:
                raise ValueError(
                    f"{self.op}: argument 'x' of shape {x.shape} has fewer cells along axis "
                    f"{axis} than the ghost cells of 'width', {low} below and {high} above"
                )
            window[axis] = slice(low, x.shape[axis] - high)
        return x[tuple(window)]


def scatter_blocks(
    x: Any,
    cart: MPI.Cartcomm,
    root: int = 0,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 0,
    token: Any = None,
) -> Any:
    """Cut the root's array into blocks, one for each rank of a Cartesian communicator.

    Args:
        x: on the root, the whole array; on other ranks anything of its shape and dtype, also a
            ``jax.ShapeDtypeStruct``: values are not read there. Or a pytree of such.
        cart: communicator with a Cartesian topology.
        root: rank that has the array.
        axes: the array's axis that each dimension of ``cart`` cuts, by default the last ones.
        width: number of ghost cells around a block, as for :func:`halo_exchange`, by default none.
            They are filled; at an edge of the grid that is not periodic with zeros.
        token: token from another op, or None.

    Returns:
        tuple: this rank's block; and the new token.

    Raises:
        TypeError: a wrong type of an argument.
        ValueError: an axis that cannot be cut into equal blocks, or is not named.

    Derivative:
        That of :func:`scatter` and :func:`halo_exchange`, which it is made of: the transpose
        gathers on the root.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> n = MPI.COMM_WORLD.size
        >>> cart = MPI.COMM_WORLD.Create_cart([n, 1], periods=[False, True])
        >>> block, token = mpi4jax.scatter_blocks(jnp.ones((2 * n, 3)), cart, width=1)
        >>> block.shape
        (4, 5)
        >>> whole, token = mpi4jax.gather_blocks(block, cart, width=1)
        >>> cart.rank > 0 or whole.shape == (2 * n, 3)
        True

    See also: :func:`gather_blocks`, :func:`halo_exchange`, :func:`scatter`.
    """
    name = "scatter_blocks"
    cuts = _Cuts(name, cart, axes, width)
    root = rank_of(name, "root", root, cuts.comm)

    def prepare(leaf: Any) -> Any:
        if cuts.comm.rank == root:
            return cuts.stack(jnp.asarray(leaf))
        if not hasattr(leaf, "dtype"):
            leaf = jnp.asarray(leaf)
        return jnp.zeros(cuts.block(leaf.shape), leaf.dtype)

    y, token = with_token(scatter, token, jax.tree.map(prepare, x), root, comm=cart)
    if any(width != (0, 0) for width in cuts.widths):
        y = jax.tree.map(cuts.pad, y)
        y, token = with_token(halo_exchange, token, y, cart, axes=axes, width=width)
    return y if token is NO_TOKEN else (y, token)


def gather_blocks(
    x: Any,
    cart: MPI.Cartcomm,
    root: int = 0,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 0,
    token: Any = None,
) -> Any:
    """Put the blocks of all ranks of a Cartesian communicator together, on the root.

    Args:
        x: this rank's block, of the same shape on all ranks; or a pytree of blocks.
        cart: communicator with a Cartesian topology.
        root: rank that gets the whole array.
        axes: the array's axis that each dimension of ``cart`` cuts, by default the last ones.
        width: number of ghost cells around the block, which are left out: as for
            :func:`halo_exchange`, by default none.
        token: token from another op, or None.

    Returns:
        tuple: the whole array on the root, and ``x``, unchanged, on other ranks; and the new token.

    Raises:
        TypeError: a wrong type of an argument.
        ValueError: an axis that is cut is not named, or has fewer cells than ghost cells.

    Derivative:
        That of :func:`gather`, which it is made of: the transpose scatters from the root.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> y, token = mpi4jax.gather_blocks(jnp.full(2, cart.rank), cart)
        >>> cart.rank > 0 or [int(v) for v in y] == [r for r in range(cart.size) for _ in "ab"]
        True

    See also: :func:`scatter_blocks`, :func:`gather`.
    """
    name = "gather_blocks"
    cuts = _Cuts(name, cart, axes, width)
    root = rank_of(name, "root", root, cuts.comm)
    inner = jax.tree.map(lambda leaf: cuts.inner(jnp.asarray(leaf)), x)
    y, token = with_token(gather, token, inner, root, comm=cart)
    y = jax.tree.map(cuts.join, y) if cuts.comm.rank == root else x
    return y if token is NO_TOKEN else (y, token)
