"""Checkpoints of global arrays, which the ranks of one job write and those of another one read.

Each array of a pytree is an array in zarr's format, which TensorStore writes (``pip install
tensorstore``) and any library for zarr reads. Each rank writes and reads its own block.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from ._job.flush import flush
from ._numerics import store
from ._numerics.base import as_comm, waits_in
from ._numerics.layout import Layout, as_layout, part_of
from ._spmd.mesh import Mesh
from .grids import Block
from .layouts import comm_of

__all__ = ["latest", "load", "save"]

Window = tuple[slice, ...]


class _Array(NamedTuple):
    """An array of the tree, and where this rank's part of it lies in the global array.

    Attributes:
        name: its place in the pytree.
        leaf: what is there.
        dtype: of what is stored.
        layout: as in the arguments.
        whole: shape of the global array. Along an axis that joins ranks it is this rank's length
            until all have exchanged theirs.
        window: this rank's block in it.
        inner: the block in what the rank has.
        writes: whether this rank writes the block, of which several may have a copy.
    """

    name: str
    leaf: Any
    dtype: str
    layout: Any
    whole: tuple[int, ...]
    window: Window
    inner: Window
    writes: bool = True

    @property
    def written(self) -> list[int] | None:
        """The shape of what this rank writes, None for nothing."""
        return [s.stop - s.start for s in self.window] if self.writes else None

    def along(self, length: int, start: int, stop: int) -> _Array:
        """Return the array with another global length, and block, along the axis of `layout`."""
        whole, window = [*self.whole], [*self.window]
        whole[self.layout], window[self.layout] = length, slice(start, stop)
        inner = [*self.inner]
        inner[self.layout] = slice(0, stop - start)
        return self._replace(whole=(*whole,), window=(*window,), inner=(*inner,))


def _is_layout(x: Any) -> bool:
    return x is None or isinstance(x, (int, Layout, PartitionSpec)) or hasattr(x, "layout_of")


def _known(op: str, layouts: Any, mesh: Mesh | None, comm: Any) -> tuple[Any, MPI.Intracomm]:
    """Layouts with shardings in place of specs, and the communicator."""

    def known(layout: Any) -> Any:
        if not isinstance(layout, PartitionSpec):
            return layout
        from .sharding import as_sharding  # loaded only by programs that use it

        return as_sharding(op, layout, mesh)

    layouts = jax.tree.map(known, layouts, is_leaf=_is_layout)
    given = jax.tree.leaves(layouts, is_leaf=_is_layout)
    comm = mesh.comm(mesh.axis_names) if comm is None and mesh is not None else comm
    return layouts, comm_of(op, comm, *given)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """Return the data of a leaf to store, or its shape and dtype if it has no data."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _arrays(op: str, tree: Any, layouts: Any, rank: int) -> list[_Array]:
    try:
        subtrees = jax.tree.map(
            lambda layout, part: [layout] * len(jax.tree.leaves(part)),
            layouts,
            tree,
            is_leaf=_is_layout,
        )
    except ValueError as error:
        raise ValueError(
            f"{op}: argument 'layouts' must be a layout, or a pytree of layouts that the tree "
            f"begins with: {error}"
        ) from None
    each = jax.tree.leaves(subtrees, is_leaf=_is_layout)
    named = jax.tree.leaves_with_path(tree)
    return [
        _array(op, jax.tree_util.keystr(path), leaf, layout, rank)
        for (path, leaf), layout in zip(named, each, strict=True)
    ]


def _array(op: str, name: str, leaf: Any, layout: Any, rank: int) -> _Array:
    if not _is_layout(layout) or isinstance(layout, bool):
        raise TypeError(
            f"{op}: argument 'layouts' must have a Layout, a NamedSharding, a PartitionSpec, a "
            "grids.Block, the number of an axis or None for array "
            f"{name or 'x'}; got {type(layout).__name__}: {layout!r}"
        )
    data = _data(leaf)
    shape, dtype = tuple(data.shape), data.dtype
    if dtype.kind in "OSU":
        raise TypeError(f"{op}: array {name or 'x'} has dtype {dtype}; expected numbers")
    window = tuple(slice(0, n) for n in shape)
    if layout is None:
        return _Array(name, leaf, dtype.name, layout, shape, window, window, rank == 0)
    if isinstance(layout, int):
        axes = leaf.ndim if hasattr(leaf, "ndim") else 0
        if not -axes <= layout < axes:
            raise ValueError(
                f"{op}: argument 'layouts' has axis {layout} for array {name or 'x'}; expected one "
                f"of its {axes} axes"
            )
        return _Array(name, leaf, dtype.name, layout % axes, shape, window, window)
    writes = True
    if isinstance(layout, Block):
        whole, block, padded = layout.global_shape, layout.slices, layout.padded_shape
        inner = layout.inner
    else:
        known = as_layout(op, "layouts", layout, sys.maxsize, shape)
        whole, block, padded = known.shape, known.block(rank), known.block_shape(rank)
        inner = tuple(slice(0, n) for n in padded)
        writes = rank < known.ranks and known.place(rank)[1] == 0
    before = max(len(shape) - len(padded), 0)
    if shape[before:] != padded:
        raise ValueError(
            f"{op}: array {name or 'x'} has shape {shape}; expected {padded}, or that behind other "
            f"axes, as {layout!r} says of rank {rank}"
        )
    first = window[:before]
    whole = (*shape[:before], *whole)
    blocks = (*first, *block), (*first, *inner)
    return _Array(name, leaf, dtype.name, layout, whole, *blocks, writes)


def _on_all(op: str, comm: MPI.Intracomm, f: Callable[[], Any]) -> list[Any]:
    """Return the results of all ranks; if one rank raises an error, all ranks raise it."""
    result, failed, words = None, None, None
    try:
        result = f()
    except Exception as error:
        failed, words = error, f"{type(error).__name__}: {error}"
    with waits_in(as_comm(op, comm), f"checkpoints.{op}"):
        found = comm.allgather((result, words))
    if failed is not None:
        raise failed
    for rank, (_, words) in enumerate(found):
        if words is not None:
            raise OSError(f"{op}: rank {rank} has failed: {words}")
    return [result for result, _ in found]


def _joined(op: str, arrays: list[_Array], comm: MPI.Intracomm) -> list[_Array]:
    """Return the arrays with the lengths of all ranks, which must have the same arrays."""

    def seen(a: _Array) -> tuple[Any, ...]:
        joins = isinstance(a.layout, int)
        shape = [-1 if joins and axis == a.layout else n for axis, n in enumerate(a.whole)]
        return a.name, a.dtype, shape, a.layout if joins else None

    lengths = [a.whole[a.layout] if isinstance(a.layout, int) else 0 for a in arrays]
    found = comm.allgather((lengths, [seen(a) for a in arrays]))
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            differ = next((p for p in zip(found[0][1], other, strict=False) if p[0] != p[1]), None)
            raise ValueError(
                f"{op}: argument 'tree' must have the same arrays on all ranks; rank 0 has "
                f"{len(found[0][1])} and rank {rank} has {len(other)}"
                + (f", rank 0 {differ[0]} and rank {rank} {differ[1]}" if differ else "")
            )
    out = []
    for number, a in enumerate(arrays):
        if isinstance(a.layout, int):
            parts = [lengths[number] for lengths, _ in found]
            start = sum(parts[: comm.Get_rank()])
            a = a.along(sum(parts), start, start + parts[comm.Get_rank()])
        out.append(a)
    return out


def _largest_block(op: str, a: _Array, of_ranks: Sequence[list[int] | None]) -> list[int]:
    """Return the shape of the largest block of all ranks; the blocks must make up the array."""
    blocks = [block for block in of_ranks if block is not None]
    covered, elements = sum(map(math.prod, blocks)), math.prod(a.whole)
    if covered != elements:
        raise ValueError(
            f"{op}: argument 'layouts': the blocks of array {a.name or 'x'} have {covered} "
            f"elements on the communicator's {len(of_ranks)} ranks; expected {elements}, as in "
            f"shape {a.whole}"
        )
    return [max(axis) for axis in zip(*blocks, strict=True)]


def _to_write(
    op: str, tree: Any, layouts: Any, comm: MPI.Intracomm
) -> list[tuple[_Array, list[int]]]:
    """Return the arrays of a tree, each with the shape of the largest block of all ranks."""
    flush()  # operations that this thread has started may be on the same communicator
    arrays: list[_Array] = []
    _on_all(op, comm, store.check_library)
    _on_all(op, comm, lambda: arrays.extend(_arrays(op, tree, layouts, comm.Get_rank())))
    arrays = _joined(op, arrays, comm)
    blocks = zip(*comm.allgather([a.written for a in arrays]), strict=True)
    return [(a, _largest_block(op, a, b)) for a, b in zip(arrays, blocks, strict=True)]


@contextlib.contextmanager
def _removed_on_error(path: Path, is_first: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if is_first:
            store.clean(path)
        raise


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
        path: a directory, which is made if it does not exist. The new checkpoint replaces the
            previous one. If a job was killed while saving, the next call with the same path removes
            what is left. Other files in the directory stay. Two jobs must not save to the same path
            at the same time.
        tree: this rank's arrays: a pytree of JAX's or NumPy's arrays, random keys, and numbers.
        layouts: which block of a global array a rank has: a `jax.sharding.PartitionSpec` or a
            :class:`mpi4jax.sharding.NamedSharding`; a :class:`mpi4jax.Layout`; a
            :class:`mpi4jax.grids.Block`, whose ghost cells are not written (there may be other axes
            before those of the last two); the number of an axis along which the arrays of all ranks
            are joined, which may have different lengths; or None for what is the same on all
            ranks, of which rank 0 writes its own. One for the whole tree, or a pytree of them that
            is a prefix of the tree, as ``in_axes`` of :func:`jax.vmap`.
        keep: number of checkpoints to keep: if ``path`` ends with a number, such as ``run/300``,
            those in ``run`` with the ``keep`` largest numbers; the others are removed when this one
            is complete. By default, all are kept.
        mesh: :class:`mpi4jax.Mesh` of the `PartitionSpec`; by default that of ``with mesh:``.
        comm: communicator of the ranks; by default that of the mesh, or a clone of ``COMM_WORLD``.

    Returns:
        None, when the checkpoint is complete.

    Raises:
        TypeError: if a layout has another type, or an array does not hold numbers.
        ValueError: if an array does not have the shape that its layout gives, if the blocks of all
            ranks do not make up the global array, if the arrays differ between ranks, or if
            ``keep`` is less than 1 or given for a path that does not end with a number.
        FileExistsError: if ``path`` exists, is not empty, and is not a checkpoint.
        OSError: if a rank cannot write, or the index is damaged. The previous checkpoint stays.
        ModuleNotFoundError: if TensorStore is not installed.

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
    layouts, comm = _known("save", layouts, mesh, comm)
    path = Path(path)
    is_first = comm.Get_rank() == 0
    if keep is not None and (keep < 1 or not path.name.isdecimal()):
        raise ValueError(
            "save: argument 'keep' must be at least 1, and 'path' must end with a number; got "
            f"{keep} and {str(path)!r}"
        )
    to_write = _to_write("save", tree, layouts, comm)
    arrays = [a for a, _ in to_write]
    entries = store.entries(
        (a.name, store.metadata(a.whole, a.dtype, block)) for a, block in to_write
    )
    folder = path

    def write() -> None:
        started = []
        for a, entry in zip(arrays, entries, strict=True):
            if a.writes and all(s.stop > s.start for s in a.window):
                stored = store.open_array(folder / entry["directory"], entry["metadata"]).result()
                started.append(stored[a.window].write(_data(a.leaf)[a.inner]))
        for write in started:
            write.result()

    def begin() -> Path | None:
        return store.begin(path, entries) if is_first else None

    def digests() -> list[dict[int, str]]:
        pairs = zip(arrays, entries, strict=True)
        return [store.digests(folder, entry, a.window) for a, entry in pairs]

    with _removed_on_error(path, is_first):
        folder = _on_all("save", comm, begin)[0]
        _on_all("save", comm, write)
        found = _on_all("save", comm, digests)
        for number, entry in enumerate(entries):
            of_all = {k: v for rank in found for k, v in rank[number].items()}
            entry["digests"] = [of_all[k] for k in sorted(of_all)]
        _on_all("save", comm, lambda: store.publish(folder, entries) if is_first else None)
    if keep is not None and is_first:
        for old in store.numbered(path.parent)[:-keep]:
            with contextlib.suppress(OSError, ValueError):  # a damaged one stays
                store.discard(old)


def latest(directory: str | os.PathLike[str], *, comm: MPI.Intracomm | None = None) -> Path | None:
    """Return the newest checkpoint whose name is a number. Collective.

    Args:
        directory: where the checkpoints are, such as ``run`` for ``run/100`` and ``run/200``.
        comm: communicator of the ranks; by default a clone of ``COMM_WORLD``.

    Returns:
        The path of the complete checkpoint with the largest number, the same on all ranks, or None.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.checkpoints.latest("none/of/that/name") is None
        True

    See also: ``keep`` of :func:`save`.
    """
    comm = comm_of("latest", comm)
    flush()

    def found() -> list[Path]:
        return store.numbered(Path(directory)) if comm.Get_rank() == 0 else []

    return next(reversed(_on_all("latest", comm, found)[0]), None)


def load(
    path: str | os.PathLike[str],
    like: Any,
    layouts: Any = None,
    *,
    mesh: Mesh | None = None,
    comm: MPI.Intracomm | None = None,
) -> Any:
    """Read a checkpoint, written by any number of ranks with any layouts. Collective.

    Checksums (CRC-32C) of all data are verified.

    Args:
        path: as of :func:`save`.
        like: a pytree like the saved one, with arrays of the shapes and dtypes that this rank
            needs, or :class:`jax.ShapeDtypeStruct`. Ghost cells keep their values.
        layouts: as of :func:`save`: those of the arrays of ``like``. With the number of an axis, a
            rank gets its part of that axis as :func:`numpy.array_split` partitions it, whatever its
            length in ``like``.
        mesh, comm: as of :func:`save`.

    Returns:
        A tree like ``like`` with the values of the checkpoint: NumPy arrays and Python numbers
        where ``like`` has them, and JAX arrays otherwise.

    Raises:
        TypeError: if a layout has another type.
        ValueError: if the checkpoint has other arrays, shapes or dtypes.
        FileNotFoundError: on all ranks, if there is no complete checkpoint of that name.
        OSError: if a file is missing or damaged; the error names the file.
        ModuleNotFoundError: if TensorStore is not installed, even if there is no checkpoint yet.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> state, step = 0.5, 0
        >>> try:
        ...     state, step = mpi4jax.checkpoints.load("none/of/that/name", (state, step))
        ... except FileNotFoundError:
        ...     pass  # the first job begins at step 0

    See also: :func:`save`.
    """
    layouts, comm = _known("load", layouts, mesh, comm)
    flush()
    path = Path(path)
    rank, size = comm.Get_rank(), comm.Get_size()
    _on_all("load", comm, store.check_library)
    index = _on_all("load", comm, lambda: store.read_index(path) if rank == 0 else None)[0]
    if index is None:
        raise FileNotFoundError(f"load: there is no complete checkpoint {path}")
    leaves = []

    def read() -> None:
        arrays = _arrays("load", like, layouts, rank)
        names = [entry["name"] for entry in index["arrays"]]
        if names != [a.name for a in arrays]:
            raise ValueError(
                f"load: argument 'like' has the arrays {[a.name for a in arrays]}; expected those "
                f"of {path}, {names}"
            )
        for a, entry in zip(arrays, index["arrays"], strict=True):
            shape, dtype = (*entry["metadata"]["shape"],), entry["metadata"]["data_type"]
            if isinstance(a.layout, int) and len(shape) == len(a.whole):
                length = shape[a.layout]
                a = a.along(length, *part_of(length, size, rank))
            if (shape, dtype) != (a.whole, a.dtype):
                raise ValueError(
                    f"load: array {a.name or 'x'} is {a.dtype}{[*a.whole]}; expected "
                    f"{dtype}{[*shape]}, as in {path}"
                )
            leaves.append(_restored(a, store.read(path / index["folder"], entry, a.window)))

    _on_all("load", comm, read)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _restored(a: _Array, block: np.ndarray[Any, Any]) -> Any:
    """Return a leaf with the values of its block."""
    leaf = a.leaf
    data = _data(leaf)
    if isinstance(a.layout, Block) and block.shape != data.shape:
        has_values = isinstance(data, np.ndarray)
        around = np.array(data) if has_values else np.zeros(data.shape, data.dtype)
        around[a.inner] = block
        block = around
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(block), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(block.item())
    if isinstance(leaf, np.generic):
        return block[()]
    return block if isinstance(leaf, np.ndarray) else jnp.asarray(block)
