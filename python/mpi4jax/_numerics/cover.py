"""Whether the blocks of all ranks cover a global array exactly once, by messages of constant size.

The elements of a block are a polynomial: element (i, j) is the monomial x**i * y**j. Blocks cover
the array exactly once if and only if the sum of their polynomials equals the polynomial of the
array. Ranks add values of the polynomials at one point, modulo a prime (Schwartz 1980, Zippel
1979): if the polynomials differ, so do the values, except with a probability of the array's sum of
axis lengths divided by 2**61.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_PRIME = 2**61 - 1

#: Low and high 32 bits of a value: the sum over 2**32 ranks fits into 64 bits.
Halves = tuple[int, int]


def number(*words: object) -> int:
    """Return a hash of 64 bits, which is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "big")


def _value(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the value of a block's polynomial, times ``x - 1`` for each axis: common factors."""
    product = 1
    for axis, (start, stop) in enumerate(intervals):
        x = number("point", axis) % _PRIME
        product = product * (pow(x, int(stop), _PRIME) - pow(x, int(start), _PRIME)) % _PRIME
    return product


def halves(window: Sequence[slice]) -> Halves:
    """Return the halves of the value of a block, which ranks add up."""
    value = _value((s.start, s.stop) for s in window)
    return value & (2**32 - 1), value >> 32


def sums(starts: Any, stops: Any) -> Halves:
    """Return the sums of the halves of blocks: arrays with a row for each block."""
    points = [number("point", axis) % _PRIME for axis in range(starts.shape[1])]
    power = functools.cache(lambda axis, exponent: pow(points[axis], exponent, _PRIME))
    total = 0
    for row in np.stack([starts, stops], axis=2).tolist():
        product = 1
        for axis, (start, stop) in enumerate(row):
            product = product * (power(axis, stop) - power(axis, start)) % _PRIME
        total += product
    return total % _PRIME, 0


def is_exact(low: int, high: int, shape: Sequence[int]) -> bool:
    """Return whether the blocks cover an array exactly once, given the sums of their halves."""
    return (low + (high << 32)) % _PRIME == _value((0, n) for n in shape)


def overlapping(blocks: Sequence[tuple[slice, ...] | None]) -> tuple[int, int] | None:
    """Return the first two ranks whose blocks overlap, or None. A rank may have no block."""
    here = [rank for rank, block in enumerate(blocks) if block is not None]
    starts = np.array([[s.start for s in blocks[rank] or ()] for rank in here], np.int64)
    stops = np.array([[s.stop for s in blocks[rank] or ()] for rank in here], np.int64)
    for k, rank in enumerate(here):
        low = np.maximum(starts[k], starts[k + 1 :])
        high = np.minimum(stops[k], stops[k + 1 :])
        (found,) = np.nonzero((low < high).all(axis=1))
        if found.size:
            return rank, here[k + 1 + found[0]]
    return None
