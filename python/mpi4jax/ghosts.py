"""Ghost values by global index, for unstructured meshes, graphs and sparse matrices.

Each rank owns some rows of a global array, and needs rows that others own. A :class:`Plan` is made
once, and then moves rows between the ranks concerned. It corresponds to PetscSF in PETSc (Zhang et
al., IEEE TPDS 33, 2022), Import and Export in Tpetra, IndexMap and Scatterer in DOLFINx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from ._job.flush import flush
from ._numerics.arrays import T, as_array
from ._numerics.base import Uncopied, as_comm, waits_in
from ._numerics.rendezvous import Ids, Rendezvous, RowExchange, rendezvous
from ._requests.request import Request
from .ops import alltoallv, ialltoallv

__all__ = ["Plan"]

# Each rank stores a part of the interval of all ids, unless the interval is this many times as long
# as the number of ids.
SPARSE = 4


def _all_or_none(comm: MPI.Intracomm, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that does not communicate.

    If it fails on one rank, all ranks raise the error.
    """
    result = problem = None
    try:
        result = function(*args)
    except (TypeError, ValueError) as e:
        problem = e
    first = np.empty(1, np.int64)
    own = np.array([comm.size if problem is None else comm.rank], np.int64)
    comm.Allreduce(own, first, MPI.MIN)
    if first[0] < comm.size:
        raise comm.bcast(problem, root=int(first[0])) from None
    return result


def _as_ids(name: str, given: Any, rank: int) -> Ids:
    ids = np.asarray(given)
    if not ids.size:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"ghosts.Plan: argument '{name}' must be a sequence of integers, one for each row; "
            f"got shape {ids.shape} and dtype {ids.dtype} on rank {rank}"
        )
    if ids.dtype == np.uint64 and ids.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(
            f"ghosts.Plan: argument '{name}' has id {ids.max()} on rank {rank}; expected ids that "
            "fit into int64"
        )
    return ids.astype(np.int64)


class _Directory:
    """The owner of each id. The rank that stores an entry follows from the id alone.

    If the ids of all ranks fill at least ``1 / SPARSE`` of an interval, each rank stores a part of
    the interval, and ranks that own consecutive ids send entries to themselves and to neighbors.
    Otherwise, a hash of the id gives the rank.
    """

    def __init__(self, comm: MPI.Intracomm, by: Rendezvous, owned: Ids):
        self._comm, self._by = comm, by
        limits = np.iinfo(np.int64)
        ends = [owned.min(initial=limits.max), ~owned.max(initial=limits.min)]
        minima, total = np.empty(2, np.int64), np.empty(1, np.int64)
        comm.Allreduce(np.array(ends, np.int64), minima, MPI.MIN)
        comm.Allreduce(np.array([len(owned)], np.int64), total, MPI.SUM)
        self._low, self._high = int(minima[0]), ~int(minima[1])
        self._length = self._high - self._low + 1
        # No rank then stores more than SPARSE times the mean number of entries.
        self._is_dense = 0 < self._length <= SPARSE * int(total[0]) < limits.max // comm.size
        entries = RowExchange(by, self._ranks(owned))
        ids, rows = entries.send(owned, np.arange(len(owned)))
        order = np.argsort(ids, kind="stable")
        self._ids, self._rows, self._owners = ids[order], rows[order], entries.sources[order]

    def _ranks(self, ids: Ids) -> Ids:
        """Return the ranks of the entries, distributed evenly even if the ids have a common
        divisor.
        """
        if self._is_dense:
            return (ids.clip(self._low, self._high) - self._low) * self._comm.size // self._length
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Knuth's hash
        return (mixed >> np.uint64(32)).astype(np.int64) % self._comm.size

    def _check(self, requested: Ids, sources: Ids) -> None:
        (again,) = np.nonzero(self._ids[1:] == self._ids[:-1])
        if again.size:
            k = again[0]
            a, b = self._owners[k : k + 2]
            owners = f"ranks {a} and {b} own" if a != b else f"rank {a} owns twice"
            raise ValueError(
                f"ghosts.Plan: argument 'owned_ids' has id {self._ids[k]}, which {owners}; "
                "expected one owner for each id"
            )
        (missing,) = np.nonzero(~np.isin(requested, self._ids))
        if missing.size:
            k = missing[0]
            raise ValueError(
                f"ghosts.Plan: argument 'needed_ids' of rank {sources[k]} has id "
                f"{requested[k]}, which no rank owns"
            )

    def find(self, needed: Ids) -> Ids:
        """Return the owner of each id, and its row there."""
        request = RowExchange(self._by, self._ranks(needed))
        (requested,) = request.send(needed)
        _all_or_none(self._comm, self._check, requested, request.sources)
        at = np.searchsorted(self._ids, requested)
        return request.answer(self._owners[at], self._rows[at])


class Plan(Uncopied):
    """A plan for the exchange of rows by global index.

    All ranks of ``comm`` make a plan together, outside compiled functions. The directory of owners
    is distributed over the ranks, so no rank has a list of all ids. Time and memory grow with the
    number of this rank's ids, plus two integers for each other rank. If ranks own consecutive ids,
    messages go only to ranks that own needed ids, apart from reductions and barriers. A traced
    function may close over a plan, or take it as a static argument. Plans are compared by identity.

    Args:
        owned_ids: ids of the rows that this rank owns: a 1-D NumPy array of integers, in any order,
            that need not be contiguous; or empty. Each id has one owner.
        needed_ids: ids of the rows that this rank needs, in the order of the result of
            :meth:`fill`; an array like ``owned_ids``. An id may occur more than once, and may be
            owned by this rank.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Attributes:
        sources: other ranks that own rows which this rank needs.
        destinations: other ranks that need rows which this rank owns.

    Raises:
        TypeError: if the ids are not integers in one dimension.
        ValueError: if a needed id has no owner, or an id has two owners. All ranks raise the error
            of one rank.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> following = (comm.rank + 1) % comm.size
        >>> plan = mpi4jax.ghosts.Plan([100 + comm.rank], [100 + following, 100 + comm.rank])
        >>> x = plan.fill(jnp.array([comm.rank + 0.5]))
        >>> [float(v) for v in x] == [following + 0.5, comm.rank + 0.5]
        True
        >>> float(plan.add(x)[0]) == 2 * (comm.rank + 0.5)
        True

    See also: :func:`halo_exchange` for grids.
    """

    def __init__(self, owned_ids: Any, needed_ids: Any, *, comm: MPI.Intracomm | None = None):
        known = as_comm("ghosts.Plan", comm)
        self._comm = known.mpi
        # All ranks first complete the operations that were called on this communicator before.
        flush("ghosts.Plan")
        number = known.cache["plans"] = known.cache.get("plans", 0) + 1
        self._name = f"ghosts.Plan {number}"  # ranks compare the names of leaves
        with waits_in(known, f"the creation of {self._name}"):
            self._make(owned_ids, needed_ids)

    def _make(self, owned_ids: Any, needed_ids: Any) -> None:
        rank = self._comm.rank
        owned, needed = _all_or_none(
            self._comm,
            lambda: (
                _as_ids("owned_ids", owned_ids, rank),
                _as_ids("needed_ids", needed_ids, rank),
            ),
        )
        with rendezvous(self._comm) as by:
            self._arrange(by, owned, needed)

    def _arrange(self, by: Rendezvous, owned: Ids, needed: Ids) -> None:
        directory = _Directory(self._comm, by, owned)
        ids, places = np.unique(needed, return_inverse=True)
        owners, rows = directory.find(ids)

        # Rows are received in the order of their owners, and from each owner in the order in which
        # they are first needed: then most plans need not reorder them.
        first = np.full(len(ids), len(needed))
        np.minimum.at(first, places, np.arange(len(needed)))
        far = owners != self._comm.rank
        order = np.lexsort((first, owners))
        order = order[far[order]]
        requests = RowExchange(by, owners[order])
        (self._sent_rows,) = requests.send(rows[order])
        self.destinations, self.sources = tuple(requests.recv_counts), tuple(requests.send_counts)
        self._counts: tuple[Any, ...] = tuple(
            _for_all(counts, self._comm.size)
            for counts in (requests.recv_counts, requests.send_counts)
        )

        # The rows received are followed by this rank's own, if it needs some of them.
        self._owned, self._needed, self._received = len(owned), len(needed), len(order)
        self._needs_own = self._received < len(ids)
        place = len(order) + rows
        place[order] = np.arange(len(order))
        self._places = place[places]
        available = len(order) + len(owned) * self._needs_own
        self._in_order = np.array_equal(self._places, np.arange(available))

    def __repr__(self) -> str:
        return (
            f"<ghosts.Plan: {self._owned} rows owned, {self._needed} needed, {self._received} of "
            f"them from {len(self.sources)} other ranks>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: its communicator belongs to this process. Pickle "
            "'owned_ids' and 'needed_ids', from which all ranks together make a ghosts.Plan again"
        )

    # ---- Before a message is sent, and after it has been received

    def _checked(self, name: str, argument: str, x: Any, rows: int) -> Any:
        def check(leaf: Any) -> jax.Array:
            leaf = as_array(f"ghosts.Plan.{name}", argument, leaf)
            if leaf.shape[:1] != (rows,):
                raise ValueError(
                    f"ghosts.Plan.{name}: argument '{argument}' must have a row for each id; "
                    f"expected ({rows}, ...) on rank {self._comm.rank}, got {leaf.shape}"
                )
            if name.endswith("add") and not jnp.issubdtype(leaf.dtype, np.number):
                raise TypeError(
                    f"ghosts.Plan.{name}: argument '{argument}' has an array of dtype "
                    f"{leaf.dtype}, which cannot be added; expected numbers"
                )
            return leaf

        return jax.tree.map(check, x)

    def _to_send(self, x: Any) -> Any:
        return {self._name: jax.tree.map(lambda v: _rows(v, self._sent_rows), x)}

    def _own(self, x: Any) -> Any:
        return x if self._needs_own else ()

    def _filled(self, rows: dict[str, Any], own: Any) -> Any:
        (received,) = rows.values()
        if self._needs_own:
            received = jax.tree.map(lambda *parts: jnp.concatenate(parts), received, own)
        if self._in_order:
            return received
        return jax.tree.map(lambda v: _rows(v, self._places), received)

    def _to_return(self, y: Any) -> tuple[Any, Any]:
        """Return the rows to send back to their owners, and this rank's own rows."""
        if not self._in_order:
            n = self._received + self._owned * self._needs_own
            y = jax.tree.map(lambda v: _sum_into(_zeros(n, v), self._places, v), y)
        back = {self._name: jax.tree.map(lambda v: v[: self._received], y)}
        return back, jax.tree.map(
            lambda v: v[self._received :] if self._needs_own else _zeros(self._owned, v), y
        )

    def _added(self, rows: dict[str, Any], own: Any) -> Any:
        (received,) = rows.values()
        return jax.tree.map(lambda v, r: _sum_into(v, self._sent_rows, r), own, received)

    # ---- Public methods

    def fill(self, x: T) -> T:
        """Return the rows that this rank needs, from their owners. Collective.

        Args:
            x: array of shape ``(len(owned_ids), *S)``, of any dtype, rows in the order of
                ``owned_ids``; ``S`` is the same on all ranks. Or a pytree of such arrays, which are
                sent together.

        Returns:
            Array of shape ``(len(needed_ids), *S)`` and the dtype of ``x``, rows in the order of
            ``needed_ids``; or a pytree of such arrays.

        Raises:
            ValueError: if ``x`` does not have one row per owned id.

        Derivative:
            The transpose is :meth:`add`.
        """
        x = self._checked("fill", "x", x, self._owned)
        received = alltoallv(self._to_send(x), *self._counts, comm=self._comm)
        return self._filled(received, self._own(x))

    def add(self, y: T) -> T:
        """Return, for each row that this rank owns, the sum of all ranks' rows of ``y`` for it.

        Args:
            y: array of shape ``(len(needed_ids), *S)``, of numbers, rows in the order of
                ``needed_ids``; or a pytree of such arrays.

        Returns:
            Array of shape ``(len(owned_ids), *S)`` and the dtype of ``y``: zero for rows that no
            rank needs. Each sum is always evaluated in the same order.

        Raises:
            TypeError: if ``y`` does not hold numbers.
            ValueError: if ``y`` does not have one row per needed id.

        Derivative:
            The transpose is :meth:`fill`.
        """
        y = self._checked("add", "y", y, self._needed)
        back, own = self._to_return(y)
        return self._added(alltoallv(back, *self._counts[::-1], comm=self._comm), own)

    def ifill(self, x: T) -> Request[T]:
        """Initiate :meth:`fill` without waiting; :func:`mpi4jax.wait` returns its result.

        It takes the arguments of :meth:`fill`. Between initiation and wait, compute what needs no
        ghost values.
        """
        x = self._checked("ifill", "x", x, self._owned)
        request = ialltoallv(self._to_send(x), *self._counts, comm=self._comm)
        return request.then(self._filled, self._own(x), name="fill")

    def iadd(self, y: T) -> Request[T]:
        """Initiate :meth:`add` without waiting; :func:`mpi4jax.wait` returns its result."""
        y = self._checked("iadd", "y", y, self._needed)
        back, own = self._to_return(y)
        request = ialltoallv(back, *self._counts[::-1], comm=self._comm)
        return request.then(self._added, own, name="add")


def _for_all(counts: dict[int, int], size: int) -> Ids:
    """Return an array with one count per rank, zero for ranks that are not in ``counts``."""
    each = np.zeros(size, np.int64)
    each[[*counts]] = [*counts.values()]
    return each


def _rows(x: jax.Array, places: Ids) -> jax.Array:
    return x.at[places].get(mode="promise_in_bounds")


def _sum_into(x: jax.Array, places: Ids, rows: jax.Array) -> jax.Array:
    return x.at[places].add(rows, mode="promise_in_bounds")


def _zeros(n: int, like: jax.Array) -> jax.Array:
    return jnp.zeros((n, *like.shape[1:]), like.dtype)
