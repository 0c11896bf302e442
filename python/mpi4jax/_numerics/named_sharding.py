"""What a mesh and a `PartitionSpec` say about an array: `mpi4jax.sharding.NamedSharding`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from .._functions.pvary import pvary
from .._spmd.mesh import Mesh
from ..ops import allgatherv, bcast, gatherv, scatterv
from .arrays import as_array, names_of
from .base import current
from .layout import Layout, Pieces, Shape


class NamedSharding:
    """Describe how an array is sharded over a mesh of ranks, like `jax.sharding.NamedSharding` for
    devices.

    Blocks have the lengths of :func:`numpy.array_split`. All ranks along the axes of the mesh that
    ``spec`` does not name have the same block.

    Args:
        mesh: :class:`mpi4jax.Mesh`.
        spec: a `jax.sharding.PartitionSpec`: for each axis of the array, the axes of the mesh that
            partition it, or None. Trailing axes may be left out.
        shape: shape of the global array. Functions that take a block need it only if the blocks are
            not all equal.

    Raises:
        TypeError: if ``mesh`` or ``spec`` has the wrong type.
        ValueError: if the mesh has no axis of that name, if an axis occurs twice, or if ``shape``
            has fewer axes than ``spec``.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = mpi4jax.Mesh()
        >>> rows = mpi4jax.sharding.NamedSharding(mesh, P("i"), (mesh.size, 3))
        >>> rows.layout().block(0)
        (slice(0, 1, None), slice(0, 3, None))

    See also: :class:`mpi4jax.Layout`, without a mesh; :class:`mpi4jax.grids.Block`, with ghost
    cells.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec, shape: Sequence[int] | None = None):
        if not isinstance(mesh, Mesh):
            raise TypeError(
                "NamedSharding: argument 'mesh' must be a mpi4jax.Mesh, got "
                f"{type(mesh).__name__}: {mesh!r}"
            )
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "NamedSharding: argument 'spec' must be a jax.sharding.PartitionSpec, got "
                f"{type(spec).__name__}: {spec!r}"
            )
        names = names_of(spec)
        if not set(names) <= set(mesh.axis_names) or len(set(names)) < len(names):
            raise ValueError(
                f"NamedSharding: argument 'spec' must name different axes of {mesh!r}, got {spec}"
            )
        self.mesh, self.spec = mesh, spec
        #: Shape of the global array, or None.
        self.shape = None if shape is None else tuple(int(n) for n in shape)
        if self.shape is not None:
            self.layout()

    @property
    def comm(self) -> MPI.Intracomm:
        """Communicator of all ranks of the mesh."""
        return self.mesh.comm(self.mesh.axis_names)

    @property
    def num_devices(self) -> int:
        """Number of ranks of the mesh."""
        return self.mesh.size

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's block of an array of a global shape."""
        return self.layout(global_shape).block_shape(self.comm.rank)

    def _key(self) -> Any:
        return self.mesh, self.spec, self.shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedSharding) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        shape = "" if self.shape is None else f", {self.shape}"
        return f"mpi4jax.sharding.NamedSharding({self.mesh!r}, {self.spec}{shape})"

    if not TYPE_CHECKING:  # to a type checker, a class with __getattr__ has every name

        def __getattr__(self, name):
            raise AttributeError(
                f"mpi4jax.sharding.NamedSharding has no attribute {name!r}: it is over ranks, not "
                "devices. Make an array without it, and pass it to mpi4jax.sharding.device_put",
                name=name,
                obj=self,
            )

    def layout(self, shape: Sequence[int] | None = None) -> Layout:
        """Return the block of each rank, of an array of this global shape."""
        whole = self.shape if shape is None else tuple(shape)
        if whole is None or len(self.spec) > len(whole):
            raise ValueError(
                f"NamedSharding: expected the global shape of an array with at least "
                f"{len(self.spec)} axes, NamedSharding(mesh, {self.spec}, shape); got {whole}"
            )
        number = {name: k for k, name in enumerate(self.mesh.axis_names)}
        axes = [tuple(number[name] for name in jax.tree.leaves(entry)) for entry in self.spec]
        axes += [()] * (len(whole) - len(axes))
        return Layout.on_grid(whole, self.mesh.axis_sizes, axes)

    def layout_of(self, op: str, name: str, block: Shape | None) -> Layout:
        """Return the layout of the global array that a block of this shape is part of."""
        if self.shape is not None:
            layout = self.layout()
        elif block is None or len(self.spec) > len(block):
            raise ValueError(
                f"{op}: argument '{name}' is {self!r}; expected one with the global shape, "
                "NamedSharding(mesh, spec, shape)"
                if block is None
                else f"{op}: argument '{name}' is {self!r}, which has more axes than an array of "
                f"shape {block}"
            )
        else:
            parts = [self._parts(entry) for entry in self.spec] + [1] * len(block)
            layout = self.layout([n * k for n, k in zip(block, parts, strict=False)])
        if block is not None and layout.block_shape(self.comm.rank) != block:
            raise ValueError(
                f"{op}: the array has shape {block} on rank {self.comm.rank}; expected "
                f"{layout.block_shape(self.comm.rank)}, the shape of its block of {self!r}"
            )
        return layout

    def _parts(self, entry: Any) -> int:
        return math.prod(self.mesh.shape[name] for name in jax.tree.leaves(entry))

    def _axes(self, is_used: bool) -> tuple[str, ...]:
        """Return the axes of the mesh, of more than one rank, that `spec` names, or the others."""
        names, sizes = names_of(self.spec), self.mesh.shape.items()
        return tuple(name for name, n in sizes if n > 1 and (name in names) == is_used)

    def cut(self, x: Any, root: int | None = None) -> jax.Array:
        """Return this rank's block of a global array: :func:`cut` of one array."""
        if root is not None:
            return self._from_root(x, root)
        x = as_array("cut", "tree", x)
        if used := self._axes(True):
            x = pvary(x, comm=self.mesh.comm(used))
        return x[self.layout(x.shape).block(self.comm.rank)]

    def _from_root(self, x: Any, root: int) -> jax.Array:
        layout, at = self.layout(x.shape), self._coordinates(root)
        own = layout.block_shape(self.comm.rank)
        cells = jnp.zeros(math.prod(own), x.dtype)
        pieces = self._pieces(x.shape)
        if self.comm.rank == root:
            cells = pieces.pack(as_array("cut", "tree", x))
        used, others = self._axes(True), self._axes(False)
        if used and all(self.mesh.coordinates[name] == at[name] for name in others):
            comm = self.mesh.comm(used)  # of the root, and ranks with other blocks
            cells = scatterv(cells, pieces.counts(comm.size), self._rank(used, at), comm=comm)
        if others:
            cells = bcast(cells, self._rank(others, at), comm=self.mesh.comm(others))
        return cells.reshape(own)

    def join(self, x: Any, root: int | None = None) -> jax.Array:
        """Return the global array of blocks: :func:`join` of one array."""
        x = as_array("join", "tree", x)
        layout = self.layout_of("join", "shardings", x.shape)
        used = self._axes(True)
        if not used:
            return x
        comm, pieces = self.mesh.comm(used), self._pieces(layout.shape)
        counts = pieces.counts(comm.size)
        if root is None:
            return pieces.unpack(allgatherv(x.ravel(), counts, comm=comm))
        cells = gatherv(x.ravel(), counts, self._rank(used, self._coordinates(root)), comm=comm)
        return pieces.unpack(cells) if self.comm.rank == root else x

    def cut_padded(self, x: Any, root: int | None = None) -> jax.Array:
        """Return this rank's block of a global array, padded to the length of the longest one.

        The last row of the block is repeated. A block without rows is zero.
        """
        x, whole = self.cut(x, root), self.layout(x.shape)
        if 0 in x.shape:
            return jnp.zeros(_longest(whole), x.dtype)
        more = [(0, n - k) for n, k in zip(_longest(whole), x.shape, strict=True)]
        return jnp.pad(x, more, mode="edge") if np.any(more) else x

    def mask(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return which entries of :meth:`cut_padded` are of the array, along the axes of `spec`."""
        layout, axes = self.layout(shape), range(len(self.spec))
        own, longest = layout.block_shape(self.comm.rank), _longest(layout)
        return (
            np.all(
                np.meshgrid(*[np.arange(longest[k]) < own[k] for k in axes], indexing="ij"), axis=0
            )
            if axes
            else np.array(True)
        )

    def join_padded(self, x: Any, root: int | None = None) -> jax.Array:
        """Return the global array of padded blocks."""
        x = as_array("join", "tree", x)
        if self.shape is None or x.shape != (padded := _longest(self.layout())):
            expected = "one with the global shape" if self.shape is None else f"blocks {padded}"
            raise ValueError(
                f"join: argument 'shardings' is {self!r} for a padded block of shape {x.shape}; "
                f"expected {expected}: NamedSharding(mesh, spec, shape)"
            )
        own = self.layout().block_shape(self.comm.rank)
        return self.join(x[tuple(slice(0, n) for n in own)], root)

    def _pieces(self, shape: Shape) -> Pieces:
        """Return the blocks of a global array, of the ranks along the axes that `spec` names."""
        whole = tuple(slice(0, n) for n in shape)
        return Pieces.of((), whole, self.layout(shape).without_copies())

    def _coordinates(self, rank: int) -> dict[str, int]:
        at = np.unravel_index(rank, self.mesh.axis_sizes)
        return dict(zip(self.mesh.axis_names, map(int, at), strict=True))

    def _rank(self, axes: Sequence[str], at: dict[str, int]) -> int:
        """Return the rank in ``mesh.comm(axes)`` of the one at these coordinates."""
        sizes = [self.mesh.shape[name] for name in axes]
        return int(np.ravel_multi_index([at[name] for name in axes], sizes))


def _longest(layout: Layout) -> Shape:
    """Return the shape to which all blocks are padded."""
    return tuple(-(-n // layout.parts(axis)) for axis, n in enumerate(layout.shape))


def is_sharding(x: Any) -> bool:
    """Return whether this is a leaf of a pytree of shardings."""
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def as_sharding(op: str, given: Any, mesh: Mesh | None) -> NamedSharding:
    """Return the sharding of a `PartitionSpec` on a mesh, by default on the current mesh."""
    if isinstance(given, NamedSharding):
        return given
    mesh = current() if mesh is None else mesh
    if not is_sharding(given) or mesh is None:
        raise TypeError(
            f"{op}: expected a NamedSharding, or a PartitionSpec and argument 'mesh' or a "
            f"'with mesh:'; got {type(given).__name__}: {given!r}"
        )
    return NamedSharding(mesh, PartitionSpec() if given is None else given)
