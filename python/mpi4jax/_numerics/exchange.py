"""The messages that redistribute a global array, and the communicator on which they go."""

from __future__ import annotations

from typing import Any

import jax
from mpi4py import MPI

from ..ops.alltoallv import alltoallv
from .base import as_comm
from .layout import Layout, Pieces, Shape, Windows


def comm_of(op: str, comm: MPI.Intracomm | None, *given: Any) -> MPI.Intracomm:
    """Return the communicator of an argument, else of shardings and blocks, else the default."""
    found = [g.comm for g in (*given,) if hasattr(g, "comm")]
    if comm is not None or not found:
        found = [as_comm(op, comm).mpi, *found]
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
        # If several ranks have a block, each rank receives from one that is near it on the grid.
        same_copies = (source.grid, source.free) == (target.grid, target.free)
        self.outgoing: Pieces | Windows
        if same_copies or (source.blocks, target.blocks) == (source.ranks, target.ranks):
            copy = target.place(rank % target.ranks)[1]
            self.outgoing = Pieces.of(batch, source.block(rank), target, copy)
        else:
            self.outgoing = Windows.of(batch, source, rank, target, size)
        copy = source.place(rank % source.ranks)[1]
        self.incoming = Pieces.of(batch, target.block(rank), source, copy)

    def run(self, x: jax.Array) -> jax.Array:
        """Return this rank's new block of an array, given its old block."""
        return self.incoming.unpack(self.send(self.outgoing.pack(x)))

    def send(self, message: jax.Array, name: str = "") -> jax.Array:
        """Send the pieces of the old block, and return the pieces of the new one.

        Ranks compare the name of the operation that the exchange is a part of, as they compare the
        name of a leaf.
        """
        size = self._comm.Get_size()
        counts = self.outgoing.counts(size), self.incoming.counts(size)
        received = alltoallv({name: message} if name else message, *counts, comm=self._comm)
        return received[name] if isinstance(received, dict) else received
