"""``flush``: wait for all operations that have been started.

JAX's runtime tokens do not cover the operations of a program whose effect is hidden. Three facts
take their place: programs run in the order in which their thread started them, an array is ready
when its program has ended, and Rust records which operations are running.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import numpy as np

from .. import _native
from .._jax import compat


@jax.jit
def _nothing(x: jax.Array) -> jax.Array:
    # A copy needs no kernel. JAX would not run a function that returns its argument.
    return jax.lax.optimization_barrier(x)


_zero = np.zeros((), np.float32)


def last(device: Any = None) -> Any:
    """Return an array that is ready when all that this thread has started on a device, by default
    on JAX's default device, has completed."""
    with jax.transfer_guard("allow"):
        return _nothing(_zero if device is None else jax.device_put(_zero, device))


class _Thread:
    """Is deleted by the thread that it belongs to, when the thread ends."""

    def __init__(self) -> None:
        _native.thread_communicates(True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            _native.thread_communicates(False)
        with contextlib.suppress(Exception):  # at its end the interpreter waits itself
            _ended.append(last())


_threads = threading.local()
_main = threading.main_thread().ident
# Operations under way when their thread ended.
_ended: list[jax.Array] = []


def started_here() -> None:
    """Record that this thread may start operations. :func:`flush` waits for them also after the
    thread has ended."""
    try:
        _ = _threads.mine
    except AttributeError:
        is_main = threading.get_ident() == _main
        _threads.mine = None if is_main else _Thread()
        if is_main:
            _native.thread_communicates(True)


def _may_have_started() -> bool:
    return threading.get_ident() == _main or hasattr(_threads, "mine")


_finished = False


def finish() -> None:
    """Wait for the last time. JAX calls `_wait` once more at exit, when its devices are gone."""
    global _finished
    flush()
    _finished = True
    _native.python_ends()


def _wait() -> None:
    if _finished or isinstance(done := last(), jax.core.Tracer):
        return
    arrays = [done, *(x for x in jax.live_arrays() if not x.is_deleted() and not x.is_ready())]
    while _ended:
        arrays.append(_ended.pop())
    for x in arrays:
        # The error of a failed program is raised where its result is used.
        with contextlib.suppress(Exception):
            x.block_until_ready()
    _native.wait()


def flush(before: str | None = None) -> None:
    """Wait until all operations that this process has started are complete.

    JAX runs ahead of Python: when a call returns, its communication may not have begun. Call this
    before you use the same communicator through mpi4py. It is called at exit, before
    ``MPI_Finalize``. ``jax.effects_barrier()`` does the same.

    It waits for all operations of this thread and of threads that have ended, for all arrays of
    other threads, and for each operation that is running. It does not wait for a computation
    started by another thread if the operands of that computation are not ready and all references
    to its results have been dropped.

    Args:
        before: name of a function that waits before it uses mpi4py or files, for the error.

    Raises:
        RuntimeError: if it is called inside a function that JAX is tracing.
    """
    if not compat.trace_state_clean() and isinstance(last(), jax.core.Tracer):
        advice = "call flush after the compiled function"
        if before is not None:
            advice = "call it before the compiled function"
        raise RuntimeError(
            f"{before or 'flush'}: called inside a function that JAX is tracing, where no "
            f"operation has started; {advice}"
        )
    jax.effects_barrier()


def flush_own() -> None:
    """Call :func:`flush`, if this thread may have called operations.

    In a callback, a thread of JAX would wait for its own program.
    """
    if _may_have_started() and not _finished and compat.trace_state_clean():
        flush()


compat.on_effects_barrier(_wait)
