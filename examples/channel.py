"""Compute a slow flow in a channel, with a pressure from Fourier and cosine transforms.

    mpiexec -n 4 python examples/channel.py

The channel is periodic along x and y, and has walls along z, where the velocity is zero. A force
drives rolls, viscosity slows them, and after each step the pressure makes the velocity free of
divergence. Velocities are at the faces of cells, pressures at their centers. The pressure solves a
Poisson equation with zero slope at the walls: a cosine transform of type 2 along z and Fourier
transforms along x and y make it a division by the eigenvalues of the differences, so that the
divergence vanishes up to rounding errors. Slabs along x are distributed over the ranks.

The gradient of the final energy with respect to the force in each cell is computed, too.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

jax.config.update("jax_enable_x64", True)

comm = MPI.COMM_WORLD
fft = mpi4jax.fft
CART = comm.Create_cart([comm.size], periods=[True])


class Channel:
    """The grid and its differences. Arrays hold this rank's slab, of shape ``(nx, ny, nz)``."""

    def __init__(self, shape, viscosity=0.05):
        self.block = mpi4jax.grids.Block(shape, CART, axes=0, width=1)
        self.layout, self.viscosity = self.block.layout, viscosity
        self.cell = 1 / shape[2]  # the height of the channel is 1
        self.time_step = 0.1 * self.cell**2 / viscosity
        # The transforms along x and y take the coefficients of those along z, which stay in place.
        spectrum = fft.spectral_layout(self.layout, axes=(0, 1), real=True)
        kx, ky = fft.frequencies(self.layout, axes=(0, 1), real=True, comm=comm)
        kz = jnp.arange(shape[2])[spectrum.block(comm.rank)[2]] / (2 * shape[2])
        waves = sum(jnp.cos(2 * jnp.pi * k) - 1 for k in (kx, ky, kz))
        self.eigenvalues = 2 / self.cell**2 * waves

    def poisson(self, f):
        """Return the function whose discrete Laplacian is ``f``, with zero slope at the walls."""
        modes = fft.dctn(f, self.layout, axes=(2,), comm=comm)
        modes = fft.rfftn(modes, self.layout, axes=(0, 1), comm=comm)
        zero = self.eigenvalues == 0
        modes = jnp.where(zero, 0, modes / jnp.where(zero, 1, self.eigenvalues))
        modes = fft.irfftn(modes, self.layout, axes=(0, 1), comm=comm)
        return fft.idctn(modes, self.layout, axes=(2,), comm=comm)

    def with_neighbors(self, x, wall):
        """Return an array with a cell more on each side; ``wall`` times the last one at walls."""
        x = mpi4jax.halo_exchange(self.block.with_ghosts(x), CART, axes=0)
        x = jnp.pad(x, [(0, 0), (1, 1), (0, 0)], mode="wrap")
        return jnp.concatenate([wall * x[..., :1], x, wall * x[..., -1:]], 2)

    def above(self, x, axis, wall):
        """Return the differences to the next cell along an axis."""
        x = self.with_neighbors(x, wall)
        ends = [slice(2, None) if a == axis else slice(1, -1) for a in range(3)]
        return (x[tuple(ends)] - x[1:-1, 1:-1, 1:-1]) / self.cell

    def below(self, x, axis, wall):
        x = self.with_neighbors(x, wall)
        ends = [slice(None, -2) if a == axis else slice(1, -1) for a in range(3)]
        return (x[1:-1, 1:-1, 1:-1] - x[tuple(ends)]) / self.cell

    def divergence(self, velocity):
        u, v, w = velocity
        # The first element of `w` is at the lower wall, and zero is at the upper one.
        up = jnp.pad(w[..., 1:], [(0, 0), (0, 0), (0, 1)]) - w
        return self.above(u, 0, 1) + self.above(v, 1, 1) + up / self.cell

    def projected(self, velocity):
        """Subtract the gradient of a pressure, so that there is no divergence."""
        p = self.poisson(self.divergence(velocity))
        return tuple(x - self.below(p, axis, 1) for axis, x in enumerate(velocity))

    def diffused(self, x, wall):
        parts = (self.above(x, a, wall) - self.below(x, a, wall) for a in range(3))
        return x + self.time_step * self.viscosity / self.cell * sum(parts)

    def step(self, velocity, force):
        u, v, w = velocity
        u, v, w = self.diffused(u, -1), self.diffused(v, -1), self.diffused(w, 0)
        w = (w + self.time_step * force).at[..., 0].set(0)
        return self.projected((u, v, w))

    def energy(self, velocity):
        return mpi4jax.linalg.vdot(velocity, velocity, comm=comm) * self.cell**3 / 2


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=32, help="across the channel")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", help="file for the velocity and the gradient")
    options = parser.parse_args()
    n = options.points
    channel = Channel((n, n, n))
    i, j, k = jnp.indices(channel.block.shape)
    x, y = (2 * jnp.pi * index / n for index in (i + channel.block.offset[0], j))
    force = jnp.cos(x) * jnp.sin(2 * y) * jnp.sin(jnp.pi * k / n)

    def flow(force):
        start = (jnp.zeros_like(force),) * 3
        steps = range(options.steps)
        velocity, _ = jax.lax.scan(
            jax.checkpoint(lambda v, _: (channel.step(v, force), None)), start, jnp.array(steps)
        )
        return channel.energy(velocity), velocity

    run = jax.jit(jax.value_and_grad(flow, has_aux=True))
    (energy, velocity), gradient = run(force)
    slope = mpi4jax.linalg.vdot(gradient, force, comm=comm)
    divergence = jnp.abs(channel.divergence(velocity)).max()
    divergence = mpi4jax.allreduce(divergence, op=MPI.MAX, comm=comm)
    (after, _), _ = run(1.001 * force)
    (before, _), _ = run(0.999 * force)
    if comm.rank == 0:
        print(f"energy {energy:.6e}, largest divergence {divergence:.1e}")
        print(f"slope {slope:.6e}, finite difference {(after - before) / 2e-3:.6e}")
    if options.save:
        whole = [
            mpi4jax.redistribute(x, channel.layout, mpi4jax.Layout(channel.layout.shape))
            for x in (*velocity, gradient)
        ]
        if comm.rank == 0:
            np.savez(options.save, velocity=whole[:3], gradient=whole[3])


if __name__ == "__main__":
    main()
