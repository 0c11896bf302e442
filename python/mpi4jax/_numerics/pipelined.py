"""Krylov methods with one global reduction per iteration.

In exact arithmetic, they are the methods of :mod:`krylov`. Here recurrences update some products
with the operator, and inner products are computed from others, so that rounding errors grow faster.
The residual norm of an iteration is known one iteration later.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .krylov import Correction, Limits, Operator, Reason, quotient, reason_if
from .space import Space, Vector

# Iterations of `cg` after which vectors that recurrences update are computed from the solution.
REPLACE = 50

# `cg` has met a curvature that is a rounding error: the solve starts again from the solution.
RESTART = -100


def _report(limits: Limits, k: jax.Array, square: jax.Array) -> None:
    """Report a residual norm, except for the initial norm, which is reported already."""
    lax.cond(k > 0, lambda: limits.report(k, square), lambda: None)


def cg(space: Space, M: Operator, A: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply pipelined conjugate gradients (Ghysels and Vanroose, Parallel Comput. 40, 2014:
    algorithm 4 and section 5).

    The reduction of an iteration overlaps one application of ``M`` and one of ``A``. Every
    ``REPLACE`` iterations, the residual, and the products that depend on it, are computed anew.
    """
    b, plus = r, space.plus

    def step(state: Any) -> Any:
        x, r, u, w, p, s, q, z, last, _, alpha, k, _ = state
        request, w_during = space.start(w, (r, u), (w, u), (r, r))
        m = M(w_during)
        n = A(m)
        gamma, delta, square = (v.real for v in space.finish(request, n))
        _report(limits, k, square)
        beta = quotient(gamma, last)
        drop = quotient(beta * gamma, alpha)
        curvature = delta - drop
        # If A and M are definite, all steps have the same sign.
        flipped = (curvature == 0) | (curvature * gamma * alpha < 0)
        small = jnp.sqrt(jnp.finfo(square.dtype).eps) * (jnp.abs(delta) + jnp.abs(drop))
        indefinite = (jnp.abs(curvature) > small) | (delta == 0)
        done = square <= limits.square
        why = reason_if(indefinite, Reason.INDEFINITE, RESTART)
        why = reason_if(flipped & ~done, why, 0)
        alpha = jnp.where(done | flipped, 0, quotient(gamma, curvature))
        z, q, s, p = plus(n, beta, z), plus(m, beta, q), plus(w, beta, s), plus(u, beta, p)
        x, r, u, w = plus(x, alpha, p), plus(r, -alpha, s), plus(u, -alpha, q), plus(w, -alpha, z)
        return x, r, u, w, p, s, q, z, gamma, square, alpha, k + ~done, why

    def goes_on(state: Any) -> jax.Array:
        *_, square, _, k, why = state
        return (k < limits.most) & (square > limits.square) & (why == 0)

    def cycle(state: Any) -> Any:
        x, p, *scalars, k, why = state
        r = b - A(x)
        s = A(p)
        u, q = M(r), M(s)
        end = k + REPLACE
        state = (x, r, u, A(u), p, s, q, A(q), *scalars, k, why)
        state = lax.while_loop(lambda state: goes_on(state) & (state[-2] < end), step, state)
        return state[0], state[4], *state[8:]

    zero, start = jnp.zeros_like(r), jnp.zeros_like(limits.square)
    state = (zero, zero, start, start + jnp.inf, start, *2 * [jnp.zeros_like(limits.most)])
    x, *_, k, why = lax.while_loop(goes_on, cycle, state)
    return x, k, reason_if(why == RESTART, 0, why)


def bicgstab(space: Space, M: Operator, A: Operator, r: Vector, limits: Limits) -> Correction:
    """Apply BiCGSTAB with all inner products of an iteration in one reduction.

    With ``s = A p`` and ``z = A s``, all inner products of an iteration are sums of inner products
    of ``r``, ``A r``, ``s`` and ``z`` (Cools and Vanroose, Parallel Comput. 65, 2017, from which
    this differs in that ``A r`` and ``z`` are products, and not updated by recurrences).
    """
    first, plus = r, space.plus

    def goes_on(state: Any) -> jax.Array:
        *_, square, k, why = state
        return (k < limits.most) & (square > limits.square) & (why == 0)

    def step(state: Any) -> Any:
        x, r, Mr, w, Mp, s, Ms, z, _, k, _ = state
        of_first = [(first, v) for v in (r, s, w, z)]
        others = [(r, r), (w, r), (w, s), (z, r), (z, s), (w, w), (w, z), (z, z)]
        rho, fs, fw, fz, rr, wr, ws, zr, zs, ww, wz, zz = space.products(*of_first, *others)
        square = rr.real
        _report(limits, k, square)
        alpha = quotient(rho, fs)
        conj, size = jnp.conj(alpha), jnp.abs(alpha) ** 2
        # Inner products of q = r - alpha s and y = A q.
        yq = wr - alpha * ws - conj * zr + size * zs
        yy = ww.real - 2 * (alpha * wz).real + size * zz.real
        omega = jnp.where(yy > 0, quotient(yq, yy), 0)
        beta = quotient(-alpha * (fw - alpha * fz), rho)
        done = square <= limits.square
        broken = (fs == 0) | (omega == 0) | (rho == 0)
        why = reason_if(broken & ~done, Reason.BREAKDOWN, 0)
        alpha, omega = jnp.where(done, 0, alpha), jnp.where(done, 0, omega)
        x = plus(plus(x, alpha, Mp), omega, plus(Mr, -alpha, Ms))
        r = plus(plus(r, -alpha, s), -omega, plus(w, -alpha, z))
        Mr = M(r)
        w = A(Mr)
        Mp = plus(Mr, beta, plus(Mp, -omega, Ms))
        s = plus(w, beta, plus(s, -omega, z))
        Ms = M(s)
        return x, r, Mr, w, Mp, s, Ms, A(Ms), square, k + ~done, why

    Mr = M(r)
    w = A(Mr)
    Ms = M(w)
    zero = jnp.zeros_like(limits.most)
    state = (jnp.zeros_like(r), r, Mr, w, Mr, w, Ms, A(Ms), limits.square + jnp.inf, zero, zero)
    x, *_, k, why = lax.while_loop(goes_on, step, state)
    return x, k, why
