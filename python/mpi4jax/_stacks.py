"""Where Python's main thread is, for the watchdog: a thread says it, which changes nothing.

Python's faulthandler, called by a signal, would read frames while they change, and crash now and
then. So the watchdog asks a thread of Python's, which holds Python's lock while it looks. Only if C
code keeps that lock (then no frame changes), faulthandler is asked.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from typing import IO

from . import _native

_NUMBER_BYTES = 8
_FRAMES = 100
_file: IO[bytes] | None = None


def _stack(thread: int) -> str:
    """The frames of a thread, the innermost first, as faulthandler writes them."""
    lines: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and len(lines) < _FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def _answer(questions: socket.socket, thread: int) -> None:
    while number := questions.recv(_NUMBER_BYTES):
        questions.send(number + _stack(thread).encode(errors="replace"))


def start(has_signal: bool) -> None:
    """Answer from now on. ``has_signal``: ``SIGUSR1`` is ours."""
    global _file
    asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    main = threading.main_thread().ident
    threading.Thread(target=_answer, args=(answers, main), name="mpi4jax", daemon=True).start()
    file = None
    if has_signal and hasattr(os, "memfd_create"):
        # A file in memory: a full or read-only disk must not matter.
        _file = open(os.memfd_create("mpi4jax"), "wb", buffering=0)  # noqa: SIM115
        # Not all threads: they may run.
        faulthandler.register(signal.SIGUSR1, file=_file, all_threads=False, chain=False)
        file = _file.fileno()
    _native.watch_stacks(asks.detach(), file)


def finish() -> None:
    """Ask faulthandler no longer."""
    if _file is not None:
        faulthandler.unregister(signal.SIGUSR1)
