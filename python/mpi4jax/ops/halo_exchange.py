"""halo_exchange: ghost cells of blocks of an array, from the neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .. import _native
from .._call.definition import define
from .._compile.lowering import Avals, Lowering, Operands, carrier
from .._grid import border as _border, cart as _cart, faces
from .._op.spec import Call, Params, T


def _describe(p: Params, avals: Sequence[Any]) -> np.ndarray:
    """What `Attributes::halo` in `src/xla/frame.rs` reads."""
    blocks = [
        [np.dtype(x.dtype).itemsize, x.ndim, *x.shape, *(x.ndim - a for a in axes)]
        for x, axes in zip(avals, p["axes"], strict=True)
    ]
    lists = (p["widths"], [[rank] for rank in p["neighbours"]], blocks)
    return np.array([n for rows in lists for n in (len(rows), *itertools.chain(*rows))], np.int64)


def _lower(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    packed, adjoint = _native.takes_packed(low.on_gpu), bool(low.p["adjoint"])
    wire = [carrier(aval, adjoint and not packed) for _, aval in xs]
    attrs = {"reverse": int(adjoint), "halo": _describe(low.p, wire)}
    if packed:
        return _lower_packed(low, xs, attrs)
    return low.call("halo_exchange", *xs, out=out, in_place=True, packed=np.int64(0), **attrs)


def _lower_packed(low: Lowering, xs: Operands, attrs: Params) -> list[Any]:
    """XLA packs the messages and unpacks them, in the order of the directions, as `halo.rs` reads
    them."""
    avals = [aval for _, aval in xs]
    leaves = [
        (i, x.shape, axes) for i, (x, axes) in enumerate(zip(avals, low.p["axes"], strict=True))
    ]
    owned, ghosts = map(faces.boxes_of, faces.faces(leaves, low.p))
    adjoint = low.p["adjoint"]
    sent, received = (ghosts, owned) if adjoint else (owned, ghosts)
    cells = [avals[0].update(shape=(faces.cells_in(boxes),)) for boxes in (sent, received)]

    def pack(*xs: Any) -> list[Any]:
        return [faces.packed(sent, xs, xs[0])]

    def unpack(came: Any, *xs: Any) -> list[Any]:
        if adjoint:  # ghost cells that were filled get zeros
            xs = faces.filled(ghosts, xs, jnp.zeros(cells[0].shape, came.dtype))
        return faces.filled(received, xs, came, adjoint)

    (goes,) = low.locals(pack, cells[:1], *xs)
    call = low.call(
        "halo_exchange",
        (goes, cells[0]),
        out=cells[1:],
        in_place=False,
        packed=np.int64(1),
        **attrs,
    )
    return low.locals(unpack, avals, (call[0], cells[1]), *xs)


@define(
    lower=_lower,
    adjoint=_lower,
    start=faces.start,
    only_for_its_result=lambda p: True,
)
def halo_exchange(
    x: T,
    cart: MPI.Cartcomm,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 1,
    corners: bool = True,
    border: Any = None,
) -> T:
    """Fill the ghost cells of a block with the edges of the neighbours' blocks.

    Each rank holds a block of a large array, with ghost cells around it: ``width`` cells at either
    end of each exchanged axis. They become copies of the cells of the neighbours on a Cartesian
    communicator (MPI-4.1, section 8.5), all at once: one message to each neighbour, which carries
    all arrays of ``x`` (MPI_Isend, MPI_Irecv and MPI_Wait; section 3.7). At an edge of the grid
    that is not periodic, ghost cells keep what they hold, and count as part of the block: its
    neighbours along the edge get copies of them.

    Args:
        x: block with its ghost cells, of any dtype; or a pytree of blocks. Neighbours' blocks may
            differ in length along the axis that they are neighbours on, and along no other.
        cart: communicator with a Cartesian topology (``MPI.Intracomm.Create_cart``), which also
            says what is periodic. All its ranks have to take part.
        axes: the array's axis for each dimension of ``cart``, or None for a dimension that is not
            exchanged. By default the last axes, in order.
        width: number of ghost cells: one number; or for each dimension of ``cart`` a number or a
            pair (below, above). The same on all ranks.
        corners: whether ghost cells that are beyond two or more axes are filled too, by the
            diagonal neighbours (3**d - 1 neighbours instead of 2*d along d axes); they keep their
            values otherwise.
        border: what ghost cells at an edge of the grid become that is not periodic: None (they
            keep what they hold), ``"edge"`` (copies of the outermost cells), ``"reflect"`` (the
            cells inside, mirrored at the outermost ones) or a number, as with :func:`numpy.pad`;
            or for each dimension of ``cart`` one of these, or a pair (below, above).

    Returns:
        jax.Array, or pytree: the block with its ghost cells filled, of the shape and dtype of
        ``x``.

    Raises:
        TypeError: a wrong type of ``cart``, ``axes``, ``width``, ``border`` or dtype.
        ValueError: ``axes``, ``width`` or ``border`` do not fit ``cart`` or ``x``; fewer inner
            cells along an axis than the width, or than the width and one for ``"reflect"``.

    Derivative:
        The transpose adds the cotangents of ghost cells to those of the cells that they are copies
        of, and ghost cells that were filled get zeros; those of a border go to the cells that it
        was made of. Under ``vmap`` the batch goes along.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> x = jnp.full(5, cart.rank).at[0].set(-1).at[4].set(-1)
        >>> y = mpi4jax.halo_exchange(x, cart)
        >>> [int(v) for v in y] == [cart.Shift(0, 1)[0], *[cart.rank] * 3, cart.Shift(0, 1)[1]]
        True

    See also: :func:`scatter_blocks`, :func:`gather_blocks`, :func:`sendrecv`.
    """
    name = "halo_exchange"
    comm = _cart.as_cart(name, cart)
    chosen, widths = _cart.axes_of(name, comm, axes), _cart.widths_of(name, comm, width)
    exchanged = tuple(k for k, axis in enumerate(chosen) if axis is not None)
    if border is not None:
        sides = _border.sides_of(name, comm, border)
        x = _border.filled(name, comm, x, chosen, widths, sides, bool(corners))
    p = {
        "comm": comm,
        "axes": tuple(chosen[k] for k in exchanged),
        "widths": tuple(widths[k] for k in exchanged),
        "neighbours": _cart.neighbours(comm, exchanged, bool(corners)),
    }
    return Call.of(name, (x,), p)
