"""Libraries that tests compile, to stand for others."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpirun


def compile_library(path, source, *arguments, compiler="cc"):
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", path, source, *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


def mpicc():
    """The compiler of the MPI that the jobs of tests use; without it, the test is skipped."""
    found = shutil.which("mpicc", path=Path(mpirun.find_mpiexec(sys.executable)).parent)
    if found is None:
        pytest.skip("no mpicc beside mpiexec")
    return found
