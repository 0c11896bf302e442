"""The native module's rows of operations (`src/ops/table.rs`) and dtypes (`src/ops/dtypes.rs`)."""

from __future__ import annotations

import json
from typing import NamedTuple

from .. import _native

Extents = tuple[str, str]


class Row(NamedTuple):
    """What the native module says of an operation.

    Attributes:
        name: the operation, as in ``mpi4jax.<name>``.
        mpi: the MPI function that it calls.
        has_reduction, has_root, has_peer: whether it takes a reduction; a root; a source, a
            destination, or both.
        has_mean: whether the reduction is over all ranks, and may be ``MEAN``.
        has_blocks: whether it takes any number of arrays at once, and returns as many.
        has_parts: whether it has parameters for the rows that go to each rank and come from it.
        is_ragged: whether an array says, when the operation runs, how many rows go to each rank.
        private: the kind of communicator that the core makes to run it: ``"messages"``; or, for its
            transpose, ``"reversed"``.
        at_root, elsewhere: what a rank sends and receives: ``"none"``, ``"one"`` block, one
            ``"per rank"``, or ``"variable"``: then ranks may differ.
        started: the MPI function that initiates it, if the native module does.
    """

    name: str
    mpi: str
    has_reduction: bool
    has_mean: bool
    has_root: bool
    has_peer: bool
    has_blocks: bool
    has_parts: bool
    is_ragged: bool
    private: str | None
    at_root: Extents
    elsewhere: Extents
    started: str | None


class Dtype(NamedTuple):
    """What the native module says of a dtype.

    Attributes:
        name: its name.
        has_arithmetic, is_ordered, has_bits: which groups of reductions it has: SUM and PROD; MAX,
            MIN, MAXLOC and MINLOC; the reductions of bits and of truth values.
        carrier: the wider dtype as which it is communicated, if a value takes less than a byte.
        reduced_as: the wider dtype as which it is reduced, if the core has no arithmetic for it.
    """

    name: str
    has_arithmetic: bool
    is_ordered: bool
    has_bits: bool
    carrier: str | None
    reduced_as: str | None

    def has_reduction(self, name: str) -> bool:
        """Return whether one of MPI's reductions, or MEAN, is defined for it."""
        if name == "MEAN":
            return self.has_arithmetic and not self.has_bits
        if name in ("SUM", "PROD"):
            return self.has_arithmetic
        return self.is_ordered if name in ("MAX", "MIN", "MAXLOC", "MINLOC") else self.has_bits


# In alphabetical order.
ROWS = {row["name"]: Row(**row) for row in json.loads(_native.ops_table())}
DTYPES = {row["name"]: Dtype(**row) for row in json.loads(_native.dtypes_table())}
