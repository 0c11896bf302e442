"""A geometric multigrid cycle for grids whose blocks are distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._grid.border import dirichlet
from ..ops import allreduce, halo_exchange
from .base import static_int
from .exchange import Exchange
from .layout import Layout

Field = jax.Array
Function = Callable[[Field], Field]

COARSE = 256  # maximum number of cells of the coarsest grid, if it can be coarsened that far


def multigrid(
    block: Any,
    operator: Callable[..., tuple[Function, Field]],
    *fields: Any,
    levels: int | None = None,
    border: Any = None,
    smoother: Callable[[Function, Field], Function] | None = None,
    coarse: Callable[[Any, Function], Function] | None = None,
) -> Function:
    """Make a preconditioner: one V-cycle of geometric multigrid, on blocks of a Cartesian grid.

    The number of iterations then hardly depends on the number of cells. The operator is discretized
    again on each coarser grid, which has half the cells along each axis. Values are at the centers
    of cells. If the operator is symmetric positive definite, so is the cycle.

    Args:
        block: the :class:`mpi4jax.grids.Block` of the finest grid, with ``width=1`` along all axes,
            so that its ``cart`` has a dimension for each axis.
        operator: function that is called as ``operator(block, *fields)`` for each grid. It returns
            the operator of that grid, a function of an array of ``block.shape``, and its diagonal,
            of the same shape. The coarser grids cover the same domain with fewer cells.
        fields: arrays of ``block.shape``, or pytrees of them, such as coefficients. On coarser
            grids, they are means of cells.
        levels: number of grids, by default until there are at most 256 cells, or the length of an
            axis is odd, or a rank would have no cell.
        border: boundary condition of a correction, as for :func:`halo_exchange`, by default
            ``grids.dirichlet(0.0)``: with ``grids.neumann()``, for no flux.
        smoother: function of an operator and its diagonal that returns a function of the residual:
            a correction. By default three steps of Chebyshev iterations, for eigenvalues of the
            operator, divided by its diagonal, between 0.5 and 2 (Adams et al., 2003).
        coarse: function of the coarsest block and its operator that returns a solver. By default,
            all ranks have the inverse of the whole matrix, and gather the residual by one
            ``allreduce``.

    Returns:
        A function for the argument ``M`` of :func:`cg`, of an array of ``block.shape``. Each level
        applies the operator six times, and takes two more halo exchanges. If the blocks cannot be
        halved, the residual is redistributed to blocks that can, and back.

    Raises:
        TypeError: if ``levels`` is not an integer.
        ValueError: if the grid cannot be coarsened to ``levels``, a block has no ghost cells, or
            the leaves of ``fields`` do not have the shape of the block.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4py import MPI
        >>> size = MPI.COMM_WORLD.size
        >>> cart = MPI.COMM_WORLD.Create_cart([size], periods=[False])
        >>> block = mpi4jax.grids.Block((64 * size,), cart, width=1)
        >>> def operator(block):
        ...     def apply(u):  # zero at the centers of the cells beyond the walls
        ...         u = mpi4jax.halo_exchange(block.with_ghosts(u), block, border=0.0)
        ...         return (2 * u[1:-1] - u[:-2] - u[2:]) * block.global_shape[0] ** 2
        ...     return apply, jnp.full(block.shape, 2.0 * block.global_shape[0] ** 2)
        >>> M = mpi4jax.linalg.multigrid(block, operator, border=0.0)
        >>> ones = jnp.ones(block.shape)
        >>> _, info = mpi4jax.linalg.cg(operator(block)[0], ones, tol=1e-3, M=M)
        >>> bool(info.converged), bool(info.iterations < 10)
        (True, True)

    See also: :func:`block_jacobi`, :func:`host_solve`.
    """
    op = "multigrid"
    dimensions = len(block.shape)
    padded = tuple(n + 2 for n in block.shape)
    if block.padded_shape != padded:
        raise ValueError(
            f"{op}: argument 'block' must have width=1 along all axes, and a dimension of 'cart' "
            f"for each of {dimensions} axes; got {block!r} with the shape {block.padded_shape}"
        )
    for leaf in jax.tree.leaves(fields):
        if jnp.shape(leaf) != block.shape:
            raise ValueError(
                f"{op}: argument 'fields' must have arrays of shape {block.shape}, like the "
                f"block; got {jnp.shape(leaf)}"
            )
    border = dirichlet(0.0) if border is None else border
    smoother = chebyshev if smoother is None else smoother
    coarse = direct if coarse is None else coarse
    grids = _grids(op, block, levels)

    def cycle_of(grids: list[Any], fields: Any) -> Function:
        block, *coarser = grids
        apply, diagonal = operator(block, *fields)
        if not coarser:
            return coarse(block, apply)
        smooth = smoother(apply, diagonal)
        correct = cycle_of(coarser, jax.tree.map(means, fields))

        def upwards(u: Field) -> Field:
            return _prolonged(halo_exchange(coarser[0].with_ghosts(u), coarser[0], border=border))

        def downwards_of(dtype: Any) -> Callable[[Field], Any]:
            return jax.linear_transpose(upwards, jnp.zeros(coarser[0].shape, dtype))

        # `linear_transpose` exchanges zeros once: here, instead of in each cycle.
        usual = jnp.result_type(diagonal)
        downwards = downwards_of(usual)

        def cycle(r: Field) -> Field:
            u = smooth(r)
            down = downwards if r.dtype == usual else downwards_of(r.dtype)
            (residual,) = down(r - apply(u))
            u = u + upwards(correct(residual / 2**dimensions))
            return u + smooth(r - apply(u))

        return cycle

    there, back = _moved(block, block.layout, grids[0].layout), None
    if there is not None:
        back = _moved(block, grids[0].layout, block.layout)
        fields = jax.tree.map(there, fields)
    cycle = cycle_of(grids, lax.stop_gradient(fields))
    return cycle if there is None or back is None else lambda r: back(cycle(there(r)))


def _moved(block: Any, source: Layout, target: Layout) -> Function | None:
    """Return the function that redistributes an array, or None if there is nothing to do."""
    if source == target:
        return None
    return Exchange((), source, target, block.comm).run


def _grids(op: str, block: Any, levels: int | None) -> list[Any]:
    """Return this rank's blocks from the finest grid to the coarsest one."""
    shape, layout = block.global_shape, block.layout
    sizes = [layout.parts(axis) for axis in range(len(shape))]
    most = 1
    while all(n % 2**most == 0 and n // 2**most >= p for n, p in zip(shape, sizes, strict=True)):
        most += 1
    if levels is None:
        levels = 1
        while levels < most and math.prod(n >> (levels - 1) for n in shape) > COARSE:
            levels += 1
    levels = static_int(op, "levels", levels, "a number of grids, at least 1")
    if not 1 <= levels <= most:
        raise ValueError(
            f"{op}: argument 'levels' must be from 1 to {most} for a grid of {shape} on {sizes} "
            f"blocks, whose lengths are halved; got {levels}"
        )
    factor = 2 ** (levels - 1)
    lengths = [np.diff(layout.ends(axis)) for axis in range(len(shape))]
    if any((n % factor).any() for n in lengths):  # the nearest blocks that can be halved
        coarsest = Layout(tuple(n // factor for n in shape), dict(enumerate(sizes)))
        lengths = [factor * np.diff(coarsest.ends(axis)) for axis in range(len(shape))]
    # A block takes the lengths in the order of the dimensions of the communicator.
    out = []
    for level in range(levels):
        of_level = [[int(n) >> level for n in lengths[axis]] for axis in _axes_of(block)]
        coarser = tuple(n >> level for n in shape)
        out.append(type(block)(coarser, block.comm, axes=block.axes, width=1, lengths=of_level))
    return out


def _axes_of(block: Any) -> list[int]:
    axes = range(len(block.shape)) if block.axes is None else block.axes
    given = [axes] if isinstance(axes, int) else list(axes)
    return [axis % len(block.shape) for axis in given]


def means(x: Any) -> Field:
    """Return an array of half the length along each axis: the means of pairs of cells."""
    pairs = [n for length in x.shape for n in (length // 2, 2)]
    return jnp.asarray(x).reshape(pairs).mean(tuple(range(1, 2 * x.ndim, 2)))


def _prolonged(u: Field) -> Field:
    """Interpolate linearly to twice the cells along each axis, from an array with ghost cells."""
    for axis in range(u.ndim):
        below, center, above = (
            lax.slice_in_dim(u, k, u.shape[axis] - 2 + k, axis=axis) for k in range(3)
        )
        pair = [0.75 * center + 0.25 * below, 0.75 * center + 0.25 * above]
        shape = [n * 2 if k == axis else n for k, n in enumerate(center.shape)]
        u = jnp.stack(pair, axis + 1).reshape(shape)
    return u


def chebyshev(apply: Function, diagonal: Field, steps: int = 2) -> Function:
    """Return Chebyshev iterations that start from zero: Adams et al., J. Comput. Phys. 188, 2003.

    They smooth the error for eigenvalues of the operator, divided by its diagonal, from 0.5 to 2.
    """
    middle, half = 1.25, 0.75

    def smooth(r: Field) -> Field:
        rho = half / middle
        step = r / diagonal / middle
        u = step
        for _ in range(steps):
            r = r - apply(step)
            last, rho = rho, 1 / (2 * middle / half - rho)
            step = rho * last * step + 2 * rho / half * r / diagonal
            u = u + step
        return u

    return smooth


def direct(block: Any, apply: Function) -> Function:
    """Return a solver for the coarsest grid: every rank multiplies by the inverse of the whole
    matrix."""
    shape = block.global_shape
    n = math.prod(shape)

    def gathered(x: Field) -> Field:  # the cells of all ranks, as a vector
        return allreduce(jnp.zeros(shape, x.dtype).at[block.slices].set(x), comm=block.comm).ravel()

    def column(u: Field) -> Field:
        return gathered(apply(u[block.slices]))

    matrix = jax.vmap(column)(jnp.eye(n).reshape(n, *shape)).T
    # The default `rtol` is ten times as large: in float32 it leaves out modes of a fine 1-D grid.
    inverse = jnp.linalg.pinv(matrix, rtol=float(max(n, 50) * jnp.finfo(matrix.dtype).eps))
    return lambda r: (inverse @ gathered(r)).astype(r.dtype).reshape(shape)[block.slices]
