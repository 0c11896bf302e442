"""halo_exchange: ghost cells of blocks of an array, from the neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from mpi4py import MPI

from .. import _native
from .._call.definition import define
from .._compile.emit import Avals, Operands
from .._compile.lowering import Lowering
from .._compile.wire import carrier
from .._grid import border as _border, cart as _cart, faces
from .._op.operation import OfBlocks, T, call
from .._requests.request import CompositeRequest


@dataclass(frozen=True)
class HaloExchange(OfBlocks, name="halo_exchange"):
    def lower(self, low: Lowering, xs: Operands, out: Avals) -> list[Any]:
        avals = [aval.update(dtype=carrier(aval.dtype, self.adjoint)) for _, aval in xs]
        xs = [low.convert(x, to) for x, to in zip(xs, avals, strict=True)]
        leaves = [
            (i, x.shape, axes)
            for i, (x, axes) in enumerate(zip(avals, self.leaf_axes, strict=True))
        ]
        goes, comes = faces.faces(leaves, self)
        if self.adjoint:  # ghost cells go to the cells that they are copies of
            goes, comes = comes, goes
        if _native.takes_packed(low.on_gpu):
            ys = self._exchanged_packed(low, xs, goes, comes)
        else:
            # The fields that `HaloFields` in `src/ops/halo.rs` reads.
            halo = {
                "itemsize": avals[0].dtype.itemsize,
                "shapes": [x.shape for x in avals],
                "adjoint": self.adjoint,
                "sends": [(peer, *box) for peer, _, box in goes],
                "receives": [(peer, *box) for peer, _, box in comes],
            }
            ys = low.call("halo_exchange", *xs, out=avals, in_place=True, halo=halo)
        arrays = zip(zip(ys, avals, strict=True), out, strict=True)
        return [low.convert(y, to)[0] for y, to in arrays]

    def _exchanged_packed(
        self, low: Lowering, xs: Operands, goes: Sequence[faces.Face], comes: Sequence[faces.Face]
    ) -> list[Any]:
        """Do the same where XLA packs and unpacks."""
        avals = [aval for _, aval in xs]
        sent, received = (faces.message(found, self.comm) for found in (goes, comes))
        of_sent, of_received = (avals[0].update(shape=(it.size,)) for it in (sent, received))
        cells = low.local(lambda *xs: faces.packed(sent.boxes, xs, xs[0]), of_sent, *xs)
        parts = {"sends": sent.parts, "receives": received.parts}
        message = (cells, of_sent)
        (cells,) = low.call("alltoallv", message, out=[of_received], in_place=False, parts=parts)

        def unpacked(cells: Any, *xs: Any) -> Sequence[Any]:
            if not self.adjoint:
                return faces.filled(received.boxes, xs, cells)
            cleared = faces.filled(sent.boxes, xs, jnp.zeros(of_sent.shape, of_sent.dtype))
            return faces.added(tuple(comes), cleared, cells)

        return low.locals(unpacked, avals, (cells, of_received), *xs)

    def initiate(self, args: Sequence[Any]) -> CompositeRequest[Any]:
        return faces.initiate(self, args)

    def only_for_its_result(self) -> bool:
        return True


@define(HaloExchange)
def halo_exchange(
    x: T,
    cart: MPI.Cartcomm | _cart.Block,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 1,
    corners: bool = True,
    border: Any = None,
) -> T:
    """Fill the ghost cells of a block with the edges of the neighbors' blocks.

    Each rank holds a block of a large array, with ghost cells around it: ``width`` cells at either
    end of each exchanged axis. The ghost cells become copies of the cells of the neighbors on a
    Cartesian communicator (MPI-4.1, section 8.5). There is one message to each neighbor, which
    carries all arrays of ``x`` (MPI_Isend, MPI_Irecv and MPI_Wait; section 3.7). At an edge of the
    grid that is not periodic, ghost cells keep their values and count as part of the block:
    neighbors along the edge get copies of them.

    Args:
        x: block with its ghost cells, of any dtype; or a pytree of blocks. The blocks of two
            neighbors may differ in length only along the axis on which they are neighbors.
        cart: communicator with a Cartesian topology (``MPI.Intracomm.Create_cart``), which also
            says which dimensions are periodic. All its ranks have to take part. Or a
            :class:`mpi4jax.grids.Block`, whose axes and width are used, and whose ghost cells ``x``
            must have. Then arrays may have further axes in front of the axes of the block, such as
            the components of a vector.
        axes: the array's axis for each dimension of ``cart``, or None for a dimension that is not
            exchanged. By default the last axes, in order.
        width: number of ghost cells: one number; or for each dimension of ``cart`` a number or a
            pair (below, above). The same on all ranks.
        corners: whether to fill also the ghost cells at corners, from the diagonal neighbors
            (``3**d - 1`` neighbors instead of ``2*d`` for d exchanged axes). Otherwise, they keep
            their values.
        border: how to fill ghost cells at an edge of the grid that is not periodic: None (they keep
            their values), ``"edge"`` (copies of the outermost cells), ``"symmetric"`` or
            ``"reflect"`` (inner cells, mirrored at the edge or at the outermost ones), as with
            :func:`numpy.pad`; :func:`mpi4jax.grids.neumann` or :func:`mpi4jax.grids.dirichlet`; a
            number, or an array of the shape of ``x`` with the values. Or a sequence with one of
            these for each dimension of ``cart``, or a pair (below, above). If ``x`` is a dictionary
            of fields, ``border`` may be one of borders with the same keys.

    Returns:
        jax.Array, or pytree: the block with its ghost cells filled, of the shape and dtype of
        ``x``.

    Raises:
        TypeError: if ``cart``, ``axes``, ``width`` or ``border`` has the wrong type, or if the
            dtype is not supported.
        ValueError: if ``axes``, ``width`` or ``border`` does not fit ``cart`` or ``x``, or an axis
            has fewer inner cells than the width (for ``"reflect"``: than the width plus one).

    Derivative:
        The transpose adds the cotangent of each ghost cell to the cotangent of the cell that it is
        a copy of. The cotangents of filled ghost cells are set to zero; the cotangents of
        ``border`` cells are added to the cells that the border was computed from. Under
        ``vmap``, each message carries the whole batch.

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
    comm, chosen, widths = _cart.grid_of(name, cart, axes, width, x)
    exchanged = tuple(k for k, axis in enumerate(chosen) if axis is not None)
    x = _border.filled(name, comm, x, border, chosen, widths, bool(corners))
    op = HaloExchange(
        comm,
        axes=tuple(axis for axis in chosen if axis is not None),
        widths=tuple(widths[k] for k in exchanged),
        neighbors=_cart.neighbours(comm, exchanged, bool(corners)),
    )
    return call(op, x)
