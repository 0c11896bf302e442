"""Jobs that are killed while they write a checkpoint, and others that go on from it."""

import pytest

PROGRAM = """
import os, signal, sys
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import checkpoints
from mpi4jax._numerics import store

last, kill = int(sys.argv[1]), sys.argv[2]
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
layouts = {"step": None, "x": mpi4jax.Layout((1000, 64), {0: size})}
state = {"step": 0, "x": jnp.ones(layouts["x"].block_shape(rank))}

def killed(f):
    def g(*args, **more):
        if state["step"] == last and kill.startswith("before"):
            os.kill(os.getpid(), signal.SIGKILL)
        out = f(*args, **more)
        if state["step"] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return out
    return g

if kill.endswith("the index") and rank == 0:
    os.replace = killed(os.replace)
if kill.endswith("a block is begun") and rank == 1:
    store.open_array = killed(store.open_array)

try:
    state = checkpoints.load("state", state, layouts)
except FileNotFoundError:
    pass
print(f"begins with {state['step']}", flush=True)
while state["step"] < last:
    state = {"step": state["step"] + 1, "x": state["x"] + 1}
    checkpoints.save("state", state, layouts)
x = MPI.COMM_WORLD.allgather(bool((state["x"] == state["step"] + 1).all()))
print(f"ends with {state['step']}", *x, flush=True)
"""


@pytest.mark.parametrize(
    "kill, step",
    [
        ("before the index", 1),
        ("before the index", 3),
        ("after the index", 3),
        ("before a block is begun", 1),
        ("after a block is begun", 3),
    ],
)
def test_a_job_is_killed_while_it_writes(mpirun, tmp_path, kill, step):
    """The checkpoint is the one before, or, when the index names it, the new one."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    job = mpirun(2, file, step, kill)
    assert job.returncode != 0
    assert "begins with 0" in job.stdout
    assert "ends" not in job.stdout
    found = step if kill == "after the index" else step - 1
    assert (tmp_path / "state" / "index.json").exists() == (found > 0)
    job = mpirun(3, file, 5, "never")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count(f"begins with {found}") == 3
    assert job.stdout.count("ends with 5 True True True") == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["program.py", "state"]
