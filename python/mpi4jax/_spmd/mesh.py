"""Axes of a mesh, over the ranks of a communicator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .._jax.named_axes import abstract_mesh
from .._op.comm import as_comm


class Mesh:
    """Names for the axes of a grid of ranks, for :func:`mpi4jax.shard_map`.

    As `jax.make_mesh`, with ranks in the place of devices: ranks are numbered row by row. All ranks
    of ``comm`` make it together: it makes a communicator for each combination of its axes.

    Args:
        axis_shapes: the number of ranks along each axis; their product is the size of ``comm``. By
            default that of a Cartesian communicator, or one axis of all ranks.
        axis_names: a name for each axis, by default ``"i"``.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Raises:
        TypeError: a wrong type of an argument.
        ValueError: shapes and names differ in number, a name is there twice, or the shapes do not
            multiply to the size of ``comm``.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mesh = mpi4jax.Mesh()
        >>> mesh.shape["i"] == mpi4jax.default_comm().size
        True
    """

    def __init__(
        self,
        axis_shapes: Sequence[int] | None = None,
        axis_names: str | Sequence[str] = ("i",),
        *,
        comm: MPI.Intracomm | None = None,
    ):
        known = as_comm("Mesh", comm)
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if not all(isinstance(name, str) for name in names) or not names:
            raise TypeError(f"Mesh: argument 'axis_names' must be names, got {axis_names!r}")
        if axis_shapes is None:
            comm = known.mpi
            axis_shapes = comm.dims if isinstance(comm, MPI.Cartcomm) else (known.size,)
        shapes = tuple(int(n) for n in axis_shapes)
        if len(shapes) != len(names) or len(set(names)) != len(names):
            raise ValueError(
                f"Mesh: argument 'axis_names' must have a different name for each of the "
                f"{len(shapes)} axes of shape {shapes}, got {names}"
            )
        if math.prod(shapes) != known.size:
            raise ValueError(
                f"Mesh: argument 'axis_shapes' must multiply to the size of the communicator, "
                f"{known.size}; got {shapes}"
            )
        #: Names of the axes.
        self.axis_names = names
        #: Number of ranks along each axis.
        self.axis_sizes = shapes
        #: This rank's position along each axis.
        self.coordinates = dict(
            zip(names, (int(i) for i in np.unravel_index(known.rank, shapes)), strict=True)
        )
        self._abstract = abstract_mesh(shapes, names)
        self._comms: dict[tuple[str, ...], MPI.Comm] = {names: known.mpi}
        for k in range(1, len(names)):
            for axes in itertools.combinations(names, k):
                others = [name for name in names if name not in axes]
                color = self.index_along(others)
                self._comms[axes] = known.mpi.Split(color, known.rank)

    @property
    def shape(self) -> dict[str, int]:
        """Number of ranks along each axis, by its name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axis_sizes)

    def comm(self, axes: str | Sequence[str]) -> Any:
        """The communicator of the ranks that differ from this one along these axes only.

        Ranks are numbered row by row, in the order in which the mesh has the axes.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return self._comms[tuple(name for name in self.axis_names if name in names)]

    def axes_of(self, comm: Any) -> frozenset[str] | None:
        """The axes, of more than one rank, that this one and the others of a communicator differ
        along; None if these are not all ranks along some axes."""
        if comm.size == 1:
            return frozenset()
        for axes, mine in self._comms.items():
            if MPI.Comm.Compare(comm.mpi, mine) != MPI.UNEQUAL:
                return frozenset(name for name in axes if self.shape[name] > 1)
        return None

    def index_along(self, axes: Sequence[str]) -> int:
        """This rank's number among those of :meth:`comm`, counted in the order of ``axes``."""
        index = 0
        for name in axes:
            index = index * self.shape[name] + self.coordinates[name]
        return index

    def ranks_in_order(self, axes: Sequence[str]) -> list[int]:
        """The rank in :meth:`comm` of each number along ``axes``."""
        sizes = [self.shape[name] for name in axes]
        of_comm = sorted(range(len(axes)), key=lambda i: self.axis_names.index(axes[i]))
        ranks = np.arange(math.prod(sizes)).reshape([sizes[i] for i in of_comm])
        back = [of_comm.index(i) for i in range(len(axes))]
        return [int(r) for r in ranks.transpose(back).ravel()]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name!r}: {n}" for name, n in self.shape.items())
        return f"Mesh({axes})"
