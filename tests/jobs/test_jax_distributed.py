"""`jax.distributed` beside MPI: operations do not change, and JAX sees the job.

The table of docs/from-shard-map.md is evaluated, with it and without it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpi4jax_command as command
from mpirun import environment_outside_mpi

PAGE = Path(__file__).parents[2] / "docs" / "from-shard-map.md"

# What works alike with and without it.
FEATURES = """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from mpi4py import MPI
import mpi4jax.notoken as mpi4jax

if "start" in sys.argv:
    jax.distributed.initialize(cluster_detection_method="mpi4py")
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
total, x = sum(range(size)), np.int32(rank)

def summed(x):
    return mpi4jax.allreduce(x)

here = jnp.full(2, float(rank))
for f in summed, jax.jit(summed):
    assert f(here).tolist() == [total] * 2
    assert jax.grad(lambda x: (f(x) ** 2).sum())(here).tolist() == [2.0 * total] * 2
moved = mpi4jax.sendrecv(here, here, (rank - 1) % size, (rank + 1) % size)
assert moved.tolist() == [(rank - 1) % size] * 2
assert mpi4jax.wait(mpi4jax.iallreduce(here)).tolist() == [total] * 2

mesh = mpi4jax.Mesh((size,), ("i",))

def loss(w, x):
    return jax.lax.pmean(jnp.mean((x * w) ** 2), "i")

data = jnp.arange(2.0 * size)
expected = float(6 * (data**2).mean())
specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P()}
for f, of in (
    (mpi4jax.shard_map(loss, **specs), data[2 * rank : 2 * rank + 2]),
    (mpi4jax.sharding.global_shard_map(loss, **specs), data),
):
    for gradient in jax.grad(f), jax.jit(jax.grad(f)):
        assert abs(float(gradient(3.0, of)) - expected) < 1e-4 * expected

state, layouts = {"step": 3, "x": jnp.arange(2.0) + 2 * rank}, {"step": None, "x": 0}
mpi4jax.checkpoints.save("checkpoint", state, layouts)
loaded = mpi4jax.checkpoints.load("checkpoint", state, layouts)
assert (int(loaded["step"]), loaded["x"].tolist()) == (3, state["x"].tolist())
"""

# The rows of the table: an expression, and what it gives.
TABLE = """
def value(of):
    try:
        return np.asarray(eval(of)).tolist()
    except AssertionError:
        return "AssertionError"

key = jax.random.key(0)
rows = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), P("x"))
block = np.array([rank])
from_blocks = jax.make_array_from_process_local_data(rows, block)
for asked, answer in json.loads(sys.argv[1]):
    found = value(asked)
    if answer == "AssertionError":
        # JAX 0.7 compares with the value of rank 0, newer versions with the values of all ranks.
        assert found == answer or (rank == 0 and found is None), (asked, found)
    else:
        assert found == value(answer), (asked, found, answer)
print(f"{len(json.loads(sys.argv[1]))} rows are right")
"""


def table(column):
    """The rows of the page: what is asked, and the expression that a column begins with."""
    lines = PAGE.read_text().partition("<!-- asked of JAX -->\n")[2].partition("\n\n")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:4] for line in lines.splitlines()[2:]]
    code = re.compile(r"`([^`]+)`")
    return [[code.match(row[n])[1] for n in (0, column)] for row in rows]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(FEATURES + TABLE)
    return path


def test_the_table_is_read():
    assert ["jax.process_index()", "rank"] in table(2)
    assert ["jax.process_index()", "0"] in table(1)
    assert len(table(1)) == len(table(2)) > 10


def test_without(program, mpirun):
    job = mpirun(2, program, json.dumps(table(1)), fork=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("rows are right") == 2


def test_started_by_the_program(program, mpirun):
    """JAX's messages among the ranks go through gloo."""
    env = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    job = mpirun(2, program, json.dumps(table(2)), "start", fork=False, env=env)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("rows are right") == 2


def test_started_by_the_command(program):
    words = [sys.executable, command.__file__, "run", "-n", "4", "--plain", "--jax-distributed"]
    job = subprocess.run(
        [*words, program, json.dumps(table(2))],
        cwd=program.parent,
        env=environment_outside_mpi(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("rows are right") == 4


def test_after_the_first_use_of_a_device(mpirun):
    """JAX says what is wrong, and nothing is started in silence."""
    code = "import jax; jax.numpy.ones(1); import mpi4jax"
    job = mpirun(2, "-c", code, env={"MPI4JAX_JAX_DISTRIBUTED": 1}, fork=False)
    assert job.returncode not in (0, None)
    assert "jax.distributed.initialize() must be called before" in job.stderr
