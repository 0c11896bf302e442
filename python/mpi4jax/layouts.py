"""Redistribution of a global array from one layout to another."""

from __future__ import annotations

from typing import Any

import jax
from mpi4py import MPI

from ._numerics.base import as_array
from ._numerics.layout import Layout, Pieces, Shape, batch_of, check_layout
from ._op.comm import default_comm
from .ops.alltoallv import alltoallv

__all__ = ["Layout", "redistribute"]


class Exchange:
    """The messages that redistribute an array from one layout to another.

    Attributes:
        outgoing: the pieces of this rank's old block.
        incoming: the pieces of its new block.
    """

    def __init__(self, batch: Shape, source: Layout, target: Layout, comm: MPI.Intracomm):
        rank = comm.Get_rank()
        self._comm = comm
        self.outgoing = Pieces.of(batch, source.block(rank), target)
        self.incoming = Pieces.of(batch, target.block(rank), source)

    def send(self, message: jax.Array) -> jax.Array:
        """Send the pieces of the old block, and return those of the new one."""
        size = self._comm.Get_size()
        counts = self.outgoing.counts(size), self.incoming.counts(size)
        return alltoallv(message, *counts, comm=self._comm)


def redistribute(
    x: Any, source: Layout, target: Layout, *, comm: MPI.Intracomm | None = None
) -> Any:
    """Convert a global array from one layout to another. Collective.

    Two ranks exchange a message only if the old block of one and the new block of the other have
    elements in common. For pencils, these are ranks of one row or column of the grid of ranks.

    Args:
        x: this rank's block under ``source``, of any dtype. It may have leading axes before those
            of the layout, with the same lengths on all ranks. Or a pytree of such arrays.
        source: layout of ``x``.
        target: another layout of the same global shape.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        This rank's block under ``target``, of the dtype of ``x``, with the same leading axes.

    Raises:
        TypeError: if ``source`` or ``target`` is not a :class:`Layout`.
        ValueError: if the layouts have different shapes, a layout has more blocks than there are
            ranks, or ``x`` does not have the shape of this rank's block.

    Derivative:
        The transpose is ``redistribute(c, target, source)``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> rows, columns = (mpi4jax.Layout((7, 5), {axis: comm.size}) for axis in (0, 1))
        >>> whole = jnp.arange(35).reshape(7, 5)
        >>> y = mpi4jax.redistribute(whole[rows.block(comm.rank)], rows, columns)
        >>> bool((y == whole[columns.block(comm.rank)]).all())
        True

    See also: :class:`Layout`, :func:`scatter_blocks` and :func:`gather_blocks` for ghost cells.
    """
    comm = default_comm() if comm is None else comm
    rank, size = comm.Get_rank(), comm.Get_size()
    for name, layout in (("source", source), ("target", target)):
        check_layout("redistribute", name, layout, size)
    if source.shape != target.shape:
        raise ValueError(
            f"redistribute: arguments 'source' and 'target' have shapes {source.shape} and "
            f"{target.shape}; expected those of one array"
        )
    stays = all(source.block(r) == target.block(r) for r in range(size))

    def move(leaf: Any) -> jax.Array:
        leaf = as_array(leaf)
        batch = batch_of("redistribute", "x", leaf, source, rank)
        if stays:
            return leaf
        exchange = Exchange(batch, source, target, comm)
        return exchange.incoming.unpack(exchange.send(exchange.outgoing.pack(leaf)))

    return jax.tree.map(move, x)
