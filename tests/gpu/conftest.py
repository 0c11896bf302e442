"""Stand-ins for the CUDA driver and NCCL, whose device memory is host memory.

The tests run on one rank, and start jobs of more.
"""

import os
import subprocess

import client
import pytest
from libraries import compile_library, mpicc
from stand_ins import HERE, NOWHERE

import mpirun as launcher


@pytest.fixture(scope="session")
def python(fork_server, tmp_path_factory):
    """python(code, env): a program, as an MPI job of one rank."""
    folder = tmp_path_factory.mktemp("python")

    def run(code, env):
        out, err = folder / "out", folder / "err"
        environment = launcher.environment_outside_mpi()
        environment |= {name: str(value) for name, value in {**NOWHERE, **env}.items()}
        with open(os.devnull) as nothing, open(out, "w") as one, open(err, "w") as two:
            files = {number: file.fileno() for number, file in enumerate((nothing, one, two))}
            connection = client.ask(fork_server, ["-c", code], environment, str(folder), files)
        with connection:
            connection.settimeout(100)
            status = client.wait(connection)
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """The environment in which a driver and an NCCL of ours are in the part of the real ones."""
    compiler = mpicc()
    folder = tmp_path_factory.mktemp("fakes")
    return {
        **NOWHERE,
        "MPI4JAX_TEST_CUDA_ON_CPU": "1",
        "MPI4JAX_LIBCUDA": str(compile_library(folder / "libcuda.so.1", HERE / "fake/cuda.c")),
        "MPI4JAX_LIBNCCL": str(
            compile_library(folder / "libnccl.so.2", HERE / "fake/nccl.c", compiler=compiler)
        ),
    }
