"""Every fault of the table ends as it says, in time, and leaves no process behind."""

import contextlib
import os
import re
import signal
import time
import uuid
import zlib
from pathlib import Path

import faults_different
import faults_ending
import faults_hidden
import faults_reports
import faults_starting
import faults_waiting
import pytest
from mpi4py import MPI

FAULTS = {
    **faults_starting.FAULTS,
    **faults_different.FAULTS,
    **faults_hidden.FAULTS,
    **faults_waiting.FAULTS,
    **faults_ending.FAULTS,
    **faults_reports.FAULTS,
}
MARK = "MPI4JAX_TEST_FAULT"
LATE = "MPI4JAX_TEST_LATE"


def late(name):
    """RANK:SECONDS: which rank sleeps before its own lines, and for how long.

    With `any` for the rank, which `make test-matrix` sets, each fault has a rank by its name.
    """
    rank, _, seconds = os.environ.get(LATE, "").partition(":")
    if rank == "any":
        rank = zlib.crc32(name.encode()) % FAULTS[name].ranks
    return f"{rank}:{seconds}"


def left_over(mark):
    """The processes that still run of the job with this mark in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            zombie = ") Z " in (process / "stat").read_text()
            if not zombie and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, run_job, tmp_path):
    fault, mark, program = FAULTS[name], uuid.uuid4().hex, tmp_path / "fault.py"
    if fault.library not in MPI.Get_library_version():
        pytest.skip(f"of {fault.library} alone")
    program.write_text(fault.prelude + fault.program + "\n")
    env = {
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_TIMEOUT": "",
        "MPI4JAX_DUMP_DIR": str(tmp_path),
        MARK: mark,
        LATE: late(name),
        **fault.env,
    }
    # Open MPI 5's mpiexec now and then blocks itself after an abort: once is no fault of ours, if
    # the job has said why it is aborted. MPICH's has lost all output of one job of a thousand, and
    # why is not known.
    for _ in range(2):
        result = run_job(
            fault.ranks,
            program,
            cwd=tmp_path,
            time_limit=fault.time_limit,
            env=env,
            fork=fault.fork,
        )
        output = result.stdout + result.stderr
        is_aborted = fault.status != 0 and all(re.search(says, output) for says in fault.says)
        is_blocked = result.returncode is None and is_aborted
        is_lost = result.returncode and not output and "MPICH" in MPI.Get_library_version()
        if not (is_blocked or is_lost):
            break
    assert result.returncode is not None, f"not ended after {fault.time_limit} s:\n{output}"
    if fault.status is None:
        assert result.returncode != 0, output
    else:
        # On MPICH and Intel MPI, mpiexec may give the status of a rank that it has
        # killed: then the job has been aborted.
        has_hydra = any(name in MPI.Get_library_version() for name in ("MPICH", "Intel"))
        killed = (signal.SIGKILL, 255) if has_hydra and fault.status else ()
        statuses = (fault.status, *killed)
        assert result.returncode in statuses, output
    for pattern in fault.says:
        words = f"{pattern!r} not found, status {result.returncode}:\n{output}"
        assert re.search(pattern, output), words
    for pattern in fault.silent:
        assert not re.search(pattern, output), f"{pattern!r} found in:\n{output}"

    deadline = time.monotonic() + 20
    while left_over(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_over(mark)
