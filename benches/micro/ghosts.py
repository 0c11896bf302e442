"""Measure what a plan of `mpi4jax.ghosts`, `fill` and `add` cost.

    mpiexec -n 4 python benches/micro/ghosts.py

Each rank owns a strip of a grid of cells, and needs the rows of cells above and below it. The ids
of neighboring cells are far apart: the place of a cell is multiplied by a number, modulo the number
of cells. Each rank has the same number of cells, whatever the number of ranks. The program prints
the time to make the plan, the peak of NumPy's memory, and both divided by the number of cells. Then
it times `fill` and `add`, jitted, beside the same by hand with mpi4py and NumPy: `take`, Isend and
Irecv, `add.at`.
"""

import argparse
import statistics
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpi4jax import ghosts

COMM = MPI.COMM_WORLD
WIDTH = 500  # cells in a row


def strip(rows):
    """Ids of this rank's cells, and of those in the rows beside them: a torus."""
    number = rows * WIDTH * COMM.size
    factor = next(f for f in range(7919, 99999, 2) if np.gcd(f, number) == 1)
    first = COMM.rank * rows

    def ids(row):
        return (row % (rows * COMM.size) * WIDTH + np.arange(WIDTH)) * factor % number

    owned = np.concatenate([ids(row) for row in range(first, first + rows)])
    needed = np.concatenate([ids(first - 1), ids(first + rows)])
    return owned, needed


def median_of(function, rounds):
    times = []
    for _ in range(rounds + 1):
        COMM.Barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def by_hand(plan, x):
    """`fill` and `add` with mpi4py: of a torus, where only the rows at the ends go."""
    below, above = (COMM.rank - 1) % COMM.size, (COMM.rank + 1) % COMM.size
    down, up = np.arange(WIDTH), np.arange(len(x) - WIDTH, len(x))
    sent, got = np.empty((2, WIDTH), x.dtype), np.empty((2, WIDTH), x.dtype)
    total = np.empty_like(x)

    def exchange():
        requests = [
            *(COMM.Irecv(got[0], below, 1), COMM.Irecv(got[1], above, 2)),
            *(COMM.Isend(sent[0], below, 2), COMM.Isend(sent[1], above, 1)),
        ]
        MPI.Request.Waitall(requests)

    def fill():
        x.take(down, out=sent[0])
        x.take(up, out=sent[1])
        exchange()
        return got.ravel()

    def add():
        exchange()
        total[:] = 0
        np.add.at(total, down, got[0])
        np.add.at(total, up, got[1])
        return total

    return fill, add


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help=f"of {WIDTH} cells on each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan-only", action="store_true")
    args = parser.parse_args()
    owned, needed = strip(args.rows)
    seconds = median_of(lambda: ghosts.Plan(owned, needed, comm=COMM), args.rounds)
    tracemalloc.start()
    plan = ghosts.Plan(owned, needed, comm=COMM)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Where ranks share cores, the time of all of them together is what one would take alone.
    cells = len(owned) + len(needed)
    memory = COMM.allreduce(memory, MPI.MAX)
    if COMM.rank == 0:
        print(
            f"{COMM.size} ranks, {cells} cells each: {1e3 * seconds:.1f} ms for a plan, "
            f"{1e6 * seconds / cells / COMM.size:.3f} us for each cell of all ranks; "
            f"{memory / 1e6:.1f} MB at once, {memory / cells:.0f} bytes for each cell; "
            f"{len(plan.sources)} neighbours",
            flush=True,
        )
    if args.plan_only:
        return
    x = np.random.default_rng(COMM.rank).random(len(owned), np.float32)
    given, needed = jnp.asarray(x), jnp.ones(len(needed), np.float32)
    fill, add = jax.jit(plan.fill), jax.jit(plan.add)
    if COMM.size > 2:  # else both rows come from one rank, in an order that we do not know
        np.testing.assert_array_equal(fill(given), by_hand(plan, x)[0]())
    pairs = zip(
        ("fill", "add"),
        (lambda: fill(given).block_until_ready(), lambda: add(needed).block_until_ready()),
        by_hand(plan, x),
        strict=True,
    )
    for name, ours, theirs in pairs:
        a, b = (median_of(f, 200) for f in (ours, theirs))
        if COMM.rank == 0:
            print(f"{name}: {1e6 * a:.0f} us; by hand with mpi4py {1e6 * b:.0f} us", flush=True)


if __name__ == "__main__":
    main()
