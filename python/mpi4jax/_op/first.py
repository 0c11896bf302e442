"""The first operation of this process: before it, no function is traced to find operations.

Such a trace would call a function of the user's once more, for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


class _First(BaseException):
    """Ends what was expected to have no operation, at the first one of the process."""


class _State(threading.local):
    watched = False  # this thread traces what is expected to have none


_seen = False
_state = _State()


def has_operations() -> bool:
    """Whether this process has traced an operation."""
    return _seen


def note_operation() -> None:
    """An operation is traced."""
    global _seen
    if not _seen:
        _seen = True
        if _state.watched:
            raise _First


def without_operations(
    run: Callable[[], R], undo: Callable[[], None], otherwise: Callable[[], R]
) -> R:
    """``run()``. If the first operation of the process is in it, it ends there, and ``undo()`` and
    ``otherwise()`` follow. If there has been one before, ``otherwise()``."""
    if _seen:
        return otherwise()
    if _state.watched:  # what watches will do it
        return run()
    _state.watched = True
    try:
        return run()
    except _First:
        undo()
    finally:
        _state.watched = False
    return otherwise()
