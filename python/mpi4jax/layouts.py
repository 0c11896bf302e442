"""Redistribution of a global array from one layout to another, and of rows to their owners."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec
from mpi4py import MPI

from ._functions.migrate import migrate as migrate
from ._numerics.arrays import T, as_array
from ._numerics.exchange import Exchange, comm_of as comm_of
from ._numerics.files import is_layout
from ._numerics.layout import AnyLayout, Layout, as_layout, batch_of

__all__ = ["Layout", "migrate", "redistribute"]


def layouts_and_comm(
    op: str, layouts: Any, mesh: Any, comm: MPI.Intracomm | None
) -> tuple[Any, MPI.Intracomm]:
    """Return layouts with shardings in place of specs, and the communicator of arguments."""

    def known(layout: Any) -> Any:
        if not isinstance(layout, PartitionSpec):
            return layout
        from ._numerics.named_sharding import as_sharding  # loaded only by programs that use it

        return as_sharding(op, layout, mesh)

    layouts = jax.tree.map(known, layouts, is_leaf=is_layout)
    given = jax.tree.leaves(layouts, is_leaf=is_layout)
    comm = mesh.comm(mesh.axis_names) if comm is None and mesh is not None else comm
    return layouts, comm_of(op, comm, *given)


def redistribute(
    x: T, source: AnyLayout, target: AnyLayout, *, comm: MPI.Intracomm | None = None
) -> T:
    """Convert a global array from one layout to another. Collective.

    Two ranks exchange a message only if the old block of one and the new block of the other have
    elements in common. For pencils, these are ranks of one row or column of the grid of ranks. If
    several ranks have the same block, as with a `PartitionSpec` that does not name all axes of the
    mesh, one of them sends it.

    Args:
        x: this rank's block under ``source``, of any dtype. It may have leading axes in addition to
            the axes of the layout, with the same lengths on all ranks. Or a pytree of such arrays.
            If ``source`` is a ``grids.Block``, the shape of ``x`` says whether it has ghost cells.
        source: the layout of ``x``: a :class:`Layout`, a :class:`mpi4jax.grids.Block`, or a
            :class:`mpi4jax.sharding.NamedSharding` with the global shape.
        target: the new layout, of the same global shape. Ghost cells of a ``grids.Block`` are
            zero; :func:`halo_exchange` fills them.
        comm: communicator; by default the one of ``source`` or ``target``, or a duplicate of
            ``COMM_WORLD``.

    Returns:
        This rank's block under ``target``, of the dtype of ``x``, with the same leading axes.

    Raises:
        TypeError: if ``source`` or ``target`` is not one of these.
        ValueError: if they have different global shapes or communicators, or more blocks than there
            are ranks, or ``x`` is not a block of ``source``.

    Derivative:
        The transpose is ``redistribute(c, target, source)``; cotangents of several copies of a
        block are added up.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> rows, columns = (mpi4jax.Layout((7, 5), {axis: comm.size}) for axis in (0, 1))
        >>> whole = jnp.arange(35).reshape(7, 5)
        >>> y = mpi4jax.redistribute(whole[rows.block(comm.rank)], rows, columns)
        >>> bool((y == whole[columns.block(comm.rank)]).all())
        True

    See also: :class:`Layout`, :func:`scatter_blocks` and :func:`gather_blocks` for ghost cells.
    """
    op = "redistribute"
    comm = comm_of(op, comm, source, target)
    rank, size = comm.Get_rank(), comm.Get_size()
    old, new = (as_layout(op, n, g, size) for n, g in (("source", source), ("target", target)))
    if old.shape != new.shape:
        raise ValueError(
            f"redistribute: arguments 'source' and 'target' have shapes {old.shape} and "
            f"{new.shape}; expected two layouts of one array"
        )
    stays = old == new or all(old.block(r) == new.block(r) for r in range(size))

    def move(leaf: Any) -> jax.Array:
        leaf = as_array(op, "x", leaf)
        if hasattr(source, "inner_of"):
            leaf = source.inner_of(op, leaf)
        batch = batch_of(op, "x", leaf, old, rank)
        if not stays:
            leaf = Exchange(batch, old, new, comm).run(leaf)
        return target.with_ghosts(leaf) if hasattr(target, "with_ghosts") else leaf

    return jax.tree.map(move, x)
