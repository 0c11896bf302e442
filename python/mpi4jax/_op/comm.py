"""Communicators, reductions and statuses as parameters of JAX primitives.

JAX caches by the hash of an equation's parameters. mpi4py's handles are new Python objects each
time, so each communicator and reduction is represented by one object that lives as long as it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np
from mpi4py import MPI

from .. import _native
from .._job import flush, job
from .._setup import gpus, transport
from .other_names import PREDEFINED, reduction_named
from .table import ROWS

_handleof = MPI._handleof


class AnyComm:
    """Any communicator with this rank and size; an operand says which one."""

    __slots__ = ("rank", "size")
    key = None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def __repr__(self) -> str:
        return f"any[{self.size}]"

    @property
    def any(self) -> AnyComm:
        return self


_any_comm = functools.cache(AnyComm)


class Uncopied:
    """A class whose copies are the same object, because it holds a communicator."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: a communicator belongs to the process that has made it"
        )


class Comm(Uncopied):
    """A live intracommunicator.

    Attributes:
        key: its name for the native module, unique in this process. It is the communicator's own
            name where that is unique, so an exported program finds it again by name.
        number: its number for the native module.
        rank: rank of this process.
        size: number of ranks.
        any: what eager ops on it are compiled for.
        cache: what is known of it and made for it, and forgotten with it.
        made: the kinds of private communicators that the core has made of it.
        of_axes: the communicators of the axes of meshes, by their names, which are freed with it.
    """

    __slots__ = (
        "__weakref__", "any", "cache", "handle", "key", "made", "mpi", "number", "of_axes", "rank",
        "size",
    )  # fmt: skip

    def __init__(self, mpi: MPI.Intracomm, key: str):
        self.mpi, self.key, self.handle = mpi, key, _handleof(mpi)
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.any = _any_comm(self.rank, self.size)
        self.cache: dict[Any, Any] = {}
        self.made: set[str] = set()
        self.of_axes: list[dict[Any, MPI.Intracomm]] = []
        self.number = _native.register_comm(key, self.handle, self.rank, self.size)

    def __repr__(self) -> str:
        return f"{self.key}[{self.size}]"


@contextlib.contextmanager
def waits_in(comm: Comm, words: str) -> Iterator[None]:
    """Mark a collective call of this package that is made of calls of mpi4py.

    Reports name it where this rank waits in it.
    """
    _native.watch_enter(comm.key, words)
    try:
        yield
    finally:
        _native.watch_leave()


class Reduction:
    """A reduction: ``name`` is MPI's ("SUM"), or ``user#k`` for one made by the user."""

    __slots__ = ("mpi", "name", "user")

    def __init__(self, mpi: MPI.Op, name: str, user: bool):
        # `mpi` is kept, because a reduction written in Python is freed with its mpi4py object.
        self.mpi, self.name, self.user = mpi, name, user

    @property
    def is_freed(self) -> bool:
        """Return whether the user has freed it."""
        return self.user and self.mpi == MPI.OP_NULL  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return "MEAN" if self is MEAN else (as_reduction, ("pickle", self.mpi))


class Status:
    """An mpi4py status, by identity. Compiled code that writes to it keeps it alive.

    None: any one, where an operand says which.
    """

    __slots__ = ("address", "mpi")

    def __init__(self, mpi: MPI.Status | None):
        self.mpi, self.address = mpi, 0 if mpi is None else MPI._addressof(mpi)
        if self.address:
            _native.add_status(self.address)

    # At interpreter exit, the globals of the module may already be deleted.
    def __del__(self, remove: Any = _native.remove_status) -> None:
        if self.address:
            remove(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return "status"


_comms: dict[int, Comm] = {}
_freed: dict[int, str] = {}  # handle -> key, of the last ones
_REMEMBERED = 64
_keys: set[str] = set()
_count = itertools.count()
_clone: MPI.Intracomm | None = None
_default: Comm | None = None  # once it is made
_making = threading.RLock()


def _forget(mpi: MPI.Comm, keyval: int, comm: Comm) -> None:
    """Forget a communicator: MPI calls this when it is freed, by any handle and library."""
    # Programs run ahead of Python: an operation on it may not have begun. MPICH frees late, where
    # the last request on it ends, maybe within a program that a flush would wait for.
    if not _native.is_calling():
        flush.flush_own()
    _comms.pop(comm.handle, None)
    comm.cache.clear()
    # PETSc, too, frees communicators in the callback of the one that they are made of.
    for made in [c for of_mesh in comm.of_axes for c in of_mesh.values() if c is not comm.mpi]:
        if made != MPI.COMM_NULL:
            made.Free()
    _freed[comm.handle] = comm.key
    while len(_freed) > _REMEMBERED:
        _freed.pop(next(iter(_freed)), None)
    _keys.discard(comm.key)
    _native.free_comm(comm.key)


# The attribute is deleted with the communicator, and not copied to its duplicates.
_keyval = MPI.Comm.Create_keyval(delete_fn=_forget)


def _is_live(mpi: MPI.Intracomm) -> bool:
    """Return whether a handle, which is not null, belongs to a live communicator.

    After ``b = MPI.Intracomm(a); a.Free()`` the handle ``b`` dangles. MPICH reports that when it is
    used. Open MPI crashes, except in a look-up of the communicator by the index that is stored
    there.
    """
    try:
        return _handleof(MPI.Comm.f2py(mpi.py2f())) == _handleof(mpi) and mpi.Get_size() > 0
    except MPI.Exception:
        return False


def _register(mpi: MPI.Intracomm) -> Comm:
    _freed.pop(_handleof(mpi), None)
    # A name must not forge lines of a report.
    name = mpi.Get_name().encode("unicode_escape").decode() if mpi.Get_name() else ""
    unique = bool(name) and name not in _keys
    gpus.announce()
    comm = Comm(mpi, name if unique else f"{name or 'comm'}#{next(_count)}")
    _keys.add(comm.key)
    _comms[comm.handle] = comm
    mpi.Set_attr(_keyval, comm)
    return comm


def _check_not_finalized(op: str) -> None:
    if MPI.Is_finalized():
        raise RuntimeError(f"{op}: MPI_Finalize has been called; operations must run before it")


def clone_world() -> MPI.Intracomm:
    """Make the default communicator.

    Raises:
        ValueError: if settings differ that must be the same on all ranks.
    """
    global _clone
    with _making:  # two threads of a rank may need it at the same time
        if _clone is None:
            handle = _native.make_default()
            # If handle is None, ranks that never used it have exited, and a duplicate, which all
            # ranks make together, is not possible.
            made: Any = MPI.COMM_WORLD if handle is None else MPI.Intracomm.fromhandle(handle)
            _clone = made
            # On several hosts, or with some transports, all ranks call this. Otherwise, some ranks
            # may never call it.
            if handle is not None and (transport.asks_all_ranks() or not job.shares_board()):
                gpus.warn_of_sharing(made)
        return _clone


def _default_comm() -> Comm:
    global _default
    if _default is None:
        _check_not_finalized("mpi4jax")
        _default = as_comm("mpi4jax", clone_world())
    return _default


def default_comm() -> MPI.Intracomm:
    """Return the default communicator of operations, a duplicate of ``COMM_WORLD``.

    It is made when a rank first uses it. On one host, ranks that do not use it take part in a
    thread; on several hosts, its first use is collective. If a rank has called ``MPI_Finalize``
    before that, it is ``COMM_WORLD`` itself.

    Returns:
        mpi4py.MPI.Intracomm: the same communicator each time.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> 0 <= mpi4jax.default_comm().rank < mpi4jax.default_comm().size
        True
    """
    comm = _default_comm().mpi
    _native.watch_share_default()  # the program may pass it to mpi4py
    return comm


def forget_all() -> None:
    """Forget all communicators when `MPI_Finalize` begins, so that later calls raise an error."""
    global _default, _clone
    _default = _clone = None
    _comms.clear()


def static_int(op: str, name: str, value: Any, expected: str) -> int:
    """Return an argument as a static integer."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{op}: argument '{name}' must be a static integer, got a traced value: {value}; "
            "mark the argument of the compiled function with static_argnums or static_argnames"
        )
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(
        f"{op}: argument '{name}' must be {expected}, got {type(value).__name__}: {value!r}"
    )


def check_not_null(op: str, name: str, comm: Any) -> None:
    """Raise an error if a communicator in an argument is the null communicator."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError(
            f"{op}: argument '{name}' is the null communicator: it was freed, or Split or Create "
            "left this rank out; expected a communicator that has this rank"
        )


def as_comm(op: str, comm: Any) -> Comm:
    """Return the :class:`Comm` of an mpi4py communicator.

    Raises:
        TypeError: if it is not an mpi4py intracommunicator.
        ValueError: if it is the null communicator, for instance because it was freed.
        RuntimeError: if MPI was finalized.
    """
    if comm is None:
        return _default or _default_comm()
    found = _comms.get(_handleof(comm)) if isinstance(comm, MPI.Intracomm) else None
    if found is not None:
        return found
    check_not_null(op, "comm", comm)
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"{op}: argument 'comm' must be an mpi4py.MPI.Intracomm or None, "
            f"got {type(comm).__name__}: {comm!r}"
        )
    _check_not_finalized(op)
    if not _is_live(comm):
        raise ValueError(
            f"{op}: argument 'comm' is communicator {_freed.get(_handleof(comm), '')}, which has "
            "been freed through another handle; expected one that has not been freed"
        )
    with _making:  # two threads may use it at the same time
        found = _comms.get(_handleof(comm))
        return _register(comm) if found is None else found


class _Mean(Reduction):
    """The sum over all ranks, divided by their number, of floats or complex numbers."""

    __slots__ = ()


MEAN = _Mean(MPI.SUM, "MEAN", user=False)

_reductions: dict[int, Reduction] = {
    _handleof(getattr(MPI, name)): Reduction(getattr(MPI, name), name, user=False)
    for name in PREDEFINED
}
# The keys are ids of mpi4py's constants, which are never deleted, and of `MEAN`.
_constants = {id(reduction.mpi): reduction for reduction in _reductions.values()}
_constants[id(MEAN)] = MEAN
# Compiled functions read from the address of a reduction's handle whether it was freed.
_kept: list[MPI.Op] = []
_WITHOUT_MEANING = {_handleof(getattr(MPI, name)): name for name in ("REPLACE", "NO_OP", "OP_NULL")}


def as_reduction(op: str, reduction: Any) -> Reduction:
    """Return the :class:`Reduction` of an mpi4py reduction, or ``MEAN`` if the operation has it."""
    found = _constants.get(id(reduction))
    if found is None and isinstance(reduction, MPI.Op):
        found = _reductions.get(_handleof(reduction))
        # MPI may reuse the handle of a freed reduction for a new one.
        if found is not None and found.user and found.mpi != reduction:
            found = None
    if found is not None and found is not MEAN:
        return found
    mean = op in ROWS and ROWS[op].has_mean
    if found is MEAN and mean:
        return found
    if found is MEAN:
        means = ", ".join(name for name, row in ROWS.items() if row.has_mean)
        raise TypeError(
            f"{op}: argument 'op' is mpi4jax.MEAN, which is over all ranks; expected an "
            f"mpi4py.MPI.Op such as MPI.SUM (only {means} take MEAN)"
        )
    if not isinstance(reduction, MPI.Op):
        or_mean = " or mpi4jax.MEAN" if mean else ""
        meant = reduction_named(reduction)
        advice = f"; use {meant}" if meant else ""
        if isinstance(reduction, MPI.Comm):
            advice = "; pass a communicator as comm=..."
        elif not meant and callable(reduction):
            advice = "; make a reduction of a function with MPI.Op.Create(function, commute=True)"
        raise TypeError(
            f"{op}: argument 'op' must be an mpi4py.MPI.Op such as MPI.SUM{or_mean}, "
            f"got {type(reduction).__name__}: {reduction!r}{advice}"
        )
    handle = _handleof(reduction)
    if handle in _WITHOUT_MEANING:
        raise TypeError(
            f"{op}: argument 'op' is MPI.{_WITHOUT_MEANING[handle]}, which is not defined for "
            f"JAX arrays; expected one of {', '.join(PREDEFINED)} or a reduction made with "
            "MPI.Op.Create"
        )
    for freed in [known for known, old in list(_reductions.items()) if old.is_freed]:
        _reductions.pop(freed, None)
    new = Reduction(reduction, f"user#{next(_count)}", user=True)
    _native.register_reduction(new.name, handle, MPI._addressof(reduction))
    _kept.append(reduction)
    _reductions[handle] = new
    return new


def as_status(op: str, status: Any) -> Status | None:
    """Return the :class:`Status` of an mpi4py status, or None."""
    if status is None:
        return None
    if not isinstance(status, MPI.Status):
        raise TypeError(
            f"{op}: argument 'status' must be an mpi4py.MPI.Status or None, "
            f"got {type(status).__name__}: {status!r}"
        )
    return Status(status)
