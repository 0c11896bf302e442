"""A job that is ended, and goes on from its checkpoint on another number of ranks.

    mpiexec -n 4 python examples/checkpoint.py --folder run --steps 1000
    mpiexec -n 3 python examples/checkpoint.py --folder run --steps 1000 --format hdf5

Heat spreads on a plate that is cut into blocks, which are unequal where they have to be. On
SIGTERM, which schedulers send before they end a job, and not to all ranks at the same time, all
ranks finish the same step, write their blocks, and end. The same command goes on from there.

Each rank writes and reads its own block, and none has the whole plate: TensorStore writes one array
in zarr's format, to whose chunks several processes may write. With h5py, which is serial in its
wheels, each rank writes a file, and a virtual dataset shows them as one array. A checkpoint counts
when all of it has been written: the file `latest` then names it.
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

from mpi4jax import grids, notoken as mpi


class Zarr:
    """One array, with TensorStore."""

    @staticmethod
    def _open(folder, **options):
        import tensorstore

        store = {"driver": "file", "path": str(folder.resolve() / "plate.zarr")}
        return tensorstore.open({"driver": "zarr3", "kvstore": store}, **options).result()

    def write(self, folder, x, block, cart):
        if cart.rank == 0:
            self._open(folder, create=True, dtype=x.dtype.name, shape=block.global_shape)
        cart.Barrier()
        self._open(folder)[block.slices].write(x).result()

    def read(self, folder, block):
        return self._open(folder)[block.slices].read().result()


class Hdf5:
    """A file for each rank, and a virtual array, with h5py."""

    def write(self, folder, x, block, cart):
        import h5py

        with h5py.File(folder / f"block{cart.rank}.h5", "w") as file:
            file["plate"] = x
        blocks = cart.gather((block.slices, block.shape))
        if cart.rank == 0:
            whole = h5py.VirtualLayout(block.global_shape, x.dtype)
            for rank, (slices, shape) in enumerate(blocks):
                if 0 not in shape:
                    whole[slices] = h5py.VirtualSource(f"block{rank}.h5", "plate", shape)
            with h5py.File(folder / "plate.h5", "w") as file:
                file.create_virtual_dataset("plate", whole)

    def read(self, folder, block):
        import h5py

        with h5py.File(folder / "plate.h5") as file:
            return file["plate"][block.slices]


FORMATS = {"zarr": Zarr(), "hdf5": Hdf5()}


def save(folder, form, step, x, block, cart):
    """Write a checkpoint; it counts when all ranks have written."""
    new = folder / f"step{step}.{form}"
    if cart.rank == 0:
        new.mkdir(parents=True, exist_ok=True)
    cart.Barrier()
    FORMATS[form].write(new, np.asarray(x[block.inner]), block, cart)
    cart.Barrier()
    if cart.rank == 0:
        (folder / "latest.new").write_text(new.name)
        os.replace(folder / "latest.new", folder / "latest")


def load(folder, block, cart):
    """The step and this rank's block of the last checkpoint, without ghost cells; or None."""
    latest = folder / "latest"
    name = cart.bcast(latest.read_text() if cart.rank == 0 and latest.exists() else None)
    if name is None:
        return None
    step, form = name.removeprefix("step").split(".")
    return int(step), FORMATS[form].read(folder / name, block)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--format", choices=FORMATS, default="zarr")
    parser.add_argument("--size", type=int, nargs=2, default=(101, 67))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--preempt-at", type=int, help="the last rank gets SIGTERM at this step")
    return parser.parse_args()


def main():
    options = parse()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    dims = MPI.Compute_dims(MPI.COMM_WORLD.size, 2)
    cart = MPI.COMM_WORLD.Create_cart(dims, periods=[False, True])
    block = grids.Block(options.size, cart, width=1)

    @jax.jit
    def advance(x):
        x = mpi.halo_exchange(x, cart, border="edge")
        beside = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        return x.at[block.inner].add(0.2 * (beside - 4 * x[block.inner]))

    step, x = 0, block.make(lambda i, j: jnp.where((i < 20) & (j < 30), 1.0, 0.0))
    saved = load(options.folder, block, cart)
    if saved is not None:
        step, inner = saved
        x = x.at[block.inner].set(inner)
        if cart.rank == 0:
            print(f"goes on at step {step}, on {cart.size} ranks")
    while step < options.steps:
        x, step = advance(x), step + 1
        if step == options.preempt_at and cart.rank == cart.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        # A signal comes to some ranks earlier than to others: all stop if it has come to one.
        if mpi.allreduce(np.int32(len(signals)), op=MPI.MAX, comm=cart) > 0:
            save(options.folder, options.format, step, x, block, cart)
            if cart.rank == 0:
                print(f"stops at step {step}")
            sys.exit()
    save(options.folder, options.format, step, x, block, cart)
    squares = mpi.reproducible_sum(x[block.inner] ** 2, comm=cart)
    if cart.rank == 0:
        print(f"ends at step {step} with a sum of squares of {squares}")


if __name__ == "__main__":
    main()
