"""What a late rank costs: `mpiexec -n 2 python benches/late_peer.py`

Rank 1 calls an allreduce SECONDS later than rank 0, which has products of matrices to compute that
do not depend on it, in a loop and in one line after the other. The time of rank 0 is their sum
where the allreduce holds up the computation (MPI4JAX_DETACH=0), else the longer one of the two.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpi4jax import notoken

SECONDS = 1.5
PRODUCTS, ROWS = 15, 1000
ROUNDS = 5


def loop(x, m):
    return notoken.allreduce(x), jax.lax.fori_loop(0, PRODUCTS, lambda _, m: m @ m, m)


def lines(x, m):
    y = notoken.allreduce(x)
    for _ in range(PRODUCTS):
        m = m @ m
    return y, m


def alone(x, m):
    return x, jax.lax.fori_loop(0, PRODUCTS, lambda _, m: m @ m, m)


def main():
    comm = MPI.COMM_WORLD
    x, m = jnp.ones(1000), jnp.eye(ROWS)
    for f, late in (alone, 0), (loop, 0), (lines, 0), (loop, SECONDS), (lines, SECONDS):
        run = jax.jit(f)
        jax.block_until_ready(run(x, m))
        times = []
        for _ in range(ROUNDS):
            comm.Barrier()
            start = time.perf_counter()
            if comm.rank == 0:
                jax.block_until_ready(run(x, m))
                times.append(time.perf_counter() - start)
            else:
                time.sleep(late)
                if f is not alone:
                    notoken.allreduce(x).block_until_ready()
        if comm.rank == 0:
            print(f"{f.__name__}, {late} s late: {statistics.median(times):.3f} s", flush=True)


if __name__ == "__main__":
    main()
