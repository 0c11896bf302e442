"""Train a small network on all ranks: each has a part of the data, all have the same parameters.

    mpiexec -n 4 python examples/data_parallel.py

Each rank computes the gradient of the loss on its own samples; `allreduce` makes the mean of the
gradients of all ranks, all parameters in one message, and then every rank takes the same step of
Adam (optax). The mean over all samples is that of a single process, but for the order of additions:
the program checks that by training once more on rank 0 alone, with all the data.
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
    """The same on all ranks: a smooth function of some random points."""
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
    """Final parameters and all losses, on every rank of a communicator that shares the data."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def run(parameters):
        def step(carry, _):
            parameters, state = carry
            local = jax.value_and_grad(mean_loss)(parameters, x, y)
            # The loss and all gradients in one message. All ranks have equally many samples.
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
