"""Jobs that are killed while they write a checkpoint, and others that go on from it."""

import pytest

PROGRAM = """
import os, signal, sys
import jax.numpy as jnp
import mpi4py
if "serialized" in sys.argv:
    mpi4py.rc.thread_level = "serialized"
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
    store.Directory.create = killed(store.Directory.create)

is_async = "async" in sys.argv
checkpointer = checkpoints.AsyncCheckpointer()
save = checkpointer.save if is_async else checkpoints.save
try:
    state = checkpoints.load("state", state, layouts)
except FileNotFoundError:
    pass
print(f"begins with {state['step']}", flush=True)
while state["step"] < last:
    if state["step"] + 1 == last:
        checkpointer.wait()
    state = {"step": state["step"] + 1, "x": state["x"] + 1}
    save("state", state, layouts)
if is_async and kill != "never":
    checkpointer.wait()
x = MPI.COMM_WORLD.allgather(bool((state["x"] == state["step"] + 1).all()))
print(f"ends with {state['step']}", *x, flush=True)
"""


@pytest.mark.parametrize(
    "kill, step, how",
    [
        ("before the index", 1, []),
        ("before the index", 3, []),
        ("after the index", 3, []),
        ("before a block is begun", 1, []),
        ("after a block is begun", 3, []),
        ("before the index", 3, ["async"]),
        ("after a block is begun", 1, ["async"]),
        ("after a block is begun", 3, ["async", "serialized"]),
        ("after the index", 3, ["async", "serialized"]),
    ],
)
def test_a_job_is_killed_while_it_writes(mpirun, tmp_path, kill, step, how):
    """The checkpoint is the one before, or, when the index names it, the new one."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    job = mpirun(2, file, step, kill, *how)
    assert job.returncode != 0
    assert "begins with 0" in job.stdout
    assert "ends" not in job.stdout
    found = step if kill == "after the index" else step - 1
    assert (tmp_path / "state" / "index.json").exists() == (found > 0)
    job = mpirun(3, file, 5, "never", *how)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count(f"begins with {found}") == 3
    assert job.stdout.count("ends with 5 True True True") == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["program.py", "state"]
    assert not (tmp_path / "state" / "unfinished.json").exists(), "the end waits for the save"
    if how:
        job = mpirun(2, file, 5, "never")
        assert job.stdout.count("begins with 5") == 2, job.stdout + job.stderr


LOST = """
import sys
import jax.numpy as jnp
import mpi4py
if "serialized" in sys.argv:
    mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import mpi4jax
from mpi4jax import checkpoints
from mpi4jax._numerics import store

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def full(*args):
    raise OSError("no space left")

if rank == size - 1 and "healthy" not in sys.argv:
    store.write = full
layout = mpi4jax.Layout((8, 3), {0: size})
checkpointer = checkpoints.AsyncCheckpointer()
checkpointer.save("state", jnp.ones(layout.block_shape(rank)), layout)
print("the end", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("how", ["multiple", "serialized", "healthy"])
def test_the_last_checkpoint_is_lost(mpirun, tmp_path, ranks, how):
    """Nobody waits for it, but the job fails."""
    file = tmp_path / "program.py"
    file.write_text(LOST)
    job = mpirun(ranks, file, how)
    assert job.stdout.count("the end") == ranks
    if how == "healthy":
        assert job.returncode == 0, job.stderr
        assert (tmp_path / "state" / "index.json").exists()
        return
    assert job.returncode == 1, job.stderr
    assert "an uncaught exception at exit aborts the job" in job.stderr
    assert "OSError: no space left" in job.stderr
    assert not (tmp_path / "state" / "index.json").exists()


def test_the_last_checkpoint_is_lost_without_aborting(mpirun, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(LOST)
    job = mpirun(2, file, env={"MPI4JAX_ABORT": "0"})
    assert job.returncode == 0
    assert "OSError: no space left" in job.stderr
