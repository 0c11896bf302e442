"""Swap arrays between two ranks, each in one jitted function.

    $ mpiexec -n 2 python examples/send_recv.py
    rank 0 received [10. 11. 12.]
    rank 1 received [0. 1. 2.]

Rank 0 sends first and rank 1 receives first, as their programs say: operations run in program
order, also inside jit, with or without tokens. `--reverse` lets rank 1 send first; it prints the
same.
"""

import argparse

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--reverse", action="store_true", help="rank 1 sends first")
args = parser.parse_args()

comm = MPI.COMM_WORLD
if comm.size != 2:
    raise SystemExit("start this with two ranks: mpiexec -n 2 python examples/send_recv.py")
other = 1 - comm.rank


@jax.jit
def send_then_receive(x):
    mpi4jax.send(x, dest=other, comm=comm)
    return mpi4jax.recv(x, source=other, comm=comm)


@jax.jit
def receive_then_send(x):
    received = mpi4jax.recv(x, source=other, comm=comm)
    mpi4jax.send(x, dest=other, comm=comm)
    return received


sends_first = 1 if args.reverse else 0
swap = send_then_receive if comm.rank == sends_first else receive_then_send
mine = 10.0 * comm.rank + jnp.arange(3, dtype=jnp.float32)
print(f"rank {comm.rank} received {swap(mine)}\n", end="", flush=True)
