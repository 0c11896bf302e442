"""Move particles through a box that is partitioned into blocks, one for each rank.

    mpiexec -n 4 python examples/particles.py --save-figure particles.png

Each rank has the particles that are in its block. After each step, particles that have left the
block are sent to the rank whose block they are in. Their number differs from step to step and is
not known in advance: `migrate` sends them, and returns how many have arrived. With `--balance 20`,
the blocks are chosen anew every 20 steps, so that all ranks have about as many particles.

The box is periodic in both directions. At first all particles are in a drop, on one rank or a few;
the flow, two waves that take turns, draws it into threads that come to all ranks. No particle is
lost: if a rank receives more particles than its capacity, the program fails with an error.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

STEP, TURN = 0.02, 25  # length of a step; steps until the other wave has its turn
CELLS = 64  # along each axis; blocks consist of whole cells


def initial_particles(number: int):
    """Return all particles, the same on all ranks: positions from 0 to 1 in a drop, and their
    numbers."""
    rng = np.random.default_rng(1)
    radius, angle = 0.18 * np.sqrt(rng.random(number)), 2 * np.pi * rng.random(number)
    places = 0.25 + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"place": places.astype(np.float32), "number": np.arange(number, dtype=np.int32)}


def velocity(place, step):
    """Along x, as a wave of y says, or the other way round."""
    along_x = jnp.stack([jnp.sin(2 * jnp.pi * place[:, 1]), jnp.zeros(len(place))], axis=1)
    along_y = jnp.stack([jnp.zeros(len(place)), jnp.sin(2 * jnp.pi * place[:, 0])], axis=1)
    return jnp.where(step // TURN % 2 == 0, along_x, along_y)


def cells_of(place):
    """Return the cells of the box in which particles are: their indices along each axis."""
    # What is a little below 0 may be rounded to 1, which is beyond the last cell.
    return [jnp.minimum((place[:, k] * CELLS).astype(int), CELLS - 1) for k in range(2)]


class Box:
    """Blocks of a box, and this rank's particles: the first `count` of `capacity` rows.

    The box has `CELLS` cells along each axis; `cuts` are the numbers or lengths of the blocks.
    """

    def __init__(self, comm: MPI.Intracomm, capacity: int, cuts):
        self.comm, self.capacity = comm, capacity
        self.layout = mpi4jax.Layout((CELLS, CELLS), enumerate(cuts))

    def balanced(self, particles, count):
        """Return blocks in which ranks have about as many particles, as an outer product allows."""
        here = jnp.arange(len(particles["number"])) < count
        cuts = []
        for axis, cells in enumerate(cells_of(particles["place"])):
            own = jnp.bincount(jnp.where(here, cells, CELLS), length=CELLS)
            weights = mpi4jax.allreduce(own, comm=self.comm)
            cuts.append(mpi4jax.grids.balanced(weights, self.layout.parts(axis)))
        return Box(self.comm, self.capacity, cuts)

    def send_home(self, particles, count):
        """Send each particle to its rank; return the particles of this rank."""
        owners = self.layout.owner(*cells_of(particles["place"]))
        return mpi4jax.migrate(particles, owners, self.capacity, count=count, comm=self.comm)

    def run(self, particles, count, steps):
        """Return the particles after the last step, and their number after each step."""

        def one_step(state, step):
            particles, count = state
            place = particles["place"] + STEP * velocity(particles["place"], step)
            particles, count = self.send_home({**particles, "place": place % 1}, count)
            return (particles, count), count

        (particles, count), counts = lax.scan(one_step, (particles, count), steps)
        return particles, count, counts

    def on_root(self, particles, count, number: int):
        """Return all particles, on rank 0, in the order of their numbers."""
        root = self.comm.rank == 0
        owners = jnp.zeros(len(particles["number"]), int)
        room = number if root else 0
        everything, _ = mpi4jax.migrate(particles, owners, room, count=count, comm=self.comm)
        order = jnp.argsort(everything["number"])
        return jax.tree.map(lambda rows: rows[order], everything)


def draw(path: Path, box: Box, places, counts):
    """Where the particles are, in the colors of their ranks, and how many each rank has had."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (map_, curve) = plt.subplots(1, 2, figsize=(11, 5), dpi=100, layout="constrained")
    colours = plt.get_cmap("tab10")(np.arange(counts.shape[1]) % 10)
    map_.scatter(*places.T, s=2, linewidths=0, c=colours[box.layout.owner(*cells_of(places))])
    for axis, lines in enumerate((map_.axvline, map_.axhline)):
        for cell in box.layout.ends(axis)[1:-1]:
            lines(cell / CELLS, color="black", linewidth=0.8)
    title = f"{len(places)} particles after {len(counts) - 1} steps"
    map_.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="x", ylabel="y")
    for rank, colour in enumerate(colours):
        curve.plot(counts[:, rank], color=colour, label=f"rank {rank}")
    curve.set(title="particles of each rank", xlabel="step", ylim=(0, None))
    curve.legend()
    curve.grid(alpha=0.3)
    figure.savefig(path)
    print("wrote", path)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--particles", type=int, default=20_000, metavar="N")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--capacity",
        type=int,
        metavar="N",
        help="for how many particles each rank has room; by default for all of them",
    )
    parser.add_argument(
        "--balance",
        type=int,
        metavar="N",
        help="choose the blocks anew every N steps, by the numbers of particles",
    )
    parser.add_argument("--save", type=Path, metavar="PATH", help="places and counts, a .npz")
    parser.add_argument("--save-figure", type=Path, metavar="PATH", help="a PNG")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    box = Box(comm, args.capacity or args.particles, MPI.Compute_dims(comm.size, 2))
    everything = initial_particles(args.particles)
    # Each rank begins with some, wherever they are, and sends them home.
    mine = {name: rows[comm.rank :: comm.size] for name, rows in everything.items()}
    particles, count = jax.jit(box.send_home)(mine, len(mine["number"]))
    parts, every = [count[None]], args.balance or args.steps
    for first in range(0, args.steps, every):
        if args.balance:
            box = box.balanced(particles, count)
            particles, count = jax.jit(box.send_home)(particles, count)
        steps = jnp.arange(first, min(first + every, args.steps))
        particles, count, of_steps = jax.jit(box.run)(particles, count, steps)
        parts.append(of_steps)

    counts = mpi4jax.allgather(jnp.concatenate(parts), comm=comm).T
    final = jax.jit(box.on_root, static_argnums=2)(particles, count, args.particles)
    if comm.rank != 0:
        return
    counts, lost = np.asarray(counts), args.particles - int(counts[-1].sum())
    print(
        f"{args.particles} particles on {comm.size} ranks, {args.steps} steps: {lost} lost; "
        f"a rank had from {counts.min()} to {counts.max()} of them"
    )
    if args.save:
        np.savez(args.save, place=final["place"], number=final["number"], counts=counts)
    if args.save_figure:
        draw(args.save_figure, box, np.asarray(final["place"]), counts)


if __name__ == "__main__":
    main()
