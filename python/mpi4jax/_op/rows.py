"""The rows of an array, along its first axis, that ranks send to one another: static counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .comm import Comm, static_int

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
