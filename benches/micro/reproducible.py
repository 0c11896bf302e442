"""What a sum costs that has the same bits on any number of ranks, beside a plain one.

    mpiexec -n 2 python benches/micro/reproducible.py [--elements 1000000] [--rounds 30]

The elements are spread over the ranks. Paired rounds; a ratio is the median of the rounds' ratios.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken

COMM = mpi4jax.default_comm()
CALLS = 20


def seconds(f, x):
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        f(x).block_until_ready()
    return (time.perf_counter() - start) / CALLS


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    plain = jax.jit(lambda x: notoken.allreduce(jnp.sum(x), MPI.SUM))
    reproducible = jax.jit(mpi4jax.reproducible_sum)
    for dtype in (np.float32, np.float64):
        random = np.random.default_rng(COMM.rank)
        x = jnp.asarray(random.normal(size=options.elements // COMM.size), dtype)
        for f in (plain, reproducible):
            seconds(f, x)
        rounds = [(seconds(plain, x), seconds(reproducible, x)) for _ in range(options.rounds)]
        if COMM.rank == 0:
            low, middle, high = np.quantile([b / a for a, b in rounds], [0.25, 0.5, 0.75])
            a, b = 1e3 * np.median(rounds, axis=0)
            print(
                f"{COMM.size} rank(s), {options.elements} x {np.dtype(dtype).name}: "
                f"plain {a:.2f} ms, reproducible {b:.2f} ms; "
                f"ratio {middle:.2f} ({low:.2f} to {high:.2f})",
                flush=True,
            )


main()
