"""The rows of an array, along its first axis, that ranks send to one another: static counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .arguments import rank_of
from .comm import Comm, as_comm, static_int

Part = tuple[int, int, int]  # a rank, the first row that goes to it or comes from it, and how many


def counts_of(op: str, name: str, counts: Any, comm: Comm) -> tuple[int, ...]:
    """Return the number of rows of each rank, from an argument."""
    expected = f"a list of static integers, one per rank ({comm.size})"
    is_list = isinstance(counts, (Sequence, np.ndarray)) and not isinstance(counts, str)
    entries = list(counts) if is_list else [counts]
    if any(isinstance(entry, jax.core.Tracer) for entry in entries):
        raise TypeError(
            f"{op}: argument '{name}' must be {expected}, got a traced value: {counts!r}; for "
            "traced counts, use ragged_alltoall"
        )
    if not is_list:
        raise TypeError(
            f"{op}: argument '{name}' must be {expected}, got {type(counts).__name__}: {counts!r}"
        )
    if isinstance(counts, np.ndarray) and counts.ndim == 1 and counts.dtype.kind in "iu":
        row_counts = tuple(counts.tolist())  # one check for all of many entries
    else:
        row_counts = tuple(static_int(op, name, entry, expected) for entry in entries)
    if len(row_counts) != comm.size:
        raise ValueError(
            f"{op}: argument '{name}' must have one entry per rank ({comm.size}), got "
            f"{len(row_counts)}: {row_counts}"
        )
    if min(row_counts) < 0:
        raise ValueError(
            f"{op}: argument '{name}' must have numbers of rows that are not negative, got "
            f"{row_counts}"
        )
    return row_counts


def side_by_side(counts: Iterable[int]) -> tuple[Part, ...]:
    """Return the rows of the ranks that have some, if they lie in the order of the ranks."""
    ends = itertools.accumulate(counts)
    each = zip(ends, counts, strict=True)
    return tuple((rank, end - count, count) for rank, (end, count) in enumerate(each) if count)


class ToRoot(NamedTuple):
    """What goes where, if all ranks send the rows of an array to the root.

    Attributes:
        comm, root: the communicator and the root.
        own, all: the number of rows of this rank, and of the root's result (elsewhere ``own``).
        whole: the number of rows of all ranks.
        own_parts, all_parts: the rows of this rank that go to each rank, and the rows of the root
            that come from each.
    """

    comm: Comm
    root: int
    own: int
    all: int
    whole: int
    own_parts: tuple[Part, ...]
    all_parts: tuple[Part, ...]


def to_root(op: str, counts: Any, root: Any, given: Any) -> ToRoot:
    """Return what goes where, if all ranks send the rows of an array to the root."""
    comm = as_comm(op, given)
    row_counts, root = counts_of(op, "counts", counts, comm), rank_of(op, "root", root, comm)
    own, is_root = row_counts[comm.rank], root == comm.rank
    return ToRoot(
        comm,
        root,
        own,
        sum(row_counts) if is_root else own,
        sum(row_counts),
        ((root, 0, own),) if own else (),
        side_by_side(row_counts) if is_root else (),
    )
