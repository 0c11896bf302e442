"""How many messages and bytes a rank sends: counts do not depend on how busy the machine is."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# With -k, which `make test-matrix` gives, and with MPI4JAX_TEST_ALL=1.
MORE = pytest.mark.one_in(2**33)


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    """The environment of a job whose calls of MPI are counted."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("counts") / "counts.so"
    source = HERE / "counts.c"
    subprocess.run(
        [compiler, "-O", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"],
        check=True,
    )
    loaded = filter(None, [str(library), os.environ.get("LD_PRELOAD")])
    return {"LD_PRELOAD": ":".join(loaded), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def count(mpirun, counting, tmp_path):
    """``count(ranks, *names)``: what is wrong in rows of the table, and how many there are."""

    def run(ranks, *names, env=()):
        program = HERE / "counts.py"
        result = mpirun(
            *(ranks, program, tmp_path / "counts.json", *names),
            env={**counting, **dict(env)},
            # Each rank imports JAX and compiles for itself, on two cores that others use too.
            time_limit=60 + 60 * ranks,
        )
        assert result.returncode == 0, result.stderr
        of_ranks = json.loads((tmp_path / "counts.json").read_text())
        assert len(of_ranks) == ranks
        differ = [
            (rank, name, found, expected)
            for rank, rows in enumerate(of_ranks)
            for name, found, expected in rows
            if found != expected
        ]
        assert not differ, "\n".join(map(str, differ))
        return len(of_ranks[0])

    return run


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3, 4, *(pytest.param(n, marks=MORE) for n in (8, 16))])
def test_counts(count, ranks, request):
    """All rows on 2 ranks. Some solvers run on other numbers only in `make test-matrix`."""
    with_all = ranks == 2 or request.config.option.keyword
    assert count(ranks, *([] if with_all else ["--quick"])) > (60 if with_all else 50)


def test_counts_with_check(count):
    """Compared are hashes, in one allreduce: not the descriptions of all ranks."""
    assert count(3, "allreduce", "iallreduce", env={"MPI4JAX_CHECK": "1"}) == 2


FIRST = """
import ctypes, os
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
os.environ["MPI4JAX_TEST_HOST"] = f"host{rank % 2}"
import jax.numpy as jnp
from mpi4jax import notoken as m
library, x = ctypes.CDLL(None), jnp.ones(3, jnp.float32)
library.counts_end.restype = ctypes.c_char_p
library.counts_begin()
m.allreduce(x, MPI.SUM).block_until_ready()
if rank == 0: print(library.counts_end().decode(), library.counts_communicators(), "communicators")
"""


def test_the_first_allreduce_on_two_hosts(mpirun, counting, tmp_path):
    """Two duplicates: the default communicator, and one for messages between hosts."""
    (tmp_path / "first.py").write_text(FIRST)
    result = mpirun(2, tmp_path / "first.py", env=counting)
    assert result.returncode == 0, result.stderr
    calls = dict(re.findall(r"(MPI_\w+) (\d+ \d+) \d+", result.stdout))
    # Hashes of each rank's host and of its settings; whether a rank has a GPU, and 12 bytes.
    assert calls == {"MPI_Comm_dup": "2 0", "MPI_Allreduce": f"3 {2 * 16 + 1 + 12}"}
    # All on the default communicator: Open MPI sends messages in the first reduction on each.
    assert "1 communicators" in result.stdout, result.stdout
