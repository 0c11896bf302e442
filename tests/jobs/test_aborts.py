"""Errors at run time and at import: the job ends, with a line that says who, what and why."""

import re
import textwrap

import pytest


def program(tmp_path, text):
    file = tmp_path / "program.py"
    head = """
        import jax, jax.numpy as jnp, numpy as np
        from mpi4py import MPI
        import mpi4jax
        from mpi4jax import notoken
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    """
    file.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return file


def message(sent, expected):
    return f"""
        notoken.send(jnp.ones({sent}), 1) if rank == 0 else notoken.recv(jnp.ones({expected}), 0)
        notoken.barrier()
    """


TRUNCATED = r"returned error code \d+: .*[Tt]runc"

ABORTING = {
    "truncated message": (2, message(5, 3), rf"r1 \| MPI_Recv {TRUNCATED}"),
    "short message": (
        2,
        message(3, 5),
        r"r1 \| MPI_Recv received 3 items from rank 0, expected 5",
    ),
    "in a communicator of one's own": (
        3,
        """
        comm = MPI.COMM_WORLD.Split(rank == 0, -rank)   # ranks 2, 1 of the world are 0, 1 of it
        x = jnp.ones(5 if comm.rank == 0 else 3)
        if comm.size == 2:
            notoken.send(x, 1, comm=comm) if comm.rank == 0 else notoken.recv(x, 0, comm=comm)
        notoken.barrier()
        """,
        rf"r1 \| MPI_Recv {TRUNCATED}",
    ),
}


@pytest.mark.parametrize("ranks, text, line", ABORTING.values(), ids=ABORTING)
def test_mpi_errors_end_the_job(mpirun, tmp_path, ranks, text, line):
    """All ranks end; without that the others would wait for ever for the one that failed."""
    job = mpirun(ranks, program(tmp_path, textwrap.dedent(text) + "print('came to the end')\n"))
    assert job.returncode not in (0, None), job.stderr
    assert re.search(line, job.stderr), job.stderr
    assert "came to the end" not in job.stdout


def test_python_errors_end_the_job(mpirun, tmp_path):
    """A rank that dies of an exception does not leave the others waiting."""
    text = """
        if rank == 1:
            raise ValueError("on purpose")
        notoken.recv(1.0, 1)
        mpi4jax.flush()
    """
    job = mpirun(2, program(tmp_path, text))
    assert job.returncode not in (0, None), job.stderr
    assert "on purpose" in job.stderr
