"""Fourier transforms of global arrays of which each rank has a block: slabs, pencils or others.

A transform is local transforms along the axes that are whole, and redistributions between them.
Going back to the layout that one came from costs another redistribution, so the spectrum is left
in the layout of the last one, or in that of the array with ``natural=True``. All
functions take the layout of the array, not that of its spectrum: that is
:func:`spectral_layout`. As mpi4py-fft (Dalcin, Mortensen and Keyes, J. Parallel Distrib. Comput.
128, 2019) and PencilFFTs.jl do it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from ._numerics.base import as_array
from ._numerics.layout import Layout, Pieces, Shape, as_layout, batch_of
from ._numerics.local_fft import local_fft
from .layouts import Exchange, comm_of

__all__ = ["fftn", "frequencies", "ifftn", "irfftn", "rfftn", "spectral_layout"]

NORMS = ("backward", "ortho", "forward")


# ---- Which axes are transformed in which layout


class _Stage(NamedTuple):
    """Transforms of whole axes.

    Attributes:
        before: the layout of their operand.
        axes: they are transformed.
        after: the layout of their result.
        real: whether the last of the axes is that of a real transform.
    """

    before: Layout
    axes: tuple[int, ...]
    after: Layout
    real: bool = False


def _as_axes(op: str, layout: Layout, axes: Sequence[int] | None) -> tuple[int, ...]:
    n = len(layout.shape)
    given = range(n) if axes is None else axes
    known = tuple(axis % n for axis in given if -n <= axis < n)
    if not known or len(known) < len(given) or len(set(known)) < len(known):
        raise ValueError(
            f"{op}: argument 'axes' must be different axes of an array of shape {layout.shape}, "
            f"got {axes!r}"
        )
    if min(layout.shape[axis] for axis in known) < 1:
        raise ValueError(f"{op}: argument 'axes' has an axis of length 0 of {layout.shape}")
    return known


@functools.lru_cache(maxsize=256)
def _stages(op: str, layout: Layout, axes: tuple[int, ...], real: bool) -> tuple[_Stage, ...]:
    left = set(axes)
    stages: list[_Stage] = []
    while left:
        cut = {axis for axis, dimensions in enumerate(layout.dimensions) if dimensions}
        # The real transform is the first: its axis has to be whole before any other is done.
        whole = left - cut if not real or axes[-1] not in cut else set()
        after = layout
        is_real = real and axes[-1] in whole
        if is_real:
            shape = list(layout.shape)
            shape[axes[-1]] = shape[axes[-1]] // 2 + 1
            after, real = layout.of_shape(tuple(shape)), False
        if whole or not stages:
            done = tuple(axis for axis in axes if axis in whole)
            stages.append(_Stage(layout, done, after, is_real))
        left -= whole
        layout = after
        if left:
            layout = _with_one_whole(op, layout, axes[-1] if real else max(left), left)
    return tuple(stages)


def _with_one_whole(op: str, layout: Layout, axis: int, left: set[int]) -> Layout:
    """Return the layout in which this axis is whole, and another one cut in its place.

    Preferred is an axis that is transformed already, then one with an element for each rank, then
    the following one, because then the pieces received are in the order of memory.
    """
    cut = [b for b, dimensions in enumerate(layout.dimensions) if dimensions]
    free = [b for b in range(len(layout.shape)) if b not in cut]
    if free:
        parts = layout.parts(axis)
        new = min(free, key=lambda b: (b in left, layout.shape[b] < parts, b < axis, abs(b - axis)))
        return layout.moved(axis, new)
    cut.remove(axis)
    if not cut:
        raise ValueError(
            f"{op}: argument 'layout' cuts the only axis of an array of shape {layout.shape}; "
            "expected an array of two axes or more"
        )
    return layout.moved(axis, min(cut, key=lambda b: (b in left, -b)))


def _last(stages: tuple[_Stage, ...], layout: Layout, natural: bool) -> Layout:
    after = stages[-1].after
    return layout.of_shape(after.shape) if natural else after


# ---- Transforms of global arrays


def _complex(dtype: Any) -> Any:
    return jnp.result_type(dtype, jnp.complex64)


class _Transform:
    """The arguments of a transform, checked."""

    def __init__(
        self, op: str, layout: Any, axes: Any, norm: Any, real: bool, natural: bool, comm: Any
    ):
        self.op, self.real, self.natural = op, real, natural
        self.comm = comm_of(op, comm, layout)
        self.rank = self.comm.Get_rank()
        self.layout = as_layout(op, "layout", layout, self.comm.Get_size())
        if norm is not None and norm not in NORMS:
            raise ValueError(f"{op}: argument 'norm' must be None or one of {NORMS}, got {norm!r}")
        self.axes = _as_axes(op, self.layout, axes)
        self.stages = _stages(op, self.layout, self.axes, real)
        self.spectrum = _last(self.stages, self.layout, natural)
        points = math.prod(self.layout.shape[axis] for axis in self.axes)
        self.scale = {"ortho": math.sqrt(points), "forward": float(points)}.get(norm or "", 1.0)

    def _run(self, x: jax.Array, batch: Shape, inverse: bool) -> jax.Array:
        """Transform in each stage, and exchange between one and the next."""
        # The stages in the order of execution, each with the layout after it.
        stages = list(self.stages)
        if inverse:
            stages = [_Stage(s.after, s.axes, s.before, s.real) for s in reversed(stages)]
        end = self.layout if inverse else self.spectrum
        at = self.spectrum if inverse else self.layout
        if at != stages[0].before:
            stages.insert(0, _Stage(at, (), at))
        following = [*(stage.before for stage in stages[1:]), end]
        incoming = _whole(batch, at.block_shape(self.rank))
        x = x.ravel()
        for stage, target in zip(stages, following, strict=True):
            axes = tuple(axis + len(batch) for axis in stage.axes)
            length = self.layout.shape[self.axes[-1]] if stage.real else None
            after = _whole(batch, stage.after.block_shape(self.rank))
            exchange = None
            if target != stage.after:
                exchange = Exchange(batch, stage.after, target, self.comm)
            outgoing = after
            if exchange:
                assert isinstance(exchange.outgoing, Pieces)  # all on the same grid of ranks
                outgoing = exchange.outgoing
            x = local_fft(x, incoming, axes, outgoing, inverse, length)
            incoming = after
            if exchange:
                x, incoming = exchange.send(x), exchange.incoming
        return incoming.unpack(x)

    def forward(self, x: Any) -> jax.Array:
        x = as_array(x)
        batch = batch_of(self.op, "x", x, self.layout, self.rank)
        if self.real and jnp.iscomplexobj(x):
            raise TypeError(f"{self.op}: argument 'x' must be real, got dtype {x.dtype}")
        dtype = _complex(x.dtype)
        x = self._run(x.astype(jnp.finfo(dtype).dtype if self.real else dtype), batch, False)
        return x if self.scale == 1 else x / self.scale

    def inverse(self, y: Any) -> jax.Array:
        y = as_array(y)
        batch = batch_of(self.op, "y", y, self.spectrum, self.rank)
        y = self._run(y.astype(_complex(y.dtype)), batch, True)
        return y if self.scale == 1 else y * self.scale


def _whole(batch: Shape, block: Shape) -> Pieces:
    """Return an array as its only piece."""
    return Pieces(tuple((n,) for n in (*batch, *block)), (0,))


def fftn(
    x: Any,
    layout: Layout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a global array, as :func:`jax.numpy.fft.fftn` does a local one.

    All ranks call it with the same arguments. Between the local transforms, the array is
    redistributed: by one ``alltoallv`` for slabs, two for pencils, and one more for
    ``natural=True``.

    Args:
        x: this rank's block of the array, of shape ``layout.block_shape(rank)``; of type float32,
            float64, complex64 or complex128. It may have axes before those of the layout, such as
            the components of a vector; they are not decomposed, and not transformed.
        layout: layout of the array: a :class:`mpi4jax.Layout`, or a
            :class:`mpi4jax.sharding.NamedSharding` with the global shape. Axis lengths and the
            number of blocks are arbitrary.
        axes: axes of the layout to transform, by default all. For each decomposed axis that is
            transformed, the array must have another axis, along which it is redistributed
            meanwhile.
        norm: "backward" (or None), "ortho" or "forward", as in :mod:`numpy.fft`.
        natural: whether the spectrum has the layout of the array, which costs one more exchange.
        comm: communicator; by default that of the sharding's mesh, or a clone of ``COMM_WORLD``.

    Returns:
        This rank's block of the spectrum, with the same leading axes. Its layout is
        :func:`spectral_layout`; complex64 or complex128.

    Raises:
        TypeError: if ``layout`` is not a :class:`Layout`.
        ValueError: if ``x`` does not have the shape of this rank's block, the layout has more
            blocks than there are ranks, ``axes`` or ``norm`` is invalid, or the only axis of the
            array is decomposed.

    Derivative:
        Linear: its transpose is the same transform, backward through the same layouts.

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
    return _Transform("fftn", layout, axes, norm, False, natural, comm).forward(x)


def ifftn(
    y: Any,
    layout: Layout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a spectrum back: the inverse of :func:`fftn` with the same other arguments.

    Args:
        y: this rank's block of the spectrum, as :func:`fftn` returns it.
        layout: layout of the result, not of ``y``.
        axes, norm, natural, comm: as for :func:`fftn`. ``natural`` says which layout ``y`` has.

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
    return _Transform("ifftn", layout, axes, norm, False, natural, comm).inverse(y)


def rfftn(
    x: Any,
    layout: Layout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a real global array, as :func:`jax.numpy.fft.rfftn` does a local one.

    The spectrum has ``n // 2 + 1`` elements along the last one of ``axes``, where the array has
    ``n``. If that axis is decomposed, it is redistributed first; decompose another one to avoid
    this.

    Args:
        x: this rank's block of the array, of type float32 or float64, as for :func:`fftn`.
        layout, axes, norm, natural, comm: as for :func:`fftn`.

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
    return _Transform("rfftn", layout, axes, norm, True, natural, comm).forward(x)


def irfftn(
    y: Any,
    layout: Layout,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    natural: bool = False,
    comm: MPI.Intracomm | None = None,
) -> jax.Array:
    """Transform a spectrum back to a real array: the inverse of :func:`rfftn`.

    Args:
        y: this rank's block of the spectrum, as :func:`rfftn` returns it.
        layout: layout of the result, not of ``y``. Its last length may be even or odd.
        axes, norm, natural, comm: as for :func:`fftn`.

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
    return _Transform("irfftn", layout, axes, norm, True, natural, comm).inverse(y)


def spectral_layout(
    layout: Layout,
    axes: Sequence[int] | None = None,
    *,
    real: bool = False,
    natural: bool = False,
) -> Layout:
    """Return the layout of the spectrum of an array.

    Args:
        layout: layout of the array.
        axes, natural: as for :func:`fftn`.
        real: whether the spectrum is that of :func:`rfftn`.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.fft.spectral_layout(mpi4jax.Layout((8, 8, 8), {0: 4}), real=True)
        Layout(shape=(8, 8, 5), cuts=((1, 4),))
    """
    op = "spectral_layout"
    layout = as_layout(op, "layout", layout, sys.maxsize)
    return _last(_stages(op, layout, _as_axes(op, layout, axes), real), layout, natural)


def frequencies(
    layout: Layout,
    axes: Sequence[int] | None = None,
    *,
    d: float | Sequence[float] = 1.0,
    real: bool = False,
    natural: bool = False,
    dtype: Any = None,
    comm: MPI.Intracomm | None = None,
) -> tuple[jax.Array, ...]:
    """Return the frequencies of this rank's block of a spectrum, in cycles per unit of ``d``.

    Args:
        layout, axes, natural, comm: as for :func:`fftn`.
        d: distance between two points, or a sequence with one distance for each of ``axes``. With
            ``1 / n``, frequencies are integers; with ``L / (2 pi n)``, they are wavenumbers of a
            box of size ``L``.
        real: whether the spectrum is that of :func:`rfftn`.
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
        >>> [int(k) for k in kx[:, 0]]  # the spectrum is cut along the other axis
        [0, 1, -2, -1]

    See also: :func:`jax.numpy.fft.fftfreq`, :func:`jax.numpy.fft.rfftfreq`.
    """
    t = _Transform("frequencies", layout, axes, None, real, natural, comm)
    distances = [d] * len(t.axes) if np.ndim(d) == 0 else list(d)  # type: ignore[arg-type]
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
        # fftfreq(n, d) is k / (n d). Rounded once, as NumPy does it.
        of = np.fft.rfftfreq if is_half else np.fft.fftfreq
        values = of(t.layout.shape[axis], distance)[block[axis]]
        shape = [1] * len(t.layout.shape)
        shape[axis] = -1
        out.append(jnp.asarray(values.reshape(shape), dtype))
    return tuple(out)
