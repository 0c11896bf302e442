"""If one rank fails, abort the job.

After an exception on one rank, the other ranks would wait in operations that can never complete,
and this rank would wait for them in ``MPI_Finalize``. So, in a job of several ranks, an uncaught
exception, and ``sys.exit`` with an error, abort the job, after Python has printed its traceback.

Caught exceptions (for example, by a test runner), interactive sessions, jobs of one rank, and
programs with ``MPI4JAX_ABORT=0`` are not affected.

If a rank is interrupted or terminated, it prints where it was, unless the program handles the
signal.
"""

from __future__ import annotations

import atexit
import builtins
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from . import settings
from .hints import hint

# A rank that fails has this time to abort the job through MPI.
_LAST_RESORT = 3.0
# After an interrupt, the others have this time to print where they are.
_INTERRUPT_GRACE = 1.5
# After sys.exit, the other ranks have this time to end by themselves.
_EXIT_GRACE = 1.0

_OPT_OUT = "(set MPI4JAX_ABORT=0 to keep it running)"

_exit_code = 0


def _interactive() -> bool:
    return (
        hasattr(sys, "ps1")
        or bool(sys.flags.interactive)
        or "IPython.core.interactiveshell" in sys.modules
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _abort_after(seconds: float, code: int, is_interrupt: bool = False) -> None:
    """Abort the job after ``seconds``, unless this process has ended before."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    if native := sys.modules.get("mpi4jax._native"):
        (native.abort_after_interrupt if is_interrupt else native.abort_after)(seconds, code)
    else:  # the import failed before it was installed
        threading.Thread(target=end, daemon=True).start()


def _abort(code: int) -> None:
    _flush()
    _abort_after(_LAST_RESORT, code)
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def say(words: str) -> None:
    """Print a line with this rank."""
    if sys.stderr is not None:
        rank = "" if MPI.Is_finalized() else f"r{MPI.COMM_WORLD.rank} | "
        sys.stderr.write(f"{rank}mpi4jax: {words}\n")


# ---- Exceptions


def _say_exception(where: str, exception: Any) -> None:
    """Print the exception in one write.

    So lines of several failing ranks do not mix, and none is lost if the launcher kills the ranks.
    """
    words = f"an uncaught exception {where} aborts the job {_OPT_OUT}"
    if exception is not None:
        words += "\n" + "".join(traceback.format_exception(*exception)).rstrip()
    # If settings differ, ranks call different functions of MPI, and MPI's errors do not mention the
    # settings.
    native = sys.modules.get("mpi4jax._native")
    if native and (difference := native.watch_difference()):
        words += f"\n{difference}"
    if exception is not None and (line := hint(*exception[1:])):
        words += f"\n{line}"
    _flush()
    say(words)


def _say_interrupt(trace: TracebackType | None) -> None:
    """Print one line: each rank of the job prints it."""
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if "/site-packages/" not in f.filename and "<" not in f.filename]
    where = "".join(f" at {f.filename}:{f.lineno} in {f.name}" for f in (own or frames)[-1:])
    _flush()
    say(f"KeyboardInterrupt{where} aborts the job {_OPT_OUT}")


def _on_exception(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    ends_job = not _interactive()
    own = ends_job and _previous_hook is sys.__excepthook__
    if ends_job:  # standard error may be a pipe that nobody reads
        is_interrupt = own and issubclass(kind, KeyboardInterrupt)
        _abort_after(_LAST_RESORT + _INTERRUPT_GRACE, 1, is_interrupt)
    if not own:
        _previous_hook(kind, value, trace)
    if own and issubclass(kind, KeyboardInterrupt):
        _say_interrupt(trace)
        # Other ranks may have been interrupted in operations, too, and report before they end.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_INTERRUPT_GRACE)
    elif ends_job:
        _say_exception("on this rank", (kind, value, trace) if own else None)
    if ends_job:
        _abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if issubclass(args.exc_type, SystemExit):
        return  # it ends only the thread, as in Python (but Python does not accept subclasses here)
    ends_job = args.thread is not None and not args.thread.daemon and not _interactive()
    own = ends_job and _previous_thread_hook is threading.__excepthook__
    if not own:
        _previous_thread_hook(args)
    if ends_job:
        name = args.thread.name if args.thread is not None else ""
        exception = (args.exc_type, args.exc_value, args.exc_traceback)
        _say_exception(f"in a thread of this rank ({name})", exception if own else None)
        _abort(1)


# ---- sys.exit
#
# Python calls no hook for `sys.exit`, and the exception may be caught. If no Python frame is left
# when the exception is deleted, nothing has caught it.


class _Exit(SystemExit):
    __module__, __qualname__ = "builtins", "SystemExit"

    def __reduce__(self) -> Any:
        return SystemExit, self.args

    def __del__(self) -> None:
        global _exit_code
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            code = self.code
            _exit_code = int(code) if isinstance(code, int) else int(code is not None)


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    raise _Exit(status)


def _quit(self: Any, code: Any = None) -> NoReturn:
    raise _Exit(code)


def _at_exit() -> None:
    if _exit_code and not _interactive():
        say(f"exit with status {_exit_code} on this rank aborts the job {_OPT_OUT}")
        _flush()
        # Ranks that exit by themselves at the same time get to print everything.
        _abort_after(_EXIT_GRACE, _exit_code & 0xFF or 1)


def fail_at_exit(error: Exception) -> None:
    """Fail because of an error that a handler at exit has found.

    Python would print it and end with status 0, also in a job of one rank.
    """
    if not _is_asked() or _interactive():
        raise error
    _say_exception("at exit", (type(error), error, error.__traceback__))
    _abort(1)
    os._exit(1)  # MPI has been finalized


_installed = False


def _is_asked() -> bool:
    """Return whether failures abort the job, also if the setting has a wrong value: the check of
    the settings raises later."""
    return settings.get("MPI4JAX_ABORT").lower() not in settings.FALSE


def _is_wanted() -> bool:
    runs = MPI.Is_initialized() and not MPI.Is_finalized()
    return runs and MPI.COMM_WORLD.size > 1 and _is_asked()


def install() -> None:
    """Make errors of this rank abort the job.

    Called before everything else in the package that may fail: after a wrong setting, or without
    a library on one node, the other ranks would wait, too.
    """
    global _installed, _previous_hook, _previous_thread_hook
    if _installed or not _is_wanted():
        return
    _installed = True
    _previous_hook, sys.excepthook = sys.excepthook, _on_exception
    _previous_thread_hook, threading.excepthook = threading.excepthook, _on_thread_exception
    sys.exit = _exit
    # `raise SystemExit(3)` of the program itself calls nothing that could be replaced.
    vars(sys.modules["__main__"]).setdefault("SystemExit", _Exit)
    quitter = type(getattr(builtins, "exit", None))
    if quitter.__name__ == "Quitter":
        quitter.__call__ = _quit  # type: ignore[method-assign,assignment]
    atexit.register(_at_exit)


def complete() -> None:
    """Do what :func:`install` cannot do yet. Called after the package has been imported."""
    if not _installed:
        return
    # This runs at exit, before handlers that wait for other ranks.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    if not _interactive():
        is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        sys.modules["mpi4jax._native"].watch_signals(is_pythons)


def uninstall() -> None:
    """Undo :func:`install`, except for ``sys.exit``, which then works as in Python."""
    if sys.excepthook is _on_exception:
        sys.excepthook = _previous_hook
    if threading.excepthook is _on_thread_exception:
        threading.excepthook = _previous_thread_hook
    atexit.unregister(_at_exit)


_previous_hook = sys.excepthook
_previous_thread_hook = threading.excepthook
