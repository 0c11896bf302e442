"""Transforms of a global array along some of its axes: local transforms, and exchanges between.

Each rank has a block. Axes that are whole are transformed, and the array is redistributed so that
others become whole.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from . import cosine
from .arrays import as_array
from .exchange import Exchange, comm_of
from .layout import Layout, Pieces, Shape, as_layout, batch_of
from .local_fft import local_fft
from .modes import of_length, of_modes
from .stages import Lengths, Stage, as_axes, as_lengths, last_layout, stages_of

NORMS = ("backward", "ortho", "forward")


def _complex(dtype: Any) -> Any:
    return jnp.result_type(dtype, jnp.complex64)


class Plan:
    """The arguments of a transform, checked, and its stages."""

    def __init__(
        self,
        op: str,
        layout: Any,
        axes: Any,
        norm: Any,
        natural: bool,
        comm: Any,
        *,
        real: bool = False,
        s: Any = None,
        modes: Any = None,
    ):
        self.op, self.real, self.natural = op, real, natural
        self.comm = comm_of(op, comm, layout)
        self.rank = self.comm.Get_rank()
        self.layout = as_layout(op, "layout", layout, self.comm.Get_size())
        if norm is not None and norm not in NORMS:
            raise ValueError(f"{op}: argument 'norm' must be None or one of {NORMS}, got {norm!r}")
        self.norm = norm or "backward"
        self.axes, self.lengths, self.stages, self.spectrum = planned(
            op, self.layout, axes, real, natural, s, modes
        )

    def _local(
        self, x: jax.Array, batch: Shape, stage: Stage, pieces: tuple[Pieces, Pieces], inverse: bool
    ) -> jax.Array:
        """Transform along the axes of a stage, from a message to another one."""
        raise NotImplementedError

    def _run(self, x: jax.Array, batch: Shape, inverse: bool) -> jax.Array:
        """Transform in each stage, and exchange between one and the next."""
        # The stages in the order of execution, each with the layout after it.
        stages = list(self.stages)
        if inverse:
            stages = [Stage(s.after, s.axes, s.before, s.real) for s in reversed(stages)]
        end = self.layout if inverse else self.spectrum
        at = self.spectrum if inverse else self.layout
        if at != stages[0].before:
            stages.insert(0, Stage(at, (), at))
        following = [*(stage.before for stage in stages[1:]), end]
        incoming = _whole(batch, at.block_shape(self.rank))
        x = x.ravel()
        for stage, target in zip(stages, following, strict=True):
            after = _whole(batch, stage.after.block_shape(self.rank))
            exchange = None
            if target != stage.after:
                exchange = Exchange(batch, stage.after, target, self.comm)
            outgoing = after
            if exchange:
                assert isinstance(exchange.outgoing, Pieces)  # all on the same grid of ranks
                outgoing = exchange.outgoing
            if stage.axes:
                x = self._local(x, batch, stage, (incoming, outgoing), inverse)
            else:
                x = outgoing.pack(incoming.unpack(x))
            incoming = after
            if exchange:
                axes = " and ".join(map(str, self.axes))
                x = exchange.send(x, f"a transform along axes {axes} by {self.op}")
                incoming = exchange.incoming
        return incoming.unpack(x)


class Fourier(Plan):
    """A Fourier transform."""

    @property
    def scale(self) -> float:
        """The divisor of a spectrum, which is normalized as the spectrum of an array of ``modes``
        points."""
        points, modes = (math.prod(n) for n in zip(*self.lengths.values(), strict=True))
        norms = {"ortho": math.sqrt(modes), "forward": float(modes)}
        return norms.get(self.norm, 1.0) * (points / modes)

    def _local(
        self, x: jax.Array, batch: Shape, stage: Stage, pieces: tuple[Pieces, Pieces], inverse: bool
    ) -> jax.Array:
        first = len(batch)
        at = [axis + first for axis in stage.axes]
        axes, (incoming, outgoing) = tuple(at), pieces
        known = [self.lengths[axis] for axis in stage.axes]
        length = known[-1].points if stage.real else None
        array = stage.after if inverse else stage.before
        ends = [array.shape[axis] for axis in stage.axes]
        if all(n == points == modes for n, (points, modes) in zip(ends, known, strict=True)):
            return local_fft(x, incoming, axes, outgoing, inverse, length)
        # All axes of the stage have the length of the transform: of the array, or of the spectrum.
        long, spectral = [*incoming.shape], [*incoming.shape]
        for axis, (points, _) in zip(axes, known, strict=True):
            long[axis] = points
            spectral[axis] = points // 2 + 1 if stage.real and axis == axes[-1] else points
        shapes = [_whole((), tuple(shape)) for shape in (long, spectral)]
        x = incoming.unpack(x)
        steps = list(zip(axes, ends, known, strict=True))
        half = axes[-1] if stage.real else None
        if not inverse:
            for axis, _, (points, _) in steps:
                x = of_length(x, axis, points)
            x = local_fft(x.ravel(), shapes[0], axes, shapes[1], False, length).reshape(spectral)
            for axis, _, (points, modes) in steps:
                x = of_modes(x, axis, points, modes, axis == half)
        else:
            for axis, _, (points, modes) in steps:
                x = of_modes(x, axis, modes, points, axis == half)
            x = local_fft(x.ravel(), shapes[1], axes, shapes[0], True, length).reshape(long)
            for axis, end, _ in steps:
                x = of_length(x, axis, end)
        return outgoing.pack(x)

    def forward(self, x: Any) -> jax.Array:
        x = as_array(self.op, "x", x)
        batch = batch_of(self.op, "x", x, self.layout, self.rank)
        if self.real and jnp.iscomplexobj(x):
            raise TypeError(f"{self.op}: argument 'x' must be real, got dtype {x.dtype}")
        dtype = _complex(x.dtype)
        x = self._run(x.astype(jnp.finfo(dtype).dtype if self.real else dtype), batch, False)
        return x if self.scale == 1 else x / self.scale

    def inverse(self, y: Any) -> jax.Array:
        y = as_array(self.op, "y", y)
        batch = batch_of(self.op, "y", y, self.spectrum, self.rank)
        y = self._run(y.astype(_complex(y.dtype)), batch, True)
        return y if self.scale == 1 else y * self.scale


class Cosine(Plan):
    """A cosine or sine transform."""

    def __init__(self, *args: Any, type: Any, sine: bool):
        super().__init__(*args)
        self.type, self.sine = type, sine
        if type not in cosine.INVERSE:
            raise ValueError(f"{self.op}: argument 'type' must be 1, 2 or 3, got {type!r}")
        short = [n for n, _ in self.lengths.values() if cosine.period(n, type, sine) < 1]
        if short:
            raise ValueError(
                f"{self.op}: argument 'type' is 1, which needs axes of length 2 or more, got an "
                "axis of length 1"
            )

    def _local(
        self, x: jax.Array, batch: Shape, stage: Stage, pieces: tuple[Pieces, Pieces], inverse: bool
    ) -> jax.Array:
        type, norm = self.type, self.norm
        if inverse:
            type = cosine.INVERSE[type]
            norm = {"backward": "forward", "forward": "backward"}.get(norm, norm)
        x = pieces[0].unpack(x)
        for axis in stage.axes:
            x = cosine.transform(x, axis + len(batch), type, self.sine, norm)
        return pieces[1].pack(x)

    def run(self, x: Any, inverse: bool) -> jax.Array:
        name, layout = ("y", self.spectrum) if inverse else ("x", self.layout)
        x = as_array(self.op, name, x)
        batch = batch_of(self.op, name, x, layout, self.rank)
        dtype = _complex(x.dtype)
        dtype = dtype if jnp.iscomplexobj(x) else jnp.finfo(dtype).dtype
        return self._run(x.astype(dtype), batch, inverse)


def planned(
    op: str, layout: Layout, axes: Any, real: bool, natural: bool, s: Any, modes: Any
) -> tuple[tuple[int, ...], dict[int, Lengths], tuple[Stage, ...], Layout]:
    """Return the axes, the lengths along each, the stages, and the layout of the spectrum."""
    known = as_axes(op, layout, axes)
    points = as_lengths(op, "s", s, [layout.shape[axis] for axis in known])
    kept = as_lengths(op, "modes", modes, points)
    stages = stages_of(op, layout, known, kept, real)
    lengths = {axis: Lengths(*n) for axis, *n in zip(known, points, kept, strict=True)}
    return known, lengths, stages, last_layout(stages, layout, natural)


def _whole(batch: Shape, block: Shape) -> Pieces:
    """Return an array as its only piece."""
    return Pieces(tuple((n,) for n in (*batch, *block)), (0,))
