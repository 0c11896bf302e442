"""Redistribution of a global array from one layout to another, and of rows to their owners."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mpi4py import MPI

from ._numerics.arrays import T, as_array
from ._numerics.base import rows_to_owners
from ._numerics.exchange import Exchange, comm_of as comm_of
from ._numerics.files import is_layout
from ._numerics.layout import Layout, as_layout, batch_of

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


def redistribute(x: T, source: Any, target: Any, *, comm: MPI.Intracomm | None = None) -> T:
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
        comm: communicator; by default the one of ``source`` or ``target``, or a clone of
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
        leaf = as_array(leaf)
        if hasattr(source, "inner_of"):
            leaf = source.inner_of(op, leaf)
        batch = batch_of(op, "x", leaf, old, rank)
        if not stays:
            leaf = Exchange(batch, old, new, comm).run(leaf)
        return target.with_ghosts(leaf) if hasattr(target, "with_ghosts") else leaf

    return jax.tree.map(move, x)


def migrate(
    x: T,
    owners: Any,
    capacity: int,
    *,
    count: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[T, jax.Array]:
    """Send each row to its owner, such as each particle to the rank of its cell. Collective.

    It sorts the rows by their owners for :func:`ragged_alltoall`, which sends them. Rows that stay
    on their rank are sorted too.

    Args:
        x: array of shape ``(rows, *S)``; or a pytree of such arrays.
        owners: integer array of shape ``(rows,)``: the rank that gets each row, such as the result
            of :meth:`Layout.owner`. It may be traced.
        capacity: maximum number of rows that this rank can receive: a static integer. It may differ
            between ranks.
        count: number of valid rows; only the first ``count`` rows are sent. It may be traced. By
            default all rows are sent.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        tuple: a pair: array of shape ``(capacity, *S)``, or a pytree of such arrays, and the number
        of rows that have arrived, an int32 array of shape ``()``. Rows are sorted by source rank;
        rows from one rank keep their order. The remaining rows are zero.

    Raises:
        TypeError: if ``owners`` does not hold integers, or ``count`` is not an integer.
        ValueError: if ``owners`` does not have one entry per row of ``x``, or ``count`` is negative
            or more than the rows of ``x``.
        jax.errors.JaxRuntimeError: when it runs, on all ranks: if a rank would receive more than
            its ``capacity`` rows, an owner is not a valid rank, or a traced ``count`` is out of
            range. No row is dropped. A compiled function may raise a ValueError instead.

    Derivative:
        With respect to ``x`` only: the transpose sends the rows back.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> cells = mpi4jax.Layout((2 * comm.size,), {0: comm.size})
        >>> place = jnp.arange(2.0 * comm.size)  # each rank has a particle in each cell
        >>> owners = cells.owner(place.astype(int))
        >>> found, count = mpi4jax.migrate(place, owners, 3 * comm.size)
        >>> int(count) == 2 * comm.size, bool((found[:2] == 2 * comm.rank + jnp.arange(2)).all())
        (True, True)

    See also: :func:`redistribute` for arrays, :class:`mpi4jax.ghosts.Plan` for rows that several
    ranks need.
    """
    op = "migrate"
    comm = comm_of(op, comm)
    size = comm.Get_size()
    owners = as_array(owners)
    if not jnp.issubdtype(owners.dtype, np.integer):
        raise TypeError(f"{op}: argument 'owners' must be an array of integers, got {owners.dtype}")
    x = jax.tree.map(as_array, x)
    for leaf in jax.tree.leaves(x):
        if owners.ndim != 1 or leaf.shape[:1] != owners.shape:
            raise ValueError(
                f"{op}: argument 'owners' must have one entry per row of 'x', got shapes "
                f"{owners.shape} and {leaf.shape}"
            )
    rows = owners.size if count is None else count
    if jnp.shape(rows) or not jnp.issubdtype(jnp.result_type(rows), np.integer):
        raise TypeError(
            f"{op}: argument 'count' must be an integer, or a traced scalar of an integer type; "
            f"got {jnp.result_type(rows)} of shape {jnp.shape(rows)}"
        )
    # A traced count is checked together with the counts, because reading it here would wait for it.
    if not isinstance(rows, jax.Array) and not 0 <= rows <= owners.size:
        raise ValueError(
            f"{op}: argument 'count' must be from 0 to {owners.size}, the number of rows of 'x', "
            f"got {rows}"
        )
    owners, rows = _small(owners), _small(jnp.asarray(rows))
    is_sent = jnp.arange(owners.size) < rows
    is_rank = (owners >= 0) & (owners < size)
    keys = jnp.where(is_sent & is_rank, owners, size)
    # A negative count encodes what is wrong: `Wrong` in `src/ops/ragged.rs` lists the codes.
    codes = 8 * jnp.abs(owners) + jnp.where(owners < 0, 3, 2)
    wrong = jnp.max(jnp.where(is_sent & ~is_rank, codes, 0), initial=0)
    code = 8 * jnp.abs(rows) + jnp.where(rows < 0, 5, 4)
    wrong = jnp.where((rows < 0) | (rows > owners.size), code, wrong)
    counts = jnp.where(wrong > 0, -wrong, jnp.bincount(keys, length=size))
    order = jnp.argsort(keys)  # stable
    ordered = jax.tree.map(lambda leaf: leaf[order], x)
    found, received = rows_to_owners(ordered, counts, capacity, comm)
    return found, received.sum(dtype=np.int32)


def _small(numbers: jax.Array) -> jax.Array:
    """Return integers as int32, clipped to 28 bits and a sign."""
    limits, limit = np.iinfo(numbers.dtype), 2**28 - 1
    return numbers.clip(max(-limit, limits.min), min(limit, limits.max)).astype(np.int32)
