"""Train a small network: each rank has some of the samples, and all have the same parameters.

    mpiexec -n 4 python examples/data_parallel.py

Each rank computes the gradient of the loss on its own samples. One `allreduce` averages the
gradients of all parameters over the ranks, and then every rank takes the same step of Adam (optax).
Except for the order of additions, a single process computes the same mean over all samples. The
program checks this: it trains once more on rank 0 alone, with all samples.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

SAMPLES, FEATURES, HIDDEN = 240, 4, 16  # 240: to be shared by 1 to 6 ranks, and more


def data():
    """Return samples of a smooth function at random points, the same on all ranks."""
    x = np.random.default_rng(1).uniform(-1, 1, (SAMPLES, FEATURES)).astype(np.float32)
    y = np.sin(3 * x[:, 0]) * x[:, 1] + np.abs(x[:, 2])
    return x, y.astype(np.float32)


def initial_parameters():
    keys = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / np.sqrt(FEATURES),
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(keys[1], (HIDDEN,)) / np.sqrt(HIDDEN),
    }


def mean_loss(parameters, x, y):
    hidden = jnp.tanh(x @ parameters["hidden"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["out"] - y) ** 2)


def train(x, y, steps: int, comm: MPI.Intracomm):
    """Return the final parameters and all losses, on every rank of a communicator."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def run(parameters):
        def step(carry, _):
            parameters, state = carry
            local = jax.value_and_grad(mean_loss)(parameters, x, y)
            # One collective for the loss and all gradients. All ranks have the same number of
            # samples.
            loss, gradient = mpi4jax.allreduce(local, op=mpi4jax.MEAN, comm=comm)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(parameters, updates), state), loss

        carry = parameters, optimizer.init(parameters)
        (parameters, _), losses = jax.lax.scan(step, carry, length=steps)
        return parameters, losses

    return run(initial_parameters())


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, metavar="PATH", help="losses and parameters, a .npz")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    if SAMPLES % comm.size:
        raise SystemExit(f"{SAMPLES} samples cannot be shared equally by {comm.size} ranks")
    x, y = data()
    mine = slice(*(SAMPLES // comm.size * np.array([comm.rank, comm.rank + 1])))
    parameters, losses = train(x[mine], y[mine], args.steps, comm)
    if comm.rank != 0:
        return
    alone, _ = train(x, y, args.steps, MPI.COMM_SELF)
    differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), parameters, alone)
    difference = max(float(d) for d in jax.tree.leaves(differences))
    print(
        f"{comm.size} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps; "
        f"parameters differ from those of one process by at most {difference:.1e}"
    )
    if args.save:
        np.savez(args.save, losses=losses, difference=difference, **parameters)


if __name__ == "__main__":
    main()
