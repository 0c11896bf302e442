"""Checkpoints of global arrays, which the ranks of one job write and the ranks of another job read.

Each rank writes its blocks of all arrays into one file. An index says which file has which block.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from ._job.flush import flush
from ._numerics import files, store
from ._numerics.arrays import T
from ._numerics.base import as_comm, fail_at_exit, static_int
from ._numerics.index import Array, Index
from ._numerics.layout import part_of
from ._numerics.lock import Lock
from ._spmd.mesh import Mesh
from .layouts import comm_of, layouts_and_comm

__all__ = ["AsyncCheckpointer", "latest", "load", "save"]


class _Save:
    """A checkpoint that is being saved. Its methods are collective, except `write` and `leave`."""

    def __init__(self, path: Any, tree: Any, layouts: Any, keep: Any, comm: MPI.Intracomm):
        self.path, self.keep = path, keep
        self.rank, self.ranks = comm.Get_rank(), comm.Get_size()
        arrays, blocks = files.to_write("save", tree, layouts, comm, self._check)
        numbers, self.tables = files.tables("save", arrays, blocks, comm)
        self.arrays = [Array(a.name, a.dtype, n) for a, n in zip(arrays, numbers, strict=True)]
        #: The arrays that this rank writes.
        self.values = [
            files.data_of(a.leaf)[a.inner]
            for a in arrays
            if a.writes and all(s.stop > s.start for s in a.window)
        ]
        self._lock: Lock | None = None
        self._begun = files.of_first("save", comm, self._begin)
        try:
            for leftover in self._begun.leftovers:
                store.remove(leftover.share(self.rank, self.ranks))
        except BaseException:
            self.leave()
            raise

    def _check(self) -> None:
        self.path, keep = files.path_of("save", self.path), self.keep
        if keep is None:
            return
        number = static_int("save", "keep", keep, "a number of checkpoints, or None")
        if number < 1 or not self.path.name.isdecimal():
            raise ValueError(
                "save: argument 'keep' must be at least 1, and 'path' must end with a number; got "
                f"{self.keep} and {str(self.path)!r}"
            )

    def _begin(self) -> store.Begun:
        begun, self._lock = store.begin(self.path, self.ranks)
        return begun

    def write(self) -> None:
        """Write this rank's blocks."""
        if self.values:
            store.write(self._begun, self.rank, self.values)

    def complete(self, comm: MPI.Intracomm, write: Callable[[], None]) -> None:
        """Publish the checkpoint, unless a rank has raised an error."""
        try:
            files.agree("save", comm, write)
            obsolete = files.of_first("save", comm, self._publish)
        except Exception:
            self._abandon(comm)
            raise
        except BaseException:
            self.leave()
            raise
        for removal in obsolete:
            store.remove(removal.share(self.rank, self.ranks))

    def _publish(self) -> list[store.Removal]:
        assert self._lock is not None
        begun = self._begun
        index = Index(
            begun.identity, begun.subdirectory, self.ranks, (*self.arrays,), (*self.tables,)
        )
        store.publish(index, Path(begun.path), self._lock)
        older = [] if self.keep is None else store.retire(Path(begun.path).parent, self.keep)
        return [*begun.old, *older]

    def _abandon(self, comm: MPI.Intracomm) -> None:
        """Remove the files of this save. No rank writes any more."""
        begun = self._begun
        with contextlib.suppress(OSError):
            if files.of_first("save", comm, lambda: store.is_published(begun)):
                self.leave()
                return
            store.remove(store.Removal(begun.path, begun.subdirectory, [self.rank]))
            files.agree("save", comm, lambda: None)
            files.of_first("save", comm, self._remove_rest)

    def _remove_rest(self) -> None:
        assert self._lock is not None
        store.abandon(self._begun, self._lock)

    def leave(self) -> None:
        """Release the lock of a save that was given up."""
        if self._lock is not None:
            self._lock.leave()


def save(
    path: str | os.PathLike[str],
    tree: Any,
    layouts: Any = None,
    *,
    keep: int | None = None,
    mesh: Mesh | None = None,
    comm: MPI.Intracomm | None = None,
) -> None:
    """Write a checkpoint to a shared file system. Collective.

    Saving is atomic: a job that is killed while saving leaves the previous checkpoint intact.

    Args:
        path: a directory, which is created if it does not exist. The new checkpoint replaces the
            previous one. If a job was killed while saving, the next call with the same path removes
            what is left. Other files in the directory stay.
        tree: this rank's arrays: a pytree of JAX's or NumPy's arrays, random keys, and numbers.
        layouts: which block of a global array a rank has: a `jax.sharding.PartitionSpec` or a
            :class:`mpi4jax.sharding.NamedSharding`; a :class:`mpi4jax.Layout`; a
            :class:`mpi4jax.grids.Block`, whose ghost cells are not written (with a layout or a
            block, arrays may have further axes in front); the number of an axis along which the
            arrays of all ranks are joined, which may have different lengths; or None for values
            that are the same on all ranks, and that rank 0 writes. Pass one for the whole tree, or
            a pytree of them that is a prefix of the tree, as ``in_axes`` of :func:`jax.vmap`.
        keep: number of checkpoints to keep, for a ``path`` that ends with a number, such as
            ``run/300``. The checkpoints in ``run`` with the ``keep`` largest numbers are kept; the
            others are removed when this one is complete. By default, all are kept.
        mesh: :class:`mpi4jax.Mesh` of the `PartitionSpec`; by default the mesh of ``with mesh:``.
        comm: communicator of the ranks; by default the mesh's communicator, or a duplicate of
            ``COMM_WORLD``.

    Returns:
        None, when the checkpoint is complete.

    Raises:
        TypeError: if a layout has another type, or an array does not hold numbers.
        ValueError: if an array does not have the shape that its layout gives, if the blocks of all
            ranks do not cover the global array exactly once, if the arrays differ between ranks, or
            if ``keep`` is less than 1 or given for a path that does not end with a number.
        FileExistsError: if ``path`` exists, is not empty, and is not a checkpoint.
        BlockingIOError: if another job is saving to ``path``; the error says which one.
        OSError: if a rank cannot write, or the index is damaged. The previous checkpoint stays.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> directory = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        >>> rows = mpi4jax.Layout((5, 2), {0: comm.size})
        >>> x = jnp.full(rows.block_shape(comm.rank), 7.0)
        >>> layouts = {"x": rows, "step": None}
        >>> mpi4jax.checkpoints.save(f"{directory}/last", {"x": x, "step": 1}, layouts)
        >>> y = mpi4jax.checkpoints.load(f"{directory}/last", {"x": x, "step": 0}, layouts)
        >>> bool((y["x"] == x).all()), y["step"]
        (True, 1)

    See also: :func:`load`, :func:`latest`.
    """
    layouts, comm = layouts_and_comm("save", layouts, mesh, comm)
    this = _Save(path, tree, layouts, keep, comm)
    this.complete(comm, this.write)


class AsyncCheckpointer:
    """Save checkpoints in the background, while the program continues.

    ``save`` copies the arrays to the host and returns. A thread writes them and publishes the
    checkpoint when all ranks have written; it communicates on a duplicate of the communicator, so
    that the program may use the communicator meanwhile. If MPI does not support
    ``MPI_THREAD_MULTIPLE``, the thread only writes, and ``wait`` or the next ``save``
    publishes the checkpoint.

    At exit, the job waits for the save to complete. If the save fails, the job is aborted with exit
    status 1, as after an uncaught exception. With ``MPI4JAX_ABORT=0``, the error is only printed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> directory = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        >>> x = jnp.zeros(3)
        >>> with mpi4jax.checkpoints.AsyncCheckpointer() as checkpointer:
        ...     for step in range(1, 5):
        ...         x = x + 1
        ...         checkpointer.save(f"{directory}/{step}", x, keep=2)
        >>> mpi4jax.checkpoints.latest(directory).name
        '4'

    See also: :func:`mpi4jax.checkpoints.save`, :func:`mpi4jax.checkpoints.load`.
    """

    def __init__(self) -> None:
        self._this: _Save | None = None  # the save that is under way
        self._thread: threading.Thread | None = None
        self._comm = MPI.Intracomm()  # a null handle
        self._has_threads = False
        self._error: Exception | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        tree: Any,
        layouts: Any = None,
        *,
        keep: int | None = None,
        mesh: Mesh | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        """Wait for the previous save, and begin another one. Collective.

        The program may overwrite or donate the arrays when this returns.

        Args:
            path, tree, layouts, keep, mesh, comm: as for :func:`mpi4jax.checkpoints.save`.

        Raises:
            OSError: if a rank could not write the previous checkpoint. The new one is not begun.
            Exception: as for :func:`mpi4jax.checkpoints.save`, if the error is found before data
                are written.
        """
        self.wait()
        layouts, comm = layouts_and_comm("save", layouts, mesh, comm)
        this = _Save(path, tree, layouts, keep, comm)
        try:
            this.values = [np.array(x) for x in this.values]
        except BaseException:
            this.leave()
            raise
        self._comm = comm.Dup()
        as_comm("save", self._comm)
        level = np.array([MPI.Query_thread()])
        comm.Allreduce(MPI.IN_PLACE, level, MPI.MIN)
        self._has_threads = bool(level[0] >= MPI.THREAD_MULTIPLE)
        self._this, self._error = this, None
        self._thread = threading.Thread(target=self._run, name="checkpoints.save", daemon=True)
        atexit.register(self._at_exit, os.getpid())
        self._thread.start()

    def _run(self) -> None:
        assert self._this is not None
        try:
            self._this.write()
        except Exception as error:
            self._error = error
        if self._has_threads:
            self._complete()

    def _complete(self) -> None:
        """Publish the checkpoint if all ranks have written; otherwise, raise the error of one rank
        on all ranks."""
        assert self._this is not None
        failed = self._error

        def write() -> None:
            if failed is not None:
                raise failed

        try:
            if self._has_threads:
                all_have_written = self._comm.Ibarrier()
                while not all_have_written.Test():
                    time.sleep(0.01)  # sleeping leaves the core to the program
            self._this.complete(self._comm, write)
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            OSError: on all ranks, if a rank could not write. The previous checkpoint stays.
        """
        if self._thread is not None:
            self._end()
            self._comm.Free()
            atexit.unregister(self._at_exit)
            self._this = self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if not self._has_threads:
            self._complete()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # a forked child is not a rank
            self._end()
            if self._error is not None:
                fail_at_exit(self._error)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.wait()


def latest(directory: str | os.PathLike[str], *, comm: MPI.Intracomm | None = None) -> Path | None:
    """Return the newest checkpoint whose name is a number. Collective.

    Args:
        directory: parent directory of the checkpoints, such as ``run`` for ``run/100`` and
            ``run/200``.
        comm: communicator of the ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        The path of the complete checkpoint with the largest number, the same on all ranks, or None.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.checkpoints.latest("none/of/that/name") is None
        True

    See also: ``keep`` of :func:`save`.
    """
    comm = comm_of("latest", comm)
    flush("latest")

    found = files.of_first("latest", comm, lambda: store.numbered(Path(directory))[-1:])
    return found[0] if found else None


def load(
    path: str | os.PathLike[str],
    like: T,
    layouts: Any = None,
    *,
    mesh: Mesh | None = None,
    comm: MPI.Intracomm | None = None,
) -> T:
    """Read a checkpoint, written by any number of ranks with any layouts. Collective.

    Checksums (CRC-32) of all data that are read are verified.

    Args:
        path: as for :func:`save`.
        like: a pytree like the saved one, with arrays of the shapes and dtypes that this rank
            needs, or :class:`jax.ShapeDtypeStruct`. Ghost cells keep their values.
        layouts: layouts of the arrays of ``like``, as for :func:`save`. With the number of an axis,
            a rank gets its part of that axis as :func:`numpy.array_split` partitions it, whatever
            its length in ``like``.
        mesh, comm: as for :func:`save`.

    Returns:
        A tree like ``like`` with the values of the checkpoint: NumPy arrays and Python numbers
        where ``like`` has them, and JAX arrays otherwise.

    Raises:
        TypeError: if a layout has another type.
        ValueError: if the checkpoint has other arrays, shapes or dtypes.
        FileNotFoundError: on all ranks, if there is no complete checkpoint of that name.
        OSError: if a file is missing or damaged; the error names the file.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> state, step = 0.5, 0
        >>> try:
        ...     state, step = mpi4jax.checkpoints.load("none/of/that/name", (state, step))
        ... except FileNotFoundError:
        ...     pass  # the first job begins at step 0

    See also: :func:`save`.
    """
    layouts, comm = layouts_and_comm("load", layouts, mesh, comm)
    flush("load")
    rank, size = comm.Get_rank(), comm.Get_size()
    index = files.of_first("load", comm, lambda: store.find_index(files.path_of("load", path)))
    if index is None:
        raise FileNotFoundError(f"load: there is no complete checkpoint at '{path}'")
    known = index

    def read() -> list[Any]:
        directory = files.path_of("load", path)
        arrays = files.arrays_of("load", like, layouts, rank)
        names = [array.name for array in known.arrays]
        if names != [a.name for a in arrays]:
            raise ValueError(
                f"load: argument 'like' has the arrays {[a.name for a in arrays]}; expected the "
                f"arrays of {path}, {names}"
            )
        for number, (a, stored) in enumerate(zip(arrays, known.arrays, strict=True)):
            shape = known.tables[stored.table].shape
            if isinstance(a.layout, int) and len(shape) == len(a.whole):
                length = shape[a.layout]
                a = arrays[number] = a.along(length, *part_of(length, size, rank))
            if (shape, stored.dtype) != (a.whole, a.dtype):
                raise ValueError(
                    f"load: array {a.name or 'x'} is {a.dtype}{[*a.whole]}; expected "
                    f"{stored.dtype}{[*shape]}, as in {path}"
                )
        blocks = store.read(directory, known, [a.window for a in arrays], rank)
        return [_restored(a, block) for a, block in zip(arrays, blocks, strict=True)]

    leaves = files.agree("load", comm, read)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _restored(a: files.Array, block: np.ndarray[Any, Any]) -> Any:
    """Return a leaf with the values of its block."""
    leaf = a.leaf
    data = files.data_of(leaf)
    if hasattr(a.layout, "padded_shape") and block.shape != data.shape:
        has_values = isinstance(data, np.ndarray)
        around = np.array(data) if has_values else np.zeros(data.shape, data.dtype)
        around[a.inner] = block
        block = around
    if files.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(block), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(block.item())
    if isinstance(leaf, np.generic):
        return block[()]
    return block if isinstance(leaf, np.ndarray) else jnp.asarray(block)
