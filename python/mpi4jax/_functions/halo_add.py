"""halo_add: the transpose of a halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from .._call.call import run
from .._grid import border as _border, cart as _cart
from .._op.arguments import from_end
from .._op.operation import OPERATIONS, T

_NAME = "halo_add"


def halo_add(
    x: T,
    cart: MPI.Cartcomm | _cart.Block,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 1,
    corners: bool = True,
    border: Any = None,
) -> T:
    """Add the ghost cells of a block to the cells that they are copies of.

    The transpose of :func:`halo_exchange`. Use it when a rank computes contributions to cells that
    other ranks own, as in particle deposition and finite-element assembly. Afterwards, ghost cells
    are zero, and each cell holds the sum of the contributions of all ranks. The messages are the
    same as for :func:`halo_exchange`, in the opposite direction.

    Args:
        x: block with its ghost cells, of numbers; or a pytree of blocks.
        cart, axes, width, corners: as for :func:`halo_exchange`.
        border: where ghost cells go at an edge of the grid that is not periodic: None (they keep
            what they hold), ``"edge"`` (to the outermost cells), ``"reflect"`` (to the cells
            inside, mirrored at the outermost ones) or a number such as 0.0 (what leaves the domain
            is dropped, whatever the number); or for each dimension of ``cart`` one of these, or a
            pair (below, above).

    Returns:
        jax.Array, or pytree: the block of the shape and dtype of ``x``.

    Raises:
        TypeError: if ``cart``, ``axes``, ``width`` or ``border`` has the wrong type, or ``x`` does
            not hold numbers.
        ValueError: as for :func:`halo_exchange`.

    Derivative:
        The transpose is :func:`halo_exchange`, with zeros in place of a number at the border.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> mpi4jax.halo_add(jnp.array([1.0, 5.0, 6.0, 2.0]), cart).tolist()
        [0.0, 7.0, 7.0, 0.0]

    See also: :func:`halo_exchange`, :meth:`mpi4jax.ghosts.Plan.add`.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(jnp.result_type(leaf), np.number):
            raise TypeError(
                f"{_NAME}: argument 'x' has an array of dtype {jnp.result_type(leaf)}, which "
                "cannot be added; expected numbers"
            )
    comm, chosen, widths = _cart.grid_of(_NAME, cart, axes, width, x)
    exchanged = [(k, w) for k, w in zip(chosen, widths, strict=True) if k is not None]
    for leaf in jax.tree.leaves(x):  # the errors of halo_exchange, with the name of this function
        from_end(_NAME, [k for k, _ in exchanged], [w for _, w in exchanged], jnp.shape(leaf))
    _border.check(_NAME, comm, x, border)
    prepare = OPERATIONS["halo_exchange"].prepare
    call = prepare(x, cart, axes=axes, width=width, corners=corners, border=None)
    y = run(call._replace(op=call.op.transposed()))
    return _border.added(_NAME, comm, y, border, chosen, widths, corners)  # type: ignore[no-any-return]
