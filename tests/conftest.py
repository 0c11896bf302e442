"""What all tests share: results for tools/run_tests.py, and jobs that tests start.

unit/   one process, no MPI job
ranks/  run by every rank: `python tools/run_tests.py -n 1,2 tests/ranks/...`
jobs/   start MPI jobs of their own, on any number of ranks
gpu/    the same on fakes for CUDA and NCCL; and scripts for machines with a GPU
forks/  processes that have imported JAX, for the jobs that tests start
rust/   the tests of the native module that need more than one file: `make test-rust`

A test has `timeout` seconds: the value in pyproject.toml, or of its marker (pytest-timeout).
Of the cases of a test with the marker `one_in(k)` a run takes about one in k, by their names, and
each run of `make test` others: its share is MPI4JAX_TEST_SHARE. With MPI4JAX_TEST_ALL=1, and with
-k, it takes all.
"""

import functools
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import mpirun as launcher
from run_tests import ALL

# A file for the outcome of each test, written at once: a crash must not take the results with it.
RESULTS = os.environ.get("MPI4JAX_TEST_RESULTS")
# Workers of pytest-xdist hand their reports to the process that has started them.
WORKER = "PYTEST_XDIST_WORKER" in os.environ

FORKS = Path(__file__).parent / "forks"


SHARE = int(os.environ.get("MPI4JAX_TEST_SHARE", "0"))


def pytest_configure(config):
    config.addinivalue_line("markers", "one_in(k): see tests/conftest.py")


def is_taken(item):
    """Whether this case is of the share: by its name, so that two shares of two are all cases."""
    number = zlib.crc32(item.name.encode()) + SHARE
    return all(number % marker.args[0] == 0 for marker in item.iter_markers("one_in"))


def pytest_collection_modifyitems(config, items):
    if ALL or config.option.keyword:
        return
    taken = [item for item in items if is_taken(item)]
    missed = {item.function: item for item in items}  # of each test one case at least
    for item in taken:
        missed.pop(item.function, None)
    taken = {*taken, *missed.values()}
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = [item for item in items if item in taken]


def record(outcome, test, reason=""):
    if RESULTS and not WORKER:
        with open(RESULTS, "a") as file:
            file.write(f"{outcome}\t{test.partition('@')[0]}\t{' '.join(reason.split())}\n")


def pytest_runtest_logstart(nodeid):
    record("started", nodeid)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        record(report.outcome, report.nodeid, reason.removeprefix("Skipped: "))


def pytest_collectreport(report):
    if report.failed:
        record("failed", report.nodeid)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """The socket of a server of forks (forks/server.py), for this process's tests."""
    folder = tmp_path_factory.mktemp("forks")
    server = subprocess.Popen(
        [sys.executable, FORKS / "server.py", folder / "socket"],
        env=launcher.environment_outside_mpi(),
        stdin=subprocess.DEVNULL,
    )
    while not (folder / "socket").exists():
        assert server.poll() is None
        time.sleep(0.02)
    yield str(folder / "socket")
    server.kill()
    server.wait()


def read_at_start(env):
    """Whether env has what Python, JAX or NumPy read when they are imported."""
    at_start = ("PYTHON", "JAX_", "OMP_", "OPENBLAS_", "LD_")
    return any(k.startswith(at_start) and os.environ.get(k) != v for k, v in env.items())


@pytest.fixture(scope="session")
def run_job(fork_server):
    """run_job(ranks, *arguments, cwd, time_limit=100, env={}, fork=True): `python arguments...`.

    It is a job of its own. Returns a CompletedProcess with the output as text; the return code is
    None after a timeout. Without fork no process has imported anything, and ranks are mpiexec's
    own children: for tests of what the launcher or the watchdog does to processes.
    """

    def run(ranks, *arguments, cwd, time_limit=100, env=None, fork=True):
        env = {k: str(v) for k, v in (env or {}).items()}
        command = [sys.executable]
        if fork and not read_at_start(env):
            command += ["-I", "-S", FORKS / "client.py", fork_server]
        command = [str(word) for word in (*command, *arguments)]
        return launcher.captured(ranks, command, cwd=cwd, time_limit=time_limit, env=env)

    return run


@pytest.fixture
def mpirun(run_job, tmp_path):
    """run_job in tmp_path."""
    return functools.partial(run_job, cwd=tmp_path)
