"""Where Python's threads are, for the watchdog: a thread of their own says it.

It holds Python's lock while it looks, so that no frame changes meanwhile. If C code keeps the lock,
it cannot answer, and a report says that.
"""

from __future__ import annotations

import _thread
import contextlib
import socket
import sys
import threading

from .. import _native

_NUMBER_BYTES = 8
# For answers, each of which is one message: macOS would have 2 KiB.
_BUFFER_BYTES = 1 << 18


def _answer(questions: socket.socket, main: int) -> None:
    with contextlib.suppress(OSError):
        while number := questions.recv(_NUMBER_BYTES):
            questions.send(number + _native.stack(sys._current_frames, main))


def start() -> None:
    """Answer from now on."""
    # Where there is no thread to be had, reports say less, and all else works.
    with contextlib.suppress(OSError, RuntimeError):
        asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        answers.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        asks.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        # Not by `threading`: programs wait until its other threads have ended.
        _thread.start_new_thread(_answer, (answers, threading.main_thread().ident or 0))
        _native.watch_stacks(asks.detach())
