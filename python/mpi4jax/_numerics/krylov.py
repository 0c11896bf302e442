"""Krylov methods for vectors whose elements are distributed over the ranks.

A method takes a residual, and returns a correction of the solution, the number of its iterations,
and a :class:`Reason` or zero. :func:`solved` calls the method until the true residual, not the one
that the method updates by recurrence, is small, or gets no smaller. Vectors have one axis, and a
dtype of at least float32.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

from ..ops import allreduce
from .arrays import as_array
from .space import Space, Vector

Operator = Callable[[Vector], Vector]


def inexact(op: str, name: str, tree: Any) -> Any:
    """Return an argument as a pytree of arrays of real or complex floating-point numbers."""
    return jax.tree.map(lambda leaf: as_array(op, name, leaf) * 1.0, tree)


class Reason(enum.IntEnum):
    """Why a solve has stopped; the value is positive if the solve has converged.

    Attributes:
        TOLERANCE: the tolerance is met.
        ITERATIONS: ``maxiter`` was reached.
        STAGNATION: the residual norm, computed from the solution, falls no more.
        BREAKDOWN: a divisor of the method is zero, or a number is infinite or NaN.
        INDEFINITE: in ``cg``, ``A`` or ``M`` is neither positive nor negative definite: the steps
            along two search directions had different signs, or a direction has no curvature. Use
            :func:`minres` or :func:`gmres`.
    """

    TOLERANCE = 1
    ITERATIONS = -1
    STAGNATION = -2
    BREAKDOWN = -3
    INDEFINITE = -4


class Info(NamedTuple):
    """Outcome of a solve.

    Attributes:
        iterations: number of iterations, counted like ``maxiter``; an integer.
        residual_norm: norm over all ranks of ``b - A(x)``, computed from ``x``; at least float32.
        reason: value of a :class:`Reason`, an integer array; outside of :func:`jax.jit`,
            ``Reason(int(info.reason)).name`` is the name.
        converged: whether the tolerance was met: ``reason > 0``.
    """

    iterations: jax.Array
    residual_norm: jax.Array
    reason: jax.Array

    @property
    def converged(self) -> jax.Array:
        return self.reason > 0


def quotient(a: Any, b: Any) -> jax.Array:
    """Return the quotient, or zero if the divisor is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


class Limits(NamedTuple):
    """The criteria that stop a solve.

    Attributes:
        square: square of the norm below which the solve has converged.
        most: maximum number of iterations.
        progress: the solve stops unless each correction reduces the square of the residual norm
            below ``progress`` times its last value.
        report: called with the number of an iteration and the square of the residual norm.
    """

    square: jax.Array
    most: jax.Array
    progress: float
    report: Callable[[Any, Any], None]


def reporter(monitor: Callable[[Any, Any], Any] | None, scale: jax.Array) -> Callable[..., None]:
    """Return the ``report`` of :class:`Limits` that calls a user's function."""

    def report(k: Any, square: jax.Array) -> None:
        if monitor is not None:
            jax.debug.callback(monitor, k, jnp.sqrt(square) * scale)

    return report


def most_iterations(space: Space, maxiter: int | None, size: int) -> jax.Array:
    """Return ``maxiter``, by default 10 times the number of elements on all ranks."""
    if maxiter is not None:
        return jnp.asarray(maxiter, jnp.int32)
    room = (2**31 - 1) // 10 // space.comm.Get_size()
    return 10 * allreduce(jnp.asarray(min(size, room), jnp.int32), comm=space.comm)


def scale_of(space: Space, b: Vector) -> jax.Array:
    """Return a power of two near the largest absolute value of all ranks.

    Squares of the elements of a vector that is divided by it neither overflow nor vanish.
    """
    mine = jnp.max(jnp.abs(b), initial=0)
    largest = allreduce(mine, op=MPI.MAX, comm=space.comm)
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    least = jnp.finfo(largest.dtype).minexp // 2  # so that its inverse is finite
    return jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, least))


def reason_if(condition: Any, reason: Any, otherwise: Any) -> jax.Array:
    return jnp.where(condition, reason, otherwise).astype(jnp.int32)


Measure = Callable[[Vector], tuple[Vector, jax.Array]]
# A vector, the number of iterations, and a reason or zero.
Correction = tuple[Vector, jax.Array, jax.Array]
Method = Callable[[Vector, Limits], Correction]
Solution = tuple[Vector, Vector, jax.Array, jax.Array, jax.Array]  # see `solved`


def solved(measure: Measure, method: Method, x: Vector, limits: Limits) -> Solution:
    """Apply corrections by a method until the residual is small.

    Args:
        measure: returns the residual of a vector, and the square of the norm that must become
            small.
        method: returns a correction for a residual.
        x: initial guess.
        limits: criteria that stop the solve.

    Returns:
        The solution, its residual, the square of the norm, the number of iterations, and the
        reason.
    """

    def go_on(state: Any) -> Any:
        *_, square, last, k, _ = state
        is_better = square < limits.progress * last
        return (k < limits.most) & (square > limits.square) & is_better

    def step(state: Any) -> Any:
        x, r, square, last, k, _ = state
        rest = limits._replace(
            most=limits.most - k, report=lambda more, square: limits.report(k + more, square)
        )
        d, more, why = method(r, rest)
        y = x + d
        s, new = measure(y)
        why = reason_if(jnp.isfinite(new), why, Reason.BREAKDOWN)
        # The first step is accepted even if the norm grew, because some methods reduce it only at
        # the end.
        taken = (new < square) | (jnp.isinf(last) & jnp.isfinite(new))
        x, r, new = (jnp.where(taken, a, b) for a, b in ((y, x), (s, r), (new, square)))
        return x, r, new, square, k + more, why

    r, square = measure(x)
    zero = jnp.zeros_like(limits.most)
    limits.report(zero, square)
    state = (x, r, square, jnp.full_like(square, jnp.inf), zero, zero)
    x, r, square, _, k, why = lax.while_loop(go_on, step, state)
    why = reason_if(jnp.isfinite(square), why, Reason.BREAKDOWN)
    stopped = reason_if(k < limits.most, Reason.STAGNATION, Reason.ITERATIONS)
    why = reason_if(square <= limits.square, Reason.TOLERANCE, reason_if(why == 0, stopped, why))
    return jnp.where(jnp.isnan(square), square, x), r, square, k, why


def cg(space: Space, M: Operator, A: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply conjugate gradients (Hestenes and Stiefel, J. Res. Nat. Bur. Standards 49, 1952)."""

    def measured(r: Vector) -> tuple[Vector, jax.Array, jax.Array]:
        z = M(r)
        gamma, square = space.products((r, z), (r, r))
        return z, gamma.real, square.real

    def go_on(state: Any) -> Any:
        *_, gamma, square, _, k = state
        return (k < limits.most) & (square > limits.square) & (gamma != 0)

    def step(state: Any) -> Any:
        x, r, p, gamma, _, last, k = state
        Ap = A(p)
        curvature = space.products((p, Ap))[0].real
        alpha = quotient(gamma, curvature)
        # If A and M are definite, all steps have the same sign.
        indefinite = (curvature == 0) | (alpha * last < 0)
        alpha = jnp.where(indefinite, 0, alpha)
        x, r = space.plus(x, alpha, p), space.plus(r, -alpha, Ap)
        z, new, square = measured(r)
        limits.report(k + 1, square)
        new = jnp.where(indefinite, 0, new)  # there is no next direction
        return x, r, space.plus(z, new / gamma, p), new, square, alpha, k + 1

    z, gamma, square = measured(r)
    state = (jnp.zeros_like(r), r, z, gamma, square, 0 * gamma, jnp.zeros_like(limits.most))
    x, *_, gamma, square, _, k = lax.while_loop(go_on, step, state)
    return x, k, reason_if((gamma == 0) & (square > limits.square), Reason.INDEFINITE, 0)


def bicgstab(space: Space, M: Operator, A: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply BiCGSTAB (van der Vorst, SIAM J. Sci. Stat. Comput. 13, 1992)."""
    first, plus = r, space.plus

    def go_on(state: Any) -> Any:
        *_, rho, omega, square, k = state
        # Zero means a breakdown: there is no next direction.
        is_small = square <= limits.square
        return (k < limits.most) & ~is_small & (rho != 0) & (omega != 0)

    def step(state: Any) -> Any:
        x, r, p, rho, _, _, k = state
        Mp = M(p)
        q = A(Mp)
        alpha = quotient(rho, space.products((first, q))[0])
        s = plus(r, -alpha, q)
        Ms = M(s)
        t = A(Ms)
        ss, ts, tt = space.products((s, s), (t, s), (t, t))
        done = ss.real <= limits.square  # then t may be zero
        omega = jnp.where(done, 0, quotient(ts, tt))
        x, r = plus(plus(x, alpha, Mp), omega, Ms), plus(s, -omega, t)
        new, square = space.products((first, r), (r, r))
        limits.report(k + 1, square.real)
        beta = new / rho * quotient(alpha, omega)
        return x, r, plus(r, beta, plus(p, -omega, q)), new, omega, square.real, k + 1

    (square,) = space.products((r, r))
    one = jnp.ones_like(square)
    state = (jnp.zeros_like(r), r, r, square, one, square.real, jnp.zeros_like(limits.most))
    x, *_, rho, omega, square, k = lax.while_loop(go_on, step, state)
    broken = ((rho == 0) | (omega == 0)) & (square > limits.square)
    return x, k, reason_if(broken, Reason.BREAKDOWN, 0)


def gmres(
    restart: int, space: Space, M: Operator, A: Operator, r: Vector, limits: Limits
) -> Correction:
    """Apply GMRES until the next restart (Saad and Schultz, SIAM J. Sci. Stat. Comput. 7, 1986)."""

    def extend(j: Any, state: Any) -> Any:
        """Return one more vector of the Krylov space, orthogonal to those before."""
        V, H = state
        w = A(M(V[j]))
        (h,) = space.products((V, w))
        w = w - space.combined(h, V)
        # Orthogonalize twice, because of rounding; the second time changes the norm little.
        again, square = space.products((V, w), (w, w))
        w = w - space.combined(again, V)
        less = square.real - jnp.vdot(again, again).real
        norm = jnp.sqrt(space.square(w) if space.reproducible else jnp.maximum(less, 0))
        h = h + again
        # Otherwise the space contains the solution, and the following columns are zero.
        is_new = norm > 10 * jnp.finfo(norm.dtype).eps * jnp.linalg.norm(h)
        w = jnp.where(is_new, w / jnp.where(is_new, norm, 1), 0)
        return V.at[j + 1].set(w), H.at[:, j].set(h.at[j + 1].set(jnp.where(is_new, norm, 0)))

    norm = jnp.sqrt(space.square(r))
    V = jnp.zeros((restart + 1, r.size), r.dtype).at[0].set(r / norm)
    H = jnp.zeros((restart + 1, restart), r.dtype)
    V, H = lax.fori_loop(0, restart, extend, (V, H))
    Q, R = jnp.linalg.qr(H)
    R = R + jnp.diag(jnp.where(jnp.diag(R) == 0, 1, 0).astype(R.dtype))
    rotated = norm * jnp.conj(Q[0])
    y = lax.linalg.triangular_solve(R, rotated[:, None], left_side=True)[:, 0]
    one = jnp.ones_like(limits.most)
    limits.report(one, jnp.sum(jnp.abs((H @ y).at[0].add(-norm)) ** 2))
    return M(space.combined(y, V[:-1])), one, 0 * one


def minres(space: Space, M: Operator, A: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply MINRES: algorithm 4.1 of Elman, Silvester and Wathen, "Finite Elements and Fast
    Iterative Solvers"."""
    plus, times = space.plus, space.times

    def normed(v: Vector) -> tuple[Vector, jax.Array]:
        z = M(v)
        return z, jnp.sqrt(jnp.maximum(space.products((z, v))[0].real, 0))

    def go_on(state: Any) -> Any:
        *_, eta, k = state
        return (k < limits.most) & (eta**2 > small)

    def step(state: Any) -> Any:
        x, before, v, z, last, w, gammas, cosines, sines, eta, k = state
        (old, gamma), (c0, c1), (s0, s1) = gammas, cosines, sines
        z = z / gamma
        Az = A(z)
        delta = space.products((z, Az))[0].real
        after = plus(plus(Az, -delta / gamma, v), -quotient(gamma, old), before)
        z_after, new = normed(after)
        a = times(c1, delta) - times(c0 * s1, gamma)
        b = space.length(a, new)
        c2, s2 = quotient(a, b), quotient(new, b)
        above = plus(plus(z, -s0 * gamma, last), -(times(s1, delta) + times(c0 * c1, gamma)), w)
        above = quotient(above, b)
        x = plus(x, c2 * eta, above)
        limits.report(k + 1, quotient((s2 * eta) ** 2, ratio))
        rotations = ((gamma, new), (c1, c2), (s1, s2))
        return x, v, after, z_after, w, above, *rotations, -s2 * eta, k + 1

    z, gamma = normed(r)
    # The recurrence computes the residual's norm in the inner product of M, so the limit is scaled.
    ratio = quotient(gamma**2, space.square(r))
    small = limits.square * ratio
    none, zero, one = jnp.zeros_like(r), jnp.zeros_like(gamma), jnp.ones_like(gamma)
    rotations = ((zero, gamma), (one, one), (zero, zero))
    state = (none, none, r, z, none, none, *rotations, gamma, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k, 0 * k


def lsmr(space: Space, A: Operator, adjoint: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply LSMR: sections 2.8 and 5 of Fong and Saunders, SIAM J. Sci. Comput. 33, 2011."""

    def normed(v: Vector) -> tuple[Vector, jax.Array]:
        norm = jnp.sqrt(space.square(v))
        return quotient(v, norm), norm

    def go_on(state: Any) -> Any:
        *_, zeta, k = state
        return (k < limits.most) & (zeta**2 > limits.square)

    def step(state: Any) -> Any:
        x, u, v, h, g, alpha, inner, rho, outer, cosine, sine, zeta, k = state
        u, beta = normed(space.plus(A(v), -alpha, u))
        v, alpha = normed(space.plus(adjoint(u), -beta, v))
        last, rho = rho, space.length(inner, beta)
        theta, inner = quotient(beta, rho) * alpha, quotient(inner, rho) * alpha
        over, below = sine * rho, cosine * rho
        old, outer = outer, space.length(below, theta)
        cosine, sine = quotient(below, outer), quotient(theta, outer)
        g = space.plus(h, -quotient(over * rho, last * old), g)
        x = space.plus(x, quotient(cosine * zeta, rho * outer), g)
        h = space.plus(v, -quotient(theta, rho), h)
        limits.report(k + 1, (sine * zeta) ** 2)
        return x, u, v, h, g, alpha, inner, rho, outer, cosine, sine, -sine * zeta, k + 1

    u, beta = normed(r)
    v, alpha = normed(adjoint(u))
    none, one = jnp.zeros_like(v), jnp.ones_like(alpha)
    scalars = (alpha, alpha, one, one, one, jnp.zeros_like(one), alpha * beta)
    state = (none, u, v, v, none, *scalars, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k, 0 * k


def check(name: str, functions: dict[str, Any], monitor: Any, x0: Any, like: Any) -> None:
    """Raise an error about the arguments of a solver."""
    for argument, function in {**functions, "monitor": monitor}.items():
        if not callable(function) and function is not None:
            takes = "this rank's elements of a vector"
            takes = "an iteration number and a norm" if argument == "monitor" else takes
            raise TypeError(
                f"{name}: argument '{argument}' must be a function of {takes}, got "
                f"{type(function).__name__}"
            )
    shapes = functools.partial(jax.tree.map, jnp.shape)
    if x0 is not None and like is not None and shapes(x0) != shapes(like):
        raise ValueError(
            f"{name}: argument 'x0' must have the shapes of 'b', {shapes(like)}, got {shapes(x0)}"
        )


def check_result(name: str, argument: str, y: Any, expected: Any, of: str, dtype: Any) -> None:
    """Raise an error if a user's function has not returned a vector like ``expected``."""
    wanted, got = ([jnp.shape(leaf) for leaf in jax.tree.leaves(v)] for v in (expected, y))
    if got != wanted:
        words = [str(shapes[0] if len(shapes) == 1 else shapes) for shapes in (wanted, got)]
        raise ValueError(
            f"{name}: argument '{argument}' must return a vector of the shapes of {of}, "
            f"{words[0]}, got {words[1]}"
        )
    given = jnp.result_type(dtype, *jax.tree.leaves(y))
    if jnp.issubdtype(given, np.complexfloating) and jnp.issubdtype(dtype, np.floating):
        raise TypeError(
            f"{name}: argument '{argument}' returns {given} for a vector of {dtype}; pass "
            "complex vectors, such as b.astype(complex)"
        )


def wide_of(dtype: Any) -> Any:
    """Return the dtype of the iteration, at least float32: squares underflow in float16."""
    return jnp.promote_types(dtype, jnp.float32)


def vdot(
    op: str, given: dict[str, Any], comm: MPI.Intracomm | None, reproducible: bool
) -> jax.Array:
    """Return the inner product of two vectors of the same shapes; at least float32.

    Args:
        given: the vectors by the names of the arguments, or one vector.
    """
    vectors = [ravel_pytree(inexact(op, name, v))[0] for name, v in given.items()]
    one, two = vectors[0], vectors[-1]
    dtype = wide_of(jnp.promote_types(one.dtype, two.dtype))
    return Space(op, comm, reproducible).products((one.astype(dtype), two.astype(dtype)))[0]


def solve(
    name: str,
    method: Any,
    A: Any,
    b: Any,
    x0: Any,
    M: Any,
    space: Space,
    tol: Any,
    atol: Any,
    maxiter: int | None,
    monitor: Any,
    *,
    symmetric: bool = False,
    progress: float = 0.25,
) -> tuple[Any, Info]:
    check(name, {"A": A, "M": M}, monitor, x0, b)
    flat, tree = ravel_pytree(inexact(name, "b", b))
    wide = wide_of(flat.dtype)

    def on_flat(argument: str, f: Any) -> Operator:
        def of_flat(v: Vector) -> Vector:
            y = f(tree(v))
            check_result(name, argument, y, b, "'b'", flat.dtype)
            return ravel_pytree(y)[0]

        return of_flat

    def in_wide(f: Operator) -> Operator:
        return lambda v: space.fixed(f(v.astype(flat.dtype)).astype(wide))

    start = jnp.zeros_like(flat) if x0 is None else ravel_pytree(inexact(name, "x0", x0))[0]
    start = lax.stop_gradient(start).astype(wide)
    precondition = (lambda v: v) if M is None else in_wide(on_flat("M", M))

    def on_scaled(start: Vector, matvec: Operator, b: Vector) -> tuple[Vector, Info]:
        b = b.astype(wide)
        scale = scale_of(space, b)
        b, A = b / scale, in_wide(matvec)
        given = space.square(b)
        small = jnp.maximum(tol**2 * given, (jnp.asarray(atol, given.dtype) / scale) ** 2)
        most = most_iterations(space, maxiter, b.size)

        def measure(x: Vector) -> tuple[Vector, jax.Array]:
            r = b - A(x)
            return r, space.square(r)

        x, _, square, k, reason = solved(
            measure,
            functools.partial(method, space, precondition, A),
            jnp.where(given == 0, 0, start / scale),
            Limits(small, most, progress, reporter(monitor, scale)),
        )
        x = (x * scale).astype(flat.dtype)
        return x, Info(k, jnp.sqrt(square) * scale, reason)

    x, info = lax.custom_linear_solve(
        on_flat("A", A),
        flat,
        functools.partial(on_scaled, start),
        # `x0` is not a guess for the solution of another equation.
        transpose_solve=functools.partial(on_scaled, jnp.zeros_like(start)),
        symmetric=symmetric and not jnp.iscomplexobj(flat),
        has_aux=True,
    )
    return tree(x), jax.tree.map(lax.stop_gradient, info)
