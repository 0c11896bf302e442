"""Two programs that compute while they communicate, beside the same without overlap.

    mpiexec -n 2 python benches/programs/overlap_programs.py [model | training] [--rounds 5]

`model`: the shallow-water model of `examples/`, which computes the inner cells of its blocks while
the ghost cells travel. `training`: a network with the data on the ranks. The gradients of a layer
are reduced while the gradients of the layers before it are computed, beside one reduction of all.
Milliseconds a step of the slowest rank: medians and quartiles over the rounds, in which the two
take turns. Each rank computes on one core.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import mpi4jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "suite"))

import measurements
from shallow_water import Fields, Model, Parameters, State, tendencies, walls

COMM = mpi4jax.default_comm()

# ---- The model


class Overlapping(Model):
    """The model, with a halo exchange at the beginning of a step instead of its end."""

    def _start(self, blocks: Any) -> State:
        state = super()._start(blocks)
        return state._replace(tendency=jax.tree.map(jnp.copy, state.tendency))

    def part(self, fields: Fields, rows: slice, columns: slice) -> Fields:
        """Return the time derivatives of some inner cells: of those inside of these rows and
        columns."""
        first, last, _ = rows.indices(fields.h.shape[0])
        f = np.asarray(self.f)[first : last - 1]
        return tendencies(self.p, f, Fields(*(a[rows, columns] for a in fields)))

    def step(self, state: State) -> State:
        request = mpi4jax.ihalo_exchange(state.fields, self.grid.cart)
        there = mpi4jax.after(request, state.fields)
        everything, inside = slice(None), slice(1, -1)
        middle = self.part(there, inside, inside)
        fields = mpi4jax.wait(request, after=middle)
        parts = [(middle, (2, 2))]
        n, m = fields.h.shape
        for rows, columns, at in (
            (slice(0, 3), everything, (1, 1)),
            (slice(n - 3, n), everything, (n - 2, 1)),
            (inside, slice(0, 3), (2, 1)),
            (inside, slice(m - 3, m), (2, m - 2)),
        ):
            parts.append((self.part(fields, rows, columns), at))
        tendency = state.spare
        for part, at in parts:
            tendency = Fields(*map(lax.dynamic_update_slice, tendency, part, 3 * [at]))
        tendency = walls(self.grid, tendency)
        new, old = self.weights
        stepped = (
            x + (new * now - old * before)
            for x, now, before in zip(fields, tendency, state.tendency, strict=True)
        )
        return State(Fields(*stepped), tendency, spare=state.tendency)


def models(size: tuple[int, int], steps: int) -> Iterator[Callable[[], Any]]:
    """Yield a run of each, after a check that they agree."""
    pair = [kind(Parameters(*size), COMM, True) for kind in (Model, Overlapping)]
    states = [model.initial_state() for model in pair]
    fields = [
        model.snapshot(model.advance(state, 4)) for model, state in zip(pair, states, strict=True)
    ]
    if COMM.rank == 0:
        np.testing.assert_allclose(*(np.asarray(f)[:3] for f in fields), rtol=1e-4, atol=1e-4)
    for model, state in zip(pair, states, strict=True):
        yield lambda model=model, state=state: model.advance(state, steps)


# ---- The training


def apply(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@jax.custom_vjp
def layer(w: jax.Array, x: jax.Array, request: mpi4jax.Request) -> jax.Array:
    """Return a layer. The cotangent of ``request`` is the request of the weights' gradient."""
    return apply(w, x)


def _forward(w: jax.Array, x: jax.Array, request: mpi4jax.Request) -> Any:
    return jax.vjp(apply, w, x)


def _backward(pull: Any, c: jax.Array) -> Any:
    gradient, before = pull(c)
    request = mpi4jax.iallreduce(gradient, mpi4jax.MEAN)
    return jnp.zeros_like(gradient), mpi4jax.after(request, before), request


layer.defvjp(_forward, _backward)


def loss_of(y: jax.Array) -> jax.Array:
    return jnp.mean(y**2)


def step_at_once(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(ws: list[jax.Array]) -> jax.Array:
        y = x
        for w in ws:
            y = apply(w, y)
        return loss_of(y)

    gradients = mpi4jax.notoken.allreduce(jax.grad(loss)(ws), mpi4jax.MEAN)
    return [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]


def step_by_layers(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(requests: list[mpi4jax.Request]) -> jax.Array:
        y = x
        for w, request in zip(ws, requests, strict=True):
            y = layer(w, y, request)
        return loss_of(y)

    kinds = jax.eval_shape(lambda: [mpi4jax.iallreduce(w, mpi4jax.MEAN) for w in ws])
    none = jax.tree.map(lambda n: jnp.zeros(n.shape, n.dtype), kinds)
    gradients = mpi4jax.waitall(jax.grad(loss)(none))
    return [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]


def trainings(layers: int, width: int, batch: int) -> Iterator[Callable[[], Any]]:
    keys = jax.random.split(jax.random.key(0), layers)
    ws = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    x = jax.random.normal(jax.random.key(1 + COMM.rank), (batch, width))
    steps = [jax.jit(step) for step in (step_at_once, step_by_layers)]
    one, other = (step(ws, x) for step in steps)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for step in steps:
        yield lambda step=step: step(ws, x)


# ---- Times


def compare(name: str, runs: Iterator[Callable[[], Any]], steps: int, rounds: int) -> None:
    """Print what a step takes without overlap, and with it."""
    both = list(runs)
    times: list[list[float]] = [[] for _ in both]
    for done in range(rounds + 1):
        for run, found in zip(both, times, strict=True):
            COMM.Barrier()
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds = COMM.allreduce(time.perf_counter() - begin, MPI.MAX)
            if done:  # the first one warms up
                found.append(1e3 * seconds / steps)
    if COMM.rank == 0:
        without, overlapping = (
            "{:9.2f} ({:.2f} to {:.2f})".format(*measurements.spread(found)) for found in times
        )
        ratio = measurements.ratio_of(times[:1], times[1:])
        print(
            f"{name:40} without {without}  overlapping {overlapping}  ratio {ratio}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="*", choices=["model", "training", []], default=[])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    wanted = options.which or ["model", "training"]
    if "model" in wanted:
        for size, steps in (((360, 180), 100), ((1080, 540), 20), ((3600, 1800), 4)):
            name = f"model, {size[0]} x {size[1]} cells"
            compare(name, models(size, steps), steps, options.rounds)
    if "training" in wanted:
        for layers, width, batch in ((8, 256, 256), (8, 512, 512), (8, 1024, 512)):
            name = f"training, {layers} layers of {4 * width * width >> 10} KiB"
            compare(name, trainings(layers, width, batch), 1, options.rounds)


if __name__ == "__main__":
    main()
