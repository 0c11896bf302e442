"""Every fault of the table ends as it says, in time, and leaves no process behind."""

import contextlib
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import FAULTS, PRELUDE, TIMEOUT

MARK = "MPI4JAX_FAULT"
# Jobs spend most of their time in waiting: for a time-out, for a grace period.
AT_A_TIME = 3


def left_over(mark):
    """The processes that still run of the job with this mark in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            zombie = ") Z " in (process / "stat").read_text()
            if not zombie and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture(scope="module")
def jobs(request, run_job, tmp_path_factory):
    """jobs(name): mark and result of the job of a row. The jobs of all rows run meanwhile."""

    def run(name):
        fault, folder, mark = FAULTS[name], folders[name], uuid.uuid4().hex
        program = folder / "fault.py"
        program.write_text(PRELUDE + fault.program + "\n")
        env = {
            "JAX_PLATFORMS": "cpu",
            "MPI4JAX_TIMEOUT": str(TIMEOUT),
            "MPI4JAX_DUMP_DIR": str(folder),
            MARK: mark,
            **fault.env,
        }
        # Open MPI 5's mpiexec now and then blocks itself after an abort: once is no fault of ours.
        for _ in range(2):
            result = run_job(fault.ranks, program, cwd=folder, time_limit=fault.time_limit, env=env)
            if result.returncode is not None:
                break
        return mark, result

    rows = [
        item.callspec.params["name"]
        for item in request.session.items
        if "jobs" in item.fixturenames
    ]
    folders = {name: tmp_path_factory.mktemp("fault") for name in rows}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {name: pool.submit(run, name) for name in rows}
        yield lambda name: futures[name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, jobs):
    fault = FAULTS[name]
    mark, result = jobs(name)
    output = result.stdout + result.stderr
    assert result.returncode is not None, f"not ended after {fault.time_limit} s:\n{output}"
    if fault.status is None:
        assert result.returncode != 0, output
    else:
        assert result.returncode == fault.status, output
    for pattern in fault.says:
        assert re.search(pattern, output), f"{pattern!r} not found in:\n{output}"
    for pattern in fault.silent:
        assert not re.search(pattern, output), f"{pattern!r} found in:\n{output}"

    deadline = time.monotonic() + 5
    while left_over(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_over(mark)


def test_the_table_is_long_enough():
    assert len(FAULTS) >= 30
