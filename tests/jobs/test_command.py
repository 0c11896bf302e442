"""The command `mpi4jax`: `run` and the programs of the package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mpi4jax_command as command
from mpirun import environment_outside_mpi

PROGRAM = """
import sys
from mpi4py import MPI
print("out of", MPI.COMM_WORLD.size)
print("r7 | mpi4jax: a report", file=sys.stderr)
print("last", *sys.argv[1:], end="", flush=True)
sys.exit(3 * (MPI.COMM_WORLD.rank == 1))
"""


def mpi4jax(*arguments, cwd=None, env=None):
    file = Path(command.__file__)
    return subprocess.run(
        [sys.executable, file, *arguments],
        cwd=cwd,
        env={**environment_outside_mpi(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_run(tmp_path):
    """Lines begin with their rank, and the exit status is the exit status of the job."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = mpi4jax("run", "-n", "2", program, "-x", "1")
    assert job.returncode == 3
    expected = [f"r{r} | {words}" for r in (0, 1) for words in ("last -x 1", "out of 2")]
    # MPICH's mpiexec puts the mark before the rest of a line that has no end.
    assert sorted(job.stdout.replace("1r", "1\nr").splitlines()) == expected
    assert job.stderr.count("r7 | mpi4jax: a report") == 2
    plain = mpi4jax("run", "-n", "1", "--plain", program)
    assert plain.returncode == 0
    assert plain.stdout == "out of 1\nlast"


def test_run_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = mpi4jax("run", "-n", "1", "--plain", "-m", "module", "-x")
    assert job.returncode == 0
    assert job.stdout == "out of 1\nlast -x"


def test_marks_of_open_mpi(tmp_path):
    given = b"launcher\n[1,0]<stdout>: a\n[job-1@1,12]<stderr>: r12 | b\n"
    given += b"[1,1]<stdout>: c[1,0]<stdout>: d"
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(given)
    with source.open("rb") as read, target.open("wb") as write:
        command._copy(read, write)
    assert target.read_text().splitlines() == ["launcher", "r0 | a", "r12 | b", "r1 | c", "r0 | d"]


@pytest.mark.parametrize("name", ["check", "report", "timeline"])
def test_programs(name):
    job = mpi4jax(name, "--help")
    assert job.returncode == 0
    assert job.stdout.startswith(f"usage: python -m {command.MODULES[name][0]}")


def test_timelines_are_read_without_mpi_and_jax(tmp_path):
    for package in ("mpi4py", "jax", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    name = {"ph": "M", "name": "process_name", "pid": 0, "args": {"host": "a"}}
    (tmp_path / "t.0.json").write_text(json.dumps([name])[:-1])
    job = mpi4jax("timeline", "t.0.json", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert job.returncode == 0, job.stderr
    assert "sum of all ranks" in job.stdout


def test_wrong_arguments():
    assert mpi4jax("check", "no.py").returncode == 2
    for arguments in ([], ["run", "x.py"], ["run", "-n", "2", "--no-such", "x.py"], ["walk"]):
        assert mpi4jax(*arguments).returncode == 2, arguments


def test_the_command_starts_without_mpi():
    """A launcher must not be an MPI process."""
    code = "import sys, mpi4jax_command; print({'jax', 'mpi4py', 'mpi4jax'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
