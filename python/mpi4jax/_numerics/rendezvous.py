"""Exchanges of rows of integers between ranks that do not know who will send to them.

A rank sends messages only to the ranks that it has rows for. That all of them have arrived is found
by a nonblocking consensus: its messages are synchronous, so when they have completed, they have
been received; the rank then enters a barrier, and goes on receiving until the barrier has completed
(Hoefler, Siebert, Lumsdaine: Scalable communication protocols for dynamic sparse data exchange,
PPoPP 2010).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

Ids = np.ndarray[Any, np.dtype[np.int64]]
Rows = dict[int, Ids]  # for each rank, or from each, an array of two dimensions


class Rendezvous:
    """Exchanges on a communicator of their own, one after another."""

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._exchanges = 0

    def _tag(self) -> int:
        # A rank may begin the next exchange before others have left this one.
        self._exchanges += 1
        return self._exchanges

    def exchange(self, rows: Rows, width: int) -> Rows:
        """Send rows of ``width`` numbers to ranks, and return those that came, by rank."""
        comm, tag, status = self._comm, self._tag(), MPI.Status()
        received = {comm.rank: rows[comm.rank]} if comm.rank in rows else {}
        sends = [comm.Issend(part, r, tag) for r, part in rows.items() if r != comm.rank]
        barrier: MPI.Request | None = None
        while True:
            if comm.Iprobe(MPI.ANY_SOURCE, tag, status):
                part = np.empty((status.Get_count(MPI.INT64_T) // width, width), np.int64)
                comm.Recv(part, status.source, tag)
                received[status.source] = part
            elif barrier is None and MPI.Request.Testall(sends):
                barrier = comm.Ibarrier()
            elif barrier is not None and barrier.Test():
                return received
            else:
                time.sleep(0)  # other threads and processes may run

    def answer(self, rows: Rows, expected: dict[int, int], width: int) -> Rows:
        """Send rows to ranks that expect them: how many this rank expects, by rank."""
        comm, tag = self._comm, self._tag()
        received = {r: np.empty((n, width), np.int64) for r, n in expected.items()}
        others = [r for r in received if r != comm.rank]
        requests = [comm.Irecv(received[r], r, tag) for r in others]
        requests += [comm.Isend(part, r, tag) for r, part in rows.items() if r != comm.rank]
        MPI.Request.Waitall(requests)
        if comm.rank in rows:
            received[comm.rank] = rows[comm.rank]
        return received


@contextmanager
def rendezvous(comm: MPI.Intracomm) -> Iterator[Rendezvous]:
    """Exchange rows on a duplicate of a communicator, where no other receive matches."""
    own = comm.Dup()
    try:
        yield Rendezvous(own)
    finally:
        own.Free()


class RowExchange:
    """An exchange of rows of integers with other ranks, and of their answers."""

    def __init__(self, by: Rendezvous, destinations: Ids):
        self._by = by
        self._order = np.argsort(destinations, kind="stable")
        ranks, counts = np.unique(destinations, return_counts=True)
        #: The number of rows to each rank, and from each rank, in the order of the ranks.
        self.send_counts = dict(zip(ranks.tolist(), counts.tolist(), strict=True))
        self.recv_counts = dict[int, int]()
        #: The rank that has sent each of the rows received.
        self.sources = np.empty(0, np.int64)

    def send(self, *columns: Ids) -> Ids:
        """Return the columns of the received rows, in the order of the sending ranks."""
        rows = np.stack(columns, axis=1)[self._order]
        received = self._by.exchange(_by_rank(rows, self.send_counts), len(columns))
        self.recv_counts = {r: len(received[r]) for r in sorted(received)}
        self.sources = np.repeat([*self.recv_counts], [*self.recv_counts.values()])
        return _joined(received, len(columns)).T

    def answer(self, *columns: Ids) -> Ids:
        """Return the columns of the received answers, in the order of the sent rows."""
        rows = _by_rank(np.stack(columns, axis=1), self.recv_counts)
        out = np.empty((len(self._order), len(columns)), np.int64)
        out[self._order] = _joined(
            self._by.answer(rows, self.send_counts, len(columns)), len(columns)
        )
        return out.T


def _by_rank(rows: Ids, counts: dict[int, int]) -> Rows:
    ends = np.cumsum([*counts.values()])
    parts = np.split(np.ascontiguousarray(rows, np.int64), ends[:-1]) if counts else []
    return dict(zip(counts, parts, strict=True))


def _joined(rows: Rows, width: int) -> Ids:
    empty = np.empty((0, width), np.int64)
    return np.concatenate([empty, *(rows[r] for r in sorted(rows))])
