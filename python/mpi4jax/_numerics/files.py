"""The arrays of a pytree that ranks write to files together, or read, and their blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from .._job.flush import flush
from . import store
from .base import as_comm, waits_in
from .layout import Layout, as_layout

Window = tuple[slice, ...]


class Array(NamedTuple):
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
    if dtype.kind in "OSU":
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
            f"{op}: array {name or 'x'} has shape {shape}; expected {padded}, or that behind other "
            f"axes, as {layout!r} says of rank {rank}"
        )
    first = window[:before]
    whole = (*shape[:before], *whole)
    blocks = (*first, *block), (*first, *inner)
    return Array(name, leaf, dtype.name, layout, whole, *blocks, writes)


def on_all(op: str, comm: MPI.Intracomm, f: Callable[[], Any]) -> list[Any]:
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


def _joined(op: str, arrays: list[Array], comm: MPI.Intracomm) -> list[Array]:
    """Return the arrays with the lengths of all ranks, which must have the same arrays."""

    def seen(a: Array) -> tuple[Any, ...]:
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


def _largest_block(op: str, a: Array, of_ranks: Sequence[list[int] | None]) -> list[int]:
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


def to_write(
    op: str, tree: Any, layouts: Any, comm: MPI.Intracomm
) -> list[tuple[Array, list[int]]]:
    """Return the arrays of a tree, each with the shape of the largest block of all ranks."""
    flush()  # operations that this thread has started may be on the same communicator
    arrays: list[Array] = []
    on_all(op, comm, store.check_library)
    on_all(op, comm, lambda: arrays.extend(arrays_of(op, tree, layouts, comm.Get_rank())))
    arrays = _joined(op, arrays, comm)
    blocks = zip(*comm.allgather([a.written for a in arrays]), strict=True)
    return [(a, _largest_block(op, a, b)) for a, b in zip(arrays, blocks, strict=True)]
