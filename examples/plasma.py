"""Simulate electrons that oscillate in their own field, by a particle-in-cell code in 1-D.

    mpiexec -n 4 python examples/plasma.py

Each rank has a block of cells and the electrons in it. A step

1. deposits the charge of each electron on the two nodes beside it. A node that belongs to the next
   block is a ghost cell: `halo_add` adds it to the node there;
2. integrates the charge to the electric field (Gauss's law), with an `exscan` over the ranks;
3. interpolates the field at the electrons. `halo_exchange` fills the ghost cells;
4. moves the electrons, and sends those that have left the block to their rank with
   `ragged_alltoall`.

No charge is lost: parts of a charge are multiples of 1/256, whose sums are exact, and their total
is compared to the bit. Electrons that are displaced as a sine oscillate with the plasma frequency,
which is 1 here: after half a period, the displacement has the other sign.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

PER_CELL, AMPLITUDE = 32, 0.5  # electrons in a cell; their displacement at first, in cells


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--steps-per-period", type=int, default=100)
    options = parser.parse_args()
    cells, dt = options.cells, 2 * np.pi / options.steps_per_period

    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
    block = mpi4jax.grids.Block((cells,), cart, width=1)
    (first,), (nodes,) = block.offset, block.shape
    starts = jnp.array(
        [mpi4jax.grids.Block((cells,), cart, rank=r).offset[0] for r in range(cart.size)]
    )
    capacity = 2 * PER_CELL * -(-cells // cart.size)

    def beside(x):
        """The node below each electron, as an index of the block with ghost cells, and how far it
        is from there."""
        below = jnp.floor(x)
        far = jnp.round((x - below) * 256) / 256
        return below.astype(int) - first + 1, far

    def density(x, count):
        node, far = beside(x)
        here = jnp.where(jnp.arange(capacity) < count, 1.0, 0.0)
        rho = jnp.zeros(block.padded_shape)
        rho = rho.at[node].add(here * (1 - far)).at[node + 1].add(here * far)
        return mpi4jax.halo_add(rho, cart)[block.inner]

    def field(rho):
        """At the nodes, with ghost cells."""
        jump = 1 - rho / PER_CELL  # ions at rest, and electrons
        above = mpi4jax.exscan(jump.sum(), op=MPI.SUM, comm=cart) + jnp.cumsum(jump)
        above -= mpi4jax.allreduce(above.sum(), op=MPI.SUM, comm=cart) / cells
        above = mpi4jax.halo_exchange(jnp.pad(above, 1), cart)
        return mpi4jax.halo_exchange(jnp.pad((above[1:-1] + above[:-2]) / 2, 1), cart)

    def move(electrons, count):
        """To the rank in whose block each is."""
        rank = jnp.searchsorted(starts, electrons["x"], side="right") - 1
        rank = jnp.where(jnp.arange(capacity) < count, rank, cart.size)
        order = jnp.argsort(rank)
        counts = jnp.bincount(rank, length=cart.size)
        sent = jax.tree.map(lambda leaf: leaf[order], electrons)
        electrons, came = mpi4jax.ragged_alltoall(sent, counts, capacity, comm=cart)
        return electrons, came.sum()

    def step(_, state):
        electrons, count = state
        x, v = electrons["x"], electrons["v"]
        e = field(density(x, count))
        node, far = beside(x)
        v -= dt * (e[node] * (1 - far) + e[node + 1] * far)
        x = (x + dt * v) % cells
        x = jnp.where(x < cells, x, 0.0)  # what is a little below 0 may be rounded
        return move({"x": x, "v": v, "x0": electrons["x0"]}, count)

    @jax.jit
    def measure(electrons, count):
        """Return the total charge, and the amplitude of the displacement."""
        here = jnp.arange(capacity) < count
        shift = (electrons["x"] - electrons["x0"] + cells / 2) % cells - cells / 2
        wave = jnp.where(here, shift * jnp.sin(2 * jnp.pi * electrons["x0"] / cells), 0.0)
        charge = density(electrons["x"], count).sum()
        charge, wave = mpi4jax.allreduce((charge, wave.sum()), op=MPI.SUM, comm=cart)
        return charge, 2 * wave / (PER_CELL * cells)

    x0 = first + (jnp.arange(capacity) + 0.5) / PER_CELL
    x = (x0 + AMPLITUDE * jnp.sin(2 * jnp.pi * x0 / cells)) % cells
    state = {"x": x, "v": 0 * x, "x0": x0}, jnp.int32(nodes * PER_CELL)
    half = jax.jit(lambda s: lax.fori_loop(0, options.steps_per_period // 2, step, s))
    state = jax.jit(move)(*state)
    for halves in range(3):
        charge, amplitude = measure(*state)
        if cart.rank == 0:
            print(f"{halves} half periods: charge {charge}, amplitude {amplitude:.3f}")
        if float(charge) != PER_CELL * cells:
            raise SystemExit("charge was lost")
        state = half(state)


if __name__ == "__main__":
    main()
