"""A warning if an argument that should be this rank's block is the same array on all ranks, if one
that should be the same array is not, or if ranks run the collectives of a function in different
orders.

A program for devices passes the whole array to its `shard_map`. When a function is first called,
the ranks along the axes that shard an argument send a hash of their blocks to the first of them.
They send no reply and wait for nothing, because ranks may compile at different times, and some may
not call the function at all. The first rank looks at what has arrived after its own call, and at
exit.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var
from mpi4py import MPI

from .._jax import compat, traces

_SAMPLE = 4096  # elements
_PATIENCE = 0.2  # seconds, at the first call of a compiled function


class _State(threading.local):
    is_off = False


_state = _State()


class Block(NamedTuple):
    """An argument that should be a block, or the same array on all ranks.

    Attributes:
        function: the function, equal on all ranks; there is one warning for each.
        argument: its argument.
        words: what the warning says.
        comm: a communicator for these hashes alone.
        ranks: the ranks of ``comm`` that have the blocks of the array.
        is_whole: whether they should have the same array.
        digest: what is compared in place of the array.
    """

    function: str
    argument: str
    words: str
    comm: MPI.Intracomm
    ranks: tuple[int, ...]
    is_whole: bool = False
    digest: bytes | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.function, self.argument


_noted: dict[int, tuple[Any, list[Block]]] = {}  # by the ids of variables
_known: dict[tuple[int, Any], dict[int, bytes]] = {}  # hashes, by communicator and key
_expected: dict[tuple[int, Any], Block] = {}  # where this rank is the first
_warned: set[str] = set()  # functions
_sent: list[MPI.Request] = []


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Context manager: blocks are taken from whole arrays, and nothing is compared."""
    before, _state.is_off = _state.is_off, True
    try:
        yield
    finally:
        _state.is_off = before


def note(x: Any, block: Block) -> None:
    """Compare an array; for an argument of a compiled function, when the function is first
    called."""
    if _state.is_off:
        return
    x = traces.origin(x)
    if not isinstance(x, Var):
        compare([(x, block)])
    else:
        if len(_noted) > 1024:  # arguments of functions that were traced and not compiled
            _noted.clear()
        _noted.setdefault(id(x), (x, []))[1].append(block)


def noted(jaxpr: Jaxpr) -> list[tuple[int, Block]]:
    """Return the arguments of a function that are to be compared, by their index from the end."""
    n, found = len(jaxpr.invars), []
    for k, v in enumerate(jaxpr.invars):
        if id(v) in _noted:
            found += [(k - n, block) for block in _noted.pop(id(v))[1]]
    return found


def compare(arrays: Sequence[tuple[Any, Block]]) -> None:
    """Send the hashes of arrays to the first rank, or expect them there."""
    for x, block in arrays:
        key, rank = (MPI._handleof(block.comm), block.key), block.comm.rank
        is_known = key in _known and rank in _known[key]
        digest = None if is_known else block.digest or _digest(x)
        if digest is None:
            continue
        _known.setdefault(key, {})[rank] = digest
        if rank == block.ranks[0]:
            _expected[key] = block
        else:
            _sent[:] = [request for request in _sent if not request.Test()]
            _sent.append(block.comm.isend((block.key, rank, digest), block.ranks[0]))


def look(called: Sequence[Block] = ()) -> None:
    """Warn of arrays that should not be the same on all ranks, or should, among those whose hashes
    have arrived.

    Args:
        called: arguments of a function that has just been called: wait for their hashes, not long.
    """
    until, new = time.monotonic() + _PATIENCE, {block.key for block in called}
    while _expected:
        for block in list(_expected.values()):
            if block.comm == MPI.COMM_NULL:  # it is freed with the communicator of its mesh
                _expected.clear()
                return
            while message := block.comm.improbe():
                of, rank, digest = message.recv()
                _known.setdefault((MPI._handleof(block.comm), of), {})[rank] = digest
        for key, block in list(_expected.items()):
            if len(_known[key]) == len(block.ranks):
                del _expected[key]
                is_same = len(set(_known[key].values())) == 1
                if is_same != block.is_whole and block.function not in _warned:
                    _warned.add(block.function)
                    compat.warn(block.words)
        if time.monotonic() > until or not any(of in new for _, of in _expected):
            return
        time.sleep(0.001)


def _digest(x: Any) -> bytes | None:
    """Return a hash of some elements, or None for an array whose elements are equal, such as
    zeros."""
    if not hasattr(x, "shape") or not jnp.issubdtype(x.dtype, np.number) or x.size < 2:
        return None
    at = np.unravel_index(np.linspace(0, x.size - 1, min(x.size, _SAMPLE), dtype=int), x.shape)
    with jax.transfer_guard("allow"):
        few = np.asarray(x)[at] if x.size <= 1 << 16 else np.asarray(x[at])
    data = few.tobytes()
    is_constant = data == data[: few.itemsize] * few.size
    return None if is_constant else hashlib.blake2b(data, digest_size=16).digest()


atexit.register(look)
