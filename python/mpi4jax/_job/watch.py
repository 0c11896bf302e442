"""The settings of the watchdog, from environment variables, and its start."""

from __future__ import annotations

import gc
import math
import signal
import sys
from pathlib import Path

from mpi4py import MPI

from .. import _native
from . import abort, job, pools, settings, stacks


def seconds(name: str, default: float = 0.0) -> float:
    """Return the seconds of a variable; infinity if they are 0, which stands for never."""
    return float(settings.check(name) or default) or math.inf


def trace_file(name: str, rank: int) -> Path:
    """Return the file for the timeline of a rank."""
    path = Path(name.replace("{rank}", str(rank)))
    return (
        path if "{rank}" in name else path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")
    )


def compares() -> bool:
    """Return whether anything is compared (not ``MPI4JAX_CHECK=0``)."""
    return settings.check("MPI4JAX_CHECK").lower() not in settings.FALSE


def compares_before() -> bool:
    """Return whether collectives are compared before they run (``MPI4JAX_CHECK=1``)."""
    return settings.check("MPI4JAX_CHECK").lower() in settings.TRUE


def set_check() -> None:
    """Set whether operations are compared. Called before they are registered with XLA."""
    takes_samples = settings.check("MPI4JAX_CHECK").lower() in ("", "samples")
    _native.set_check(3 if takes_samples else int(compares_before()))


def _stderr() -> int:
    """Return the descriptor of standard error as the user sees it.

    pytest has redirected it before it imports a test, and so has a notebook's kernel: their users
    see what these have kept.
    """
    kept = getattr(sys.stderr, "_original_stdstream_copy", None)  # of ipykernel
    if isinstance(kept, int):
        return kept
    if capture := sys.modules.get("_pytest.capture"):
        kinds = tuple(
            kind
            for name in ("FDCapture", "FDCaptureBinary")
            if (kind := getattr(capture, name, None)) is not None
        )
        captures = [it for it in gc.get_objects() if issubclass(type(it), kinds)]
        # The first capture has the lowest descriptor.
        saved = (it.targetfd_save for it in captures if getattr(it, "targetfd", None) == 2)
        return min((fd for fd in saved if isinstance(fd, int)), default=2)
    return 2


def check_settings() -> None:
    """Check the environment variables, and print warnings on rank 0."""
    unknown = settings.check_all()
    if MPI.COMM_WORLD.rank == 0:
        for words in filter(None, [*unknown, job.missing_ranks(MPI.COMM_WORLD.size)]):
            abort.say(words)


def shared_settings() -> list[tuple[str, str, str]]:
    """Return the settings that must be equal on all ranks: variable, meaning to compare, and value.

    If one differs, ranks would deadlock. Other differences are allowed, or are found where they
    matter: a difference of ``MPI4JAX_NCCL_MESSAGES`` is found where NCCL meets the other ranks.
    """
    check = "1" if compares_before() else ""
    transport, _ = _native.transport_choice()
    wait = settings.get("MPI4JAX_WAIT")
    sleeps = "sleep" if wait.lower() == "sleep" else ""
    return [
        ("MPI4JAX_CHECK", check, settings.get("MPI4JAX_CHECK")),
        ("MPI4JAX_WAIT", sleeps, wait),
        transport,
    ]


def start() -> None:
    """Start recording and watching. Called when the package is imported."""
    aborts = settings.check("MPI4JAX_ON_TIMEOUT").lower() != "continue"

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    # None means that the handler is written in C. MPICH installs one, and our handler calls it.
    free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, None)
    given = {
        "rank": rank,
        "size": size,
        "job": job.board(size),
        "directory": job.directory(size),
        "timeout": seconds("MPI4JAX_TIMEOUT"),
        "report_after": seconds("MPI4JAX_REPORT_AFTER", 30.0),
        "deadlock_after": seconds("MPI4JAX_DEADLOCK_AFTER", 300.0),
        "abort": aborts,
        "takes_signal": free,
        "is_first_here": job.local_rank(rank) == 0,
        "stderr": _stderr(),
        "on_one_host": job.shares_board(),
        "shared": shared_settings(),
        "build": _native.build(),
        "launchers": job.LAUNCHERS,
    }
    _native.watch_start(given)
    stacks.start()
    if trace := settings.get("MPI4JAX_TRACE"):
        path = trace_file(trace, rank)
        try:
            _native.trace_to(path, rank)
        except OSError as error:
            raise OSError(
                "mpi4jax: environment variable MPI4JAX_TRACE must be a file that can be written, "
                f"got {trace!r}: {path}: {error}"
            ) from None
    if size > 1:
        pools.install()
