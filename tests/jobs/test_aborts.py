"""Errors at run time and at import: the job ends, with a line that says who, what and why."""

import re
import textwrap

import pytest
from mpi4py import MPI


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
    "truncated message in a loop": (
        2,
        """
        def body(i, x):
            y = notoken.sendrecv(jnp.ones(3 + rank), x, 1 - rank, 1 - rank)
            return y
        f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))
        f(jnp.ones(3)).block_until_ready()
        mpi4jax.flush()
        """,
        rf"r0 \| MPI_Sendrecv {TRUNCATED}",
    ),
    "alone": (
        1,
        """
        request = MPI.COMM_WORLD.Isend(np.ones(5, np.float32), 0)
        y = jax.jit(lambda x: notoken.recv(x, 0, comm=MPI.COMM_WORLD))(jnp.ones(2))
        y.block_until_ready()
        """,
        rf"r0 \| MPI_Recv {TRUNCATED}",
    ),
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


# ---- Import


def imported(mpirun, tmp_path, before, ranks=1):
    file = tmp_path / "import.py"
    file.write_text(textwrap.dedent(before) + "\nimport mpi4jax\nprint('imported')\n")
    job = mpirun(ranks, file)
    assert job.returncode not in (0, None), job.stdout
    assert "imported" not in job.stdout
    assert "Segmentation" not in job.stderr
    return job.stderr


def test_another_mpi_than_the_one_built_for(mpirun, tmp_path):
    error = imported(
        mpirun,
        tmp_path,
        """
        import sys, types
        sys.modules["mpi4jax._build_info"] = types.SimpleNamespace(
            vendor="Another MPI", version="9.8.7", found="by a test"
        )
        """,
    )
    vendor = MPI.get_vendor()[0]
    assert re.search(rf"ImportError: .*built for Another MPI 9.8.7, but .* {vendor}", error), error
    assert "MPICC" in error
    assert "MPI4PY_LIBMPI" in error


def test_module_that_does_not_load(mpirun, tmp_path):
    """Such as one whose MPI symbols are missing."""
    error = imported(
        mpirun,
        tmp_path,
        """
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "mpi4jax._native":
                    raise ImportError("undefined symbol: MPI_Of_another")
        sys.meta_path.insert(0, Finder())
        """,
    )
    assert "ImportError: mpi4jax's native module" in error
    assert "undefined symbol: MPI_Of_another" in error
    assert "MPICC" in error


def test_mpi_is_not_initialized(mpirun, tmp_path):
    error = imported(mpirun, tmp_path, "import mpi4py\nmpi4py.rc.initialize = False")
    assert "ImportError: mpi4jax needs a running MPI, but MPI is not initialized" in error


def test_mpi_was_finalized(mpirun, tmp_path):
    error = imported(mpirun, tmp_path, "from mpi4py import MPI\nMPI.Finalize()")
    assert "ImportError: mpi4jax needs a running MPI, but MPI was finalized" in error


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_thread_level(mpirun, tmp_path, level):
    before = f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\n"
    before += "from mpi4py import MPI\nprint('level', MPI.Query_thread() >= MPI.THREAD_SERIALIZED)"
    file = tmp_path / "import.py"
    file.write_text(before + "\nimport mpi4jax\n")
    job = mpirun(1, file)
    if "level True" in job.stdout:
        pytest.skip("this MPI gives more than it is asked for")
    assert job.returncode != 0
    assert (
        "ImportError: mpi4jax calls MPI from XLA's threads, but MPI was initialized" in job.stderr
    )
    assert "expected at least MPI_THREAD_SERIALIZED" in job.stderr


def test_tables_that_differ(mpirun, tmp_path):
    """A native module of another version."""
    error = imported(
        mpirun,
        tmp_path,
        """
        from mpi4py import MPI
        import sys, types, importlib.util, importlib.machinery
        where = importlib.util.find_spec("mpi4jax").submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec("mpi4jax._native", where)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        fake = types.ModuleType("mpi4jax._native")
        fake.__dict__.update(native.__dict__)
        fake.ops_table = lambda: native.ops_table()[1:]
        sys.modules["mpi4jax._native"] = fake
        """,
    )
    assert "ImportError: mpi4jax: the native module does not know the op allgather" in error
