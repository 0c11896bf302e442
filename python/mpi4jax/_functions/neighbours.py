"""Exchange with the neighbors of a communicator that has a topology: a grid, or a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._call.call import run
from .._op.comm import Comm, as_comm, check_not_null
from .._op.operation import OPERATIONS, Call, T
from .._op.packing import as_array, zeros_like
from .._requests.nonblocking import nonblocking

_KINDS = {MPI.CART: MPI.Cartcomm, MPI.GRAPH: MPI.Graphcomm, MPI.DIST_GRAPH: MPI.Distgraphcomm}


class _Edges:
    """The edges of this rank: rank at the other end of each, in the order of the topology.

    Attributes:
        ins, outs: sources and destinations.
        sent: the edges that lead to a rank, in the order in which their blocks are sent.
        received: where the blocks of the incoming edges are among those that come; of an edge from
            MPI.PROC_NULL, behind the last.
    """

    def __init__(self, op: str, comm: Any):
        check_not_null(op, "comm", comm)
        kind = comm.Get_topology() if isinstance(comm, MPI.Intracomm) else None
        if kind not in _KINDS:
            raise TypeError(
                f"{op}: argument 'comm' must be a communicator with a topology, such as "
                "MPI.COMM_WORLD.Create_cart(dims, periods) or .Create_dist_graph_adjacent(sources, "
                f"destinations), got {type(comm).__name__}: {comm!r}"
            )
        self.comm: Comm = as_comm(op, comm)
        self.ins, self.outs = (list(side) for side in _KINDS[kind](comm).inoutedges)
        # If two ranks have several edges, both ends list them in the same order. On a grid,
        # however, a message that one rank sends down is received from above.
        there = (lambda k: k ^ 1) if kind == MPI.CART else (lambda k: k)
        self.sent = sorted(self._real(self.outs), key=lambda k: (self.outs[k], there(k)))
        came = sorted(self._real(self.ins), key=lambda k: self.ins[k])
        places = {k: place for place, k in enumerate(came)}
        self.received = [places.get(k, len(came)) for k in range(len(self.ins))]

    @staticmethod
    def _real(ranks: list[int]) -> list[int]:
        return [k for k, rank in enumerate(ranks) if rank != MPI.PROC_NULL]

    def counts(self, ranks: list[int]) -> list[int]:
        """Return how many edges lead to, or come from, each rank."""
        return [ranks.count(rank) for rank in range(self.comm.size)]


@dataclass(frozen=True)
class _InOrder:
    """Puts the received blocks into the order of the topology, by `_Edges.received`."""

    received: tuple[int, ...]

    def __call__(self, blocks: Any) -> Any:
        return jax.tree.map(self._ordered, blocks)

    def _ordered(self, rows: Any) -> Any:
        if rows.shape[0] in self.received:  # from MPI.PROC_NULL
            like = jax.ShapeDtypeStruct((1, *rows.shape[1:]), rows.dtype)
            rows = jnp.concatenate([rows, zeros_like(like)])
        return rows[np.array(self.received, int)]


def _prepare(edges: _Edges, blocks: Any) -> tuple[Call, _InOrder]:
    """Prepare a call that sends the blocks of a tree, which are in the order of `edges.sent`."""
    counts = edges.counts(edges.outs), edges.counts(edges.ins)
    call = OPERATIONS["alltoallv"].prepare(blocks, *counts, comm=edges.comm.mpi)
    return call, _InOrder(tuple(edges.received))


def _run(prepared: tuple[Call, _InOrder]) -> Any:
    call, in_order = prepared
    return in_order(run(call))


def neighbor_alltoall(x: T, comm: MPI.Intracomm) -> T:
    """Send a block to each neighbor (MPI_Neighbor_alltoall; MPI-4.1, section 8.6).

    All ranks take part, but only neighbors exchange messages. On a grid, the neighbors are one step
    down and one step up in each dimension, in this order: block 0 goes down in the first dimension,
    and block 1 up. A block that one rank sends down, the other one receives from above, even if
    both neighbors are the same rank, as in a periodic dimension of one or two ranks.

    Args:
        x: array of shape ``(outdegree, *S)``, of any dtype, a block for each destination in the
            order of the topology (``comm.inoutedges``); or a pytree of such arrays. All blocks have
            the shape ``S``, on all ranks.
        comm: communicator with a topology: Cartesian, or a (distributed) graph.

    Returns:
        jax.Array, or pytree: array of shape ``(indegree, *S)`` and the dtype of ``x``, the blocks
        of the sources in the order of the topology, and zeros for a missing neighbor
        (``MPI.PROC_NULL``, beyond the edge of a grid).

    Raises:
        TypeError: if ``comm`` has the wrong type or no topology, or the dtype is not supported.
        ValueError: if ``x`` does not have one block for each destination.

    Derivative:
        The transpose sends the blocks back (the derivative of :func:`alltoallv`).

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> ring = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> below, above = ring.Shift(0, 1)
        >>> y = mpi4jax.neighbor_alltoall(jnp.array([10, 20]) + ring.rank, ring)
        >>> [int(v) for v in y] == [20 + below, 10 + above]
        True

    See also: :func:`neighbor_allgather`, :func:`halo_exchange`, :func:`alltoallv`.
    """
    return _run(_prepare_alltoall(x, comm))


def _prepare_alltoall(x: Any, comm: MPI.Intracomm) -> tuple[Call, _InOrder]:
    name = "neighbor_alltoall"
    edges = _Edges(name, comm)

    def chosen(leaf: Any) -> Any:
        leaf = as_array(leaf)
        expected = len(edges.outs)
        if leaf.shape[:1] != (expected,):
            raise ValueError(
                f"{name}: argument 'x' must have a block for each destination of 'comm'; expected "
                f"({expected}, ...), got {leaf.shape}"
            )
        return leaf[np.array(edges.sent, int)]

    return _prepare(edges, jax.tree.map(chosen, x))


def neighbor_allgather(x: T, comm: MPI.Intracomm) -> T:
    """Gather the arrays of the neighbors (MPI_Neighbor_allgather; MPI-4.1, section 8.6).

    Args:
        x: array of shape ``S``, equal on all ranks, of any dtype; or a pytree of such arrays. It is
            sent to all neighbors that are destinations in ``comm``.
        comm: communicator with a topology: Cartesian, or a (distributed) graph.

    Returns:
        jax.Array, or pytree: array of shape ``(indegree, *S)`` and the dtype of ``x``: the blocks
        of the sources in the order of the topology (``comm.inoutedges``: on a grid, one step down
        and up each dimension), and zeros for a missing neighbor (``MPI.PROC_NULL``, beyond the edge
        of a grid).

    Raises:
        TypeError: if ``comm`` has the wrong type or no topology, or the dtype is not supported.

    Derivative:
        The transpose adds what the neighbors send back (the derivative of :func:`alltoallv`).

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> line = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[False])
        >>> y = mpi4jax.neighbor_allgather(line.rank + 1.0, line)
        >>> float(y[0]) == line.rank  # the first rank has no neighbor below
        True

    See also: :func:`neighbor_alltoall`, :func:`allgather`.
    """
    return _run(_prepare_allgather(x, comm))


def _prepare_allgather(x: Any, comm: MPI.Intracomm) -> tuple[Call, _InOrder]:
    edges = _Edges("neighbor_allgather", comm)

    def repeated(leaf: Any) -> Any:
        leaf = as_array(leaf)
        return jnp.broadcast_to(leaf, (len(edges.sent), *leaf.shape))

    return _prepare(edges, jax.tree.map(repeated, x))


ineighbor_alltoall = nonblocking(neighbor_alltoall, _prepare_alltoall)
ineighbor_allgather = nonblocking(neighbor_allgather, _prepare_allgather)
