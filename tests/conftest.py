"""What all tests share: results for tools/run_tests.py, and jobs that tests start.

unit/   one process, no MPI job
ranks/  run by every rank: `python tools/run_tests.py -n 1,2 tests/ranks/...`
jobs/   start MPI jobs of their own, on any number of ranks
gpu/    the same on stand-ins for CUDA and NCCL; and scripts for machines with a GPU
rust/   the tests of the native module that need more than one file: `make test-rust`

A test has `timeout` seconds (pyproject.toml), or those of its marker `timeout` (pytest-timeout).
"""

import functools
import os
import sys

import pytest

import mpirun as launcher

# A file for the outcome of each test, written at once: a crash must not take the results with it.
RESULTS = os.environ.get("MPI4JAX_TEST_RESULTS")
# Workers of pytest-xdist hand their reports to the process that has started them.
WORKER = "PYTEST_XDIST_WORKER" in os.environ


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
def run_job():
    """run_job(ranks, *arguments, cwd, time_limit=100, env={}): `python arguments...` as a job.

    Returns a CompletedProcess with the output as text; the return code is None after a time-out.
    """

    def run(ranks, *arguments, cwd, time_limit=100, env=None):
        command = [sys.executable, *map(str, arguments)]
        return launcher.captured(ranks, command, cwd=cwd, time_limit=time_limit, env=env)

    return run


@pytest.fixture
def mpirun(run_job, tmp_path):
    """run_job in tmp_path."""
    return functools.partial(run_job, cwd=tmp_path)
