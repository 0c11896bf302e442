"""A report is seen where standard error is redirected: by test runners, notebooks, loggers."""

import re
from pathlib import Path

import pytest
from faults import HUNG_STATUS

IMPORTS = """
import io, os, sys, threading
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
def hang():
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    nt.recv(jnp.zeros(3), (rank - 1) % size).block_until_ready()
"""

# How a program redirects descriptor 2.
REDIRECTED = {
    "not": "",
    "to a file": ("os.dup2(os.open('log', os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)"),
    "to nothing": ("os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"),
    "closed": ("os.close(2)"),
    "to a file that stands in its place": ("os.close(2); open('log', 'a').fileno()"),
    "to a pipe that is not read": (
        "r, w = os.pipe(); os.set_blocking(w, False)\n"
        "while True:\n"
        "    try: os.write(w, b'.' * 4096)\n"
        "    except BlockingIOError: break\n"
        "os.dup2(w, 2)"
    ),
    "to a pipe without a reader": ("r, w = os.pipe(); os.dup2(w, 2); os.close(r)"),
}


ENV = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DEADLOCK_AFTER": "3"}


def check(job, tmp_path, times=1):
    """The report is there, and its last lines name a file that has it too."""
    assert job.returncode == HUNG_STATUS, job.stdout + job.stderr
    said = job.stdout + job.stderr
    assert len(re.findall(r"r0 \| mpi4jax: deadlock: rank 0 is in recv from 1", said)) == times, (
        said
    )
    (file,) = set(re.findall(r"this report: (\S+)", said))
    assert "deadlock: rank 0 is in recv" in Path(file).read_text()


@pytest.mark.parametrize("how", REDIRECTED)
def test_redirected_after_the_import(how, run_job, tmp_path):
    redirects = REDIRECTED[how]
    (tmp_path / "program.py").write_text(IMPORTS + redirects + "\nhang()\n")
    env = {**ENV, "MPI4JAX_DUMP_DIR": str(tmp_path)}
    check(run_job(2, "program.py", cwd=tmp_path, env=env), tmp_path)


TEST = (
    IMPORTS
    + """
def test_hang():
    print("captured")
    hang()
"""
)

OPTIONS = {
    "by default": (),
    "not captured": ("-s",),
    "in Python alone": ("--capture=sys",),
    "and shown": ("--capture=tee-sys",),
    "without the plugin's threads": ("-p", "no:faulthandler", "-p", "no:threadexception"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_under_pytest(options, run_job, tmp_path):
    (tmp_path / "test_program.py").write_text(TEST)
    env = {**ENV, "MPI4JAX_DUMP_DIR": str(tmp_path)}
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *OPTIONS[options])
    check(run_job(2, *arguments, "test_program.py", cwd=tmp_path, env=env, fork=False), tmp_path)


def test_under_pytest_with_the_import_in_a_conftest(run_job, tmp_path):
    (tmp_path / "conftest.py").write_text("import mpi4jax")
    (tmp_path / "test_program.py").write_text(TEST)
    env = {**ENV, "MPI4JAX_DUMP_DIR": str(tmp_path)}
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    check(run_job(2, *arguments, "test_program.py", cwd=tmp_path, env=env, fork=False), tmp_path)
