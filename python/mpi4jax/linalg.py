"""Krylov solvers for distributed vectors.

They have the signatures of :mod:`jax.scipy.sparse.linalg`, and ``comm``. The operator takes and
returns this rank's elements, and may communicate. Inner products are global reductions; inner
products that are needed at the same time share one reduction. Derivatives are implicit: they
differentiate the solution and not the iteration, in forward and in reverse mode.

With ``reproducible=True``, inner products use :func:`mpi4jax.reproducible_sum`. The bits of a
solution then do not depend on the number of ranks or on the distribution of its elements, provided
that the bits of the results of ``A`` and ``M`` do not. Each inner product takes two reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

from ._numerics import krylov, pipelined as _pipelined
from ._numerics.arrays import T
from ._numerics.base import static_int
from ._numerics.host import host_solve as host_solve
from ._numerics.krylov import Info, Reason, check, solve, wide_of
from ._numerics.multigrid import multigrid as multigrid
from ._numerics.space import Space, Vector

__all__ = [
    "Info",
    "Reason",
    "bicgstab",
    "block_jacobi",
    "cg",
    "gmres",
    "host_solve",
    "lsmr",
    "minres",
    "multigrid",
    "norm",
    "vdot",
]

Operator = Callable[[Vector], Vector]
Monitor = Callable[[Any, Any], Any]


def norm(x: Any, *, comm: MPI.Intracomm | None = None, reproducible: bool = False) -> jax.Array:
    """Return the Euclidean norm of a vector over all ranks.

    Args:
        x: this rank's elements, in an array of any shape, which may differ between ranks; or a
            pytree of arrays.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        reproducible: whether the bits of the result must not depend on how the vector is
            distributed.

    Returns:
        The norm, at least float32, the same on all ranks. Its derivative at zero is zero.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> size = mpi4jax.default_comm().size
        >>> round(float(mpi4jax.linalg.norm(jnp.array([3.0, 4.0]))) ** 2) == 25 * size
        True
    """
    square = krylov.vdot("norm", {"x": x}, comm, reproducible).real
    return jnp.where(square == 0, 0, jnp.sqrt(jnp.where(square == 0, 1, square)))


def vdot(
    a: Any, b: Any, *, comm: MPI.Intracomm | None = None, reproducible: bool = False
) -> jax.Array:
    """Return the inner product of two vectors over all ranks, the sum of ``conj(a) * b``.

    Args:
        a: this rank's elements of the first vector, in an array of any shape, which may differ
            between ranks; or a pytree of arrays.
        b: this rank's elements of the second vector, with the shapes of ``a``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        reproducible: whether the bits of the result must not depend on how the vectors are
            distributed.

    Returns:
        The product, of the promoted dtype, at least float32, the same on all ranks.

    Raises:
        ValueError: if ``b`` does not have the shapes of ``a``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> x = jnp.ones(3)
        >>> float(mpi4jax.linalg.vdot(x, x)) == 3 * mpi4jax.default_comm().size
        True
    """
    shapes = [jax.tree.map(jnp.shape, v) for v in (a, b)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"vdot: argument 'b' must have the shapes of 'a', {shapes[0]}, got {shapes[1]}"
        )
    return krylov.vdot("vdot", {"a": a, "b": b}, comm, reproducible)


def block_jacobi(blocks: Any) -> Callable[[Any], Any]:
    """Make a preconditioner: the inverse of the diagonal blocks of this rank's rows.

    Applying it needs no communication. If the matrix is Hermitian positive definite, so is the
    preconditioner.

    Args:
        blocks: the block of this rank's rows and columns, of shape ``(m, m)`` for a vector of ``m``
            elements; or ``k`` blocks, of shape ``(k, m, m)`` for ``k m`` elements, in order. A rank
            may have no elements. For a small ``m``, ``jax.jacfwd(A)(jnp.zeros(m))`` computes the
            block of a function ``A`` that uses zeros instead of other ranks' values.

    Returns:
        A function for the argument ``M`` of the solvers. It takes an array of any shape, or a
        pytree of arrays; the number of elements must equal the number of rows of the blocks.

    Raises:
        ValueError: if ``blocks`` has another shape. The returned function raises it if the size of
            the vector differs.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> M = mpi4jax.linalg.block_jacobi(jnp.array([[4.0, 1.0], [1.0, 4.0]]))
        >>> M(jnp.array([5.0, 5.0])).tolist()
        [1.0, 1.0]
    """
    matrix = krylov.inexact("block_jacobi", "blocks", blocks)
    if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(
            "block_jacobi: argument 'blocks' must have the shape (m, m) or (k, m, m), got "
            f"{matrix.shape}"
        )
    rows = matrix.shape[-1] * (len(matrix) if matrix.ndim == 3 else 1)
    wide = matrix.astype(wide_of(matrix.dtype))
    inverse = jnp.linalg.inv(wide) if rows else wide
    inverse = inverse.reshape(-1 if rows else 0, *inverse.shape[-2:])

    def apply(v: Any) -> Any:
        flat, tree = ravel_pytree(v)
        if flat.size != rows:
            raise ValueError(
                f"block_jacobi: the blocks have {rows} rows on this rank; expected a vector of "
                f"{rows} elements, got {flat.size}"
            )
        parts = flat.astype(jnp.promote_types(flat.dtype, inverse.dtype))
        out = jnp.einsum("kij,kj->ki", inverse, parts.reshape(inverse.shape[:2]))
        return tree(out.ravel().astype(flat.dtype))

    return apply


def _space(op: str, comm: MPI.Intracomm | None, reproducible: bool, **fewer: bool) -> Space:
    """Return the inner products of a method that has a variant with fewer reductions."""
    if reproducible and any(fewer.values()):
        raise ValueError(
            f"{op}: arguments '{next(iter(fewer))}' and 'reproducible' are both True; a "
            "reproducible inner product takes two reductions. Pass one of them"
        )
    return Space(op, comm, reproducible)


def cg(
    A: Any,
    b: T,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    monitor: Monitor | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: bool = False,
    pipelined: bool = False,
) -> tuple[T, Info]:
    """Solve ``A(x) = b`` by conjugate gradients, for a Hermitian positive definite ``A``.

    Each iteration takes two global reductions, in addition to the communication of ``A`` and ``M``.

    Args:
        A: function that takes this rank's elements of a vector, and returns this rank's elements of
            the result. All ranks call it together, and it may communicate.
        b: this rank's elements of the right-hand side, in an array of any shape, which may differ
            between ranks; or a pytree of arrays.
        x0: initial guess, like ``b``; by default zeros.
        tol: relative tolerance. Converged when ``norm(b - A(x)) <= max(tol * norm(b), atol)``, with
            norms over all ranks.
        atol: absolute tolerance, see ``tol``.
        maxiter: maximum number of iterations, by default 10 times the number of elements on all
            ranks.
        M: preconditioner: a function like ``A`` that approximates its inverse, Hermitian positive
            definite.
        monitor: function that each rank calls with the number of the iteration and the residual
            norm, as the method updates it: first with 0, then after each iteration, and in reverse
            mode also for the transposed equation. It runs in :func:`jax.debug.callback`, and may
            communicate through mpi4py, on a communicator of its own;
            :func:`jax.effects_barrier` waits for all calls.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        reproducible: whether the bits of the result must not depend on how the vectors are
            distributed.
        pipelined: whether to take one reduction per iteration, which overlaps ``A`` and ``M``
            (Ghysels and Vanroose, 2014). Each iteration updates four more vectors, and the residual
            stays larger, by up to a few digits; every 50 iterations, it is computed anew, by three
            products with ``A``. `Linear solvers <solvers.md#fewer-reductions>`_ says when it pays.
            It excludes ``reproducible``.

    Returns:
        Tuple of this rank's elements of the solution, like ``b``, and an :class:`Info`, the same on
        all ranks. The residual norm is computed from the solution. If it is larger than the one
        that the iteration has updated by recurrence, the iteration is restarted. ``info.converged``
        is True if the tolerance is met, and ``info.reason`` says why the solve has stopped, as a
        :class:`Reason`.

        The iteration computes at least in float32. ``A`` and ``M`` get and return the dtype of
        ``b``. With float16 and bfloat16, the relative residual seldom gets below ``1e-3``.

    Raises:
        TypeError: if ``A`` or ``M`` is not a function, or returns complex numbers where ``b`` is
            real.
        ValueError: if ``x0``, or what ``A`` or ``M`` returns, does not have the shapes of ``b``; or
            if ``pipelined`` and ``reproducible`` are both True.

    Derivative:
        The derivative of the solution with respect to ``b`` and to everything that ``A`` closes
        over. It takes one more solve, in forward and in reverse mode.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> def A(x):  # 3 x + the sum of all elements
        ...     return 3 * x + mpi4jax.pvary(mpi4jax.allreduce(x.sum()))
        >>> x, _ = mpi4jax.linalg.cg(A, jnp.ones(2))
        >>> bool(jnp.allclose(x, 1 / (3 + 2 * mpi4jax.default_comm().size)))
        True

    See also: :func:`bicgstab`, :func:`gmres`.
    """
    space = _space("cg", comm, reproducible, pipelined=pipelined)
    method = _pipelined.cg if pipelined else krylov.cg
    return solve("cg", method, A, b, x0, M, space, tol, atol, maxiter, monitor, symmetric=True)


def bicgstab(
    A: Any,
    b: T,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    monitor: Monitor | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: bool = False,
    merged: bool = False,
) -> tuple[T, Info]:
    """Solve ``A(x) = b`` by stabilized biconjugate gradients, for any ``A``.

    Each iteration takes three global reductions, and calls ``A`` and ``M`` twice. Arguments,
    results, errors and derivatives are the same as for :func:`cg`, but ``A`` and ``M`` need not be
    Hermitian. In reverse mode, ``M`` also preconditions the transposed equation.

    Args:
        merged: whether to take one global reduction per iteration, of twelve inner products.
            Rounding errors grow faster. It excludes ``reproducible``.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> x, _ = mpi4jax.linalg.bicgstab(lambda x: 4 * x, jnp.ones(2))
        >>> x.tolist()
        [0.25, 0.25]

    See also: :func:`gmres`.
    """
    space = _space("bicgstab", comm, reproducible, merged=merged)
    method = _pipelined.bicgstab if merged else krylov.bicgstab
    return solve("bicgstab", method, A, b, x0, M, space, tol, atol, maxiter, monitor)


def gmres(
    A: Any,
    b: T,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Any = None,
    monitor: Monitor | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: bool = False,
) -> tuple[T, Info]:
    """Solve ``A(x) = b`` by generalized minimal residuals, for any ``A``.

    Each vector of the Krylov space takes two global reductions, in addition to the communication of
    ``A`` and ``M``. Arguments, results, errors and derivatives are the same as for :func:`cg`, but
    ``A`` and ``M`` need not be Hermitian. In reverse mode, ``M`` also preconditions the transposed
    equation.

    Args:
        restart: dimension of the Krylov space, which is the number of vectors that are stored.
            After ``restart`` steps, the residual is tested, and a new space is begun.
        maxiter: maximum number of restarts.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> x, _ = mpi4jax.linalg.gmres(lambda x: 4 * x, jnp.ones(2), restart=2)
        >>> [round(v, 5) for v in x.tolist()]
        [0.25, 0.25]

    See also: :func:`bicgstab`.
    """
    expected = "the dimension of the Krylov space, at least 1"
    if static_int("gmres", "restart", restart, expected) < 1:
        raise ValueError(f"gmres: argument 'restart' must be {expected}, got {restart}")
    method, space = functools.partial(krylov.gmres, restart), Space("gmres", comm, reproducible)
    return solve("gmres", method, A, b, x0, M, space, tol, atol, maxiter, monitor, progress=1.0)


def minres(
    A: Any,
    b: T,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    monitor: Monitor | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: bool = False,
) -> tuple[T, Info]:
    """Solve ``A(x) = b`` by minimal residuals, for a Hermitian ``A``, definite or indefinite.

    Each iteration takes two global reductions, in addition to the communication of ``A`` and ``M``.
    Arguments, results, errors and derivatives are the same as for :func:`cg`. ``M`` has to be
    Hermitian positive definite.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> x, _ = mpi4jax.linalg.minres(lambda x: jnp.array([4.0, -2.0]) * x, jnp.ones(2))
        >>> [round(v, 5) for v in x.tolist()]
        [0.25, -0.5]

    See also: :func:`cg`, :func:`gmres`.
    """
    space = Space("minres", comm, reproducible)
    return solve(
        "minres", krylov.minres, A, b, x0, M, space, tol, atol, maxiter, monitor, symmetric=True
    )


def lsmr(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    damp: float = 0.0,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    monitor: Monitor | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: bool = False,
) -> tuple[Any, Info]:
    """Minimize ``norm(A(x) - b)**2 + damp**2 * norm(x)**2`` over all ranks, for any linear ``A``.

    The adjoint of ``A`` is derived from ``A``. Each iteration takes two global reductions, in
    addition to the communication of ``A`` and of its adjoint.

    Args:
        A: function that takes this rank's elements of a vector like ``x0``, and returns this rank's
            elements of a vector like ``b``. All ranks call it together.
        b: this rank's elements of the right-hand side, in an array of any shape, which may differ
            between ranks; or a pytree of arrays.
        x0: initial guess, which has the shapes of the solution; by default zeros like ``b``.
        damp: weight of the solution's norm.
        tol: relative tolerance. Converged when ``norm(g) <= max(tol * norm(adjoint(b)), atol)``
            with ``g = adjoint(b - A(x)) - damp**2 * x``.
        atol: absolute tolerance, see ``tol``.
        maxiter: maximum number of iterations, by default 10 times the number of elements of the
            solution on all ranks.
        monitor: as for :func:`cg`, but called with ``norm(g)``.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        reproducible: whether the bits of the result must not depend on how the vectors are
            distributed, provided that the bits of ``A`` and of its adjoint do not. The adjoint adds
            the contributions of other ranks last, so interface elements with three or more terms
            are rounded differently.

    Returns:
        Tuple of this rank's elements of the solution, like ``x0``, and an :class:`Info`, as from
        :func:`cg`. ``residual_norm`` is the norm of ``b - A(x)``.

    Raises:
        TypeError: if ``A`` is not a function, or returns complex numbers where ``b`` and ``x0`` are
            real.
        ValueError: if what ``A`` returns does not have the shapes of ``b``.

    Derivative:
        The derivative of the solution with respect to ``b``, ``damp`` and everything that ``A``
        closes over, by conjugate gradients for the normal equations with the same tolerances. ``A``
        must have full column rank, or ``damp`` must be positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> A = lambda x: jnp.array([x[0], x[0], x[1]])
        >>> x, _ = mpi4jax.linalg.lsmr(A, jnp.array([1.0, 3.0, 5.0]), jnp.zeros(2))
        >>> [round(float(v), 4) for v in x]
        [2.0, 5.0]

    See also: :func:`cg`, :func:`minres`.
    """
    check("lsmr", {"A": A}, monitor, None, None)
    space = Space("lsmr", comm, reproducible)
    given, _ = ravel_pytree(krylov.inexact("lsmr", "b", b))
    start, tree_x = ravel_pytree(krylov.inexact("lsmr", "x0", b if x0 is None else x0))
    dtype = jnp.promote_types(given.dtype, start.dtype)
    wide = wide_of(dtype)
    given, start = given.astype(wide), lax.stop_gradient(start).astype(wide)
    if x0 is None:
        start = jnp.zeros_like(start)
    rows = given.size
    # Damping adds rows to the matrix, and zeros to `b`.
    given = jnp.concatenate([given, jnp.zeros_like(start)])

    def rows_of(x: Vector) -> Vector:
        y = A(tree_x(x.astype(dtype)))
        krylov.check_result("lsmr", "A", y, b, "'b'", dtype)
        return jnp.concatenate([ravel_pytree(y)[0].astype(wide), damp * x])

    # Arrays that `A` closes over become arguments, so that they have derivatives. `fixed` is left
    # out of the products, because its operations on bits have no derivative.
    product, closed = jax.closure_convert(rows_of, start)

    # This must be outside loops, because it runs the operations of `A` once, on zeros.
    def adjoint_of(*closed: Any) -> Operator:
        transposed = jax.linear_transpose(lambda x: product(x, *closed), start)
        return lambda y: jnp.conj(transposed(jnp.conj(y))[0])

    @jax.custom_jvp
    def minimum(given: Vector, *closed: Any) -> tuple[Vector, Info]:
        def forward(x: Vector) -> Vector:
            return space.fixed(product(x, *closed))

        backward = adjoint_of(*closed)

        def adjoint(y: Vector) -> Vector:
            return space.fixed(backward(y))

        scale = krylov.scale_of(space, given)
        b = given / scale
        of_b = space.square(adjoint(b))
        small = jnp.maximum(tol**2 * of_b, (jnp.asarray(atol, of_b.dtype) / scale) ** 2)
        most = krylov.most_iterations(space, maxiter, start.size)
        limits = krylov.Limits(small, most, 0.25, krylov.reporter(monitor, scale))
        first = jnp.where(of_b == 0, 0, start / scale)

        def measure(x: Vector) -> tuple[Vector, jax.Array]:
            r = b - forward(x)
            return r, space.square(adjoint(r))

        method = functools.partial(krylov.lsmr, space, forward, adjoint)
        x, r, _, k, reason = krylov.solved(measure, method, first, limits)
        left = jnp.sqrt(space.square(r[:rows])) * scale
        return x * scale, Info(k, left, reason)

    @minimum.defjvp
    def of_tangents(primals: Any, tangents: Any) -> Any:
        """Differentiate the condition that the gradient of the minimized function is zero."""
        x, info = minimum(*primals)

        def gradient(given: Vector, *closed: Any) -> Vector:
            return adjoint_of(*closed)(given - product(x, *closed))

        backward = adjoint_of(*primals[1:])

        def normal(v: Vector) -> Vector:
            return backward(product(v, *primals[1:]))

        _, slope = jax.jvp(gradient, primals, tangents)
        t, _ = cg(normal, slope, tol=tol, atol=atol, comm=comm, reproducible=reproducible)
        none: Any = np.zeros((), jax.dtypes.float0)
        return (x, info), (t, Info(none, jnp.zeros_like(info.residual_norm), none))

    x, info = minimum(given, *closed)
    return tree_x(x.astype(dtype)), jax.tree.map(lax.stop_gradient, info)
