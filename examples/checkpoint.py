"""Stop a job, and continue from its checkpoint on another number of ranks.

    mpiexec -n 4 python examples/checkpoint.py --directory run --steps 1000
    mpiexec -n 3 python examples/checkpoint.py --directory run --steps 2000

Heat spreads on a plate that is partitioned into blocks, which may be unequal. Schedulers send
SIGTERM before they end a job, and not to all ranks at the same time. All ranks then finish the same
step, write their blocks, and exit. A checkpoint is also written every `--every` steps. If a job is
killed, even while it writes, the next one continues from the last complete checkpoint.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax


def parse():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    parser.add_argument("--size", type=int, nargs=2, default=(101, 67))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--preempt-at", type=int, help="the last rank gets SIGTERM at this step")
    return parser.parse_args()


def main():
    options = parse()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    dims = MPI.Compute_dims(MPI.COMM_WORLD.size, 2)
    cart = MPI.COMM_WORLD.Create_cart(dims, periods=[False, True])
    block = mpi4jax.grids.Block(options.size, cart, width=1)

    @jax.jit
    def advance(x):
        x = mpi4jax.halo_exchange(x, cart, border="edge")
        beside = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        return x.at[block.inner].add(0.2 * (beside - 4 * x[block.inner]))

    state = {"step": 0, "x": block.make(lambda i, j: jnp.where((i < 20) & (j < 30), 1.0, 0.0))}
    layouts = {"step": None, "x": block}
    last = options.directory / "last"
    try:
        state = mpi4jax.checkpoints.load(last, state, layouts)
    except FileNotFoundError:
        pass  # the first job
    else:
        if cart.rank == 0:
            print(f"goes on at step {state['step']}, on {cart.size} ranks")

    while state["step"] < options.steps:
        step = state["step"] + 1
        state = {"step": step, "x": advance(state["x"])}
        if step == options.preempt_at and cart.rank == cart.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        # A signal reaches some ranks earlier than others: all stop if one rank has received it.
        stops = mpi4jax.allreduce(np.int32(len(signals)), op=MPI.MAX, comm=cart) > 0
        if stops or step % options.every == 0 or step == options.steps:
            mpi4jax.checkpoints.save(last, state, layouts)
        if stops:
            if cart.rank == 0:
                print(f"stops at step {step}")
            sys.exit()
    squares = mpi4jax.reproducible_sum(state["x"][block.inner] ** 2, comm=cart)
    if cart.rank == 0:
        print(f"ends at step {state['step']} with a sum of squares of {squares}")


if __name__ == "__main__":
    main()
