"""Checkpoints that a thread writes while the program goes on."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE

import mpi4jax
from mpi4jax import checkpoints, notoken
from mpi4jax._numerics import store

ROWS = mpi4jax.Layout((2 * SIZE + 1, 3), {0: SIZE})
SHAPE = ROWS.block_shape(RANK)


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast(tmp_path_factory.mktemp("async") if RANK == 0 else None)


@pytest.fixture(params=["multiple", "serialized"])
def level(request, monkeypatch):
    """The thread level that MPI says it has."""
    if request.param == "serialized":
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    return request.param


@pytest.fixture
def slow(monkeypatch):
    """Writing takes longer than the program does between saves."""
    write = store.write

    def late(*args):
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(store, "write", late)


@pytest.fixture
def go_on(monkeypatch):
    """An event, for which writing waits."""
    write, event = store.write, threading.Event()

    def late(*args):
        assert event.wait(60)
        write(*args)

    monkeypatch.setattr(store, "write", late)
    yield event
    event.set()


def loaded(path):
    return checkpoints.load(path, {"x": np.zeros(SHAPE), "step": 0}, {"x": ROWS, "step": None})


def begin(checkpointer, path, x, step=1, **more):
    checkpointer.save(path, {"x": x, "step": step}, {"x": ROWS, "step": None}, **more)


def test_the_program_goes_on(folder, go_on, level):
    """It overwrites what is saved, and communicates on the same communicator."""
    checkpointer = checkpoints.AsyncCheckpointer()
    x = np.full(SHAPE, RANK + 1.0)
    begin(checkpointer, folder / "1", x)
    x[:] = np.nan
    total = 0
    for _ in range(20):
        total += float(notoken.allreduce(jnp.float32(1)))
        total += notoken.default_comm().allreduce(1)
    assert total == 40 * SIZE
    assert not (folder / "1" / store.INDEX).exists()
    go_on.set()
    checkpointer.wait()
    checkpointer.wait()
    found = loaded(folder / "1")
    assert (found["x"] == RANK + 1).all()
    assert found["step"] == 1


def test_donated_arrays(folder, slow):
    with checkpoints.AsyncCheckpointer() as checkpointer:
        x = jnp.full(SHAPE, 2.0, jnp.float32)
        checkpointer.save(folder / "1", x, ROWS)
        jax.block_until_ready(jax.jit(lambda x: x * jnp.nan, donate_argnums=0)(x))
    found = checkpoints.load(folder / "1", np.zeros(SHAPE, np.float32), ROWS)
    assert (found == 2).all()


def test_a_second_save_waits_for_the_first(folder, slow, level):
    with checkpoints.AsyncCheckpointer() as checkpointer:
        for step in (1, 2, 3):
            begin(checkpointer, folder / str(step), np.full(SHAPE, 1.0 * step), step, keep=2)
            if step > 1:
                assert loaded(folder / str(step - 1))["step"] == step - 1
    assert checkpoints.latest(folder) == folder / "3"
    COMM.Barrier()
    assert not (folder / "1").exists()
    with checkpoints.AsyncCheckpointer() as checkpointer:
        for step in (4, 5):
            begin(checkpointer, folder / "3", np.full(SHAPE, 1.0 * step), step)
    assert loaded(folder / "3")["step"] == 5


@pytest.mark.parametrize("where", ["wait", "save"])
def test_an_error_on_one_rank(folder, monkeypatch, level, where):
    """All ranks raise it at the next call; the previous checkpoint stays."""
    checkpointer = checkpoints.AsyncCheckpointer()
    begin(checkpointer, folder / "x", np.ones(SHAPE))
    checkpointer.wait()

    def full(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        if RANK == SIZE - 1:
            patched.setattr(store, "write", full)
        begin(checkpointer, folder / "x", np.ones(SHAPE), 2)
        words = "^no space left" if RANK == SIZE - 1 else f"rank {SIZE - 1} has failed: OSError: no"
        begin_next = lambda: begin(checkpointer, folder / "x", np.ones(SHAPE), 3)
        with pytest.raises(OSError, match=words):
            (checkpointer.wait if where == "wait" else begin_next)()
    assert loaded(folder / "x")["step"] == 1
    COMM.Barrier()
    assert sorted(p.name for p in (folder / "x").iterdir()) == ["arrays-1", "index.json"]
    begin(checkpointer, folder / "x", np.ones(SHAPE), 4)
    checkpointer.wait()
    assert loaded(folder / "x")["step"] == 4


def test_errors_before_data_are_written(folder):
    checkpointer = checkpoints.AsyncCheckpointer()
    with pytest.raises(ValueError, match="save: array x has shape"):
        checkpointer.save(folder / "1", np.zeros((7, 7, 7)), ROWS)
    with pytest.raises(ValueError, match="'keep' must be at least 1"):
        checkpointer.save(folder / "x", np.zeros(SHAPE), ROWS, keep=2)
    checkpointer.wait()
