"""Every fault of the table ends as it says, in time, and leaves no process behind."""

import contextlib
import re
import signal
import time
import uuid
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
        **fault.env,
    }
    # Open MPI 5's mpiexec now and then blocks itself after an abort: once is no fault of ours.
    for _ in range(2):
        result = run_job(
            fault.ranks,
            program,
            cwd=tmp_path,
            time_limit=fault.time_limit,
            env=env,
            fork=fault.fork,
        )
        if result.returncode is not None:
            break
    output = result.stdout + result.stderr
    assert result.returncode is not None, f"not ended after {fault.time_limit} s:\n{output}"
    if fault.status is None:
        assert result.returncode != 0, output
    else:
        # MPICH's mpiexec may give the status of a rank that it has killed.
        is_mpich = "MPICH" in MPI.Get_library_version()
        statuses = (fault.status, signal.SIGKILL) if is_mpich else (fault.status,)
        assert result.returncode in statuses, output
    for pattern in fault.says:
        assert re.search(pattern, output), f"{pattern!r} not found in:\n{output}"
    for pattern in fault.silent:
        assert not re.search(pattern, output), f"{pattern!r} found in:\n{output}"

    deadline = time.monotonic() + 20
    while left_over(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_over(mark)
