"""permute: arrays between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from .._call.definition import define
from .._op import rows
from .._op.arguments import rank_of
from .._op.comm import Comm, as_comm
from .._op.operation import T, WithParts, call


def _pairs_of(perm: Any, comm: Comm) -> list[tuple[int, int]]:
    """Return the pairs of sources and destinations, which must be ranks, each of them once."""
    try:
        given = [tuple(pair) for pair in perm]
    except TypeError:
        given = [()]
    if any(len(pair) != 2 for pair in given):
        raise TypeError(
            "permute: argument 'perm' must be a sequence of pairs (source, destination) of ranks, "
            f"got {perm!r}"
        )
    ranks_of_pairs = []
    for i, (source, dest) in enumerate(given):
        name = f"perm[{i}]"
        ranks_of_pairs.append(
            (rank_of("permute", name, source, comm), rank_of("permute", name, dest, comm))
        )
    for side, what in enumerate(("source", "destination")):
        ranks = [pair[side] for pair in ranks_of_pairs]
        twice = [pair for pair in ranks_of_pairs if ranks.count(pair[side]) > 1]
        if twice:
            raise ValueError(
                f"permute: argument 'perm' must name each rank at most once as {what}, got {twice}"
            )
    return ranks_of_pairs


@dataclass(frozen=True)
class Permute(WithParts, name="permute"):
    """The adjoint is a permute with source and destination exchanged."""


@define(Permute)
def permute(x: T, perm: Sequence[tuple[int, int]], *, comm: MPI.Intracomm | None = None) -> T:
    """Send arrays from rank to rank, by a list of pairs (MPI_Sendrecv; MPI-4.1, section 3.10).

    Like `jax.lax.ppermute`. All ranks take part, including those that are in no pair.

    Args:
        x: array of any dtype, or pytree of arrays. Its shape must be the same on all ranks of the
            pairs; the values may differ.
        perm: list of pairs (source, destination) of static integers, the same on all ranks. Each
            rank may be a source once and a destination once. A rank may send to itself.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of the shape and dtype of ``x``: the array of the rank that
        sends to this one, or zeros if no rank does.

    Raises:
        TypeError: if ``perm`` or ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if an entry of ``perm`` is not a rank of ``comm``, or appears twice.

    Derivative:
        The transpose sends the cotangents back, from the second to the first rank of each pair.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> to_next = [(rank, rank + 1) for rank in range(comm.size - 1)]
        >>> y = mpi4jax.permute(jnp.ones(3), to_next)
        >>> float(y[0]) == (comm.rank > 0)
        True

    See also: :func:`sendrecv`, :func:`alltoallv`.
    """
    c = as_comm("permute", comm)
    ranks_of_pairs = _pairs_of(perm, c)
    dests = [dest for source, dest in ranks_of_pairs if source == c.rank]
    sources = [source for source, dest in ranks_of_pairs if dest == c.rank]
    op = Permute(
        c,
        rows=(None, None),
        send_parts=_all_rows(dests),
        recv_parts=_all_rows(sources),
    )
    return call(op, x)


def _all_rows(ranks: list[int]) -> tuple[rows.Part, ...]:
    """Return all of an array for, or from, the only one of these ranks, if there is one."""
    return tuple((rank, 0, 1) for rank in ranks)
