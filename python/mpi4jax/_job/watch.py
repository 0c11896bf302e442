"""What watches over operations: settings from the environment, and when it starts and ends.

========================  ==========  =============================================================
Variable                  Default     Meaning
========================  ==========  =============================================================
``MPI4JAX_TIMEOUT``       0           seconds after which an operation counts as hung; 0: never
``MPI4JAX_REPORT_AFTER``  30          seconds after which a line says what an operation waits for,
                                      then at growing intervals; 0: never
``MPI4JAX_ON_TIMEOUT``    abort       ``abort`` ends the job where an operation hangs, ``continue``
                                      only reports
``MPI4JAX_DUMP_DIR``      the         where ranks leave their state; for ranks on several hosts a
                          system's    directory that all of them see
``MPI4JAX_CHECK``         samples     1: compare collectives before they run; 0: do not even
                                      compare ``samples`` afterwards
``MPI4JAX_TRACE``         none        file for a timeline; ``{rank}`` in it is replaced, or the
                                      rank is put before the suffix
``MPI4JAX_ABORT``         1           0: a failing rank does not end the job
========================  ==========  =============================================================
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

from mpi4py import MPI

from .. import _native
from . import abort, job, pools, stacks

DEFAULT_REPORT_AFTER = 30.0

_FALSE, _TRUE = ("", "0", "false", "off", "no"), ("1", "true", "on", "yes")


def _choice(name: str, default: str, *choices: str) -> str:
    value = os.environ.get(name, default).strip().lower()
    if value not in choices:
        raise ValueError(
            f"mpi4jax: environment variable {name} must be one of "
            f"{', '.join(filter(None, choices))}, got {value!r}"
        )
    return value


def _seconds(name: str, default: float, zero: str) -> float:
    text = os.environ.get(name, "").strip() or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"mpi4jax: environment variable {name} must be a number of seconds, {zero}, "
            f"got {text!r}"
        )
    return seconds


def timeout() -> float:
    """Seconds of ``MPI4JAX_TIMEOUT``.

    Raises:
        ValueError: not a number, or a negative one.
    """
    return _seconds("MPI4JAX_TIMEOUT", 0.0, "0 for no time-out")


def report_after() -> float:
    """Seconds of ``MPI4JAX_REPORT_AFTER``.

    Raises:
        ValueError: not a number, or a negative one.
    """
    return _seconds("MPI4JAX_REPORT_AFTER", DEFAULT_REPORT_AFTER, "0 for no lines")


def trace_file(name: str, rank: int) -> Path:
    """The timeline's file of a rank."""
    path = Path(name.replace("{rank}", str(rank)))
    return (
        path if "{rank}" in name else path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")
    )


def _check() -> str:
    return _choice("MPI4JAX_CHECK", "samples", "samples", *_FALSE, *_TRUE)


def compares_before() -> bool:
    """Whether collectives are compared before they run (``MPI4JAX_CHECK=1``)."""
    return _check() in _TRUE


def set_check() -> None:
    """Whether operations are compared. Before XLA is told of them, which decides what it records.

    Raises:
        ValueError: the environment variable has a wrong value.
    """
    _native.set_check(3 if _check() == "samples" else int(compares_before()))


def start() -> None:
    """Start recording and watching. Called when the package is imported.

    Raises:
        ValueError: an environment variable has a wrong value.
    """
    seconds, told_after = timeout(), report_after()
    aborts = _choice("MPI4JAX_ON_TIMEOUT", "abort", "abort", "continue") == "abort"
    may_abort = _choice("MPI4JAX_ABORT", "1", *_FALSE, *_TRUE) in _TRUE

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    # None stands for a handler in C: MPICH has one, which ours calls.
    free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, None)
    settings = {
        "rank": rank,
        "size": size,
        "directory": job.directory(size),
        "timeout": seconds or math.inf,
        "report_after": told_after or math.inf,
        "abort": aborts,
        "takes_signal": free,
        "one_directory": job.has_one_directory(),
        "launchers": job.LAUNCHERS,
    }
    _native.watch_start(settings)
    stacks.start()
    if trace := os.environ.get("MPI4JAX_TRACE"):
        _native.trace_to(trace_file(trace, rank), rank)
    if size > 1:
        pools.install()
        if may_abort:
            abort.install()
