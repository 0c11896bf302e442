"""Stand-ins for the CUDA driver and NCCL, whose device memory is host memory.

The tests run on one rank, and start jobs of more.
"""

import os
import subprocess

import client
import pytest
from libraries import compile_stand_ins
from stand_ins import NOWHERE

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
    return {**NOWHERE, **compile_stand_ins(tmp_path_factory.mktemp("fakes"))}
