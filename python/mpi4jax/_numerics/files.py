"""The arrays of a pytree that ranks write to files together, or read, and their blocks."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from .._job.flush import flush
from . import cover
from .base import as_comm, waits_in
from .index import DTYPES, Table
from .layout import Layout, as_layout

T = TypeVar("T")
Window = tuple[slice, ...]
_ONES = 2**64 - 1
_SHOWN = 4  # ranks that an error names
# If one rank raises one of these errors, the other ranks raise the same type; for all other errors,
# they raise OSError.
_KINDS = {
    kind.__name__: kind
    for kind in (
        BlockingIOError,
        FileExistsError,
        FileNotFoundError,
        MemoryError,
        ModuleNotFoundError,
        PermissionError,
        TypeError,
        ValueError,
    )
}


class Array(NamedTuple):
    """An array of the tree, and where this rank's part of it lies in the global array.

    Attributes:
        name: path of the array in the pytree, such as ``['x']``.
        leaf: the array, key or number itself.
        dtype: name of the dtype of the stored data.
        layout: layout of the array, as in the arguments.
        whole: shape of the global array. Along an axis that joins ranks it is this rank's length
            until all have exchanged theirs.
        window: this rank's block in it.
        inner: the block in this rank's array, which may have ghost cells.
        writes: whether this rank writes the block. Several ranks may have a copy of it.
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
    def block(self) -> Window | None:
        """What this rank writes, None for nothing."""
        return self.window if self.writes else None

    def along(self, length: int, start: int, stop: int) -> Array:
        """Return the array with another global length, and block, along the axis of `layout`."""
        whole, window = [*self.whole], [*self.window]
        whole[self.layout], window[self.layout] = length, slice(start, stop)
        inner = [*self.inner]
        inner[self.layout] = slice(0, stop - start)
        return self._replace(whole=(*whole,), window=(*window,), inner=(*inner,))


def is_layout(x: Any) -> bool:
    return x is None or isinstance(x, (int, Layout, PartitionSpec)) or hasattr(x, "layout_of")


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def data_of(leaf: Any) -> Any:
    """Return the data of a leaf to store, or its shape and dtype if it has no data."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def arrays_of(op: str, tree: Any, layouts: Any, rank: int) -> list[Array]:
    try:
        subtrees = jax.tree.map(
            lambda layout, part: [layout] * len(jax.tree.leaves(part)),
            layouts,
            tree,
            is_leaf=is_layout,
        )
    except ValueError as error:
        raise ValueError(
            f"{op}: argument 'layouts' must be a layout, or a pytree of layouts that the tree "
            f"begins with: {error}"
        ) from None
    each = jax.tree.leaves(subtrees, is_leaf=is_layout)
    named = jax.tree.leaves_with_path(tree)
    return [
        _array(op, jax.tree_util.keystr(path), leaf, layout, rank)
        for (path, leaf), layout in zip(named, each, strict=True)
    ]


def _array(op: str, name: str, leaf: Any, layout: Any, rank: int) -> Array:
    if not is_layout(layout) or isinstance(layout, bool):
        raise TypeError(
            f"{op}: argument 'layouts' must have a Layout, a NamedSharding, a PartitionSpec, a "
            "grids.Block, the number of an axis or None for array "
            f"{name or 'x'}; got {type(layout).__name__}: {layout!r}"
        )
    data = data_of(leaf)
    shape, dtype = tuple(data.shape), data.dtype
    if dtype.name not in DTYPES:
        raise TypeError(f"{op}: array {name or 'x'} has dtype {dtype}; expected numbers")
    window = tuple(slice(0, n) for n in shape)
    if layout is None:
        return Array(name, leaf, dtype.name, layout, shape, window, window, rank == 0)
    if isinstance(layout, int):
        axes = leaf.ndim if hasattr(leaf, "ndim") else 0
        if not -axes <= layout < axes:
            raise ValueError(
                f"{op}: argument 'layouts' has axis {layout} for array {name or 'x'}; expected one "
                f"of its {axes} axes"
            )
        return Array(name, leaf, dtype.name, layout % axes, shape, window, window)
    writes = True
    if hasattr(layout, "padded_shape"):  # a block
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
            f"{op}: array {name or 'x'} has shape {shape} on rank {rank}; {layout!r} expects "
            f"{padded}, optionally behind other axes"
        )
    first = window[:before]
    whole = (*shape[:before], *whole)
    blocks = (*first, *block), (*first, *inner)
    return Array(name, leaf, dtype.name, layout, whole, *blocks, writes)


def _module_of(op: str) -> str:
    return "output" if op == "append" else "checkpoints"


def path_of(op: str, path: Any) -> Path:
    """Return argument 'path' as a :class:`Path`."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"{op}: argument 'path' must be a path, got {type(path).__name__}; the path comes "
            f"first: {_module_of(op)}.{op}(path, tree)"
        )
    return Path(path)


def waiting(op: str, comm: MPI.Intracomm) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: reports of the watchdog name the function in which a rank waits."""
    return waits_in(as_comm(op, comm), f"{_module_of(op)}.{op}")


def _raise(op: str, comm: MPI.Intracomm, error: Exception | None, first: int) -> NoReturn:
    """Raise this rank's error, or one of the type and with the words of the first rank's error."""
    kind, words = comm.bcast(error and (type(error).__name__, str(error)), root=first)
    if error is not None:
        raise error
    raise _KINDS.get(kind, OSError)(f"{op}: rank {first} has failed: {kind}: {words}")


def agree(op: str, comm: MPI.Intracomm, f: Callable[[], T]) -> T:
    """Call a function; if it raises an error on one rank, all ranks raise an error of that type.

    It costs one reduction of 24 bytes.
    """
    return _agree(op, comm, f, lambda _: 0)[0]


def _agree(
    op: str, comm: MPI.Intracomm, f: Callable[[], T], digest: Callable[[T], int]
) -> tuple[T, bool]:
    """Return the result, too, and whether its digest of 64 bits is the same on all ranks."""
    failed: Exception | None = None
    result: Any = None
    mine = 0
    try:
        result = f()
        mine = digest(result)
    except Exception as error:
        failed = error
    rank, size = comm.Get_rank(), comm.Get_size()
    least = np.array([size if failed is None else rank, mine, mine ^ _ONES], np.uint64)
    with waiting(op, comm):
        comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
        first, low, high = map(int, least)
        if first < size:
            _raise(op, comm, failed, first)
    return result, low ^ high == _ONES


def of_first(op: str, comm: MPI.Intracomm, f: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks.

    If it raises an error, all ranks raise an error of that type.
    """
    failed: Exception | None = None
    result: Any = None
    if comm.Get_rank() == 0:
        try:
            result = f()
        except Exception as error:
            failed = error
    with waiting(op, comm):
        has_failed, result = comm.bcast((failed is not None, result), root=0)
        if has_failed:
            _raise(op, comm, failed, 0)
    return result  # type: ignore[no-any-return]


def _words(a: Array) -> str:
    """Describe the properties of an array that must be the same on all ranks."""
    axis = a.layout if isinstance(a.layout, int) else None
    shape = ", ".join("*" if k == axis else str(n) for k, n in enumerate(a.whole))
    joined = "" if axis is None else f", joined along axis {axis}"
    return f"array {a.name or 'x'} of dtype {a.dtype} and global shape [{shape}]{joined}"


def _refuse_others(op: str, arrays: list[Array], comm: MPI.Intracomm) -> NoReturn:
    """Raise an error on all ranks that names the first rank with other arrays than rank 0."""
    mine = [_words(a) for a in arrays]
    with waiting(op, comm):
        expected = comm.bcast(mine, root=0)
        rank = np.array([comm.Get_rank() if mine != expected else comm.Get_size()])
        comm.Allreduce(MPI.IN_PLACE, rank, MPI.MIN)
        other = comm.bcast(mine, root=int(rank[0]))
    differ = next((p for p in zip(expected, other, strict=False) if p[0] != p[1]), None)
    raise ValueError(
        f"{op}: argument 'tree' must have the same arrays on all ranks; rank 0 has "
        f"{len(expected)} and rank {rank[0]} has {len(other)}"
        + (f": rank 0 has {differ[0]}, and rank {rank[0]} has {differ[1]}" if differ else "")
    )


def _joined(op: str, arrays: list[Array], comm: MPI.Intracomm) -> list[Array]:
    """Return the arrays with this rank's places along axes that join the blocks of all ranks."""
    lengths = np.array([a.whole[a.layout] for a in arrays if isinstance(a.layout, int)], np.int64)
    if not lengths.size:
        return arrays
    starts, totals = np.zeros_like(lengths), np.zeros_like(lengths)
    with waiting(op, comm):
        comm.Exscan(lengths, starts, MPI.SUM)
        comm.Allreduce(lengths, totals, MPI.SUM)
    if comm.Get_rank() == 0:
        starts[:] = 0  # MPI leaves them undefined
    places = iter(zip(totals.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))
    return [a.along(*next(places)) if isinstance(a.layout, int) else a for a in arrays]


def _check_cover(op: str, arrays: list[Array], comm: MPI.Intracomm) -> list[int]:
    """Check that the blocks of all ranks cover each array exactly once, by one reduction.

    Returns:
        For each array a number, which is the same for arrays with the same blocks on all ranks.
    """
    rank = comm.Get_rank()
    sums = np.zeros((len(arrays), 3), np.uint64)
    for row, a in zip(sums, arrays, strict=True):
        low, high = (0, 0) if a.block is None else cover.halves(a.block)
        row[:] = low, high, cover.number(rank, a.block)
    with waiting(op, comm):
        comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    for (low, high, _), a in zip(sums.tolist(), arrays, strict=True):
        if not cover.is_exact(low, high, a.whole):
            _refuse_blocks(op, a, comm)
    return [cover.number(s, a.whole) for s, a in zip(sums[:, 2].tolist(), arrays, strict=True)]


def _refuse_blocks(op: str, a: Array, comm: MPI.Intracomm) -> NoReturn:
    """Raise an error on all ranks that says which blocks do not cover an array exactly once."""
    with waiting(op, comm):
        of_ranks = comm.gather((a.block, repr(a.layout)), root=0)
        words = comm.bcast(of_ranks and _cover_words(a, of_ranks), root=0)
    raise ValueError(
        f"{op}: argument 'layouts': the blocks of all ranks must cover array {a.name or 'x'} of "
        f"global shape {a.whole} exactly once; {words}"
    )


def _cover_words(a: Array, of_ranks: list[tuple[Window | None, str]]) -> str:
    def has(rank: int) -> str:
        block, layout = of_ranks[rank]
        where = ", ".join(f"{s.start}:{s.stop}" for s in block or ())
        return f"rank {rank} writes {f'[{where}]' if block else 'nothing'} by layout {layout}"

    blocks = [block for block, _ in of_ranks]
    if (pair := cover.overlapping(blocks)) is not None:
        return f"{has(pair[0])} and {has(pair[1])}, which overlap"
    covered = sum(math.prod(s.stop - s.start for s in block) for block in blocks if block)
    shown = ", ".join(has(rank) for rank in range(min(len(of_ranks), _SHOWN)))
    more = f", and so on for {len(of_ranks)} ranks" if len(of_ranks) > _SHOWN else ""
    return f"they have {covered} of its {math.prod(a.whole)} elements: {shown}{more}"


def to_write(
    op: str, tree: Any, layouts: Any, comm: MPI.Intracomm, check: Callable[[], object]
) -> tuple[list[Array], list[int]]:
    """Return the arrays of a tree, and for each a number that arrays with the same blocks share.

    Args:
        check: a function that raises an error if other arguments are wrong.
    """
    flush(op)  # pending operations of this thread may use the same communicator
    arrays, are_same = _agree(
        op,
        comm,
        lambda: (check(), arrays_of(op, tree, layouts, comm.Get_rank()))[1],
        lambda arrays: cover.number([_words(a) for a in arrays]),
    )
    if not are_same:
        _refuse_others(op, arrays, comm)
    arrays = _joined(op, arrays, comm)
    return arrays, _check_cover(op, arrays, comm)


def tables(
    op: str, arrays: list[Array], blocks: list[int], comm: MPI.Intracomm
) -> tuple[list[int], list[Table]]:
    """Return the table of blocks of each array, and the tables, which only rank 0 has.

    Rank 0 receives the blocks of all ranks, once for each table: some 50 bytes from each rank.

    Args:
        blocks: as `to_write` returns them.
    """
    of_table = dict(zip(reversed(blocks), reversed(arrays), strict=True))  # the first of each
    numbers = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
    firsts = [of_table[block] for block in numbers]
    mine = []
    for a in firsts:
        has_block = a.writes and all(s.stop > s.start for s in a.window)
        mine += [has_block, *(end for s in a.window for end in (s.start, s.stop))]
    rank, size = comm.Get_rank(), comm.Get_size()
    of_ranks = np.empty((size if rank == 0 else 0, len(mine)), np.int64)
    with waiting(op, comm):
        comm.Gather(np.array(mine, np.int64), of_ranks, root=0)
    found, at = [], 0
    for a in firsts if rank == 0 else ():
        columns = of_ranks[:, at : at + 1 + 2 * len(a.whole)]
        at += columns.shape[1]
        (files,) = np.nonzero(columns[:, 0])
        found.append(Table(a.whole, np.column_stack([files, columns[files, 1:]])))
    return [numbers[block] for block in blocks], found


def largest_blocks(op: str, arrays: list[Array], comm: MPI.Intracomm) -> list[list[int]]:
    """Return for each array the shape of the largest block of all ranks."""
    mine = [s.stop - s.start if a.writes else 0 for a in arrays for s in a.window]
    lengths = np.array(mine, np.int64)
    with waiting(op, comm):
        comm.Allreduce(MPI.IN_PLACE, lengths, MPI.MAX)
    found = iter(lengths.tolist())
    return [[next(found) for _ in a.window] for a in arrays]
