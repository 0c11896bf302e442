"""halo_exchange: ghost cells of blocks of an array, from the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from mpi4py import MPI

from .. import _native
from .._call.definition import define
from .._compile.lowering import Avals, Lowering, Operands, carrier
from .._grid import border as _border, cart as _cart, faces
from .._op.spec import Call, Params, T


def _leaves(low: Lowering, avals: Sequence[Any]) -> list[faces.Leaf]:
    return [
        (i, x.shape, axes) for i, (x, axes) in enumerate(zip(avals, low.p["axes"], strict=True))
    ]


def _lower(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    adjoint = bool(low.p["adjoint"])
    carriers = [carrier(aval, adjoint) for _, aval in xs]
    if not adjoint and not _native.takes_packed(low.on_gpu):
        halo = _describe(low, carriers)
        return low.call("halo_exchange", *xs, out=out, in_place=True, halo=halo)
    xs = [low.convert(x, to) for x, to in zip(xs, carriers, strict=True)]
    results = zip(_lower_packed(low, xs), carriers, strict=True)
    return [low.convert(y, to)[0] for y, to in zip(results, out, strict=True)]


def _describe(low: Lowering, avals: Sequence[Any]) -> Params:
    """What `HaloFields` in `src/ops/halo.rs` reads."""
    goes, comes = faces.faces(_leaves(low, avals), low.p)
    return {
        "widths": low.p["widths"],
        "itemsize": avals[0].dtype.itemsize,
        "shapes": [x.shape for x in avals],
        "sends": [(peer, *box) for peer, _, box in goes],
        "receives": [(peer, *box) for peer, _, box in comes],
    }


def _lower_packed(low: Lowering, xs: Operands) -> list[Any]:
    """XLA packs the messages, and unpacks them or adds them up."""
    avals, adjoint = [aval for _, aval in xs], low.p["adjoint"]
    owned, ghosts = faces.messages(_leaves(low, avals), low.p)
    sent, received = (ghosts, owned) if adjoint else (owned, ghosts)
    goes, comes = (avals[0].update(shape=(message.size,)) for message in (sent, received))

    def pack(*xs: Any) -> Any:
        return faces.packed(sent.boxes, xs, xs[0])

    def unpack(came: Any, *xs: Any) -> list[Any]:
        if adjoint:  # ghost cells that were filled get zeros
            xs = faces.filled(ghosts.boxes, xs, jnp.zeros(goes.shape, came.dtype))
        return faces.filled(received.boxes, xs, came, adjoint)

    parts = {"sends": sent.parts, "receives": received.parts}
    message = (low.local(pack, goes, *xs), goes)
    (came,) = low.call("alltoallv", message, out=[comes], in_place=False, parts=parts)
    return low.locals(unpack, avals, (came, comes), *xs)


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
