"""Simulate a jet on a rotating planet that rolls up into vortices (shallow-water equations).

    mpiexec -n 4 python examples/shallow_water.py --save-animation jet.gif
    mpiexec -n 4 python examples/shallow_water.py --save-figure jet.png --days 5
    mpiexec -n 2 python examples/shallow_water.py --benchmark
    mpiexec -n 2 python examples/shallow_water.py --benchmark --halo

A thin layer of fluid of depth H + h flows with velocity (u, v) in a channel: periodic in x, with
walls in y. In vector-invariant form, with potential vorticity q = (f + dv/dx - du/dy) / (H + h),

    du/dt =  q (H + h) v - dB/dx + nu lap(u)        B = g h + (u^2 + v^2) / 2
    dv/dt = -q (H + h) u - dB/dy + nu lap(v)        f = f0 + beta y
    dh/dt = -d[(H + h) u]/dx - d[(H + h) v]/dy

on an Arakawa C grid, in the form of Sadourny (1975) that conserves energy, stepped with
Adams-Bashforth 2. It starts from a jet in geostrophic balance with a small bump in height; the jet
is unstable and rolls up into vortices.

The grid is partitioned into blocks, one for each rank. After each step, one ring of ghost cells
around the blocks is filled; each cell is then computed by the same arithmetic on any number of
ranks. There are two ways to fill it: `exchange` does it with messages between pairs of ranks
(sendrecv), `exchange_halo` (--halo) with one operation that is made for it.
"""

import argparse
import math
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

HOUR, DAY = 3600.0, 86400.0


# The physics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """The channel, in SI units; the lengths are typical of the atmosphere in middle latitudes."""

    nx: int = 360  # cells of the whole grid
    ny: int = 180
    width: float = 3.6e6  # m, extent in x
    height: float = 1.8e6  # m, extent in y
    gravity: float = 9.81  # m/s^2
    depth: float = 500.0  # m, H
    coriolis: float = 1e-4  # 1/s, f0, in the middle of the channel
    beta: float = 1.6e-11  # 1/(m s), df/dy
    jet_speed: float = 15.0  # m/s
    jet_width: float = 1.0e5  # m
    bump: float = 4.0  # m, what disturbs the balance
    courant: float = 0.15  # time step, in units of what a gravity wave needs to cross a cell
    damping: float = 0.1  # of Adams-Bashforth 2, which alone lets short waves grow

    @property
    def dx(self) -> float:
        return self.width / self.nx

    @property
    def dy(self) -> float:
        return self.height / self.ny

    @property
    def dt(self) -> float:
        return self.courant * min(self.dx, self.dy) / math.sqrt(self.gravity * self.depth)

    @property
    def viscosity(self) -> float:
        """Lateral friction, m^2/s: as little as keeps the smallest eddies smooth."""
        return 0.015 * self.jet_speed * min(self.dx, self.dy)


class Fields(NamedTuple):
    """The block of this rank, as one array for each: rows in y, columns in x.

    In a cell, h is in the middle, u on the eastern edge, v on the northern edge, and vorticity on
    the north-eastern corner.
    """

    u: jax.Array
    v: jax.Array
    h: jax.Array


class State(NamedTuple):
    """Two time levels: of a step x' = x + a F - b F_before, with tendencies F. With ghost cells."""

    fields: Fields  # x
    tendency: Fields  # F_before: at walls as the fields are, in other ghost cells anything
    spare: Fields  # F of the step before that: memory for the next one


def tendencies(p: Parameters, f: np.ndarray, fields: Fields) -> Fields:
    """Return the time derivatives of the inner cells. `f` is a column: its values on the
    corners."""
    u, v, h = fields
    north, south, east, west = np.s_[1:, :], np.s_[:-1, :], np.s_[:, 1:], np.s_[:, :-1]
    inner_rows, inner_columns = np.s_[1:-1, :], np.s_[:, 1:-1]

    # Each array spans the inner cells, and the ghost cells for which it can be computed.
    depth = p.depth + h
    flux_x = 0.5 * (depth[west] + depth[east]) * u[west]
    flux_y = 0.5 * (depth[south] + depth[north]) * v[south]
    vorticity = relative_vorticity(p, fields)
    pair = depth[south] + depth[north]
    q = (vorticity + f) / (0.25 * (pair[west] + pair[east]))
    u2, v2 = (u * u)[north], (v * v)[:, 1:]
    bernoulli = p.gravity * h[1:, 1:] + 0.25 * (u2[west] + u2[east] + v2[south] + v2[north])
    coriolis_u = q * (flux_y[west] + flux_y[east])
    coriolis_v = q * (flux_x[south] + flux_x[north])

    du = 0.25 * (coriolis_u[south] + coriolis_u[north])[:, 1:]
    du -= (bernoulli[east] - bernoulli[west])[south] / p.dx
    dv = -0.25 * (coriolis_v[west] + coriolis_v[east])[north]
    dv -= (bernoulli[north] - bernoulli[south])[west] / p.dy
    dh = (flux_x[west] - flux_x[east])[inner_rows] / p.dx
    dh += (flux_y[south] - flux_y[north])[inner_columns] / p.dy
    return Fields(du + friction(p, u), dv + friction(p, v), dh)


def relative_vorticity(p: Parameters, fields: Fields) -> jax.Array:
    """dv/dx - du/dy on the corners of the inner cells and of those to their south and west."""
    u, v, _ = fields
    return (v[:-1, 1:] - v[:-1, :-1]) / p.dx - (u[1:, :-1] - u[:-1, :-1]) / p.dy


def friction(p: Parameters, a: jax.Array) -> jax.Array:
    middle = 2.0 * a[1:-1, 1:-1]
    x = p.viscosity / p.dx**2 * (a[1:-1, :-2] - middle + a[1:-1, 2:])
    y = p.viscosity / p.dy**2 * (a[:-2, 1:-1] - middle + a[2:, 1:-1])
    return x + y


def initial_fields(p: Parameters) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u, v and h of the whole grid: the jet, the height that balances it, and the bump."""
    x = (np.arange(p.nx) + 0.5) * p.dx
    y = (np.arange(p.ny) + 0.5) * p.dy - 0.5 * p.height
    y_edge = y[:-1] + 0.5 * p.dy

    def jet(y):
        return p.jet_speed / np.cosh(y / p.jet_width) ** 2

    # f u = -g dh/dy, with f and u on the edges between the rows
    slope = -(p.coriolis + p.beta * y_edge) * jet(y_edge) / p.gravity
    balanced = np.concatenate([[0.0], np.cumsum(slope * p.dy)])
    balanced -= balanced.mean()

    bump = p.bump * np.exp(-(((x - p.width / 3) / (2 * p.jet_width)) ** 2))
    bump = bump * np.exp(-((y[:, None] / p.jet_width) ** 2))

    u = np.broadcast_to(jet(y)[:, None], (p.ny, p.nx))
    return u, np.zeros((p.ny, p.nx)), balanced[:, None] + bump


# The ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Which block of the whole grid this rank holds, and which ranks hold those beside it."""

    comm: MPI.Intracomm
    p: Parameters

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """Blocks in y and x: of all ways to cut the grid, that with the shortest cuts."""
        p, size = self.p, self.comm.size
        cuts = [(n, size // n) for n in range(1, size + 1) if size % n == 0]
        cuts = [(y, x) for y, x in cuts if p.ny % y == 0 and p.nx % x == 0]
        if not cuts:
            raise SystemExit(f"cannot cut {p.nx} x {p.ny} cells into {size} equal blocks")
        lengths = {(y, x): p.nx * (y - 1) + (p.ny * x if x > 1 else 0) for y, x in cuts}
        return min(cuts, key=lambda cut: (lengths[cut], cut[1]))

    @property
    def position(self) -> tuple[int, int]:
        return divmod(self.comm.rank, self.blocks[1])

    @cached_property
    def cart(self) -> MPI.Cartcomm:
        """The same ranks, in rows of blocks."""
        return self.comm.Create_cart(self.blocks, periods=[False, True])

    @property
    def shape(self) -> tuple[int, int]:
        return self.p.ny // self.blocks[0], self.p.nx // self.blocks[1]

    @property
    def block(self) -> tuple[slice, slice]:
        """The place of this rank's cells in the whole grid."""
        (j, i), (ny, nx) = self.position, self.shape
        return np.s_[j * ny : (j + 1) * ny, i * nx : (i + 1) * nx]

    def neighbours(self, axis: int) -> tuple[int | None, int | None]:
        """Return the ranks to the south and north (axis 0) or west and east (axis 1); None is a
        wall."""
        low, high = (None if r == MPI.PROC_NULL else r for r in self.cart.Shift(axis, 1))
        return low, high


def walls(grid: Grid, fields: Fields) -> Fields:
    """No flow through the walls (v = 0), no friction along them (the rest is mirrored).

    This is linear: what holds for the tendencies will hold for the fields.
    """
    u, v, h = fields
    south, north = grid.neighbours(0)
    if south is None:
        u, v, h = u.at[0].set(u[1]), v.at[0].set(0.0), h.at[0].set(h[1])
    if north is None:
        u, v, h = u.at[-1].set(u[-2]), v.at[-2:].set(0.0), h.at[-1].set(h[-2])
    return Fields(u, v, h)


def exchange(grid: Grid, fields: Fields) -> Fields:
    """Fill the ghost cells that other ranks hold: first the columns, then the rows, corners too.

    The edges of all fields travel in one message for each neighbor.
    """
    for axis in (1, 0):
        low, high = swap(grid, axis, edges(fields, axis, at=1), edges(fields, axis, at=-2))
        fields = fill(fields, axis, low, at=0)
        fields = fill(fields, axis, high, at=-1)
    return fields


def edges(fields: Fields, axis: int, at: int) -> jax.Array:
    return jnp.stack([lax.index_in_dim(a, at, axis) for a in fields])


def fill(fields: Fields, axis: int, edge: jax.Array | None, at: int) -> Fields:
    if edge is None:
        return fields
    at %= fields.h.shape[axis]
    update = lax.dynamic_update_index_in_dim
    return Fields(*(update(a, e, at, axis) for a, e in zip(fields, edge, strict=True)))


def swap(grid: Grid, axis: int, low: jax.Array, high: jax.Array):
    """Give `low` to the neighbor below and `high` to the one above; return what they give."""
    below, above = grid.neighbours(axis)
    if below == above == grid.comm.rank:
        return lax.optimization_barrier((high, low))

    def sendrecv(edge, source, dest):
        return mpi4jax.sendrecv(edge, edge, source, dest, comm=grid.comm)

    if axis == 1:  # round the ring: all data moves up, then all moves down
        return sendrecv(high, below, above), sendrecv(low, above, below)
    # Along the line, pairs of neighbors swap: first 0-1, 2-3, ..., then 1-2, 3-4, ...
    from_below = from_above = None
    above_first = grid.position[axis] % 2 == 0
    for upward in (above_first, not above_first):
        if upward and above is not None:
            from_above = sendrecv(high, above, above)
        if not upward and below is not None:
            from_below = sendrecv(low, below, below)
    return from_below, from_above


def exchange_halo(grid: Grid, fields: Fields) -> Fields:
    """Return the same by one halo exchange."""
    return mpi4jax.halo_exchange(fields, grid.cart)


# The model ---------------------------------------------------------------------------------------


class Model:
    def __init__(self, p: Parameters, comm: MPI.Intracomm, halo: bool = False):
        self.p = p
        self.exchange = exchange_halo if halo else exchange
        self.comm = comm
        self.grid = Grid(comm, p)
        rows, _ = self.grid.block
        corners = np.arange(rows.start, rows.stop + 1) * p.dy - 0.5 * p.height
        self.f = np.asarray(p.coriolis + p.beta * corners, np.float32)[:, None]
        self.start = jax.jit(self._start)
        self.advance = jax.jit(self._advance)
        self.snapshot = jax.jit(self._snapshot)

    def initial_state(self) -> State:
        return self.start([np.float32(a[self.grid.block]) for a in initial_fields(self.p)])

    def _start(self, blocks) -> State:
        fields = walls(self.grid, Fields(*(jnp.pad(a, 1) for a in blocks)))
        fields = self.exchange(self.grid, fields)
        # With this as the tendency of the step before, the first step is one of Euler's method.
        tendency = self.tendency(fields, Fields(*map(jnp.zeros_like, fields)))
        return State(fields, tendency, spare=tendency)

    def tendency(self, fields: Fields, spare: Fields) -> Fields:
        """Return the time derivatives of all cells but the ghosts of other ranks' cells.

        They are written into the middle of arrays that are not used any more: `jnp.pad` would make
        the loop that computes them test each cell for being one of the edge.
        """
        inner = tendencies(self.p, self.f, fields)
        tendency = map(lax.dynamic_update_slice, spare, inner, 3 * [(1, 1)])
        return walls(self.grid, Fields(*tendency))

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of the tendency of this step, and of the tendency of the step before."""
        old_weight = (0.5 + self.p.damping) * self.p.dt
        return self.p.dt + old_weight, old_weight

    def step(self, state: State) -> State:
        """The sums are over whole arrays, ghost cells and all: XLA computes them in place."""
        new_weight, old_weight = self.weights
        tendency = self.tendency(state.fields, state.spare)
        stepped = (
            x + (new_weight * new - old_weight * old)
            for x, new, old in zip(state.fields, tendency, state.tendency, strict=True)
        )
        fields = self.exchange(self.grid, Fields(*stepped))
        return State(fields, tendency, spare=state.tendency)

    def _advance(self, state: State, steps) -> State:
        """Take an even number of steps: after two, the results lie where the loop expects them."""
        return lax.fori_loop(0, steps // 2, lambda _, s: self.step(self.step(s)), state)

    def _snapshot(self, state: State):
        """u, v, h and relative vorticity of the whole grid on rank 0, None elsewhere."""
        inner = [a[1:-1, 1:-1] for a in state.fields]
        inner.append(relative_vorticity(self.p, state.fields)[1:, 1:])
        blocks = mpi4jax.gather(jnp.stack(inner), 0, comm=self.comm)
        if self.comm.rank != 0:
            return None
        (rows, columns), (ny, nx) = self.grid.blocks, self.grid.shape
        blocks = blocks.reshape(rows, columns, 4, ny, nx)
        return blocks.transpose(2, 0, 3, 1, 4).reshape(4, self.p.ny, self.p.nx)


# The command -------------------------------------------------------------------------------------


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--days", type=float, help="simulated time (default: 8)")
    parser.add_argument("--size", type=int, nargs=2, metavar=("NX", "NY"), help="cells, 360 x 180")
    parser.add_argument("--halo", action="store_true", help="exchange with mpi4jax.halo_exchange")
    parser.add_argument("--benchmark", action="store_true", help="only print the time it takes")
    parser.add_argument("--steps", type=int, help="steps of a benchmark (default: 100)")
    parser.add_argument("--save-animation", type=Path, metavar="PATH", help="GIF, or MP4 (ffmpeg)")
    parser.add_argument("--save-figure", type=Path, metavar="PATH", help="the last state, as a PNG")
    parser.add_argument("--save-state", type=Path, metavar="PATH", help="the last state, as a .npz")
    parser.add_argument("--frame-hours", type=float, default=2.0, help="simulated time of a frame")
    args = parser.parse_args(argv)
    if args.steps is not None and not args.benchmark:
        parser.error("--steps is for --benchmark; use --days")
    args.size = args.size or ([3600, 1800] if args.benchmark else [360, 180])
    return args


def even(number: float) -> int:
    return max(2, 2 * round(number / 2))


def benchmark(model: Model, steps: int):
    """The best of three runs after a warm-up."""
    state = model.initial_state()
    jax.block_until_ready(model.advance(state, 2))
    times = []
    for _ in range(3):
        model.comm.Barrier()
        begin = time.perf_counter()
        jax.block_until_ready(model.advance(state, steps))
        model.comm.Barrier()
        times.append(time.perf_counter() - begin)
    report(model, steps, min(times))


def report(model: Model, steps: int, wall: float):
    if model.comm.rank == 0:
        p, (rows, columns), size = model.p, model.grid.blocks, model.comm.size
        ranks = "1 rank" if size == 1 else f"{size} ranks ({columns} x {rows})"
        print(
            f"{p.nx} x {p.ny} cells on {ranks}, {steps} steps: "
            f"wall time {wall:.2f} s, {steps / wall:.1f} steps per second",
            flush=True,
        )


def simulate(model: Model, days: float, frame_hours: float, keep_frames: bool):
    """Run the model; return the fields at the end and frames (time, vorticity), on rank 0."""
    from tqdm import tqdm

    p, root = model.p, model.comm.rank == 0
    total = even(days * DAY / p.dt)
    per_frame = min(total, even(frame_hours * HOUR / p.dt))
    state = model.initial_state()
    jax.block_until_ready(model.advance(state, 2))  # compiles
    frames = []

    def look(steps):
        fields = model.snapshot(state)
        if root and keep_frames:
            thin = max(1, p.nx // 720)
            frames.append((steps * p.dt, np.asarray(fields[3, ::thin, ::thin])))
        return fields

    done, wall = 0, 0.0
    form = "{l_bar}{bar}| {n:.1f}/{total:.1f} days [{elapsed}<{remaining}]"
    with tqdm(total=days, bar_format=form, disable=not root) as bar:
        fields = look(done)
        while done < total:
            steps = min(per_frame, total - done)
            begin = time.perf_counter()
            state = jax.block_until_ready(model.advance(state, steps))
            wall += time.perf_counter() - begin
            done += steps
            fields = look(done)
            bar.update(steps * p.dt / DAY)
    report(model, done, wall)
    return done * p.dt, fields, frames


class Picture:
    """Relative vorticity, in colors that stay the same for all times, and who computes what."""

    def __init__(self, p: Parameters, blocks: tuple[int, int]):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        self.figure, axes = plt.subplots(figsize=(9.6, 4.85), dpi=100, layout="constrained")
        kilometres = [0, p.width / 1e3, -p.height / 2e3, p.height / 2e3]
        limit = 0.7 * p.jet_speed / p.jet_width / p.coriolis
        how: dict[str, Any] = {"cmap": "RdBu_r", "origin": "lower", "interpolation": "bilinear"}
        how |= {"vmin": -limit, "vmax": limit, "extent": kilometres}
        self.image = axes.imshow(np.zeros((2, 2)), **how)
        self.title = axes.set_title("Shallow-water jet")  # for the layout
        axes.set(xlabel=f"{kilometres[1]:,.0f} km", xticks=[], yticks=[])
        self.figure.colorbar(self.image, label="relative vorticity / f", aspect=28, pad=0.01)
        self.show_blocks(axes, kilometres, *blocks)
        self.scale = 1 / p.coriolis
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # the same for all frames, and fast

    def show_blocks(self, axes, extent, rows: int, columns: int):
        """Dashed lines where the blocks of ranks meet, and each rank's number."""
        west, east, south, north = extent
        x = np.linspace(west, east, columns + 1)
        y = np.linspace(south, north, rows + 1)
        line = {"color": "0.2", "linestyle": "--", "linewidth": 1.2}
        for edge in x[1:-1]:
            axes.axvline(edge, **line)
        for edge in y[1:-1]:
            axes.axhline(edge, **line)
        for rank in range(rows * columns):
            row, column = divmod(rank, columns)
            place = x[column] + 0.012 * extent[1], y[row + 1] - 0.03 * (extent[3] - extent[2])
            axes.text(*place, f"rank {rank}", va="top", fontsize=11)

    def show(self, seconds: float, vorticity: np.ndarray):
        self.image.set_data(vorticity * self.scale)
        self.title.set_text(f"Shallow-water jet, day {seconds / DAY:.1f}")

    def animate(self, path: Path, frames) -> Path:
        from matplotlib.animation import FFMpegWriter, PillowWriter

        images = path.suffix in (".gif", ".webp")
        if not images and shutil.which("ffmpeg") is None:
            print(f"no ffmpeg for {path.name}: writing a GIF")
            path, images = path.with_suffix(".gif"), True
        writer = (PillowWriter if images else FFMpegWriter)(fps=15)
        with writer.saving(self.figure, path, dpi=100):
            for seconds, vorticity in frames:
                self.show(seconds, vorticity)
                writer.grab_frame()
        return path


def main():
    args = parse()
    model = Model(Parameters(*args.size), MPI.COMM_WORLD, args.halo)
    if args.benchmark:
        steps = args.steps or (args.days * DAY / model.p.dt if args.days else 100)
        return benchmark(model, even(steps))

    seconds, fields, frames = simulate(
        model, args.days or 8.0, args.frame_hours, keep_frames=args.save_animation is not None
    )
    if model.comm.rank != 0:
        return None
    u, v, h, vorticity = np.asarray(fields)
    if not np.isfinite(h).all():
        raise SystemExit("the model has become unstable")
    for path in (args.save_state, args.save_figure, args.save_animation):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    if args.save_state:
        np.savez(args.save_state, u=u, v=v, h=h, vorticity=vorticity, seconds=seconds)
    if args.save_figure:
        picture = Picture(model.p, model.grid.blocks)
        picture.show(seconds, vorticity)
        picture.figure.savefig(args.save_figure, dpi=150)
        print("wrote", args.save_figure)
    if args.save_animation:
        picture = Picture(model.p, model.grid.blocks)
        print("wrote", picture.animate(args.save_animation, frames))


if __name__ == "__main__":
    main()
