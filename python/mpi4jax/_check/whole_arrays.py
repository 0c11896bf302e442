"""A warning if an argument that should be this rank's block is the same array on all ranks, if one
that should be the same array is not, or if ranks run the collectives of a function in different
orders.

A program for devices passes the whole array to its `shard_map`. When a function is first called,
the ranks along the axes that shard an argument send a hash of their blocks to the first of them,
and the ranks along the other axes a hash of what they pass alike. That is one message from a rank
to each first rank, however many arguments there are. There is no reply, and nobody waits for it,
because ranks may compile at different times, and some may not call the function at all. The first
rank looks at what has arrived after its own call, and at exit.
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
_MOST = 8192  # arguments
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


def note(arrays: Sequence[tuple[Any, Block]]) -> None:
    """Compare arrays; arguments of a compiled function, when the function is first called."""
    if _state.is_off:
        return
    now = []
    for given, block in arrays:
        x = traces.origin(given)
        if not isinstance(x, Var):
            now.append((x, block))
        else:
            if len(_noted) > _MOST:  # arguments of functions that were traced and not compiled
                _noted.clear()
            _noted.setdefault(id(x), (x, []))[1].append(block)
    compare(now)


def noted(jaxpr: Jaxpr) -> list[tuple[int, Block]]:
    """Return the arguments of a function that are to be compared, by their index from the end."""
    n, found = len(jaxpr.invars), []
    for k, v in enumerate(jaxpr.invars):
        if id(v) in _noted:
            found += [(k - n, block) for block in _noted.pop(id(v))[1]]
    return found


def is_compared(comm: MPI.Intracomm, function: str, argument: str) -> bool:
    """Whether this rank has hashed an argument before."""
    return comm.rank in _known.get((MPI._handleof(comm), (function, argument)), ())


def compare(arrays: Sequence[tuple[Any, Block]]) -> None:
    """Send the hashes of arrays to the first rank, or expect them there."""
    messages: dict[tuple[int, int], tuple[MPI.Intracomm, list[Any]]] = {}
    for x, block in arrays:
        handle, rank = MPI._handleof(block.comm), block.comm.rank
        if is_compared(block.comm, *block.key):
            continue
        digest = block.digest or _digest(x, block.is_whole)
        if digest is None:
            continue
        _known.setdefault((handle, block.key), {})[rank] = digest
        if rank == block.ranks[0]:
            _expected[handle, block.key] = block
        else:
            message = messages.setdefault((handle, block.ranks[0]), (block.comm, []))
            message[1].append((block.key, rank, digest))
    _sent[:] = [request for request in _sent if not request.Test()]
    _sent.extend(comm.isend(message, first) for (_, first), (comm, message) in messages.items())


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
                for of, rank, digest in message.recv():
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


def _digest(x: Any, is_whole: bool) -> bytes | None:
    """Return a hash of some elements.

    None for what is not compared: arrays that are not numbers, and blocks whose elements are equal,
    such as zeros, which are no whole array.
    """
    if not hasattr(x, "shape"):
        if not is_whole or not isinstance(x, bool | int | float | complex):
            return None
        x = np.asarray(x)
    elif is_whole and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    elif is_whole and x.dtype == bool:
        x = np.asarray(x).view(np.uint8)
    if not jnp.issubdtype(x.dtype, np.number) or x.size < (1 if is_whole else 2):
        return None
    at = np.linspace(0, x.size - 1, min(x.size, _SAMPLE), dtype=int)
    # The host's arrays are not copied, and no function is compiled for them.
    is_near = x.size <= 1 << 16 or isinstance(x, np.ndarray | np.generic)
    is_near = is_near or {device.platform for device in x.devices()} == {"cpu"}
    with jax.transfer_guard("allow"):
        few = np.ravel(x)[at] if is_near else np.asarray(x[np.unravel_index(at, x.shape)])
    data = few.tobytes()
    if not is_whole and data == data[: few.itemsize] * few.size:
        return None
    return hashlib.blake2b(data, digest_size=16).digest()


atexit.register(look)
