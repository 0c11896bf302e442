"""MPI objects that can be hashed, for programs that import them from here.

A compatibility shim, for programs written for earlier packages of this name, where a communicator
had to be wrapped to be a static argument of ``jax.jit``. Nothing in this package uses it.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI


class HashableMPIType:
    """An object of mpi4py that can be hashed, and compares equal to others with its handle.

    Attributes:
        wrapped: the object: a communicator, a reduction or a status.

    Example:
        >>> from mpi4py import MPI
        >>> HashableMPIType(MPI.SUM) == HashableMPIType(MPI.SUM)
        True
    """

    def __init__(self, obj: Any):
        self.wrapped = obj

    def _key(self) -> tuple[type, int]:
        return type(self.wrapped), MPI._handleof(self.wrapped)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableMPIType) and self._key() == other._key()


def wrap_as_hashable(obj: Any) -> HashableMPIType:
    """``obj`` in a :class:`HashableMPIType`, unless it is one."""
    return obj if isinstance(obj, HashableMPIType) else HashableMPIType(obj)


def unpack_hashable(obj: Any) -> Any:
    """What a :class:`HashableMPIType` wraps; anything else as it is."""
    return obj.wrapped if isinstance(obj, HashableMPIType) else obj
