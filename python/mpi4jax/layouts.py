"""Redistribution of a global array from one layout to another."""

from __future__ import annotations

from typing import Any

import jax
from mpi4py import MPI

from ._numerics.base import as_array
from ._numerics.layout import Layout, Pieces, Shape, Windows, as_layout, batch_of
from ._op.comm import default_comm
from .ops.alltoallv import alltoallv

__all__ = ["Layout", "redistribute"]


def comm_of(op: str, comm: MPI.Intracomm | None, *given: Any) -> MPI.Intracomm:
    """Return the communicator of an argument, or else of shardings and blocks, or the default one.

    Raises:
        ValueError: if these differ.
    """
    found = [g.comm for g in (*given,) if hasattr(g, "comm")]
    found = [comm, *found] if comm is not None else found or [default_comm()]
    if any(MPI.Comm.Compare(c, found[0]) not in (MPI.IDENT, MPI.CONGRUENT) for c in found[1:]):
        raise ValueError(
            f"{op}: the arguments are on communicators of different ranks; expected meshes of one "
            "communicator"
        )
    return found[0]


class Exchange:
    """The messages that redistribute an array from one layout to another.

    Attributes:
        outgoing: the pieces of this rank's old block.
        incoming: the pieces of its new block.
    """

    def __init__(self, batch: Shape, source: Layout, target: Layout, comm: MPI.Intracomm):
        rank, size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        # Of blocks that several ranks have, each receives from one that is near it on the grid.
        same_copies = (source.grid, source.free) == (target.grid, target.free)
        self.outgoing: Pieces | Windows
        if same_copies or (source.blocks, target.blocks) == (source.ranks, target.ranks):
            copy = target.place(rank % target.ranks)[1]
            self.outgoing = Pieces.of(batch, source.block(rank), target, copy)
        else:
            self.outgoing = Windows.of(batch, source, rank, target, size)
        copy = source.place(rank % source.ranks)[1]
        self.incoming = Pieces.of(batch, target.block(rank), source, copy)

    def send(self, message: jax.Array) -> jax.Array:
        """Send the pieces of the old block, and return those of the new one."""
        size = self._comm.Get_size()
        counts = self.outgoing.counts(size), self.incoming.counts(size)
        return alltoallv(message, *counts, comm=self._comm)


def redistribute(x: Any, source: Any, target: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Convert a global array from one layout to another. Collective.

    Two ranks exchange a message only if the old block of one and the new block of the other have
    elements in common. For pencils, these are ranks of one row or column of the grid of ranks. If
    several ranks have the same block, as with a `PartitionSpec` that does not name all axes of the
    mesh, one of them sends it.

    Args:
        x: this rank's block under ``source``, of any dtype. It may have leading axes before those
            of the layout, with the same lengths on all ranks. Or a pytree of such arrays. If
            ``source`` is a ``grids.Block``, the shape of ``x`` says whether it has ghost cells.
        source: the layout of ``x``: a :class:`Layout`, a :class:`mpi4jax.grids.Block`, or a
            :class:`mpi4jax.sharding.NamedSharding` with the global shape.
        target: another one of the same global shape. Ghost cells of a ``grids.Block`` are zeros:
            :func:`halo_exchange` fills them.
        comm: communicator; by default that of ``source`` or ``target``, or a clone of
            ``COMM_WORLD``.

    Returns:
        This rank's block under ``target``, of the dtype of ``x``, with the same leading axes.

    Raises:
        TypeError: if ``source`` or ``target`` is not one of these.
        ValueError: if they have different global shapes or communicators, or more blocks than there
            are ranks, or ``x`` is not a block of ``source``.

    Derivative:
        The transpose is ``redistribute(c, target, source)``; cotangents of several copies of a
        block are added up.

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
    op = "redistribute"
    comm = comm_of(op, comm, source, target)
    rank, size = comm.Get_rank(), comm.Get_size()
    old, new = (as_layout(op, n, g, size) for n, g in (("source", source), ("target", target)))
    if old.shape != new.shape:
        raise ValueError(
            f"redistribute: arguments 'source' and 'target' have shapes {old.shape} and "
            f"{new.shape}; expected those of one array"
        )
    stays = old == new or all(old.block(r) == new.block(r) for r in range(size))

    def move(leaf: Any) -> jax.Array:
        leaf = as_array(leaf)
        if hasattr(source, "inner_of"):
            leaf = source.inner_of(op, leaf)
        batch = batch_of(op, "x", leaf, old, rank)
        if not stays:
            exchange = Exchange(batch, old, new, comm)
            leaf = exchange.incoming.unpack(exchange.send(exchange.outgoing.pack(leaf)))
        return target.with_ghosts(leaf) if hasattr(target, "with_ghosts") else leaf

    return jax.tree.map(move, x)
