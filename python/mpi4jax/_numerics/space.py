"""Inner products and sums of vectors whose elements are distributed over the ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from .._requests.wait import after, wait
from ..ops import allreduce, iallreduce
from .base import as_comm
from .reproducible import reproducible_sum

Vector = jax.Array  # this rank's part of a vector


class Space:
    """Inner products and sums of the vectors of a solve.

    With ``reproducible``, their bits do not depend on the distribution of the vectors.
    """

    def __init__(self, op: str, comm: MPI.Intracomm | None, reproducible: bool):
        self.comm, self.reproducible = as_comm(op, comm).mpi, reproducible

    def products(self, *pairs: tuple[Any, Vector]) -> list[jax.Array]:
        """Return inner products, by one reduction. Each row of a matrix is a vector."""
        if self.reproducible:
            terms = [_terms(a, b) for a, b in pairs]
            sums = reproducible_sum(terms, axis=-1, comm=self.comm)
            return [lax.complex(*parts) if len(parts) == 2 else parts[0] for parts in sums]
        local = [jnp.conj(a) @ b for a, b in pairs]
        total = allreduce(jnp.concatenate([jnp.atleast_1d(p) for p in local]), comm=self.comm)
        parts = jnp.split(total, np.cumsum([p.size for p in local])[:-1])
        return [part.reshape(p.shape) for part, p in zip(parts, local, strict=True)]

    def start(self, operand: Vector, *pairs: tuple[Vector, Vector]) -> tuple[Any, Vector]:
        """Initiate a reduction of inner products.

        Returns:
            The request, and ``operand``, from which the overlapping computation must start.
        """
        request = iallreduce(jnp.stack([jnp.conj(a) @ b for a, b in pairs]), comm=self.comm)
        return request, after(request, operand)

    def finish(self, request: Any, computed: Vector) -> list[jax.Array]:
        """Wait for the inner products after ``computed``, which overlaps the reduction."""
        return list(wait(request, after=computed))

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
        """Return ``x + factor * y``."""
        return x + self.times(factor, y)

    def length(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return ``sqrt(a**2 + b**2)``."""
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
