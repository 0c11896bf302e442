"""Under which conditions a checkpoint is safe, as docs/checkpoints.md says."""

import os
import resource
import socket
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE
from test_checkpoint_faults import tree

from mpi4jax import checkpoints
from mpi4jax._numerics import lock, store

SELF = MPI.COMM_SELF


def loaded(path, comm=SELF):
    """The step of the checkpoint, None if there is none."""
    try:
        found = checkpoints.load(path, tree(0), comm=comm)
    except FileNotFoundError:
        return None
    np.testing.assert_array_equal(found["x"], tree(found["step"])["x"])
    return found["step"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_second_job_saves_to_the_same_path(folder, monkeypatch, is_there):
    """It is told who saves there, and leaves nothing. Each rank is a job of its own."""
    path, written = folder / "x", store.write
    if RANK == 0 and is_there:
        checkpoints.save(path, tree(1), comm=SELF)
    COMM.Barrier()
    if RANK == 0:

        def late(*args):
            COMM.Barrier()
            COMM.Barrier()
            written(*args)

        monkeypatch.setattr(store, "write", late)
        checkpoints.save(path, tree(2), comm=SELF)
    else:
        COMM.Barrier()
        before = sorted(folder.rglob("*"))
        words = (
            rf"save: {path} is being saved by process \d+ on host {socket.gethostname()}, rank 0"
        )
        with pytest.raises(BlockingIOError, match=words + " of 1, since 20") as caught:
            checkpoints.save(path, tree(3), comm=SELF)
        assert "one save at a time" in str(caught.value)
        assert sorted(folder.rglob("*")) == before
        assert loaded(path) == (1 if is_there else None)
        COMM.Barrier()
    COMM.Barrier()
    assert loaded(path) == 2
    COMM.Barrier()
    if RANK == 1:
        checkpoints.save(path, tree(3), comm=SELF)
        assert loaded(path) == 3
        assert {p.name for p in path.iterdir()} == {
            "index.json",
            "arrays-2" if not is_there else "arrays-3",
        }


@pytest.mark.ranks(2)
def test_a_file_system_without_locks(folder, monkeypatch):
    def missing(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", missing)
    for step in (1, 2):
        checkpoints.save(folder / "x", tree(step), comm=COMM)
        assert loaded(folder / "x", COMM) == step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("limit", [0, 1050, 100_000])
def test_a_disk_that_is_full(folder, rank, limit):
    """A rank may write files of some size only: the lock, a part of the data, or of the index."""
    value = lambda step: {"step": step, "x": np.full(10**5, step)}
    x = folder / "x"
    checkpoints.save(x, value(1), {"step": None, "x": 0}, comm=COMM)
    before = COMM.bcast(sorted(folder.rglob("*")) if RANK == 0 else None)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    COMM.Barrier()
    if rank == RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(x, value(2), {"step": None, "x": 0}, comm=COMM)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert sorted(folder.rglob("*")) == before
    found = checkpoints.load(x, value(0), {"step": None, "x": 0}, comm=COMM)
    assert found["step"] == 1
    COMM.Barrier()
    checkpoints.save(x, value(3), {"step": None, "x": 0}, comm=COMM)
    assert checkpoints.load(x, value(0), {"step": None, "x": 0}, comm=COMM)["step"] == 3


class Disk:
    """What is on the disk for certain: data and names that were there at the last `fsync`.

    Attributes:
        removes: whether removed names are gone at once, which a file system may do as well.
    """

    def __init__(self, root, monkeypatch, removes):
        self.root, self.removes, self.moments = root, removes, 0
        self.names, self.data = {}, {}
        for file in [root, *root.rglob("*")]:
            self.sync(file)
        self.check = lambda: None
        for name in ("open", "mkdir", "replace", "unlink", "rmdir", "fsync"):
            monkeypatch.setattr(os, name, self.hooked(name, getattr(os, name)))

    def hooked(self, name, function):
        def call(*args, **more):
            gone = None
            if name in ("unlink", "rmdir") and self.removes:
                gone = os.fstat(more["dir_fd"]).st_ino if "dir_fd" in more else None
            out = function(*args, **more)
            if name == "open" and args[1] & os.O_EXCL:
                self.data.pop(os.fstat(out).st_ino, None)  # numbers of files are used again
            if name == "fsync":
                self.sync(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            if gone in self.names:
                self.names[gone].pop(args[0], None)
            if name != "open":
                self.moments += 1
                self.check()
            return out

        return call

    def sync(self, path):
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = {p.name: p.stat().st_ino for p in path.iterdir()}
        else:
            self.data[found.st_ino] = path.read_bytes()

    def put(self, to, number=None):
        """Make what the disk has after a power failure."""
        number = self.root.stat().st_ino if number is None else number
        to.mkdir()
        for name, inside in self.names.get(number, {}).items():
            if inside in self.names:
                self.put(to / name, inside)
            else:
                (to / name).write_bytes(self.data.get(inside, b""))


@pytest.mark.ranks(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of open files in /proc")
@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_power_failure_at_each_moment(folder, tmp_path, monkeypatch, is_there, removes):
    """The old checkpoint or the new one; the new one when `save` has returned."""
    root, path = folder / "root", folder / "root" / "run" / "x"
    root.mkdir()
    if is_there:
        checkpoints.save(path, tree(1), comm=SELF)
    found = []
    with monkeypatch.context() as patched:
        disk = Disk(root, patched, removes)
        numbers = iter(range(10**6))

        def check():
            disk.check = lambda: None
            after = tmp_path / f"after{next(numbers)}"
            disk.put(after)
            found.append(loaded(after / "run" / "x"))
            disk.check = check

        disk.check = check
        checkpoints.save(path, tree(2), comm=SELF)
        check()
    assert {*found} == {1 if is_there else None, 2}
    assert found == sorted(found, key=lambda step: step or 0)
    assert found[-1] == 2
    assert disk.moments >= 8


@pytest.mark.min_ranks(2)
def test_a_failure_of_one_rank_leaves_nothing(folder, monkeypatch):
    """Also of the first save to a path."""

    def full(*args):
        written(*args)
        raise OSError("No space left on device")

    written = store.write
    if RANK == SIZE - 1:
        monkeypatch.setattr(store, "write", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(folder / "new" / "x", np.ones(3), 0, comm=COMM)
    assert not (folder / "new").exists()
