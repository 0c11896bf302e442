"""Every rank runs these tests, and they meet before and after each.

Markers: ranks(1, 2), the numbers of ranks that a test is for; min_ranks(2), the least.
"""

import os
import shutil
import tempfile
from pathlib import Path

import compiled_once  # noqa: F401
import jax
import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native

FAILED_TESTS = (
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,  # by -x, or because a file could not be collected
    pytest.ExitCode.NO_TESTS_COLLECTED,
)

# Out of the way of the tests' own messages.
WORLD = MPI.COMM_WORLD.Dup()


def pytest_configure(config):
    for marker in ("ranks(*numbers)", "min_ranks(number)"):
        config.addinivalue_line("markers", f"{marker}: see tests/ranks/conftest.py")


def pytest_collection_modifyitems(items):
    for item in items:
        ranks = item.get_closest_marker("ranks")
        if ranks and WORLD.size not in ranks.args:
            skip(item, f"for n={','.join(map(str, ranks.args))}, here n={WORLD.size}")
        least = item.get_closest_marker("min_ranks")
        if least and WORLD.size < least.args[0]:
            skip(item, f"for n>={least.args[0]}, here n={WORLD.size}")


def skip(item, reason):
    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item, nextitem):
    """Within the time limit of pytest-timeout, which ends a rank that waits for another in vain."""
    WORLD.Barrier()
    result = yield
    # After `-x` all ranks stop at the same test, whichever of them failed.
    failures = WORLD.allreduce(item.session.testsfailed, MPI.MAX)
    if item.config.option.maxfail and failures >= item.config.option.maxfail:
        item.session.shouldfail = "failed on one of the ranks"
    return result


@pytest.fixture
def folder():
    """One for all ranks."""
    path = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield Path(path)
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(path)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs stay in memory: for all files on 8 ranks, one machine has too little."""
    yield
    jax.clear_caches()


@pytest.fixture
def logged(capfd):
    """``logged(f)``: the result of ``f()``, and the lines that `MPI4JAX_DEBUG` prints of it."""

    def run(f):
        mpi4jax.flush()
        capfd.readouterr()
        _native.set_debug(True)
        try:
            y = jax.block_until_ready(f())
            mpi4jax.flush()
        finally:
            _native.set_debug(False)
        return y, [line for line in capfd.readouterr().out.splitlines() if " | MPI_" in line]

    return run


def pytest_sessionfinish(session):
    # tools/run_tests.py knows which tests failed. mpiexec need not: it would end the other ranks.
    if os.environ.get("MPI4JAX_TEST_RESULTS") and session.exitstatus in FAILED_TESTS:
        session.exitstatus = pytest.ExitCode.OK
