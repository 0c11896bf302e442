"""Move particles through a box that is partitioned into blocks, one for each rank.

    mpiexec -n 4 python examples/particles.py --save-figure particles.png

Each rank has the particles that are in its block. After each step, particles that have left the
block are sent to the rank whose block they are in. Their number differs from step to step and is
not known in advance: `ragged_alltoall` sends them, and returns how many have arrived.

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


class Box:
    """Blocks of a box, and this rank's particles: the first `count` of `capacity` rows."""

    def __init__(self, comm: MPI.Intracomm, capacity: int):
        self.comm, self.capacity = comm, capacity
        self.dims = MPI.Compute_dims(comm.size, 2)

    def rank_of(self, place):
        """Return the rank in whose block a particle is."""
        # What is a little below 0 may be rounded to 1, which is beyond the last block.
        i, j = (jnp.minimum((place[:, k] * n).astype(int), n - 1) for k, n in enumerate(self.dims))
        return i * self.dims[1] + j

    def send_home(self, particles, count):
        """Send each particle to its rank; return the particles of this rank."""
        here = jnp.arange(len(particles["number"])) < count
        rank = jnp.where(here, self.rank_of(particles["place"]), self.comm.size)
        order = jnp.argsort(rank)  # those for rank 0 first; at last the rows without a particle
        sorted_by_rank = jax.tree.map(lambda rows: rows[order], particles)
        send_counts = jnp.bincount(rank, length=self.comm.size)
        particles, received = mpi4jax.ragged_alltoall(
            sorted_by_rank, send_counts, self.capacity, comm=self.comm
        )
        return particles, received.sum()

    def run(self, particles, count, steps: int):
        """Return the particles after the last step, and their number after each step."""

        def one_step(state, step):
            particles, count = state
            place = particles["place"] + STEP * velocity(particles["place"], step)
            particles, count = self.send_home({**particles, "place": place % 1}, count)
            return (particles, count), count

        (particles, count), counts = lax.scan(one_step, (particles, count), jnp.arange(steps))
        return particles, count, counts

    def on_root(self, particles, count, number: int):
        """Return all particles, on rank 0, in the order of their numbers."""
        root = self.comm.rank == 0
        send_counts = jnp.zeros(self.comm.size, int).at[0].set(count)
        everything, _ = mpi4jax.ragged_alltoall(
            particles, send_counts, number if root else 0, comm=self.comm
        )
        order = jnp.argsort(everything["number"])
        return jax.tree.map(lambda rows: rows[order], everything)


def draw(path: Path, box: Box, places, counts):
    """Where the particles are, in the colors of their ranks, and how many each rank has had."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (map_, curve) = plt.subplots(1, 2, figsize=(11, 5), dpi=100, layout="constrained")
    colours = plt.get_cmap("tab10")(np.arange(counts.shape[1]) % 10)
    map_.scatter(*places.T, s=2, linewidths=0, c=colours[np.asarray(box.rank_of(places))])
    for lines, n in ((map_.axvline, box.dims[0]), (map_.axhline, box.dims[1])):
        for k in range(1, n):
            lines(k / n, color="black", linewidth=0.8)
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
    parser.add_argument("--save", type=Path, metavar="PATH", help="places and counts, a .npz")
    parser.add_argument("--save-figure", type=Path, metavar="PATH", help="a PNG")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    box = Box(comm, args.capacity or args.particles)
    everything = initial_particles(args.particles)
    # Each rank begins with some, wherever they are, and sends them home.
    mine = {name: rows[comm.rank :: comm.size] for name, rows in everything.items()}
    send_home, run = jax.jit(box.send_home), jax.jit(box.run, static_argnums=2)
    particles, first = send_home(mine, len(mine["number"]))
    particles, count, counts = run(particles, first, args.steps)

    counts = mpi4jax.allgather(jnp.concatenate([first[None], counts]), comm=comm).T
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
