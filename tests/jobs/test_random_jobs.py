"""Correct jobs stay; those with a fault end, and the report says which rank and line.

Each seed is a job. 300 correct jobs and 300 with a fault, of seeds that no run has had before, are

    export MPI4JAX_TEST_JOBS=7000-7300
    .venv/bin/python tools/run_tests.py -n 0 tests/jobs/test_random_jobs.py --time-limit 7200

A job takes 5 to 30 seconds, and sleeps most of this time. Several run at a time.
`random_jobs.correct(seed).source()` and `random_jobs.faulty(seed).source()` are its programs.
"""

import os
import re

import c_threads
import pytest
import random_jobs
from mpi4py import MPI
from random_mismatches import NOT_COMPARED, ON_A_DUPLICATE

from run_tests import ALL

# Half as many have a fault (see faults_*.py, too), unless MPI4JAX_TEST_JOBS=FIRST-LAST chooses.
CHOSEN = os.environ.get("MPI4JAX_TEST_JOBS")
FIRST, LAST = map(int, (CHOSEN or ("0-300" if ALL else "0-6")).split("-"))
# What a machine that is busy with other tests takes for compilation, in seconds.
COMPILATION = 40
OPEN_MPI = "Open MPI" in MPI.Get_library_version()


@pytest.fixture
def run(mpirun, tmp_path):
    def run(job, **env):
        program = tmp_path / "program.py"
        program.write_text(job.source())
        limit = 2 * (job.sleeps + COMPILATION)
        env = {"MPI4JAX_DUMP_DIR": str(tmp_path), "CALLS_LATER": str(c_threads.library()), **env}
        # A forked rank does not find MPICH's launcher, so it waits for ranks that never import the
        # package.
        result = mpirun(job.size, program, time_limit=limit, env=env, fork=OPEN_MPI)
        # What nobody reads at standard error is in the report.
        reports = [file.read_text() for file in tmp_path.glob("mpi4jax-*/*/report.txt")]
        said = "".join([result.stdout, result.stderr, *reports])
        return result.returncode, f"{said}\n{job.source()}"

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_correct_jobs_stay(run, seed):
    job = random_jobs.correct(seed)
    timeout = job.sleeps + COMPILATION if seed % 2 else 0
    status, output = run(job, MPI4JAX_TIMEOUT=str(timeout), MPI4JAX_REPORT_AFTER="1")
    assert status == 0, output
    assert len(re.findall(r"^right \d$", output, re.MULTILINE)) == job.size, output
    assert not re.search("can never complete|has not completed|do not match, before", output), (
        output
    )
    assert job.is_mixed or "may not match" not in output, output
    assert job.is_late or NOT_COMPARED not in output.partition("\nimport os")[0], output
    said = output.partition("\nimport os")[0]
    # One line of each rank and reason, with the number of others.
    found = len(re.findall("was (?:never waited for|not waited for before its comm)", said))
    found += sum(map(int, re.findall(r"nor were (\d+) others", said)))
    # MPICH says that a communicator is freed when nothing is under way there any more.
    is_exact = OPEN_MPI and not job.mute
    assert found == job.unfinished if is_exact else found <= job.unfinished, output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, LAST, 1 if CHOSEN else 2))
def test_jobs_with_a_fault_end(run, seed):
    job = random_jobs.faulty(seed)
    # While a rank sleeps, or imports the package late, others may wait, but the job is not stuck.
    imports = 20 * (job.source().count("import mpi4jax;") > 1)
    limits = {
        "MPI4JAX_TIMEOUT": str(2 * job.sleeps + 30 + imports),
        "MPI4JAX_DEADLOCK_AFTER": str(job.sleeps + 4),
    }
    status, output = run(job, **limits)
    assert status is not None, output
    # What is never waited for ends no job, and neither does what is not compared.
    said = output.partition("\nimport os")[0]
    is_compared = job.fault[0] not in ON_A_DUPLICATE or NOT_COMPARED not in said
    assert (status == 0) == (job.fault[0] == "never waits") or not is_compared, output
    assert re.search(job.says(), said), f"{job.fault}\n{output}"
