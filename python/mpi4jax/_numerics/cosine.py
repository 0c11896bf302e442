"""Local cosine and sine transforms of types I to III, by real Fourier transforms.

Type II is one transform of half the length that its symmetry suggests: Makhoul, "A fast cosine
transform in one and two dimensions", IEEE Trans. Acoust. Speech Signal Process. 28, 1980. A sine
transform is a cosine transform of an array with alternating signs, in reverse order. Values and
factors agree with :mod:`scipy.fft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Transform = Callable[[jax.Array], jax.Array]  # along the last axis


def _second(x: jax.Array) -> jax.Array:
    n = x.shape[-1]
    ordered = jnp.concatenate([x[..., ::2], x[..., 1::2][..., ::-1]], -1)
    y = jnp.fft.rfft(ordered) * _turns(n, -1, x.dtype)[: n // 2 + 1]
    # The other half of the spectrum is the mirror image of this one, multiplied by i.
    return 2 * jnp.concatenate([y.real, -y.imag[..., 1 : n - n // 2][..., ::-1]], -1)


def _third(x: jax.Array) -> jax.Array:
    n = x.shape[-1]
    mirrored = jnp.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(0, 1)])[..., ::-1]
    y = jax.lax.complex(x, -mirrored) * _turns(n, 1, x.dtype)
    ordered = jnp.fft.irfft(y[..., : n // 2 + 1], n) * n
    out = jnp.zeros_like(x).at[..., ::2].set(ordered[..., : (n + 1) // 2])
    return out.at[..., 1::2].set(ordered[..., (n + 1) // 2 :][..., ::-1])


def _turns(n: int, sign: int, dtype: Any) -> jax.Array:
    angles = sign * math.pi / (2 * n) * jnp.arange(n, dtype=dtype)
    return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))


def _first_cosine(x: jax.Array) -> jax.Array:
    return jnp.fft.rfft(jnp.concatenate([x, x[..., -2:0:-1]], -1)).real


def _first_sine(x: jax.Array) -> jax.Array:
    n = x.shape[-1]
    zero = jnp.zeros_like(x[..., :1])
    return -jnp.fft.rfft(jnp.concatenate([zero, x, zero, -x[..., ::-1]], -1)).imag[..., 1 : n + 1]


def _alternating(x: jax.Array) -> jax.Array:
    return x * jnp.where(jnp.arange(x.shape[-1]) % 2, -1, 1).astype(x.dtype)


COSINE: dict[int, Transform] = {1: _first_cosine, 2: _second, 3: _third}
SINE: dict[int, Transform] = {
    1: _first_sine,
    2: lambda x: _second(_alternating(x))[..., ::-1],
    3: lambda x: _alternating(_third(x[..., ::-1])),
}
INVERSE = {1: 1, 2: 3, 3: 2}  # the type of the inverse, except for a factor


def period(n: int, type: int, sine: bool) -> int:
    """Return the length of the periodic extension of an array of ``n`` elements.

    A transform and the one of the type of its inverse multiply an array by this number.
    """
    return 2 * (n + (1 if sine else -1) * (type == 1))


def transform(x: jax.Array, axis: int, type: int, sine: bool, norm: str) -> jax.Array:
    """Return a transform along one axis.

    Args:
        norm: "ortho" makes the matrix orthogonal; "backward" has no factor, and "forward" divides
            by :func:`period`.
    """
    if jnp.iscomplexobj(x):
        parts = (transform(part, axis, type, sine, norm) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    x = jnp.moveaxis(x, axis, -1)
    n = x.shape[-1]
    ends = {1: () if sine else (0, n - 1), 2: (n - 1,) if sine else (0,)}
    ends[3] = ends[2]
    scale = jnp.ones(n, x.dtype)
    if norm == "ortho":
        scale = scale.at[jnp.array(ends[type], int)].set(math.sqrt(2))
    if type != 2:
        x = x * scale
    y = (SINE if sine else COSINE)[type](x) if x.size else x
    if type != 3:
        y = y / scale
    length = period(n, type, sine)
    y = y / {"ortho": math.sqrt(length), "forward": length, "backward": 1}[norm]
    return jnp.moveaxis(y, -1, axis)
