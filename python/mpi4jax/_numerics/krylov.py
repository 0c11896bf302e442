"""Krylov methods for vectors whose elements are distributed over the ranks.

A method takes a residual, and returns a correction of the solution, with the number of its
iterations. :func:`solved` calls it until the true residual, not the one that the method updates by
recurrence, is small, or gets no smaller. Vectors are flat, and have at least 32 bits a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from ..ops import allreduce
from .base import as_array, as_comm
from .reproducible import reproducible_sum

Vector = jax.Array  # this rank's part of one
Operator = Callable[[Vector], Vector]

inexact = functools.partial(jax.tree.map, lambda v: as_array(v) * 1.0)


class Info(NamedTuple):
    """Outcome of a solve.

    Attributes:
        iterations: number of iterations, counted like ``maxiter``; an integer.
        residual_norm: norm over all ranks of ``b - A(x)``, computed from ``x``; at least float32.
        converged: whether the tolerance was met.
    """

    iterations: jax.Array
    residual_norm: jax.Array
    converged: jax.Array


class Space:
    """Inner products and sums of the vectors of a solve.

    With ``reproducible``, their bits do not depend on the distribution of the vectors.
    """

    def __init__(self, comm: MPI.Intracomm | None, reproducible: bool):
        self.comm, self.reproducible = comm, reproducible

    def products(self, *pairs: tuple[Any, Vector]) -> list[jax.Array]:
        """Return inner products, by one reduction. A matrix stands for its rows."""
        if self.reproducible:
            terms = [_terms(a, b) for a, b in pairs]
            sums = reproducible_sum(terms, axis=-1, comm=self.comm)
            return [_of_parts(parts) for parts in sums]
        local = [jnp.conj(a) @ b for a, b in pairs]
        total = allreduce(jnp.concatenate([jnp.atleast_1d(p) for p in local]), comm=self.comm)
        ends = [0]
        for p in local:
            ends.append(ends[-1] + p.size)
        cut = zip(local, ends, ends[1:], strict=False)
        return [total[start:end].reshape(p.shape) for p, start, end in cut]

    def square(self, v: Vector) -> jax.Array:
        """Return the square of the norm."""
        return self.products((v, v))[0].real

    def fixed(self, x: jax.Array) -> jax.Array:
        """Return a vector that is rounded before anything is added to it."""
        return _fixed(x) if self.reproducible else x

    def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the product, with each of its parts rounded."""
        if not self.reproducible:
            return a * b
        if not (jnp.iscomplexobj(a) or jnp.iscomplexobj(b)):
            return _fixed(a * b)
        re, im = self.times(jnp.real(a), jnp.real(b)), self.times(jnp.real(a), jnp.imag(b))
        re = re - self.times(jnp.imag(a), jnp.imag(b))
        return lax.complex(re, im + self.times(jnp.imag(a), jnp.real(b)))

    def plus(self, x: Vector, factor: jax.Array, y: Vector) -> Vector:
        """``x + factor * y``."""
        return x + self.times(factor, y)

    def length(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``sqrt(a**2 + b**2)``."""
        return jnp.sqrt(self.times(a, a) + self.times(b, b))

    def combined(self, factors: jax.Array, rows: jax.Array) -> Vector:
        """Return the sum of the rows of a matrix, each with its factor."""
        if not self.reproducible:
            return factors @ rows
        start = jnp.zeros_like(rows[0])
        each = (factors, rows)
        return lax.scan(lambda x, row: (self.plus(x, *row), None), start, each)[0]


def _terms(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """Return the terms of an inner product: products, each of them rounded."""
    if not jnp.iscomplexobj(a):
        return [a * b]
    real = [a.real * b.real, a.imag * b.imag]
    imaginary = [a.real * b.imag, -a.imag * b.real]
    return [jnp.concatenate(real, -1), jnp.concatenate(imaginary, -1)]


def _of_parts(parts: list[jax.Array]) -> jax.Array:
    return lax.complex(*parts) if len(parts) == 2 else parts[0]


def _fixed(x: jax.Array) -> jax.Array:
    """Return the number unchanged, but rounded before anything is added to it.

    Whether XLA fuses a multiplication and an addition into one instruction may depend on the length
    of a vector. It cannot do so across an operation on the bits, even one that changes nothing: the
    only number whose bits are all set is a NaN.
    """
    if jnp.iscomplexobj(x):
        return lax.complex(_fixed(x.real), _fixed(x.imag))
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integer)
    return lax.bitcast_convert_type(bits ^ (bits == -1).astype(integer), x.dtype)


def _quotient(a: Any, b: Any) -> jax.Array:
    """Return the quotient, or zero if the divisor is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


class Limits(NamedTuple):
    """The criteria that stop a solve.

    Attributes:
        square: square of the norm below which the solve has converged.
        most: the number of iterations.
        progress: factor by which the square of the residual has to fall; otherwise the solve stops.
    """

    square: jax.Array
    most: jax.Array
    progress: float


def most_iterations(space: Space, maxiter: int | None, size: int) -> jax.Array:
    """Return ``maxiter``, by default 10 times the number of elements on all ranks."""
    if maxiter is not None:
        return jnp.asarray(maxiter, jnp.int32)
    room = (2**31 - 1) // 10 // as_comm("linalg", space.comm).size
    return 10 * allreduce(jnp.asarray(min(size, room), jnp.int32), comm=space.comm)


def scale_of(space: Space, b: Vector) -> jax.Array:
    """Return a power of two of the size of the largest element: squares neither overflow nor
    vanish."""
    mine = jnp.max(jnp.abs(b), initial=0)
    largest = allreduce(mine, op=MPI.MAX, comm=space.comm)
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    least = jnp.finfo(largest.dtype).minexp // 2  # its inverse is a number, too
    return jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, least))


Measure = Callable[[Vector], tuple[Vector, jax.Array]]
Method = Callable[[Vector, Limits], tuple[Vector, jax.Array]]


def solved(
    measure: Measure, method: Method, x: Vector, limits: Limits
) -> tuple[Vector, Vector, jax.Array, jax.Array]:
    """Apply corrections by a method until the residual is small.

    Args:
        measure: gives the residual of a vector, and the square of the norm that has to be small.
        method: gives a correction for a residual, and after how many iterations.
        x: where to start.
        limits: when to end.

    Returns:
        The solution, its residual, the square of the norm, and the number of iterations.
    """

    def go_on(state: Any) -> Any:
        *_, square, last, k = state
        is_better = square < limits.progress * last
        return (k < limits.most) & (square > limits.square) & is_better

    def step(state: Any) -> Any:
        x, r, square, last, k = state
        d, more = method(r, limits._replace(most=limits.most - k))
        y = x + d
        s, new = measure(y)
        # The first step is taken even if the norm grew: some methods reduce it only at the end.
        taken = (new < square) | (jnp.isinf(last) & jnp.isfinite(new))
        x, r, new = (jnp.where(taken, a, b) for a, b in ((y, x), (s, r), (new, square)))
        return x, r, new, square, k + more

    r, square = measure(x)
    state = (x, r, square, jnp.full_like(square, jnp.inf), jnp.zeros_like(limits.most))
    x, r, square, _, k = lax.while_loop(go_on, step, state)
    return jnp.where(jnp.isnan(square), square, x), r, square, k


def cg(
    space: Space, M: Operator, A: Operator, r: Vector, limits: Limits
) -> tuple[Vector, jax.Array]:
    """Hestenes and Stiefel, J. Res. Nat. Bur. Standards 49, 1952."""

    def measured(r: Vector) -> tuple[Vector, jax.Array, jax.Array]:
        z = M(r)
        gamma, square = space.products((r, z), (r, r))
        return z, gamma, square.real

    def go_on(state: Any) -> Any:
        *_, gamma, square, k = state
        return (k < limits.most) & (square > limits.square) & (gamma != 0)

    def step(state: Any) -> Any:
        x, r, p, gamma, _, k = state
        Ap = A(p)
        (curvature,) = space.products((p, Ap))
        alpha = _quotient(gamma, curvature)
        x, r = space.plus(x, alpha, p), space.plus(r, -alpha, Ap)
        z, new, square = measured(r)
        new = jnp.where(curvature == 0, 0, new)  # there is no next direction
        return x, r, space.plus(z, new / gamma, p), new, square, k + 1

    z, gamma, square = measured(r)
    state = (jnp.zeros_like(r), r, z, gamma, square, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k


def bicgstab(
    space: Space, M: Operator, A: Operator, r: Vector, limits: Limits
) -> tuple[Vector, jax.Array]:
    """van der Vorst, "Bi-CGSTAB", SIAM J. Sci. Stat. Comput. 13, 1992."""
    first, plus = r, space.plus

    def go_on(state: Any) -> Any:
        *_, rho, omega, square, k = state
        # A zero is a breakdown: there is no next direction.
        is_small = square <= limits.square
        return (k < limits.most) & ~is_small & (rho != 0) & (omega != 0)

    def step(state: Any) -> Any:
        x, r, p, rho, _, _, k = state
        Mp = M(p)
        q = A(Mp)
        alpha = _quotient(rho, space.products((first, q))[0])
        s = plus(r, -alpha, q)
        Ms = M(s)
        t = A(Ms)
        ss, ts, tt = space.products((s, s), (t, s), (t, t))
        done = ss.real <= limits.square  # then t may be zero
        omega = jnp.where(done, 0, _quotient(ts, tt))
        x, r = plus(plus(x, alpha, Mp), omega, Ms), plus(s, -omega, t)
        new, square = space.products((first, r), (r, r))
        beta = new / rho * _quotient(alpha, omega)
        return x, r, plus(r, beta, plus(p, -omega, q)), new, omega, square.real, k + 1

    (square,) = space.products((r, r))
    one = jnp.ones_like(square)
    state = (jnp.zeros_like(r), r, r, square, one, square.real, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k


def gmres(
    restart: int, space: Space, M: Operator, A: Operator, r: Vector, limits: Limits
) -> tuple[Vector, jax.Array]:
    """Run until the next restart: Saad and Schultz, "GMRES", SIAM J. Sci. Stat. Comput. 7, 1986."""

    def extend(j: Any, state: Any) -> Any:
        """Return one more vector of the Krylov space, orthogonal to those before."""
        V, H = state
        w = A(M(V[j]))
        (h,) = space.products((V, w))
        w = w - space.combined(h, V)
        # Orthogonalised twice, because of rounding; the second time changes the norm little.
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
    return M(space.combined(y, V[:-1])), jnp.ones_like(limits.most)


def minres(
    space: Space, M: Operator, A: Operator, r: Vector, limits: Limits
) -> tuple[Vector, jax.Array]:
    """Elman, Silvester, Wathen, "Finite Elements and Fast Iterative Solvers", algorithm 4.1."""
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
        after = plus(plus(Az, -delta / gamma, v), -_quotient(gamma, old), before)
        z_after, new = normed(after)
        a = times(c1, delta) - times(c0 * s1, gamma)
        b = space.length(a, new)
        c2, s2 = _quotient(a, b), _quotient(new, b)
        above = plus(plus(z, -s0 * gamma, last), -(times(s1, delta) + times(c0 * c1, gamma)), w)
        above = _quotient(above, b)
        x = plus(x, c2 * eta, above)
        rotations = ((gamma, new), (c1, c2), (s1, s2))
        return x, v, after, z_after, w, above, *rotations, -s2 * eta, k + 1

    z, gamma = normed(r)
    # The recurrence has the residual's norm in the inner product of M, so the limit is scaled.
    small = limits.square * _quotient(gamma**2, space.square(r))
    none, zero, one = jnp.zeros_like(r), jnp.zeros_like(gamma), jnp.ones_like(gamma)
    rotations = ((zero, gamma), (one, one), (zero, zero))
    state = (none, none, r, z, none, none, *rotations, gamma, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k


def lsmr(
    space: Space, A: Operator, adjoint: Operator, r: Vector, limits: Limits
) -> tuple[Vector, jax.Array]:
    """Fong and Saunders, "LSMR", SIAM J. Sci. Comput. 33, 2011: sections 2.8 and 5."""

    def normed(v: Vector) -> tuple[Vector, jax.Array]:
        norm = jnp.sqrt(space.square(v))
        return _quotient(v, norm), norm

    def go_on(state: Any) -> Any:
        *_, zeta, k = state
        return (k < limits.most) & (zeta**2 > limits.square)

    def step(state: Any) -> Any:
        x, u, v, h, g, alpha, inner, rho, outer, cosine, sine, zeta, k = state
        u, beta = normed(space.plus(A(v), -alpha, u))
        v, alpha = normed(space.plus(adjoint(u), -beta, v))
        last, rho = rho, space.length(inner, beta)
        theta, inner = _quotient(beta, rho) * alpha, _quotient(inner, rho) * alpha
        over, below = sine * rho, cosine * rho
        old, outer = outer, space.length(below, theta)
        cosine, sine = _quotient(below, outer), _quotient(theta, outer)
        g = space.plus(h, -_quotient(over * rho, last * old), g)
        x = space.plus(x, _quotient(cosine * zeta, rho * outer), g)
        h = space.plus(v, -_quotient(theta, rho), h)
        return x, u, v, h, g, alpha, inner, rho, outer, cosine, sine, -sine * zeta, k + 1

    u, beta = normed(r)
    v, alpha = normed(adjoint(u))
    none, one = jnp.zeros_like(v), jnp.ones_like(alpha)
    scalars = (alpha, alpha, one, one, one, jnp.zeros_like(one), alpha * beta)
    state = (none, u, v, v, none, *scalars, jnp.zeros_like(limits.most))
    x, *_, k = lax.while_loop(go_on, step, state)
    return x, k


def least_squares(
    space: Space, A: Operator, adjoint: Operator, b: Vector, x: Vector, limits: Limits
) -> tuple[Vector, Vector, jax.Array, jax.Array]:
    """Run :func:`solved` with :func:`lsmr`, until ``adjoint`` of the residual is small."""

    def measure(x: Vector) -> tuple[Vector, jax.Array]:
        r = b - A(x)
        return r, space.square(adjoint(r))

    return solved(measure, functools.partial(lsmr, space, A, adjoint), x, limits)


def equation(
    space: Space, A: Operator, b: Vector, x: Vector, method: Method, limits: Limits
) -> tuple[Vector, Vector, jax.Array, jax.Array]:
    """Run :func:`solved` with a method for ``A(x) = b``."""

    def measure(x: Vector) -> tuple[Vector, jax.Array]:
        r = b - A(x)
        return r, space.square(r)

    return solved(measure, method, x, limits)
