"""mpiexec for tests and demos: as root, on fewer cores than ranks, and never forever.

    python tools/mpirun.py -n 4 [--time-limit SECONDS] PROGRAM [ARGUMENTS...]

A program that ends with .py runs under this Python. Users start their programs with plain mpiexec;
what is set here is what containers and small machines need.
"""

import argparse
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of a checkout whose package is not installed.
sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

from mpi4jax_command import (
    ENVIRONMENT as FOR_USERS,
    find_mpiexec as find_mpiexec,
    prefix_of,
    with_python,
)

# Open MPI's libfabric component sleeps for a second in MPI_Init, and is of no use within a machine.
ENVIRONMENT = {**FOR_USERS, "OMPI_MCA_btl": "^ofi"}


ALONE_LIMIT = 10  # seconds
SETTLED = 5  # seconds

# Of a job of Open MPI 5, whose mpiexec may crash (see `captured`).
STARTS = 3

# Ends all jobs of this process: signals come to the main thread only.
STOPPED = threading.Event()

# What mpiexec tells its ranks; a job started from within a rank must not see it.
FROM_MPIEXEC = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL", "MPIR_CVAR_")


def environment_outside_mpi() -> dict[str, str]:
    """os.environ without what an mpiexec or pytest around this process has added, plus ENVIRONMENT.

    Also without PYTHONUNBUFFERED, with which print writes a line in pieces, so that the lines of
    two ranks mix.
    """
    added = (*FROM_MPIEXEC, "PYTHONUNBUFFERED", "PYTEST_", "MPI4JAX_TEST_RESULTS")
    outside = {k: v for k, v in os.environ.items() if not k.startswith(added)}
    return {**outside, **ENVIRONMENT}


def processes() -> list[Path]:
    """Return the directory in /proc of each process; some may have ended already.

    pathlib's glob is not used: on Python 3.11 it raises ProcessLookupError where a process ends
    while it looks.
    """
    with contextlib.suppress(FileNotFoundError):
        return [Path("/proc") / name for name in os.listdir("/proc") if name.isdigit()]
    return []


def _job(mpiexec: int) -> set[int]:
    """Return the live processes that mpiexec has started.

    Neither the process group nor the session says so: Open MPI gives each rank a group of its own,
    MPICH has them in another session. So: whose parent, or whose session's leader, is of the job.
    """
    parents = {}
    for process in processes():
        with contextlib.suppress(OSError):
            text = (process / "stat").read_text()
            state, parent, _group, session = text.rpartition(")")[2].split()[:4]
            if state != "Z":
                parents[int(process.name)] = {int(parent), int(session)}
    job = {mpiexec}
    while more := {pid for pid, of in parents.items() if pid not in job and of & job}:
        job |= more
    return job - {mpiexec}


def _wait(
    process: subprocess.Popen[bytes], time_limit: float | None, is_mpiexec: bool
) -> int | None:
    """Return the exit status, or None if there is none in time.

    Open MPI 5's mpiexec sometimes blocks itself forever after a job that failed: it is given up
    when it has been without a process of the job for ALONE_LIMIT. Another program may start none.
    """
    start = time.monotonic()
    not_alone = start
    while not STOPPED.is_set() and (time_limit is None or time.monotonic() < start + time_limit):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        if not is_mpiexec or _job(process.pid) or not processes():
            not_alone = time.monotonic()
        elif time.monotonic() > not_alone + ALONE_LIMIT:
            print("mpiexec does not end although its job has", file=sys.stderr)
            return 1
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End mpiexec and everything that it has started."""
    job = _job(process.pid)  # while mpiexec is there to tell whose they are
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for pid in [*job, process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def end_jobs_at_sigterm() -> None:
    """Whoever ends this process, such as `timeout`, ends its jobs too, as Ctrl-C does."""

    def end(*_: object) -> None:
        # `timeout` sends it twice: to its child, and to its process group.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def _folder() -> Iterator[dict[str, str]]:
    """Directories of the job's own for the files of Open MPI and of its mpiexec.

    A rank that is killed leaves its segment of shared memory, whose name has 16 random bits: a
    later job that draws them, too, ends with SIGSEGV or hangs
    (https://github.com/open-mpi/ompi/issues/7308). A killed mpiexec of Open MPI 5 leaves a
    directory with its process number, and the next one that gets the number says that its
    "listener thread failed to start" (https://github.com/openpmix/openpmix/issues/4022).
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    new = functools.partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    # A rank whose /dev/shm is another one needs the files of mpiexec, too.
    with new() as of_mpiexec, new(dir=shared) as of_ranks:
        yield {
            "PRTE_MCA_prte_tmpdir_base": of_mpiexec,
            # By the name of 4.1, which 5 takes as well.
            **({"OMPI_MCA_btl_vader_backing_directory": of_ranks} if shared else {}),
        }


def _sweep() -> None:
    """Remove what killed ranks of MPICH have left in shared memory.

    No process has it mapped, and none that has just made it is about to.
    """
    left = set()
    for segment in Path("/dev/shm").glob("mpich_shm_*"):
        with contextlib.suppress(OSError):
            found = segment.stat()
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - SETTLED:
                left.add(str(segment))
    for process in processes() if left else ():
        with contextlib.suppress(OSError):
            text = (process / "maps").read_text()
            left = {file for file in left if file not in text}
    for file in left:
        Path(file).unlink(missing_ok=True)


def mpirun(
    ranks: int,
    command: list[str],
    *,
    python: str = sys.executable,
    time_limit: float | None = None,
    env: dict[str, str] | None = None,
    **popen: Any,
) -> int | None:
    """Run command on ranks; its exit status, or None if the time limit or STOPPED ended it.

    On 0 ranks it is run as it is, without mpiexec.
    """
    with _folder() as settings:
        process = subprocess.Popen(
            [*([find_mpiexec(python), "-n", str(ranks)] if ranks else []), *command],
            env={
                **ENVIRONMENT,
                **prefix_of(python),
                **(os.environ if env is None else env),
                **settings,
            },
            start_new_session=True,
            **popen,
        )
        try:
            return _wait(process, time_limit, is_mpiexec=ranks > 0)
        finally:
            # Also after Ctrl-C, which a session of its own does not get from the terminal.
            if process.poll() is None:
                _kill(process)
            _sweep()


def captured(
    ranks: int,
    command: list[str],
    *,
    cwd: str | Path,
    time_limit: float,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run command on ranks, outside any other job; the return code is None after a timeout."""
    for _ in range(STARTS):
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status: Any = mpirun(
                ranks,
                command,
                time_limit=time_limit,
                env={**environment_outside_mpi(), **(env or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            out.seek(0), err.seek(0)
            result = subprocess.CompletedProcess(command, status, out.read(), err.read())
        # mpiexec itself has crashed at the end of the job, which differs from the crash of a rank
        # (https://github.com/open-mpi/ompi/issues/13650).
        if status != -signal.SIGSEGV:
            break
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", dest="ranks", type=int, required=True)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = with_python(options.command)
    end_jobs_at_sigterm()
    start = time.monotonic()
    status = mpirun(options.ranks, command, time_limit=options.time_limit)
    if status is None:
        print(f"stopped after {time.monotonic() - start:.0f} s (--time-limit)", file=sys.stderr)
        return 124
    return status


if __name__ == "__main__":
    sys.exit(main())
