"""Libraries that tests compile, to stand for others.

`python libraries.py FOLDER` makes the driver and NCCL there and prints the settings for a shell.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpirun

HERE = Path(__file__).resolve().parent


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


def compile_stand_ins(folder):
    """The environment in which a driver and an NCCL of ours are in the part of the real ones."""
    nccl = compile_library(folder / "libnccl.so.2", HERE / "fake/nccl.c", compiler=mpicc())
    return {
        "MPI4JAX_TEST_CUDA_ON_CPU": "1",
        "MPI4JAX_LIBCUDA": str(compile_library(folder / "libcuda.so.1", HERE / "fake/cuda.c")),
        "MPI4JAX_LIBNCCL": str(nccl),
    }


def compile_hip(folder):
    """The environment in which ours are in the part of HIP and RCCL, and none of CUDA."""
    fakes = compile_stand_ins(folder)
    hip = compile_library(folder / "libamdhip64.so.7", HERE / "fake/hip.c")
    return {**fakes, "MPI4JAX_LIBHIP": str(hip), "MPI4JAX_LIBCUDA": "/nowhere/libcuda.so.1"}


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, value in compile_stand_ins(FOLDER).items():
        print(f"export {name}={shlex.quote(value)}")
