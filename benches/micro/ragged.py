"""`ragged_alltoall` beside the same with mpi4py: `mpiexec -n 2 python benches/micro/ragged.py`

Rows of 4 float32, a different number for each rank at each call. With mpi4py: the counts by
Alltoall, then the rows by Alltoallv into memory that is there already. Prints the medians, and the
ratio of ours to mpi4py's with its quartiles over the rounds.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpi4jax import notoken

COMM = MPI.COMM_WORLD
SIZE = COMM.size
ROWS = (16, 1_000, 30_000, 1_000_000)
ROUNDS = 31
KINDS = 8  # the number of sets of counts, which take turns


def sets_of_counts(rows):
    """For each call, how many rows go to each rank; their sum is about `rows`."""
    numbers = np.random.default_rng(COMM.rank)
    shares = numbers.dirichlet(np.ones(SIZE), size=KINDS)
    return (shares * rows).astype(np.int32)


def contenders(rows):
    """Functions of the number of a set of counts, whose results are sums, for comparison."""
    sets = sets_of_counts(rows)
    capacity = SIZE * rows
    x = np.random.default_rng(COMM.rank).random((rows, 4), np.float32)
    given = jnp.asarray(x), [jnp.asarray(counts) for counts in sets]
    ours = jax.jit(lambda x, counts: notoken.ragged_alltoall(x, counts, capacity))

    def by_mpi4jax(i):
        y, counts = jax.block_until_ready(ours(given[0], given[1][i]))
        return y, counts

    room, recv_counts = np.zeros((capacity, 4), np.float32), np.empty(SIZE, np.int32)

    def by_mpi4py(i):
        COMM.Alltoall(sets[i], recv_counts)
        COMM.Alltoallv([x, sets[i] * 4], [room, recv_counts * 4])
        return room, recv_counts

    return by_mpi4jax, by_mpi4py


def check(run, other):
    for i in range(KINDS):
        (y, counts), (z, others) = run(i), other(i)
        np.testing.assert_array_equal(counts, others)
        n = int(np.sum(others))
        np.testing.assert_array_equal(np.asarray(y)[:n], z[:n])


def main():
    for rows in ROWS:
        both = contenders(rows)
        check(*both)
        calls = max(3, 300_000 // (rows + 300))
        times = []
        for _ in range(ROUNDS):
            pair = []
            for run in both:
                turns = itertools.islice(itertools.cycle(range(KINDS)), calls)
                COMM.Barrier()
                start = time.perf_counter()
                for i in turns:
                    run(i)
                pair.append((time.perf_counter() - start) / calls * 1e6)
            times.append(pair)
        if COMM.rank == 0:
            a, b = np.array(times).T
            low, middle, high = np.percentile(a / b, [25, 50, 75])
            medians = f"{np.median(a):10.1f} us, mpi4py {np.median(b):10.1f} us"
            print(f"{rows:9} rows: {medians}, ratio {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
