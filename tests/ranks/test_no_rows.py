"""Operations in which a rank has no rows: XLA gives empty arrays the addresses of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, Started, assert_equal

import mpi4jax
from mpi4jax import notoken

ROWS = 3


def rows(rank, other, n):
    """``n`` rows that no other pair of ranks has."""
    return np.arange(100 * rank + 10 * other, 100 * rank + 10 * other + n, dtype=np.float32)


def cases(empty):
    """(name, operand, call of an API, expected): ``empty(r)`` if that rank has no rows."""
    ranks = range(SIZE)
    counts = [0 if empty(r) else ROWS for r in ranks]
    own, n = counts[RANK], sum(counts)
    each = [rows(r, 0, counts[r]) for r in ranks]
    everything = np.concatenate(each)
    yield "allgatherv", each[RANK], lambda m, x: m.allgatherv(x, counts), everything
    yield (
        *("reduce_scatterv", np.arange(n, dtype=np.float32)),
        lambda m, x: m.reduce_scatterv(x, counts, MPI.SUM),
        SIZE * np.split(np.arange(n, dtype=np.float32), np.cumsum(counts))[RANK],
    )
    for root in ranks:
        yield (
            *(f"gatherv to {root}", each[RANK]),
            lambda m, x, root=root: m.gatherv(x, counts, root),
            everything if root == RANK else each[RANK],
        )
        yield (
            *(f"scatterv from {root}", everything if root == RANK else np.zeros(own, np.float32)),
            lambda m, x, root=root: m.scatterv(x, counts, root),
            each[RANK],
        )
    for side in ("sends", "receives"):
        lacks = lambda a, b, side=side: empty(a if side == "sends" else b)
        sent = [0 if lacks(RANK, r) else ROWS for r in ranks]
        received = [0 if lacks(r, RANK) else ROWS for r in ranks]
        x = np.concatenate([rows(RANK, r, sent[r]) for r in ranks])
        expected = np.concatenate([rows(r, RANK, received[r]) for r in ranks])
        yield (
            *(f"alltoallv, {side}", x),
            lambda m, x, to=sent, of=received: m.alltoallv(x, to, of),
            expected,
        )
        yield (
            *(f"ragged_alltoall, {side}", x),
            lambda m, x, to=sent, of=received: m.ragged_alltoall(x, jnp.array(to), sum(of))[0],
            expected,
        )


def empty_cases():
    """Operations whose arrays all have no rows."""
    x = np.zeros((0, 2), np.float32)
    blocks = np.zeros((SIZE, 0), np.float32)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for root in range(SIZE):
        yield f"bcast from {root}", x, lambda m, x, root=root: m.bcast(x, root), x
        gathered = np.stack([x] * SIZE) if root == RANK else x
        yield f"gather to {root}", x, lambda m, x, root=root: m.gather(x, root), gathered
        yield f"reduce to {root}", x, lambda m, x, root=root: m.reduce(x, MPI.SUM, root), x
        operand = blocks if root == RANK else blocks[0]
        yield f"scatter of {root}", operand, lambda m, x, r=root: m.scatter(x, r), blocks[0]
    yield "allgather", x, lambda m, x: m.allgather(x), np.stack([x] * SIZE)
    yield "allreduce", x, lambda m, x: m.allreduce(x), x
    yield "alltoall", blocks, lambda m, x: m.alltoall(x), blocks
    yield "exscan", x, lambda m, x: m.exscan(x), x
    yield "scan", x, lambda m, x: m.scan(x), x
    yield "reduce_scatter", blocks, lambda m, x: m.reduce_scatter(x), blocks[0]
    yield (
        *("permute", x),
        lambda m, x: m.permute(x, [(r, (r + 1) % SIZE) for r in range(SIZE)]),
        x,
    )
    full = np.ones(4, np.float32)
    # One of the two has no rows: messages may differ in size.
    if RANK % 2 == 0 and SIZE % 2 == 0:
        yield "sendrecv", full, lambda m, x: m.sendrecv(x, x[:0], left, right), full[:0]
    elif SIZE % 2 == 0:
        yield "sendrecv", full[:0], lambda m, x: m.sendrecv(x, full, left, right), full
    if RANK == 0:
        yield "send", x, lambda m, x: m.send(x, SIZE - 1), None
    if RANK == SIZE - 1:
        yield "recv", x, lambda m, x: m.recv(x, 0), x


EMPTY = {
    "no rank": lambda r: False,
    "all ranks": lambda r: True,
    **{f"rank {e}": lambda r, e=e: r == e for e in range(SIZE)},
    **({f"all but rank {e}": lambda r, e=e: r != e for e in range(SIZE)} if SIZE > 2 else {}),
}
BLOCKING = ("sendrecv",)  # without a nonblocking form


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("empty", EMPTY)
def test_operations_without_rows(empty, place):
    """The operand is the function's argument, or computed inside of the jitted function."""
    found = list(cases(EMPTY[empty]))
    if empty == "all ranks":
        found += empty_cases()
    operand = (lambda x: 2 * x) if place == "inside" else (lambda x: x)

    @jax.jit
    def run(xs):
        out = {}
        for (name, _, call, _), x in zip(found, xs, strict=True):
            out[name] = [call(notoken, operand(x))]
            if not name.startswith(BLOCKING):
                out[name].append(call(Started(), operand(x)))
        return out

    found_results = run([x for _, x, _, _ in found])
    mpi4jax.flush()
    for name, x, call, expected in found:
        # Eager calls take the operand as it is.
        results = [*found_results[name], call(notoken, operand(jnp.asarray(x)))]
        for y in results:
            if expected is None:
                assert y is None
            else:
                assert_equal(y, operand(expected).astype(np.float32), what=f"{name}, {empty}")
