"""Models of the ops on rows: how many go from each rank to each, and what comes of it."""

import numpy as np
from reference import fold


def counts(size):
    return [rank + 1 for rank in range(size)]


def rows_between(source, dest):
    return 1 + (source + 2 * dest) % 3


def row_counts(rank, size):
    """What a rank sends to each rank in an alltoallv, and what it receives from each."""
    return [rows_between(rank, r) for r in range(size)], [
        rows_between(r, rank) for r in range(size)
    ]


def allgatherv(xp, case, xs):
    return [xp.concatenate(xs)] * len(xs)


def alltoallv(xp, case, xs):
    n = len(xs)
    parts = [split(xp, x, row_counts(s, n)[0]) for s, x in enumerate(xs)]
    return [xp.concatenate([parts[s][r] for s in range(n)]) for r in range(n)]


def gatherv(xp, case, xs):
    return [xp.concatenate(xs) if r == case.root else x for r, x in enumerate(xs)]


def reduce_scatterv(xp, case, xs):
    parts = [split(xp, x, counts(len(xs))) for x in xs]
    return [fold(case.op, [p[r] for p in parts], xp) for r in range(len(xs))]


def scatterv(xp, case, xs):
    return split(xp, xs[case.root], counts(len(xs)))


def ragged_counts(rank, size):
    """What a rank sends to each rank in a ragged_alltoall: to some nothing."""
    return [(rank + 2 * r + 1) % 3 for r in range(size)]


SPARE = 1  # rows that stay where they are, and the space for them in the result


def ragged_alltoall(xp, case, xs):
    n = len(xs)
    counts = [ragged_counts(s, n) for s in range(n)]
    parts = [split(xp, x, [*counts[s], SPARE]) for s, x in enumerate(xs)]
    nothing = xp.zeros((SPARE, *xs[0].shape[1:]), xs[0].dtype)
    return [xp.concatenate([*(parts[s][r] for s in range(n)), nothing]) for r in range(n)]


def split(xp, x, counts):
    return xp.split(x, np.cumsum(counts)[:-1])


def pairs(size):
    """Each rank to the next one: to the first nobody, from the last nobody."""
    return [(rank, rank + 1) for rank in range(size - 1)]


def permute(xp, case, xs):
    return [xp.zeros_like(xs[0]), *xs[:-1]]
