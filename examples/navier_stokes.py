"""Compute a turbulent flow in a periodic box by Fourier transforms, and its sensitivity.

    mpiexec -n 4 python examples/navier_stokes.py --points 48

Derivatives are products with wavenumbers, and `mpi4jax.fft` transforms the velocity. Each rank has
a pencil of the box, or a slab (`--slabs`). The flow begins as a Taylor-Green vortex: smooth, until
its vortices have stretched one another (Brachet et al., J. Fluid Mech. 130, 1983). Time steps are
of second order (midpoint), and viscosity is integrated exactly.

The goal is the enstrophy at the end, the mean square of the vorticity over two. Its gradient with
respect to the velocity at the beginning is computed backwards through all steps. Only every few of
these are kept (`jax.checkpoint`), and the others are computed again.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax


class Box:
    """A periodic box of size 2 pi with `n` points along each side.

    Fields are this rank's block, behind an axis for the three components of a vector.
    """

    def __init__(self, comm: MPI.Intracomm, points: int, slabs: bool):
        self.comm, self.points = comm, points
        cuts = (comm.size,) if slabs else MPI.Compute_dims(comm.size, 2)
        self.layout = mpi4jax.Layout((points,) * 3, dict(enumerate(cuts)))
        options: dict[str, Any] = {"real": True, "comm": comm}
        self.k = mpi4jax.fft.frequencies(self.layout, d=1 / points, **options)
        self.square = sum(k**2 for k in self.k)
        # Products of two waves that the grid cannot tell from others are left out.
        self.keep = jnp.prod(jnp.stack([jnp.abs(k) < points / 3 for k in self._full()]), axis=0)

    def _full(self):
        return jnp.broadcast_arrays(*self.k)

    def spectrum(self, x):
        return mpi4jax.fft.rfftn(x, self.layout, comm=self.comm)

    def field(self, y):
        return mpi4jax.fft.irfftn(y, self.layout, comm=self.comm)

    def places(self):
        """Coordinates of this rank's points."""
        sides = [np.arange(s.start, s.stop) for s in self.layout.block(self.comm.rank)]
        return np.meshgrid(*(2 * np.pi / self.points * side for side in sides), indexing="ij")

    def taylor_green(self):
        x, y, z = self.places()
        u, v = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z)
        return jnp.asarray(np.stack([u, v, 0 * u]), jnp.result_type(float))

    def gathered(self, x):
        """Return the field of the whole box, on rank 0."""
        blocks = self.comm.gather((self.layout.block(self.comm.rank), np.asarray(x)))
        if blocks is None:  # not on rank 0
            return None
        whole = np.zeros((3, *self.layout.shape), x.dtype)
        for block, part in blocks:
            whole[(slice(None), *block)] = part
        return whole

    def curl(self, y):
        return 1j * jnp.stack(
            [self.k[a] * y[b] - self.k[b] * y[a] for a, b in ((1, 2), (2, 0), (0, 1))]
        )

    def solenoidal(self, y):
        """Without the part that is a gradient, which the pressure takes away."""
        divergence = sum(k * part for k, part in zip(self.k, y, strict=True))
        pressure = divergence / jnp.where(self.square == 0, 1, self.square)
        return y - jnp.stack([k * pressure for k in self.k])

    def mean(self, x):
        """Return the mean over all points of the box of a sum over components."""
        return mpi4jax.allreduce(jnp.sum(x), comm=self.comm) / self.points**3


def make_model(box: Box, viscosity: float, step: float, steps: int, group: int):
    """Return a function from the initial velocity to the final one and the energies."""
    half = jnp.exp(-viscosity * box.square * step / 2)

    def push(y):
        velocity, vorticity = box.field(y), box.field(box.curl(y))
        force = jnp.cross(velocity, vorticity, axis=0)
        return box.keep * box.solenoidal(box.spectrum(force))

    def one_step(y, _):
        middle = half * (y + step / 2 * push(y))
        return half**2 * y + step * half * push(middle), None

    @jax.checkpoint
    def some_steps(velocity, _):
        y, _ = jax.lax.scan(one_step, box.spectrum(velocity), None, length=group)
        velocity = box.field(y)
        return velocity, box.mean(velocity**2) / 2

    return lambda velocity: jax.lax.scan(some_steps, velocity, None, length=steps // group)


def draw(path: Path, vorticity):
    """The size of the vorticity in one half of a plane; the other is its mirror image."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plane = np.linalg.norm(vorticity[..., vorticity.shape[-1] // 8], axis=0)
    figure, axes = plt.subplots(figsize=(6, 3.2), dpi=80, layout="constrained")
    axes.imshow(plane.T[: len(plane) // 2], cmap="magma", origin="lower", interpolation="bicubic")
    axes.set(xticks=[], yticks=[], title="Taylor-Green vortex: vorticity")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=32, metavar="N", help="along each side")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group", type=int, default=5, help="steps for each that is kept")
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--reynolds", type=float, default=400.0)
    parser.add_argument("--slabs", action="store_true", help="not pencils")
    parser.add_argument("--save", type=Path, metavar="PATH", help="energies and gradient, a .npz")
    parser.add_argument(
        "--save-figure", type=Path, metavar="PATH", help="a PNG: vorticity at the end"
    )
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    box = Box(comm, args.points, args.slabs)
    model = make_model(box, 1 / args.reynolds, args.step, args.steps, args.group)

    def goal(velocity):
        last, energies = model(velocity)
        vorticity = box.field(box.curl(box.spectrum(last)))
        return box.mean(vorticity**2) / 2, energies

    first = box.taylor_green()
    (enstrophy, energies), gradient = jax.jit(jax.value_and_grad(goal, has_aux=True))(first)

    # What the gradient says of a flow that begins 1 % faster, and what that flow does.
    predicted = 0.01 * box.mean(gradient * first) * box.points**3
    faster, slower = (jax.jit(goal)(scale * first)[0] for scale in (1.005, 0.995))
    whole, vorticity = box.gathered(gradient), None
    if args.save_figure:
        last, _ = jax.jit(model)(first)
        vorticity = box.gathered(box.field(box.curl(box.spectrum(last))))
    if whole is None:  # not on rank 0
        return
    print(
        f"{args.points}^3 points on {comm.size} ranks, {args.steps} steps: energy "
        f"{float(energies[0]):.4f} -> {float(energies[-1]):.4f}, enstrophy {float(enstrophy):.4f}; "
        f"1 % faster: {float(predicted):+.5f} by its gradient, {float(faster - slower):+.5f} tried"
    )
    if args.save:
        np.savez(
            args.save,
            energies=energies,
            gradient=whole,
            predicted=predicted,
            tried=faster - slower,
        )
    if args.save_figure:
        draw(args.save_figure, vorticity)


if __name__ == "__main__":
    main()
