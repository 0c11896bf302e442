"""Checks of the arguments of ops that are no arrays: ranks and tags."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ._comm import Comm, static_int

ANY_SOURCE, ANY_TAG, PROC_NULL = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.PROC_NULL
_TAG_UB = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def rank_of(op: str, name: str, value: Any, comm: Comm, *special: str) -> int:
    """The rank of ``comm`` that an argument is, or the constant of MPI.

    Raises:
        TypeError: it is no integer, or a traced one.
        ValueError: it is no rank, and none of the ``special`` constants.
    """
    if type(value) is int and 0 <= value < comm.size:
        return value
    expected = f"a rank from 0 to {comm.size - 1}" + "".join(f" or MPI.{n}" for n in special)
    value = static_int(op, name, value, expected)
    if 0 <= value < comm.size or any(value == getattr(MPI, n) for n in special):
        return value
    raise ValueError(
        f"{op}: argument '{name}' must be {expected} (communicator {comm.key} has size "
        f"{comm.size}), got {value}"
    )


def source_of(op: str, name: str, value: Any, comm: Comm) -> int:
    """The rank that a message comes from; raises as :func:`rank_of`."""
    return rank_of(op, name, value, comm, "ANY_SOURCE", "PROC_NULL")


def dest_of(op: str, name: str, value: Any, comm: Comm) -> int:
    """The rank that a message goes to; raises as :func:`rank_of`."""
    return rank_of(op, name, value, comm, "PROC_NULL")


def tag_of(op: str, name: str, value: Any, *, wildcard: bool = False) -> int:
    """The tag of a message, of one that is received if it may be a wildcard.

    Raises:
        TypeError: it is no integer, or a traced one.
        ValueError: it is no tag.
    """
    if type(value) is int and 0 <= value <= 32767:  # every MPI allows these
        return value
    expected = f"an integer from 0 to {_TAG_UB}" + (" or MPI.ANY_TAG" if wildcard else "")
    value = static_int(op, name, value, expected)
    if 0 <= value <= _TAG_UB or (wildcard and value == ANY_TAG):
        return value
    raise ValueError(f"{op}: argument '{name}' must be {expected}, got {value}")
