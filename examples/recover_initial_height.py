"""Recover the initial height of the shallow-water model from its final state, by gradient descent.

    mpiexec -n 2 python examples/recover_initial_height.py --save-figure recovered.png

The model of shallow_water.py starts from a jet with a bump in height, which we pretend not to know,
and runs for a while. From the state that it ends in, we look for the height that it began with,
starting from the jet alone. The misfit of the final states,

    J(h0) = 1/2 sum of (h - h_obs)^2 + H/g [(u - u_obs)^2 + (v - v_obs)^2] over all cells,

has the units of energy, which waves conserve: so the Hessian of J is close to the identity, and
plain gradient descent with a step of 1 converges fast.

The gradient goes through the whole distributed run: the transpose of the halo exchange in each step
sends the sensitivities of ghost cells back to the cells that they are copies of, and each rank gets
the gradient for its own block. With `jax.checkpoint`, memory holds a state for each group of steps
and the steps of one group, rather than all intermediate results of the run.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from shallow_water import Fields, Model, Parameters, initial_fields

import mpi4jax.notoken as mpi4jax


class Inversion:
    def __init__(self, p: Parameters, comm: MPI.Intracomm, steps: int, group: int):
        if steps % group:
            raise SystemExit(f"{steps} steps are not a multiple of the {group} steps of a group")
        self.p, self.steps, self.group = p, steps, group
        self.model = Model(p, comm, halo=True)
        self.grid = self.model.grid
        self.winds = [np.asarray(a[self.grid.block], np.float32) for a in initial_fields(p)[:2]]
        self.truth = self.block(initial_fields(p)[2])
        self.first_guess = self.block(initial_fields(replace(p, bump=0.0))[2])
        self.run = jax.jit(self._run)
        self.observed = self.run(self.truth)
        self.misfit_and_gradient = jax.jit(jax.value_and_grad(self._misfit))
        self.gather = jax.jit(lambda block: mpi4jax.gather_blocks(block, self.grid.cart))

    def block(self, whole: np.ndarray) -> np.ndarray:
        return np.asarray(whole[self.grid.block], np.float32)

    def _run(self, height: jax.Array) -> Fields:
        """Return the inner cells at the end, from the height at the beginning."""

        @jax.checkpoint
        def some_steps(state, _):
            return lax.scan(lambda s, _: (self.model.step(s), None), state, length=self.group)

        state = self.model.start([*self.winds, height])
        state, _ = lax.scan(some_steps, state, length=self.steps // self.group)
        return Fields(*(a[1:-1, 1:-1] for a in state.fields))

    def _misfit(self, height: jax.Array) -> jax.Array:
        u, v, h = (a - b for a, b in zip(self._run(height), self.observed, strict=True))
        energy = h**2 + self.p.depth / self.p.gravity * (u**2 + v**2)
        return mpi4jax.allreduce(0.5 * jnp.sum(energy), op=MPI.SUM, comm=self.grid.comm)

    def descend(self, iterations: int, rate: float = 1.0):
        """Return the recovered height of this rank's block, all misfits, and the first gradient."""
        height, first = self.first_guess, jnp.zeros_like(self.first_guess)
        losses: list[float] = []
        for _ in range(iterations):
            loss, gradient = self.misfit_and_gradient(height)
            height = height - rate * gradient
            first = first if losses else gradient
            losses.append(float(loss))
        losses.append(float(self.misfit_and_gradient(height)[0]))
        return height, np.array(losses), first


def draw(path: Path, p: Parameters, losses, truth, recovered):
    """Truth, first guess and result, as differences to the first guess, and the misfits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6), dpi=100, layout="constrained")
    kilometres = [0, p.width / 1e3, -p.height / 2e3, p.height / 2e3]
    limit = np.abs(truth).max()
    pictures = [
        (axes[0, 0], "initial height: what is to be found", truth),
        (axes[0, 1], "before: the first guess", np.zeros_like(truth)),
        (axes[1, 0], f"after {len(losses) - 1} iterations", recovered),
    ]
    for where, title, field in pictures:
        where.imshow(
            field, cmap="RdBu_r", vmin=-limit, vmax=limit, extent=kilometres, origin="lower"
        )
        where.set(title=title, xlabel="x (km)", ylabel="y (km)")
    figure.colorbar(
        axes[0, 0].images[0], ax=axes, label="height above the first guess (m)", shrink=0.7
    )
    axes[1, 1].semilogy(losses / losses[0], marker="o", markersize=3)
    axes[1, 1].set(title="misfit of the final state", xlabel="iteration", ylabel="J / J at first")
    axes[1, 1].grid(alpha=0.3)
    figure.savefig(path)
    print("wrote", path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, nargs=2, metavar=("NX", "NY"), default=[120, 60])
    parser.add_argument("--steps", type=int, default=200, help="of the model")
    parser.add_argument("--group", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--iterations", type=int, default=20, help="of gradient descent")
    parser.add_argument("--save-figure", type=Path, metavar="PATH", help="a PNG")
    parser.add_argument("--save", type=Path, metavar="PATH", help="misfits and fields, as a .npz")
    return parser.parse_args()


def main():
    args = parse()
    comm = MPI.COMM_WORLD
    inversion = Inversion(Parameters(*args.size), comm, args.steps, args.group)
    height, losses, gradient = inversion.descend(args.iterations)
    guess = inversion.first_guess
    fields = jnp.stack([inversion.truth - guess, height - guess, gradient])
    fields = np.asarray(inversion.gather(fields))
    if comm.rank != 0:
        return
    truth, recovered, gradient = fields
    error = np.linalg.norm(recovered - truth) / np.linalg.norm(truth)
    print(
        f"misfit {losses[0]:.3g} -> {losses[-1]:.3g} in {args.iterations} iterations, "
        f"error of the height {100 * error:.1f} %"
    )
    if args.save:
        np.savez(args.save, losses=losses, truth=truth, recovered=recovered, gradient=gradient)
    if args.save_figure:
        draw(args.save_figure, inversion.p, losses, truth, recovered)


if __name__ == "__main__":
    main()
