"""Global arrays and their blocks: which rank has what is said by a mesh and a `PartitionSpec`.

One :class:`NamedSharding` is what checkpoints, :func:`mpi4jax.redistribute`, :mod:`mpi4jax.fft`,
:func:`mpi4jax.notoken.scatter_blocks` and :func:`mpi4jax.notoken.gather_blocks` take.
:func:`shard_map` of this module is called with global arrays, like JAX's: programs for devices run
if they import these names instead of JAX's. There, a global array is one that each rank has whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from ._functions.pvary import pvary
from ._numerics.base import as_array, check_whole, current, manual, mentioned, names_of, taken
from ._numerics.layout import Layout, Pieces, Shape
from ._numerics.whole import OfWholeArrays
from ._spmd.mesh import Mesh
from ._spmd.shard_map import shard_map as _of_blocks
from .ops import allgatherv, bcast, gatherv, scatterv

__all__ = [
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "cut",
    "device_put",
    "jit",
    "join",
    "make_array_from_callback",
    "make_mesh",
    "shard_map",
    "with_sharding_constraint",
]

T = TypeVar("T")

make_mesh = Mesh


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
        TypeError: if ``mesh`` or ``spec`` has a wrong type.
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
        names = mentioned(spec)
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

    if not TYPE_CHECKING:  # to a type checker, a class with this method has all names

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
        axes = [tuple(number[name] for name in names_of(entry)) for entry in self.spec]
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
        return math.prod(self.mesh.shape[name] for name in names_of(entry))

    def _axes(self, is_used: bool) -> tuple[str, ...]:
        """Return the axes of the mesh, of more than one rank, that `spec` names, or the others."""
        names, sizes = mentioned(self.spec), self.mesh.shape.items()
        return tuple(name for name, n in sizes if n > 1 and (name in names) == is_used)

    def cut(self, x: Any, root: int | None = None) -> jax.Array:
        """Return this rank's block of a global array: :func:`cut` of one array."""
        if root is not None:
            return self._from_root(x, root)
        x = as_array(x)
        if used := self._axes(True):
            x = pvary(x, comm=self.mesh.comm(used))
        return x[self.layout(x.shape).block(self.comm.rank)]

    def _from_root(self, x: Any, root: int) -> jax.Array:
        layout, at = self.layout(x.shape), self._coordinates(root)
        own = layout.block_shape(self.comm.rank)
        cells = jnp.zeros(math.prod(own), x.dtype)
        pieces = self._pieces(x.shape)
        if self.comm.rank == root:
            cells = pieces.pack(as_array(x))
        used, others = self._axes(True), self._axes(False)
        if used and all(self.mesh.coordinates[name] == at[name] for name in others):
            comm = self.mesh.comm(used)  # of the root, and ranks with other blocks
            cells = scatterv(cells, pieces.counts(comm.size), self._rank(used, at), comm=comm)
        if others:
            cells = bcast(cells, self._rank(others, at), comm=self.mesh.comm(others))
        return cells.reshape(own)

    def join(self, x: Any, root: int | None = None) -> jax.Array:
        """Return the global array of blocks: :func:`join` of one array."""
        x = as_array(x)
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


def _mapped(op: str, tree: Any, shardings: Any, mesh: Mesh | None, root: Any) -> Any:
    def of_part(given: Any, part: Any) -> Any:
        sharding = as_sharding(op, given, mesh)
        return jax.tree.map(lambda leaf: getattr(sharding, op)(leaf, root), part)

    return jax.tree.map(of_part, shardings, tree, is_leaf=is_sharding)


def cut(tree: T, shardings: Any, *, mesh: Mesh | None = None, root: int | None = None) -> T:
    """Take this rank's blocks of global arrays.

    Args:
        tree: a pytree of global arrays, the same on all ranks. With ``root``, only its values on
            ``root`` are used; the other ranks pass anything of the same shapes and dtypes, such as
            ``jax.ShapeDtypeStruct``.
        shardings: a `PartitionSpec` or :class:`NamedSharding`, or a pytree of them that is a prefix
            of ``tree``.
        mesh: :class:`mpi4jax.Mesh` of the `PartitionSpec`; by default the mesh of ``with mesh:``.
        root: rank of the mesh that has the arrays; by default all have them, and nothing is sent.

    Returns:
        A pytree like ``tree``, of this rank's blocks.

    Raises:
        TypeError: if an entry of ``shardings`` is neither a `PartitionSpec` nor a
            :class:`NamedSharding`, or if a `PartitionSpec` is given without a mesh.
        ValueError: if a spec does not fit its array.

    Derivative:
        The transpose sums the cotangents of the blocks over all ranks; with ``root``, it is the
        transpose of :func:`scatterv`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4jax.sharding import PartitionSpec as P, cut, join
        >>> mesh = mpi4jax.Mesh()
        >>> x = jnp.arange(7.0)
        >>> rows = mpi4jax.sharding.NamedSharding(mesh, P("i"), x.shape)
        >>> bool((join(cut(x, rows), rows) == x).all())
        True

    See also: :func:`join`.
    """
    return _mapped("cut", tree, shardings, mesh, root)  # type: ignore[no-any-return]


def join(tree: T, shardings: Any, *, mesh: Mesh | None = None, root: int | None = None) -> T:
    """Assemble global arrays from the blocks of all ranks.

    Args:
        tree: a pytree of this rank's blocks.
        shardings, mesh: as for :func:`cut`. A sharding needs a shape only where blocks are not all
            equal.
        root: rank of the mesh that gets the arrays; by default all get them.

    Returns:
        A pytree of global arrays; on ranks other than ``root``, the blocks.

    Raises:
        TypeError: as for :func:`cut`.
        ValueError: if an array does not have the shape of this rank's block.

    Derivative:
        The derivative of :func:`allgatherv`, whose result is replicated; with ``root``, of
        :func:`gatherv`. The transpose takes this rank's block.

    See also: :func:`cut`, with an example.
    """
    return _mapped("join", tree, shardings, mesh, root)  # type: ignore[no-any-return]


def make_array_from_callback(
    shape: Sequence[int],
    sharding: NamedSharding,
    data_callback: Callable[[tuple[slice, ...]], Any],
    *,
    dtype: Any = None,
) -> jax.Array:
    """Make this rank's block of a global array from a function of its slices.

    Args:
        shape: shape of the global array.
        sharding: :class:`NamedSharding`.
        data_callback: function of a slice of each axis, as `jax.make_array_from_callback` has it,
            which returns that part of the array.
        dtype: dtype of the block; by default the dtype that the function returns.

    Returns:
        jax.Array: this rank's block.

    Raises:
        ValueError: if the function returns an array of another shape.

    Example:
        >>> import numpy as np, mpi4jax.notoken as mpi4jax
        >>> from mpi4jax.sharding import NamedSharding, PartitionSpec as P
        >>> rows = NamedSharding(mpi4jax.Mesh(), P("i"))
        >>> read = lambda index: np.arange(8)[index]
        >>> x = mpi4jax.sharding.make_array_from_callback((8,), rows, read)
        >>> x.shape == (8 // rows.comm.size,)
        True
    """
    layout, rank = sharding.layout(shape), sharding.comm.rank
    block = jnp.asarray(data_callback(layout.block(rank)), dtype)
    if block.shape != layout.block_shape(rank):
        raise ValueError(
            f"make_array_from_callback: argument 'data_callback' returned an array of shape "
            f"{block.shape}; expected {layout.block_shape(rank)}, for {layout.block(rank)}"
        )
    return block


def device_put(x: T, device: Any = None) -> T:
    """Return ``x`` unchanged.

    In JAX, ``device_put`` distributes global arrays. Here every rank keeps them whole, and
    :func:`shard_map` of this module takes each rank's blocks when it is called.

    Args:
        x: a pytree of arrays, the same on all ranks.
        device: a :class:`NamedSharding`, or in a ``with mesh:`` a `PartitionSpec`, which must fit
            the arrays; or a device of this rank; or a pytree of them.

    Raises:
        TypeError: if ``device`` is a `PartitionSpec`, and there is no mesh.
        ValueError: if a sharding does not fit its array.
    """

    def put(given: Any, part: Any) -> Any:
        if given is not None and not is_sharding(given):
            return jax.device_put(part, given)
        part = jax.tree.map(as_array, part)
        if given is not None:
            sharding = as_sharding("device_put", given, None)
            jax.tree.map(lambda leaf: sharding.layout(leaf.shape), part)
        return part

    return jax.tree.map(put, device, x, is_leaf=is_sharding)  # type: ignore[no-any-return]


def with_sharding_constraint(x: T, shardings: Any) -> T:
    """Return ``x`` unchanged, like :func:`device_put`, also in a jitted function."""
    return device_put(x, shardings)


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    **how: Any,
) -> Any:
    """Compile a function of global arrays with `jax.jit`.

    Args:
        fun, how: as for `jax.jit`; without a function, a decorator is returned.
        in_shardings, out_shardings: only :func:`shard_map` distributes work over ranks, and each
            rank has the global arrays whole. If a sharding is given, the ranks of its mesh compare
            the arguments. Arguments that differ, such as blocks, give a warning when the function
            is first called, and an error with `MPI4JAX_CHECK=1`.
    """
    if fun is None:
        return functools.partial(jit, in_shardings=in_shardings, out_shardings=out_shardings, **how)
    shardings = jax.tree.leaves((in_shardings, out_shardings), is_leaf=is_sharding)
    meshes = [given.mesh for given in shardings if isinstance(given, NamedSharding)]
    function = jax.jit(fun, **how)
    if not shardings:
        return function
    return OfWholeArrays(function, lambda: meshes[0] if meshes else current())


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *positional: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    **how: Any,
) -> Any:
    """Run a function written for `jax.shard_map` on ranks, and call it with global arrays.

    Each rank passes its blocks of the arguments to :func:`mpi4jax.shard_map`, and joins the blocks
    of the results: each rank has all of the arguments and results. For arrays that do not fit a
    rank's memory, call :func:`mpi4jax.shard_map` with blocks.

    Args:
        f, mesh, in_specs, out_specs, how: as for :func:`mpi4jax.shard_map`.

    Returns:
        Callable: takes arrays that are the same on all ranks, and returns such arrays.

    Raises:
        ValueError: if a mesh axis does not partition an axis of an array into equal blocks; and as
            for :func:`mpi4jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mpi4jax.sharding import PartitionSpec as P, make_mesh, shard_map
        >>> mesh = make_mesh((-1,), ("i",))
        >>> f = shard_map(lambda x: x - jax.lax.pmean(x.mean(), "i"), mesh=mesh, in_specs=P("i"),
        ...               out_specs=P("i"))
        >>> f(jnp.arange(2.0 * mesh.size)).shape == (2 * mesh.size,)
        True
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **how
        )
    mesh = current() if mesh is None else mesh
    how |= {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    on_blocks: Any = _of_blocks(f, *positional, **how)
    name = getattr(f, "__name__", "shard_map")
    specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs

    def block(spec: Any, part: Any) -> Any:
        sharding = as_sharding("shard_map", spec, mesh)

        def of_leaf(x: Any) -> Any:
            layout = sharding.layout(jnp.shape(x))
            if any(n % layout.parts(axis) for axis, n in enumerate(layout.shape)):
                raise ValueError(
                    f"shard_map: an argument has shape {layout.shape}; expected axes that {spec} "
                    f"cuts into equal blocks on {mesh!r}"
                )
            return sharding.cut(x)

        return jax.tree.map(of_leaf, part)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        if manual.is_inside():  # of another shard_map, where arguments are what its function has
            return on_blocks(*args)
        check_whole(mesh, name, args)
        blocks = jax.tree.map(block, specs, args, is_leaf=is_sharding)
        with taken():
            results = on_blocks(*blocks)
        return join(results, out_specs, mesh=mesh)

    return mapped
