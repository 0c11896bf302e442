"""Fourier, cosine and sine transforms of distributed arrays.

A transform is local transforms along the axes that are whole, and redistributions between them.
Returning to the original layout costs another redistribution, so the spectrum is left in the layout
of the last one, or in the layout of the array with ``natural=True``. All functions take the layout
of the array, not the layout of its spectrum, which is :func:`spectral_layout`. The algorithm is the
one of mpi4py-fft (Dalcin, Mortensen and Keyes, J. Parallel Distrib. Comput. 128, 2019) and
PencilFFTs.jl.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from ._numerics.layout import AnyLayout, Layout, as_layout
from ._numerics.transforms import Cosine, Fourier, Plan, planned

__all__ = [
    "dctn",
    "dstn",
    "fftn",
    "frequencies",
    "idctn",
    "idstn",
    "ifftn",
    "irfftn",
    "rfftn",
    "spectral_layout",
]


def fftn(
    x: Any,
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a global array, as :func:`jax.numpy.fft.fftn` does a local one.

    All ranks call it with the same arguments. Between the local transforms, the array is
    redistributed: by one ``alltoallv`` for slabs, two for pencils, and one more for
    ``natural=True``.

    Args:
        x: this rank's block of the array, of shape ``layout.block_shape(rank)``; of type float32,
            float64, complex64 or complex128. It may have further axes in front, such as the
            components of a vector; they are not decomposed, and not transformed.
        layout: layout of the array: a :class:`mpi4jax.Layout`, or a
            :class:`mpi4jax.sharding.NamedSharding` with the global shape. Axis lengths and the
            number of blocks are arbitrary.
        axes: axes of the layout to transform, by default all. For each decomposed axis that is
            transformed, the array must have another axis, along which it is redistributed
            meanwhile.
        norm: "backward" (or None), "ortho" or "forward", as in :mod:`numpy.fft`.
        s: length of the transform along each of ``axes``, by default the length of the array. The
            array is padded with zeros at its end, or truncated, to this length, as by
            :func:`numpy.fft.fftn`. A decomposed axis is padded after it was redistributed.
        modes: number of Fourier modes that are kept along each of ``axes``, by default ``s``. The
            result equals the spectrum of an array of ``modes`` points: higher frequencies are
            dropped, or are zero. If the number is even, the highest frequency has the sum of both
            signs.
        natural: whether the spectrum has the layout of the array, which costs one more exchange.
        comm: communicator; by default the communicator of the sharding's mesh, or a duplicate of
            ``COMM_WORLD``.

    Returns:
        This rank's block of the spectrum, with the same leading axes. Its layout is
        :func:`spectral_layout`; complex64 or complex128.

    Raises:
        TypeError: if ``layout`` is not a :class:`Layout`.
        ValueError: if ``x`` does not have the shape of this rank's block, if the layout has more
            blocks than there are ranks, if ``axes`` or ``norm`` is invalid, or if the only axis of
            the array is decomposed.

    Derivative:
        The transform is linear. Its transpose is the same transform, backward through the same
        layouts.

    Example:
        >>> import numpy as np, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> slabs = mpi4jax.Layout((6, 7, 8), {0: comm.size})
        >>> whole = np.random.default_rng(0).random(slabs.shape, np.float32)
        >>> y = mpi4jax.fft.fftn(whole[slabs.block(comm.rank)], slabs)
        >>> part = mpi4jax.fft.spectral_layout(slabs).block(comm.rank)
        >>> bool(np.allclose(y, np.fft.fftn(whole)[part], atol=1e-4))
        True

    See also: :func:`ifftn`, :func:`rfftn`, :func:`frequencies`.
    """
    plan = Fourier("fftn", layout, axes, norm, natural, comm, real=False, s=s, modes=modes)
    return plan.forward(x)


def ifftn(
    y: Any,
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a spectrum back: the inverse of :func:`fftn` with the same other arguments.

    Args:
        y: this rank's block of the spectrum, as :func:`fftn` returns it.
        layout: layout of the result, not of ``y``.
        axes, norm, natural, comm: as for :func:`fftn`. ``natural`` says which layout ``y`` has.
        s: as for :func:`fftn`. Of the ``s`` points along an axis, the first ones, which
            ``layout`` describes, are returned, as for a convolution of an array that was padded.
        modes: as for :func:`fftn`: a spectrum of fewer modes than points is padded with zeros at
            the highest frequencies, which interpolates: the 3/2 rule.

    Returns:
        This rank's block of the array, of shape ``layout.block_shape(rank)``, with the leading axes
        of ``y``; complex64 or complex128.

    Raises:
        TypeError, ValueError: as for :func:`fftn`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> slabs = mpi4jax.Layout((6, 7), {0: comm.size})
        >>> x = jnp.ones(slabs.block_shape(comm.rank))
        >>> bool(jnp.allclose(mpi4jax.fft.ifftn(mpi4jax.fft.fftn(x, slabs), slabs), x, atol=1e-6))
        True
    """
    plan = Fourier("ifftn", layout, axes, norm, natural, comm, real=False, s=s, modes=modes)
    return plan.inverse(y)


def rfftn(
    x: Any,
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a real global array, as :func:`jax.numpy.fft.rfftn` does a local one.

    The spectrum has ``n // 2 + 1`` elements along the last one of ``axes``, where the array has
    ``n``. If that axis is decomposed, it is redistributed first; decompose another one to avoid
    this.

    Args:
        x: this rank's block of the array, of type float32 or float64, as for :func:`fftn`.
        layout, axes, norm, s, modes, natural, comm: as for :func:`fftn`.

    Returns:
        This rank's block of the spectrum, whose layout is ``spectral_layout(..., real=True)``;
        complex64 or complex128.

    Raises:
        TypeError: if ``x`` is complex, and as for :func:`fftn`.
        ValueError: as for :func:`fftn`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> slabs = mpi4jax.Layout((6, 7), {0: comm.size})
        >>> y = mpi4jax.fft.rfftn(jnp.ones(slabs.block_shape(comm.rank)), slabs)
        >>> y.shape == mpi4jax.fft.spectral_layout(slabs, real=True).block_shape(comm.rank)
        True

    See also: :func:`irfftn`.
    """
    plan = Fourier("rfftn", layout, axes, norm, natural, comm, real=True, s=s, modes=modes)
    return plan.forward(x)


def irfftn(
    y: Any,
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a spectrum back to a real array: the inverse of :func:`rfftn`.

    Args:
        y: this rank's block of the spectrum, as :func:`rfftn` returns it.
        layout: layout of the result, not of ``y``. Its last length may be even or odd.
        axes, norm, natural, comm: as for :func:`fftn`.
        s, modes: as for :func:`ifftn`.

    Returns:
        This rank's block of the array, of shape ``layout.block_shape(rank)``, with the leading axes
        of ``y``; float32 or float64.

    Raises:
        TypeError, ValueError: as for :func:`fftn`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> slabs = mpi4jax.Layout((6, 7), {0: comm.size})
        >>> x = jnp.ones(slabs.block_shape(comm.rank))
        >>> y = mpi4jax.fft.irfftn(mpi4jax.fft.rfftn(x, slabs), slabs)
        >>> bool(jnp.allclose(y, x, atol=1e-6))
        True
    """
    plan = Fourier("irfftn", layout, axes, norm, natural, comm, real=True, s=s, modes=modes)
    return plan.inverse(y)


def spectral_layout(
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    *,
    real: bool = False,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
) -> Layout:
    """Return the layout of the spectrum of an array.

    Args:
        layout: layout of the array.
        axes, s, modes, natural: as for :func:`fftn`.
        real: whether the spectrum was computed by :func:`rfftn`.

    Returns:
        The layout, whose shape is the global shape of the spectrum.

    Raises:
        TypeError, ValueError: as for :func:`fftn`.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.fft.spectral_layout(mpi4jax.Layout((8, 8, 8), {0: 4}), real=True)
        Layout(shape=(8, 8, 5), cuts=((1, 4),))
    """
    op = "spectral_layout"
    layout = as_layout(op, "layout", layout, sys.maxsize)
    return planned(op, layout, axes, real, natural, s, modes)[-1]


def frequencies(
    layout: AnyLayout,
    axes: Sequence[int] | None = None,
    *,
    d: float | Sequence[float] = 1.0,
    real: bool = False,
    s: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    natural: bool = False,
    dtype: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[jax.Array, ...]:
    """Return the frequencies of this rank's block of a spectrum, in cycles per unit of ``d``.

    Args:
        layout, axes, s, modes, natural, comm: as for :func:`fftn`.
        d: distance between two points of the array, or a sequence with one distance for each of
            ``axes``. With ``1 / n``, frequencies are integers; with ``L / (2 pi n)``, they are
            wavenumbers of a box of size ``L``.
        real: whether the spectrum was computed by :func:`rfftn`.
        dtype: floating-point type of the result; by default JAX's.

    Returns:
        One array for each of ``axes``. It has the axes of the layout, all of length 1 except for
        its own axis, so that it broadcasts with the block.

    Raises:
        TypeError, ValueError: as for :func:`fftn`, or if ``dtype`` is not a floating-point type, or
            ``d`` does not have one distance for each of ``axes``.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> slabs = mpi4jax.Layout((4, 6), {0: mpi4jax.default_comm().size})
        >>> kx, ky = mpi4jax.fft.frequencies(slabs, d=(1 / 4, 1 / 6), real=True)
        >>> [int(k) for k in kx[:, 0]]  # the other axis is decomposed
        [0, 1, -2, -1]

    See also: :func:`jax.numpy.fft.fftfreq`, :func:`jax.numpy.fft.rfftfreq`.
    """
    t = Plan("frequencies", layout, axes, None, natural, comm, real=real, s=s, modes=modes)
    distances: list[Any] = [d] * len(t.axes) if np.ndim(d) == 0 else [*np.asarray(d)]
    if len(distances) != len(t.axes):
        raise ValueError(
            f"frequencies: argument 'd' must be a number, or one for each of {len(t.axes)} axes, "
            f"got {d!r}"
        )
    dtype = jnp.result_type(float) if dtype is None else dtype
    if not jnp.issubdtype(dtype, np.floating):
        raise TypeError(
            f"frequencies: argument 'dtype' must be a floating-point type, got {dtype!r}"
        )
    block, out = t.spectrum.block(t.rank), []
    for axis, distance in zip(t.axes, distances, strict=True):
        is_half = real and axis == t.axes[-1]
        # fftfreq(n, d) is k / (n d), rounded once, as in NumPy.
        of = np.fft.rfftfreq if is_half else np.fft.fftfreq
        points, kept = t.lengths[axis]
        values = of(kept, distance * (points / kept))[block[axis]]
        shape = [1] * len(t.layout.shape)
        shape[axis] = -1
        out.append(jnp.asarray(values.reshape(shape), dtype))
    return tuple(out)


def dctn(
    x: Any,
    layout: AnyLayout,
    type: int = 2,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a global array into a cosine series, as :func:`scipy.fft.dctn` does a local one.

    The exchanges are the same as for :func:`fftn`. To combine it with other transforms, such as in
    a channel that is periodic along two axes, call one after the other: each takes the layout that
    the transform before it has left.

    Args:
        x: this rank's block of the array, as for :func:`fftn`. The real and the imaginary part of a
            complex array are transformed.
        layout, axes, natural, comm: as for :func:`fftn`.
        type: 1 (points at the walls), 2 (points half a cell away from the walls) or 3 (the inverse
            of type 2, except for a factor). Type 1 needs two points or more.
        norm: "backward" (or None), "ortho" or "forward", as in :mod:`scipy.fft`. With "ortho", the
            transform is an orthogonal matrix.

    Returns:
        This rank's block of the coefficients, with the same leading axes and the dtype of ``x``; at
        least float32. Its layout is ``spectral_layout(layout, axes)``.

    Raises:
        TypeError, ValueError: as for :func:`fftn`, or if ``type`` is not 1, 2 or 3.

    Derivative:
        The transform is linear. Its transpose goes backward through the same layouts.

    Example:
        >>> import numpy as np, scipy.fft, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> slabs = mpi4jax.Layout((6, 7), {0: comm.size})
        >>> whole = np.random.default_rng(0).random(slabs.shape, np.float32)
        >>> y = mpi4jax.fft.dctn(whole[slabs.block(comm.rank)], slabs, type=1)
        >>> part = mpi4jax.fft.spectral_layout(slabs).block(comm.rank)
        >>> bool(np.allclose(y, scipy.fft.dctn(whole, type=1)[part], atol=1e-4))
        True

    See also: :func:`idctn`, :func:`dstn`.
    """
    return Cosine("dctn", layout, axes, norm, natural, comm, type=type, sine=False).run(x, False)


def idctn(
    y: Any,
    layout: AnyLayout,
    type: int = 2,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a cosine series back: the inverse of :func:`dctn` with the same other arguments.

    Args:
        y: this rank's block of the coefficients, as :func:`dctn` returns it.
        layout: layout of the result, not of ``y``.
        type, axes, norm, natural, comm: as for :func:`dctn`.

    Returns:
        This rank's block of the array, of shape ``layout.block_shape(rank)``, with the leading axes
        and the dtype of ``y``; at least float32.

    Raises:
        TypeError, ValueError: as for :func:`dctn`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> slabs = mpi4jax.Layout((6, 7), {0: mpi4jax.default_comm().size})
        >>> x = jnp.ones(slabs.block_shape(mpi4jax.default_comm().rank))
        >>> bool(jnp.allclose(mpi4jax.fft.idctn(mpi4jax.fft.dctn(x, slabs), slabs), x, atol=1e-6))
        True
    """
    return Cosine("idctn", layout, axes, norm, natural, comm, type=type, sine=False).run(y, True)


def dstn(
    x: Any,
    layout: AnyLayout,
    type: int = 2,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a global array into a sine series, as :func:`scipy.fft.dstn` does a local one.

    Args:
        x, layout, axes, natural, comm: as for :func:`dctn`.
        type: 1 (the walls are one cell away from the outermost points), 2 (half a cell away) or 3
            (the inverse of type 2, except for a factor).
        norm: as for :func:`dctn`.

    Returns:
        As from :func:`dctn`. The first coefficient belongs to the longest wave.

    Raises:
        TypeError, ValueError: as for :func:`dctn`.

    See also: :func:`idstn`, :func:`dctn`.
    """
    return Cosine("dstn", layout, axes, norm, natural, comm, type=type, sine=True).run(x, False)


def idstn(
    y: Any,
    layout: AnyLayout,
    type: int = 2,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a sine series back: the inverse of :func:`dstn` with the same other arguments.

    Args:
        y: this rank's block of the coefficients, as :func:`dstn` returns it.
        layout: layout of the result, not of ``y``.
        type, axes, norm, natural, comm: as for :func:`dstn`.

    Returns:
        This rank's block of the array, of shape ``layout.block_shape(rank)``, with the leading axes
        and the dtype of ``y``; at least float32.

    Raises:
        TypeError, ValueError: as for :func:`dctn`.
    """
    return Cosine("idstn", layout, axes, norm, natural, comm, type=type, sine=True).run(y, True)
