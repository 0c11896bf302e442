"""Where Python's main thread is, for the watchdog: a thread says it, which changes nothing.

Python's faulthandler would read frames while they change, and crash now and then. So the watchdog
asks a thread of Python's, which holds Python's lock while it looks. Only if C code keeps that lock
(then no frame changes), faulthandler is asked.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import socket
import sys
import threading
from typing import IO

from .. import _native

_NUMBER_BYTES = 8
_registered: tuple[int, IO[bytes]] | None = None


def _main() -> int:
    return threading.main_thread().ident or 0


def _answer(questions: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while number := questions.recv(_NUMBER_BYTES):
            questions.send(number + _native.stack(sys._current_frames, _main()))


def _start_thread() -> None:
    asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    # Not by `threading`: programs wait until its other threads have ended.
    _thread.start_new_thread(_answer, (answers,))
    _native.watch_stacks(asks.detach())


def _register() -> None:
    """Let the watchdog have what faulthandler does at a signal."""
    global _registered
    number = _native.unused_signal()
    if number is None or not hasattr(os, "memfd_create"):
        return
    # A file in memory: a full or read-only disk must not matter.
    file = open(os.memfd_create("mpi4jax"), "wb", buffering=0)  # noqa: SIM115
    faulthandler.register(number, file=file, all_threads=True, chain=False)
    _native.watch_faulthandler(number, file.fileno(), _main())
    _registered = number, file


def start() -> None:
    """Answer from now on."""
    for part in (_start_thread, _register):
        # Where there is no thread or file to be had, reports say less, and all else works.
        with contextlib.suppress(OSError, RuntimeError):
            part()


def finish() -> None:
    """Ask faulthandler no longer."""
    if _registered is not None:
        faulthandler.unregister(_registered[0])
