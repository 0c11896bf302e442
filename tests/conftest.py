"""Tests run on every rank of an MPI job at once: `python tools/run_tests.py -n 1,2,3,4`.

Plain `pytest` is a job of one rank. Markers:
  ranks(1, 2)       the numbers of ranks that the test is for; elsewhere it is skipped, by name
  min_ranks(2)      the least number of ranks that it needs
  time_limit(300)   seconds, where TIME_LIMIT is too short
  starts_jobs       set here on the tests with a fixture that starts jobs of their own
  faults, examples  set here on those of them that are rows of tests/faults, or run examples/
Fixtures: mpirun and run_job, for tests that start a job of their own.
"""

import faulthandler
import functools
import os
import signal
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import mpirun as launcher

TIME_LIMIT = 120

FAILED_TESTS = (
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,  # by -x, or because a file could not be collected
    pytest.ExitCode.NO_TESTS_COLLECTED,
)

# Markers of the tests with these fixtures.
FIXTURES = {"starts_jobs": "run_job", "faults": "jobs", "examples": "example"}

# The ranks meet here before and after each test, out of the way of the tests' own messages.
WORLD = MPI.COMM_WORLD.Dup()


def pytest_configure(config):
    for marker in ("ranks(*numbers)", "min_ranks(number)", "time_limit(seconds)", *FIXTURES):
        config.addinivalue_line("markers", f"{marker}: see tests/conftest.py")
    # pytest captures the real one while a test runs.
    config.real_stderr = os.fdopen(os.dup(2), "w")


# Before pytest selects by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for marker, fixture in FIXTURES.items():
            if fixture in item.fixturenames:
                item.add_marker(marker)
        ranks = item.get_closest_marker("ranks")
        if ranks and WORLD.size not in ranks.args:
            skip(item, f"for n={','.join(map(str, ranks.args))}, here n={WORLD.size}")
        least = item.get_closest_marker("min_ranks")
        if least and WORLD.size < least.args[0]:
            skip(item, f"for n>={least.args[0]}, here n={WORLD.size}")


def skip(item, reason):
    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Keep the ranks together, and end the job if they do not come together in time."""
    marker = item.get_closest_marker("time_limit")
    limit = marker.args[0] if marker else TIME_LIMIT
    # First every rank says where it is, then the first one to die takes the job with it. Neither
    # needs the GIL, which the test may hold.
    faulthandler.dump_traceback_later(limit, file=item.config.real_stderr)
    signal.alarm(limit + 5)
    record("started", item.nodeid)
    WORLD.Barrier()
    result = yield
    # After `-x` all ranks stop at the same test, whichever of them failed.
    failures = WORLD.allreduce(item.session.testsfailed, MPI.MAX)
    if item.config.option.maxfail and failures >= item.config.option.maxfail:
        item.session.shouldfail = "failed on one of the ranks"
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    return result


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        record(report.outcome, report.nodeid, reason.removeprefix("Skipped: "))


def pytest_collectreport(report):
    if report.failed:
        record("failed", report.nodeid)


def pytest_sessionfinish(session):
    # tools/run_tests.py knows which tests failed. mpiexec need not: it would end the other ranks.
    if "MPI4JAX_TEST_RESULTS" in os.environ and session.exitstatus in FAILED_TESTS:
        session.exitstatus = pytest.ExitCode.OK


def record(outcome, test, reason=""):
    """Tell tools/run_tests.py, at once: a crash must not take the results with it."""
    if folder := os.environ.get("MPI4JAX_TEST_RESULTS"):
        with open(Path(folder) / f"rank{WORLD.rank}.results", "a") as file:
            file.write(f"{outcome}\t{test}\t{' '.join(reason.split())}\n")


@pytest.fixture(scope="session")
def run_job():
    """run_job(ranks, *arguments, cwd, time_limit=100, env={}): `python arguments...` as a job.

    Returns a CompletedProcess with the output as text; the return code is None after a time-out.
    May be called from several threads.
    """

    def run(ranks, *arguments, cwd, time_limit=100, env=None):
        command = [sys.executable, *map(str, arguments)]
        return launcher.captured(ranks, command, cwd=cwd, time_limit=time_limit, env=env)

    return run


@pytest.fixture
def mpirun(run_job, tmp_path):
    """run_job in tmp_path."""
    return functools.partial(run_job, cwd=tmp_path)
