"""Typical mistakes, and what is raised: `mistakes.txt` has them side by side.

Run this file to write the messages anew, and judge them in the difference:
``python tests/unit/test_mistakes.py``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax
import mpi4jax.notoken as m

FILE = Path(__file__).with_name("mistakes.txt")
comm = MPI.COMM_WORLD


def failed_comm():
    """Return a communicator on which an operation has failed."""
    known = comm.Dup()
    with pytest.raises(jax.errors.JaxRuntimeError):
        m.ragged_alltoall(jnp.ones(3), [3], 2, comm=known)
    return known


class Ended(Exception):
    """A process that ended with an error."""


def python(*lines, **env):
    """Run a program with other environment variables; raise an error with its last line about
    mpi4jax."""
    program = [sys.executable, "-c", "\n".join(lines)]
    env = {**os.environ, **env}
    run = subprocess.run(program, capture_output=True, text=True, timeout=100, env=env)
    if run.returncode:
        raise Ended([line for line in run.stderr.splitlines() if "Error: mpi4jax" in line][-1])


NAMES = {
    "jax": jax, "jnp": jnp, "np": np, "P": P, "MPI": MPI, "mpi4jax": mpi4jax, "m": m, "comm": comm,
    "x": jnp.ones(3), "cart": comm.Create_cart([1], periods=[True]),
    "wall": comm.Create_cart([1], periods=[False]), "null": MPI.COMM_NULL,
    "block": m.grids.Block((6,), comm.Create_cart([1], periods=[True]), width=1),
    "state": {"mu": jnp.ones(2), "opt": {"count": jnp.int32(3), "mask": jnp.array([True])}},
    "failed": failed_comm(), "python": python,
    "slabs": m.Layout((6, 4), {0: 1}),
}  # fmt: skip


def table():
    """Return pairs of a mistake, and the lines about it."""
    entries = FILE.read_text().strip().split("\n\n")
    return [entry.partition("\n")[::2] for entry in entries]


def message(mistake):
    """Return what is raised, in lines of the file."""
    try:
        eval(mistake, dict(NAMES))
    except Exception as error:
        kind = "" if isinstance(error, Ended) else f"{type(error).__name__}: "
        words = f"{kind}{str(error).partition(chr(10) + '-----')[0]}"
        words = re.sub(r"0x[0-9a-f]+", "0x...", words)
        words = words.replace("XlaRuntimeError", "JaxRuntimeError")  # its name in JAX 0.7
        words = re.sub(r"#\d+", "#1", words)
        words = re.sub(r"Tracer<([^<>]*)>", r"Tracer(\1)", words)  # as JAX 0.7 writes it
        return "    " + words.replace("\n", "\n    ")
    return "    nothing is raised"


@pytest.mark.parametrize("mistake, expected", table(), ids=[mistake for mistake, _ in table()])
def test_the_message(mistake, expected):
    assert message(mistake) == expected, f"python {Path(__file__).name} writes the messages anew"


if __name__ == "__main__":
    entries = [f"{mistake}\n{message(mistake)}" for mistake, _ in table()]
    FILE.write_text("\n\n".join(entries) + "\n")
