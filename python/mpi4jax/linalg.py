"""Iterative solvers for vectors of which each rank has a part.

They have the signatures of :mod:`jax.scipy.sparse.linalg`, and ``comm``. The operator takes and
returns this rank's part, and communicates as it likes; scalar products are over all ranks, one
message for all that are needed at once. Derivatives are implicit, of the solution and not of the
iteration, in forward and in reverse mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

from ._check.misuse import agreed
from .notoken import allreduce

__all__ = ["bicgstab", "cg", "gmres"]

Vector = jax.Array  # this rank's part of one
Operator = Callable[[Vector], Vector]


class _Space:
    """The vectors of a solve: their products, and when they are small enough."""

    def __init__(self, comm: MPI.Intracomm | None, tol: Any, atol: Any, maxiter: int | None):
        self.comm, self.tol, self.atol, self.maxiter = comm, tol, atol, maxiter

    def products(self, *pairs: tuple[Vector, Vector]) -> jax.Array:
        """Scalar products over all ranks, in one message. A matrix stands for its rows."""
        local = [jnp.conj(a) @ b for a, b in pairs]
        return allreduce(jnp.concatenate([jnp.atleast_1d(p) for p in local]), comm=self.comm)

    def limits(self, b: Vector) -> tuple[jax.Array, jax.Array]:
        """The square of the norm at which a residual is small, and the number of iterations."""
        size = jnp.asarray(b.size, b.real.dtype)
        squares, rows = allreduce(jnp.stack([jnp.vdot(b, b).real, size]), comm=self.comm)
        limit = jnp.maximum(self.tol**2 * squares, jnp.asarray(self.atol, squares.dtype) ** 2)
        return limit, 10 * rows if self.maxiter is None else jnp.asarray(self.maxiter, rows.dtype)


def _cg(space: _Space, M: Operator, A: Operator, b: Vector, x: Vector) -> Vector:
    limit, most = space.limits(b)

    def measured(r: Vector) -> tuple[Vector, jax.Array, jax.Array]:
        z = M(r)
        gamma, squares = space.products((r, z), (r, r))
        return z, gamma, squares.real

    def go_on(state: Any) -> Any:
        return agreed((state[-1] < most) & (state[-2] > limit))

    def step(state: Any) -> Any:
        x, r, p, gamma, _, k = state
        Ap = A(p)
        alpha = gamma / space.products((p, Ap))[0]
        x, r = x + alpha * p, r - alpha * Ap
        z, new, squares = measured(r)
        return x, r, z + new / gamma * p, new, squares, k + 1

    r = b - A(x)
    z, gamma, squares = measured(r)
    return lax.while_loop(go_on, step, (x, r, z, gamma, squares, jnp.zeros_like(most)))[0]


def _bicgstab(space: _Space, M: Operator, A: Operator, b: Vector, x: Vector) -> Vector:
    limit, most = space.limits(b)

    def go_on(state: Any) -> Any:
        *_, rho, omega, squares, k = state
        # A zero is a breakdown: there is no next direction.
        return agreed((k < most) & (squares > limit) & (rho != 0) & (omega != 0))

    def step(state: Any) -> Any:
        x, r, p, rho, _, _, k = state
        Mp = M(p)
        q = A(Mp)
        alpha = rho / space.products((first, q))[0]
        s = r - alpha * q
        Ms = M(s)
        t = A(Ms)
        ss, ts, tt = space.products((s, s), (t, s), (t, t))
        done = ss.real <= limit  # then t may be zero
        omega = jnp.where(done, 0, ts / jnp.where(tt == 0, 1, tt))
        x, r = x + alpha * Mp + omega * Ms, s - omega * t
        new, squares = space.products((first, r), (r, r))
        beta = new / rho * alpha / jnp.where(omega == 0, 1, omega)
        return x, r, r + beta * (p - omega * q), new, omega, squares.real, k + 1

    r = first = b - A(x)
    (squares,) = space.products((r, r))
    one = jnp.ones_like(squares)
    state = (x, r, r, squares, one, squares.real, jnp.zeros_like(most))
    return lax.while_loop(go_on, step, state)[0]


def _gmres(restart: int, space: _Space, M: Operator, A: Operator, b: Vector, x: Vector) -> Vector:
    limit, most = space.limits(M(b))

    def residual(x: Vector) -> tuple[Vector, jax.Array]:
        r = M(b - A(x))
        return r, space.products((r, r))[0].real

    def extend(j: Any, state: Any) -> Any:
        """One more vector of the Krylov space, orthogonal to those before."""
        V, H = state
        w = M(A(V[j]))
        h = space.products((V, w))
        w = w - h @ V
        # Once more, for what rounding has left. What that takes from the square is little.
        *again, squares = space.products((V, w), (w, w))
        again = jnp.stack(again)
        w = w - again @ V
        norm = jnp.sqrt(jnp.maximum(squares.real - jnp.vdot(again, again).real, 0))
        h = h + again
        # Else the space holds the solution, and the columns that follow are zero.
        is_new = norm > 10 * jnp.finfo(norm.dtype).eps * jnp.linalg.norm(h)
        w = jnp.where(is_new, w / jnp.where(is_new, norm, 1), 0)
        return V.at[j + 1].set(w), H.at[:, j].set(h.at[j + 1].set(jnp.where(is_new, norm, 0)))

    def step(state: Any) -> Any:
        x, r, squares, k = state
        norm = jnp.sqrt(squares)
        V = jnp.zeros((restart + 1, b.size), b.dtype).at[0].set(r / norm)
        H = jnp.zeros((restart + 1, restart), b.dtype)
        V, H = lax.fori_loop(0, restart, extend, (V, H))
        Q, R = jnp.linalg.qr(H)
        R = R + jnp.diag(jnp.where(jnp.diag(R) == 0, 1, 0).astype(R.dtype))
        rotated = norm * jnp.conj(Q[0])
        y = lax.linalg.triangular_solve(R, rotated[:, None], left_side=True)[:, 0]
        x = x + y @ V[:-1]
        return x, *residual(x), k + 1

    def go_on(state: Any) -> Any:
        *_, squares, k = state
        return agreed((k < most) & (squares > limit))

    return lax.while_loop(go_on, step, (x, *residual(x), jnp.zeros_like(most)))[0]


def _solve(
    name: str,
    method: Any,
    symmetric: bool,
    A: Any,
    b: Any,
    x0: Any,
    M: Any,
    space: _Space,
) -> tuple[Any, None]:
    for argument, function in (("A", A), ("M", M)):
        if not callable(function) and function is not None:
            raise TypeError(
                f"{name}: argument '{argument}' must be a function of this rank's part of a "
                f"vector, got {type(function).__name__}"
            )
    inexact = functools.partial(jax.tree.map, lambda v: jnp.asarray(v) * 1.0)
    flat, tree = ravel_pytree(inexact(b))

    def on_flat(f: Any) -> Operator:
        return lambda v: ravel_pytree(f(tree(v)))[0]

    shapes = functools.partial(jax.tree.map, jnp.shape)
    if x0 is not None and shapes(x0) != shapes(b):
        raise ValueError(
            f"{name}: argument 'x0' must have the shapes of 'b', {shapes(b)}, got {shapes(x0)}"
        )
    start = jnp.zeros_like(flat) if x0 is None else ravel_pytree(inexact(x0))[0]
    start = lax.stop_gradient(start).astype(flat.dtype)
    precondition = (lambda v: v) if M is None else on_flat(M)
    solve = functools.partial(method, space, precondition)
    x = lax.custom_linear_solve(
        on_flat(A),
        flat,
        lambda matvec, b: solve(matvec, b, start),
        # Of another equation, `x0` is no guess.
        transpose_solve=lambda vecmat, b: solve(vecmat, b, jnp.zeros_like(b)),
        symmetric=symmetric and not jnp.iscomplexobj(flat),
    )
    return tree(x), None


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[Any, None]:
    """Solve ``A(x) = b`` by conjugate gradients, for a Hermitian and positive definite ``A``.

    Two messages for scalar products an iteration, beside those of ``A`` and ``M``.

    Args:
        A: function of this rank's part of a vector, that returns this rank's part of the result.
            All ranks call it alike.
        b: this rank's part of the right-hand side, of any shape, and any length also on other
            ranks; or a pytree of arrays.
        x0: where to start, like ``b``; by default zeros.
        tol: relative tolerance: solved is what has a residual of norm ``tol * norm(b)``, over all
            ranks.
        atol: absolute tolerance: or of this norm.
        maxiter: the most iterations, by default 10 for each number of the whole vector.
        M: function like ``A``, an approximation of its inverse, Hermitian and positive definite.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Returns:
        Tuple of this rank's part of the solution, like ``b``, and None.

    Raises:
        TypeError: ``A`` or ``M`` is no function.
        ValueError: ``x0`` is not like ``b``.

    Derivative:
        That of the solution, with respect to ``b`` and to all that ``A`` closes over: one more
        solve, in forward and in reverse mode.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4jax import linalg, notoken
        >>> def A(x):  # 3 x + the sum of all elements
        ...     return 3 * x + notoken.pvary(notoken.allreduce(x.sum()))
        >>> x, _ = linalg.cg(A, jnp.ones(2))
        >>> bool(jnp.allclose(x, 1 / (3 + 2 * mpi4jax.default_comm().size)))
        True

    See also: :func:`bicgstab`, :func:`gmres`.
    """
    return _solve("cg", _cg, True, A, b, x0, M, _Space(comm, tol, atol, maxiter))


def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[Any, None]:
    """Solve ``A(x) = b`` by stabilised biconjugate gradients, for any ``A``.

    Three messages for scalar products an iteration, beside those of ``A`` and ``M``, each of which
    is called twice. Arguments, results, errors and derivatives are those of :func:`cg`; nothing has
    to be Hermitian. In reverse mode ``M`` preconditions the transposed equation, too.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4jax import linalg
        >>> x, _ = linalg.bicgstab(lambda x: 4 * x, jnp.ones(2))
        >>> x.tolist()
        [0.25, 0.25]

    See also: :func:`gmres`.
    """
    return _solve("bicgstab", _bicgstab, False, A, b, x0, M, _Space(comm, tol, atol, maxiter))


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[Any, None]:
    """Solve ``A(x) = b`` by generalised minimal residuals, for any ``A``.

    Two messages for scalar products for each vector of the Krylov space, beside those of ``A`` and
    ``M``. Arguments, results, errors and derivatives are those of :func:`cg`; nothing has to be
    Hermitian. In reverse mode ``M`` preconditions the transposed equation, too.

    Args:
        restart: dimension of the Krylov space: so many vectors are kept. The residual is looked at,
            and the space begun anew, after so many steps.
        maxiter: the most restarts.
        tol, atol: of the residual to which ``M`` was applied, relative to ``M(b)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4jax import linalg
        >>> x, _ = linalg.gmres(lambda x: 4 * x, jnp.ones(2), restart=2)
        >>> [round(v, 5) for v in x.tolist()]
        [0.25, 0.25]

    See also: :func:`bicgstab`.
    """
    method = functools.partial(_gmres, restart)
    return _solve("gmres", method, False, A, b, x0, M, _Space(comm, tol, atol, maxiter))
