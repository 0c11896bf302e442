"""The rows of an array, along its first axis, that ranks send to one another: static counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .comm import Comm, static_int

Part = tuple[int, int]  # the first row, and how many


def counts_of(op: str, name: str, counts: Any, comm: Comm) -> tuple[int, ...]:
    """Return the number of rows of each rank, from an argument.

    Raises:
        TypeError: if it is not a sequence of integers.
        ValueError: if it does not have one entry per rank, or an entry is negative.
    """
    expected = f"a list of {comm.size} numbers of rows, one for each rank"
    if isinstance(counts, jax.core.Tracer) or not isinstance(counts, (Sequence, np.ndarray)):
        what = "a traced value" if isinstance(counts, jax.core.Tracer) else type(counts).__name__
        raise TypeError(
            f"{op}: argument '{name}' must be {expected}, static integers, got {what}: {counts!r}"
        )
    row_counts = tuple(static_int(op, name, count, expected) for count in counts)
    if len(row_counts) != comm.size or min(row_counts) < 0:
        raise ValueError(f"{op}: argument '{name}' must be {expected}, got {row_counts}")
    return row_counts


def side_by_side(counts: Iterable[int]) -> tuple[Part, ...]:
    """Return the rows of each rank if they lie in the order of the ranks."""
    ends = itertools.accumulate(counts)
    return tuple((end - count, count) for end, count in zip(ends, counts, strict=True))


def with_root(
    row_counts: tuple[int, ...], root: int, comm: Comm
) -> tuple[int, tuple[Part, ...], tuple[Part, ...]]:
    """Return the counts for an array that is whole on the root.

    These are the number of its rows on this rank, the rows of each rank among them, and which of
    its own rows this rank exchanges with each rank.
    """
    own = row_counts[comm.rank]
    everyones = row_counts if root == comm.rank else (0,) * comm.size
    rows = sum(row_counts) if root == comm.rank else own
    return rows, side_by_side(everyones), only(root, (0, own), comm.size)


def only(rank: int, part: Part, size: int) -> tuple[Part, ...]:
    """Return the rows of one rank, and nothing for the others."""
    return tuple(part if r == rank else (0, 0) for r in range(size))
