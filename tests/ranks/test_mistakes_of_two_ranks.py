"""Mistakes of one of two ranks, and what each rank raises: `mistakes_of_two_ranks.txt`.

Run this file to write the messages anew, and judge them in the difference:
``python tools/mpirun.py -n 2 tests/ranks/test_mistakes_of_two_ranks.py``.
"""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax
import mpi4jax.notoken as m

FILE = Path(__file__).with_name("mistakes_of_two_ranks.txt")
pytestmark = pytest.mark.ranks(2)


def table():
    """Return pairs of a mistake, and the lines of both ranks."""
    entries = FILE.read_text().strip().split("\n\n")
    return [entry.partition("\n")[::2] for entry in entries]


def message(mistake, folder):
    """Return what this rank raises, in a line of the file."""
    comm = MPI.COMM_WORLD.Dup()
    cart = comm.Create_cart([2], periods=[True])
    names = {
        **{"jax": jax, "jnp": jnp, "MPI": MPI, "P": P, "mpi4jax": mpi4jax, "m": m},
        **{"comm": comm, "rank": comm.rank, "cart": cart, "folder": folder, "x": jnp.ones(4)},
        "rows": m.Layout((4, 3), {0: 2}),
        "block": m.grids.Block((5,), cart, width=3),
    }
    words = "nothing is raised"
    try:
        jax.block_until_ready(eval(mistake, names))
    except Exception as error:
        kind = type(error).__name__.replace("XlaRuntimeError", "JaxRuntimeError")
        words = f"{kind}: {str(error).partition(chr(10) + '-----')[0]}".replace(folder, "folder")
        words = re.sub(r"#\d+", "#1", words)
    return f"    rank {comm.rank}: " + words.replace("\n", "\n    ")


@pytest.mark.parametrize("mistake, expected", table(), ids=[mistake for mistake, _ in table()])
def test_the_message(mistake, expected, tmp_path):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path), root=0)
    both = MPI.COMM_WORLD.allgather(message(mistake, folder))
    assert "\n".join(both) == expected, f"{Path(__file__).name} writes the messages anew"


if __name__ == "__main__":
    entries = []
    for mistake, _ in table():
        folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp(), root=0)
        entries.append("\n".join([mistake, *MPI.COMM_WORLD.allgather(message(mistake, folder))]))
    if MPI.COMM_WORLD.rank == 0:
        FILE.write_text("\n\n".join(entries) + "\n")
