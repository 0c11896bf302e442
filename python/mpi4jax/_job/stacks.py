"""Where Python's main thread is, for the watchdog: a thread of Python's own says it.

It holds Python's lock while it looks, so that no frame changes meanwhile. If C code keeps the lock,
it cannot answer, and a report says that.
"""

from __future__ import annotations

import _thread
import contextlib
import socket
import sys
import threading
from typing import Any

from .. import _native

_LONGEST = 300


def _words(exception: BaseException) -> str:
    return f"{type(exception).__name__}: {exception}"[:_LONGEST]


def _exception(main: int) -> str:
    """The exception that the main thread is handling, or what a future of its has swallowed."""
    handled: Any = sys._current_exceptions().get(main)
    if isinstance(handled, tuple):  # before Python 3.12
        handled = handled[1]
    if handled is not None:
        return _words(handled)
    # A job that waits for a result looks no more at the exception of its task.
    if futures := sys.modules.get("concurrent.futures._base"):
        import gc

        for it in gc.get_objects():
            is_done = type(it) is futures.Future and it.done() and not it.cancelled()
            if is_done and (error := it._exception):
                return f"{_words(error)} (in a future)"
    return ""


def _answer(main: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=_native.watch_questions()) as questions:
        while questions.recv(64):
            exception = ""
            with contextlib.suppress(Exception):  # the text of an exception is the program's
                exception = _exception(main)
            _native.watch_answer(sys._current_frames, main, exception)


def start() -> None:
    """Answer from now on."""
    # If no thread can be started, reports lack Python's position; everything else works.
    with contextlib.suppress(RuntimeError):
        # Not a thread of `threading`, whose threads programs wait for.
        _thread.start_new_thread(_answer, (threading.main_thread().ident or 0,))
