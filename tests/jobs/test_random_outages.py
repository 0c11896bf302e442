"""Random jobs on two hosts whose network fails for a time, which end well, or forever."""

import os
import re
import subprocess
import sys
import time

import c_threads
import pytest
import random_jobs

import mpirun as launcher
import two_hosts
from run_tests import ALL

CHOSEN = os.environ.get("MPI4JAX_TEST_JOBS")
FIRST, LAST = map(int, (CHOSEN or ("0-12" if ALL else "0-2")).split("-"))
# What a machine that is busy with other tests takes for compilation, in seconds.
COMPILATION = 40


def run(job, tmp_path, until=None, **settings):
    """Return the exit status and the output; stop the job when the output matches `until`."""
    if why := two_hosts.missing():
        pytest.skip(f"two hosts: {why}")
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(job.source())
    with open(log, "w") as output, two_hosts.hosts() as hosts:
        settings = {
            "JAX_PLATFORMS": "cpu",
            "MPI4JAX_DUMP_DIR": tmp_path,
            "CALLS_LATER": c_threads.library(),
            "LINK": f"ip -n {hosts.names[0]} link set {hosts.cables[0]}",
            **settings,
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            [*hosts.mpiexec, *two_hosts.passed_on(), "-n", str(job.size), "env", *words,
             sys.executable, program],
            env=launcher.environment_outside_mpi(),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 2 * (job.sleeps + COMPILATION)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if until and re.search(until, log.read_text(errors="replace")):
                    break
                time.sleep(0.2)
            status = process.poll()
        finally:
            # Open MPI's mpiexec may wait forever for a host that it cannot reach.
            process.kill()
            process.wait(30)
    return status, f"{log.read_text(errors='replace')}\n{job.source()}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_correct_jobs_survive_an_outage(tmp_path, seed):
    job = random_jobs.Maker(seed, fault=False, two_hosts=True).job
    status, output = run(job, tmp_path, MPI4JAX_REPORT_AFTER=1, MPI4JAX_DEADLOCK_AFTER=5)
    assert status == 0, output
    assert len(re.findall(r"^right \d$", output, re.MULTILINE)) == job.size, output
    assert not re.search("can never complete|has not completed|do not match", output), output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_an_outage_forever_is_said(tmp_path, seed):
    """The other host may as well be stopped by a debugger, so the job is not aborted."""
    job = random_jobs.Maker(seed, fault=True, two_hosts=True).job
    silent = r"mpi4jax: allreduce .* has waited for .* silent: no answer over MPI within 5 s"
    status, output = run(job, tmp_path, silent, MPI4JAX_REPORT_AFTER=4, MPI4JAX_DEADLOCK_AFTER=8)
    assert status is None, output
    assert re.search(silent, output), output
    assert not re.search("can never complete|do not match", output), output
