"""Axes of a mesh, over the ranks of a communicator."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType
from mpi4py import MPI

from .._jax import compat
from .._jax.named_axes import abstract_mesh
from .._job.flush import flush
from .._op.comm import Comm, Uncopied, as_comm, waits_in

_LONGEST_NAME = 60  # Open MPI cuts names after 63 bytes
# .meshes: the meshes of the `with` statements, the innermost last, each with its context of jit.
_current = threading.local()
_in_jit = compat.context_of_jit()


class Mesh(Uncopied):
    """Name the axes of a grid of ranks, for :func:`mpi4jax.shard_map`.

    Like `jax.make_mesh`, but with ranks instead of devices. Ranks are numbered in row-major order.
    The meshes of one communicator with the same shape and names are one object. All ranks of
    ``comm`` make the first such mesh together, because that creates a communicator for each axis.
    ``with mesh:`` and `jax.set_mesh` make it the default of :func:`mpi4jax.shard_map`.

    A mesh may be smaller than ``comm``, as `jax.make_mesh` may leave devices out: it has the first
    ranks. On the others, ``coordinates`` is empty, and calls of :func:`mpi4jax.shard_map` over it
    are skipped and return None in place of each of ``out_specs``.

    Args:
        axis_shapes: number of ranks along each axis; their product is at most the size of ``comm``.
            One of them may be -1, which stands for the remaining ranks. By default the dimensions
            of a Cartesian communicator, or one axis of all ranks.
        axis_names: a name for each axis, by default ``"i"``.
        axis_types: as in `jax.make_mesh`; all are ``AxisType.Auto``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Raises:
        TypeError: if an argument has a wrong type, such as an array of devices.
        ValueError: if shapes and names differ in number, a name occurs twice, the product of the
            shapes is more than the size of ``comm``, or -1 stands for no whole number of ranks.
        NotImplementedError: if an axis type is not ``AxisType.Auto``.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mesh = mpi4jax.Mesh()
        >>> mesh.shape["i"] == mpi4jax.default_comm().size, mesh is mpi4jax.Mesh((-1,), ("i",))
        (True, True)
    """

    #: Names of the axes.
    axis_names: tuple[str, ...]
    #: Number of ranks along each axis.
    axis_sizes: tuple[int, ...]
    #: This rank's position along each axis; empty on a rank that the mesh leaves out.
    coordinates: dict[str, int]

    def __new__(
        cls,
        axis_shapes: Sequence[int] | None = None,
        axis_names: str | Sequence[str] = ("i",),
        axis_types: Sequence[AxisType] | None = None,
        *,
        comm: MPI.Intracomm | None = None,
    ) -> Mesh:
        known = as_comm("Mesh", comm)
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if not all(isinstance(name, str) for name in names) or not names:
            raise TypeError(f"Mesh: argument 'axis_names' must be names, got {axis_names!r}")
        if axis_types is not None and any(kind != AxisType.Auto for kind in axis_types):
            raise NotImplementedError(
                f"Mesh: argument 'axis_types' must be AxisType.Auto for every axis: only "
                f"mpi4jax.shard_map shards arrays over ranks; got {axis_types!r}"
            )
        shapes = _shapes(axis_shapes, known, names)
        key = ("Mesh", shapes, names)
        if key not in known.cache:
            members = _first(known, math.prod(shapes))
            known.cache[key] = object.__new__(cls)._make(members, shapes, names)
        return known.cache[key]  # type: ignore[no-any-return]

    def _make(self, known: Comm | None, shapes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        self.axis_names, self.axis_sizes, self.coordinates = names, shapes, {}
        self._abstract = abstract_mesh(shapes, names)
        if known is None:
            return self
        at = np.unravel_index(known.rank, shapes)
        self.coordinates = dict(zip(names, map(int, at), strict=True))
        self._known = known
        everything = tuple(name for name in names if self.shape[name] > 1)
        self._comms: dict[tuple[str, ...], Any] = {everything: known.mpi}
        known.of_axes.append(self._comms)
        for name in names:
            self.comm(name)
        if "hashes" not in known.cache:
            with _collective(known, f"the creation of {self!r}"):
                known.cache["hashes"] = known.mpi.Dup()
            known.of_axes.append({"hashes": known.cache["hashes"]})
        return self

    @property
    def _hashes(self) -> MPI.Intracomm:
        """A duplicate of the communicator, for messages of the checks of this package."""
        return self._known.cache["hashes"]

    def _ranks_of(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from this one along these axes only."""
        place = tuple(
            slice(None) if name in axes else self.coordinates[name] for name in self.axis_names
        )
        return tuple(map(int, np.arange(self.size).reshape(self.axis_sizes)[place].ravel()))

    @property
    def shape(self) -> dict[str, int]:
        """Number of ranks along each axis, by its name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axis_sizes)

    @property
    def empty(self) -> bool:
        """Whether the mesh has no ranks: always false."""
        return False

    def comm(self, axes: str | Sequence[str]) -> MPI.Intracomm:
        """Return the communicator of the ranks that differ from this one along these axes only.

        Ranks are numbered row by row, in the order in which the mesh has the axes. The
        communicators of each axis and of all axes are made with the mesh. A communicator of
        several axes, but not all, is made by the first call, which is collective over the mesh. A
        collective of JAX over these axes is such a call, when it is traced. All are freed with the
        communicator of the mesh.

        Args:
            axes: names of axes, in any order.

        Raises:
            ValueError: if the mesh has no such axis, ``axes`` is empty, or the mesh leaves this
                rank out.
        """
        given = (axes,) if isinstance(axes, str) else tuple(axes)
        if not given or not set(given) <= set(self.axis_names):
            raise ValueError(
                f"Mesh.comm: argument 'axes' must be axes of the mesh, {self.axis_names}; got "
                f"{axes!r}"
            )
        if not self.coordinates:
            raise ValueError(
                f"Mesh.comm: this rank is not in {self!r}, which has the first {self.size} ranks "
                "of its communicator; use the mesh on these only: if mesh.coordinates: ..."
            )
        # Axes of one rank change nothing.
        names = tuple(name for name in self.axis_names if name in given and self.shape[name] > 1)
        if names not in self._comms:
            others = [name for name in self.axis_names if name not in names]
            name = f"{self!r}.comm({', '.join(names)})"
            with _collective(self._known, f"the creation of {name}"):
                comm = self._known.mpi.Split(self.index_along(others), self._known.rank)
            comm.Set_name(name[:_LONGEST_NAME])  # reports say over which axes a collective is
            self._comms[names] = comm
        return self._comms[names]  # type: ignore[no-any-return]

    def axes_of(self, comm: Comm) -> frozenset[str] | None:
        """Return the axes (of size greater than 1) that a communicator spans, or None if its ranks
        are not a subgrid of the mesh."""
        key = ("axes", self.axis_sizes, self.axis_names, self._known.handle)
        if key not in comm.cache:
            comm.cache[key] = self._axes_of(comm.mpi.Get_group())
        return comm.cache[key]  # type: ignore[no-any-return]

    def _axes_of(self, group: MPI.Group) -> frozenset[str] | None:
        mine = self._known.mpi.Get_group()
        ranks = np.array(group.Translate_ranks(list(range(group.Get_size())), mine))
        mine.Free()
        size = group.Get_size()
        group.Free()
        if (ranks < 0).any():
            return None
        places = np.unravel_index(ranks, self.axis_sizes)
        axes = [
            name for name, at in zip(self.axis_names, places, strict=True) if (at != at[0]).any()
        ]
        return frozenset(axes) if math.prod(self.shape[name] for name in axes) == size else None

    def index_along(self, axes: Sequence[str]) -> int:
        """Return this rank's number among the ranks of :meth:`comm`, counted in the order of
        ``axes``."""
        index = 0
        for name in axes:
            index = index * self.shape[name] + self.coordinates[name]
        return index

    def ranks_in_order(self, axes: Sequence[str]) -> list[int]:
        """Return the rank in :meth:`comm` of each number along ``axes``."""
        sizes = [self.shape[name] for name in axes]
        of_comm = sorted(range(len(axes)), key=lambda i: self.axis_names.index(axes[i]))
        ranks = np.arange(math.prod(sizes)).reshape([sizes[i] for i in of_comm])
        back = [of_comm.index(i) for i in range(len(axes))]
        return [int(r) for r in ranks.transpose(back).ravel()]

    def __enter__(self) -> Mesh:
        _set(self)
        return self

    def __exit__(self, *_: object) -> None:
        *_current.meshes, (_, context) = _current.meshes
        context.__exit__(None, None, None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: its communicators belong to this process. Pickle its "
            "'axis_sizes' and 'axis_names', from which mpi4jax.Mesh makes it again"
        )

    if not TYPE_CHECKING:  # to a type checker, a class with `__getattr__` has all names

        @property
        def devices(self):
            """Numbers of the ranks, in the shape of the mesh, where a mesh of JAX has its devices.

            Programs read its shape and size. To a type checker, there are no devices.
            """
            return np.arange(self.size).reshape(self.axis_sizes)

        def __getattr__(self, name):
            raise AttributeError(
                f"mpi4jax.Mesh has no attribute {name!r}: its axes are made of ranks, not "
                "devices. For the blocks of ranks, use mpi4jax.sharding.NamedSharding and "
                "mpi4jax.shard_map in place of JAX's functions",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name!r}: {n}" for name, n in self.shape.items())
        return f"Mesh({axes})"


@contextlib.contextmanager
def _collective(known: Comm, words: str) -> Iterator[None]:
    """Context manager: MPI makes a communicator, after the operations on this one."""
    with jax.ensure_compile_time_eval():  # this may be within a function being traced
        flush()
    with waits_in(known, words):
        yield


def _first(known: Comm, size: int) -> Comm | None:
    """Return the communicator of the first ranks of one, or None on the others."""
    if size == known.size:
        return known
    key = ("first", size)
    if key not in known.cache:
        with _collective(known, f"the creation of a mesh of its first {size} ranks"):
            comm: Any = known.mpi.Split(0 if known.rank < size else MPI.UNDEFINED, known.rank)
        known.cache[key] = None
        if comm != MPI.COMM_NULL:
            known.of_axes.append({key: comm})
            known.cache[key] = as_comm("Mesh", comm)
    return known.cache[key]  # type: ignore[no-any-return]


def _set(mesh: Mesh) -> None:
    context = _in_jit(mesh) if _in_jit else contextlib.nullcontext()
    context.__enter__()
    _current.meshes = [*getattr(_current, "meshes", ()), (mesh, context)]


compat.on_set_mesh(Mesh, _set, lambda mesh: mesh.__exit__())


def current() -> Mesh | None:
    """Return the mesh of the innermost ``with`` statement of this thread, or of `jax.set_mesh`."""
    meshes = getattr(_current, "meshes", None)
    return meshes[-1][0] if meshes else None


def mesh_of_ranks(given: Any) -> Mesh:
    """Return the mesh that is given, or else the current one."""
    mesh = current() if given is None else given
    if isinstance(mesh, Mesh):
        return mesh
    raise TypeError(
        "shard_map: argument 'mesh' must be a mpi4jax.Mesh, whose axes are made of ranks, got "
        f"{type(mesh).__name__}; pass mesh=..., or call it in a 'with mesh:'"
    )


def mesh_at_definition(given: Any) -> Mesh | None:
    """Return the mesh of a function that is defined now, or None for the mesh of its calls.

    A function without a mesh of its own takes the mesh of its calls, as in JAX. In a JAX without
    contexts of `jit`, it takes the current one: `jit` would use for one mesh what it has traced for
    another.
    """
    return None if given is None and _in_jit else mesh_of_ranks(given)


def _shapes(axis_shapes: Any, known: Comm, names: tuple[str, ...]) -> tuple[int, ...]:
    if axis_shapes is None:
        comm = known.mpi
        axis_shapes = comm.dims if isinstance(comm, MPI.Cartcomm) else (known.size,)
    is_names = isinstance(axis_shapes, str) or (
        np.ndim(axis_shapes) == 1 and any(isinstance(n, str) for n in axis_shapes)
    )
    if is_names or np.ndim(axis_shapes) == 0:
        meant = f"axis_names={axis_shapes!r}" if is_names else f"({axis_shapes},), {names}"
        raise TypeError(
            "Mesh: argument 'axis_shapes' must be the number of ranks along each axis, as for "
            f"jax.make_mesh, got {type(axis_shapes).__name__}: {axis_shapes!r}; "
            f"use mpi4jax.Mesh({meant})"
        )
    # An array that contains 0 has numbers of devices, and no sizes.
    is_array = isinstance(axis_shapes, np.ndarray) and 0 in axis_shapes
    if is_array or np.ndim(axis_shapes) != 1 or np.asarray(axis_shapes).dtype == object:
        raise TypeError(
            "Mesh: argument 'axis_shapes' must be the number of ranks along each axis, as for "
            "jax.make_mesh, got an array such as jax.sharding.Mesh takes, of devices; use "
            f"mpi4jax.Mesh({np.shape(axis_shapes)}, {names})"
        )
    given = shapes = tuple(int(n) for n in axis_shapes)
    if len(shapes) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"Mesh: argument 'axis_names' must have a different name for each of the "
            f"{len(shapes)} axes of shape {shapes}, got {names}"
        )
    if shapes.count(-1) == 1 and (others := -math.prod(shapes)) > 0:
        shapes = tuple(known.size // others if n == -1 else n for n in shapes)
    size = math.prod(shapes)
    if min(shapes) < 1 or size > known.size or (-1 in given and size < known.size):
        most = "the size" if -1 in given else "at most the size"
        raise ValueError(
            f"Mesh: argument 'axis_shapes' must multiply to {most} of the communicator, "
            f"{known.size}; got {tuple(axis_shapes)}"
        )
    return shapes
