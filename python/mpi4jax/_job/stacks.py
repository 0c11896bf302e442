"""Where Python's main thread is, for the watchdog: a thread of Python's own says it.

It holds Python's lock while it looks, so that no frame changes meanwhile. If C code keeps the lock,
it cannot answer, and a report says that.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import socket
import sys
import threading

from .. import _native


def _answer(main: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=_native.watch_questions()) as questions:
        while questions.recv(64):
            _native.watch_answer(sys, gc, main)


def start() -> None:
    """Answer from now on."""
    # If no thread can be started, reports lack Python's position; everything else works.
    with contextlib.suppress(RuntimeError):
        # It is not a thread of `threading`, because programs wait for such threads.
        _thread.start_new_thread(_answer, (threading.main_thread().ident or 0,))
