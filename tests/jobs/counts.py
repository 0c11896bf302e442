"""What each function of the package sends from a rank: a table, and a program that counts.

`test_counts.py` runs this program on ranks, with counts.c preloaded. For a function, add a `row`.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
import mpi4jax.notoken as m

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LOG = (SIZE - 1).bit_length()  # ceil(log2(SIZE))
OTHERS = SIZE - 1
# Of a periodic row of ranks: with two ranks, both neighbors are one rank.
NEIGHBORS = len({(RANK - 1) % SIZE, (RANK + 1) % SIZE} - {RANK})

# How many messages a rank sends, at most, in a call of MPI, with the best algorithm for short ones.
TREE = {
    *("MPI_Allgather", "MPI_Allgatherv", "MPI_Allreduce", "MPI_Barrier", "MPI_Bcast", "MPI_Exscan"),
    *("MPI_Gather", "MPI_Reduce", "MPI_Reduce_scatter", "MPI_Reduce_scatter_block", "MPI_Scan"),
    *("MPI_Comm_dup", "MPI_Scatter"),
}
PAIRS = {"MPI_Alltoall"}
LOCAL = {"MPI_Comm_free", "MPI_Type_commit", "MPI_Type_contiguous", "MPI_Type_create_struct"}


ANY = -1  # bytes that are not compared


class Count(NamedTuple):
    calls: int
    bytes: int
    messages: int


class Row(NamedTuple):
    """What one call sends, on this rank.

    `calls` has the calls of each function of MPI, and the bytes that the rank hands to it.
    `formula` gives the number of messages, in `P` (the number of ranks), `log(P)` (base 2, rounded
    up), `neighbors` (of this rank) and `root` (whether this rank is it). If it grows as `P`, `why`
    says why.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    calls: dict[str, tuple[int, int]]
    formula: str
    why: str = ""

    def messages(self) -> int:
        names = {"P": SIZE, "log": lambda P: (P - 1).bit_length(), "neighbors": NEIGHBORS}
        names["root"] = RANK == 0
        assert self.why or "P" not in self.formula.replace("log(P)", ""), f"{self.name}: why P?"
        return int(eval(self.formula, names))


ROWS: list[Row] = []


def row(
    name: str, calls: dict[str, tuple[int, int]], formula: str, why: str = ""
) -> Callable[[Any], None]:
    """Add a row. The decorated function returns a function, and the arguments to jit it with."""

    def add(make: Any) -> None:
        ROWS.append(Row(name, make, calls, formula, why))

    return add


def library() -> ctypes.CDLL:
    found = ctypes.CDLL(None)
    found.counts_end.restype = ctypes.c_char_p
    return found


def counted(f: Callable[[], Any]) -> dict[str, Count]:
    """What `f` sends from this rank, by function of MPI."""
    counts = library()
    m.flush()
    WORLD.Barrier()
    counts.counts_begin()
    jax.block_until_ready(f())
    m.flush()
    lines = counts.counts_end().decode().splitlines()
    WORLD.Barrier()
    words = [line.split() for line in lines]
    return {name: Count(*map(int, numbers)) for name, *numbers in words}


def messages(counts: dict[str, Count]) -> int:
    """The number of messages of these calls."""
    total = 0
    for name, count in counts.items():
        blocking = name.replace("MPI_I", "MPI_", 1)
        blocking = blocking[:4] + blocking[4:].capitalize()
        if blocking in TREE:
            total += LOG * count.calls
        elif blocking in PAIRS:
            total += OTHERS * count.calls
        elif blocking not in LOCAL:
            total += count.messages
    return total


# ---- Operations: N elements of 4 bytes

N = 1000
BYTES = 4 * N
X = jnp.ones(N, jnp.float32)
BLOCKS = jnp.ones((SIZE, N), jnp.float32)


def simple(name: str, f: Any, x: Any, calls: dict[str, tuple[int, int]], *rest: Any) -> None:
    row(name, calls, *rest)(lambda: (f, (x,)))


SUM = MPI.SUM
simple("allreduce", lambda x: m.allreduce(x, SUM), X, {"MPI_Allreduce": (1, BYTES)}, "log(P)")
simple("bcast", lambda x: m.bcast(x, 0), X, {"MPI_Bcast": (1, BYTES)}, "log(P)")
simple("reduce", lambda x: m.reduce(x, SUM, 0), X, {"MPI_Reduce": (1, BYTES)}, "log(P)")
simple("scan", lambda x: m.scan(x, SUM), X, {"MPI_Scan": (1, BYTES)}, "log(P)")
simple("exscan", lambda x: m.exscan(x, SUM), X, {"MPI_Exscan": (1, BYTES)}, "log(P)")
simple("allgather", m.allgather, X, {"MPI_Allgather": (1, BYTES)}, "log(P)")
simple("gather", lambda x: m.gather(x, 0), X, {"MPI_Gather": (1, BYTES)}, "log(P)")
simple(
    "scatter",
    lambda x: m.scatter(x, 0),
    BLOCKS if RANK == 0 else X,
    {"MPI_Scatter": (1, BYTES)},
    "log(P)",
)
simple("barrier", lambda x: (m.barrier(), x)[1], X, {"MPI_Barrier": (1, 0)}, "log(P)")
simple(
    "reduce_scatter",
    lambda x: m.reduce_scatter(x, SUM),
    BLOCKS,
    {"MPI_Reduce_scatter_block": (1, BYTES)},
    "log(P)",
)
simple(
    "alltoall",
    m.alltoall,
    BLOCKS,
    {"MPI_Alltoall": (1, BYTES)},
    "P - 1",
    "each rank has a block for each other rank; the MPI library may forward short blocks",
)
simple("send and recv", lambda x: m.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE), X,
       {"MPI_Sendrecv": (1, BYTES)}, "1")  # fmt: skip
RING = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
simple("permute", lambda x: m.permute(x, RING), X, {"MPI_Isend": (1, BYTES)}, "1")


@row("a tree of 200 leaves in one allreduce", {"MPI_Allreduce": (1, 4 * 200 * 10)}, "log(P)")
def _tree():
    return lambda x: m.allreduce(x, SUM), ({f"w{i}": jnp.ones(10) for i in range(200)},)


# ---- Vectors

COUNTS = [N + rank % 2 for rank in range(SIZE)]
OWN = jnp.ones(COUNTS[RANK], jnp.float32)
simple(
    "allgatherv",
    lambda x: m.allgatherv(x, COUNTS),
    OWN,
    {"MPI_Allgatherv": (1, 4 * COUNTS[RANK])},
    "log(P)",
)
IS_ROOT = RANK == 0
# The length of each block, in 8 bytes, is gathered or scattered before the blocks.
simple(
    "gatherv",
    lambda x: m.gatherv(x, COUNTS, 0),
    OWN,
    {"MPI_Gather": (1, 8), "MPI_Gatherv": (1, 0 if IS_ROOT else 4 * COUNTS[RANK])},
    "log(P) + (0 if root else 1)",
)
simple(
    "scatterv",
    lambda x: m.scatterv(x, COUNTS, 0),
    jnp.ones(sum(COUNTS), jnp.float32) if IS_ROOT else OWN,
    {"MPI_Scatter": (1, 8), "MPI_Scatterv": (1, 4 * sum(COUNTS[1:]) if IS_ROOT else 0)},
    "log(P) + (P - 1 if root else 0)",
    "the root has rows for each other rank",
)


def to_neighbors(count: int) -> list[int]:
    near = {(RANK - 1) % SIZE, (RANK + 1) % SIZE}
    return [count if rank in near else 0 for rank in range(SIZE)]


TO_NEIGHBORS = to_neighbors(10)
simple(
    "alltoallv to two neighbors",
    lambda x: m.alltoallv(x, TO_NEIGHBORS, TO_NEIGHBORS),
    jnp.ones(sum(TO_NEIGHBORS), jnp.float32),
    {"MPI_Isend": (NEIGHBORS, 40 * NEIGHBORS)},
    "neighbors",
)


# Each message begins with its length, in 8 bytes, and has a datatype on either side.
TYPES = (2 * NEIGHBORS, 0)
simple(
    "ialltoallv to two neighbors",
    lambda x: m.wait(m.ialltoallv(x, TO_NEIGHBORS, TO_NEIGHBORS)),
    jnp.ones(sum(TO_NEIGHBORS), jnp.float32),
    {
        "MPI_Ialltoallw": (1, (40 + 8) * NEIGHBORS),
        "MPI_Type_create_struct": TYPES,
        "MPI_Type_commit": TYPES,
    },
    "neighbors",
)

simple(
    "reduce_scatterv",
    lambda x: m.reduce_scatterv(x, COUNTS, SUM),
    jnp.ones(sum(COUNTS), jnp.float32),
    # Ranks agree on their counts first: two numbers of 8 bytes.
    {"MPI_Allreduce": (1, 16), "MPI_Reduce_scatter": (1, 0)},
    "2 * log(P)",
)


# ---- Nonblocking

simple("iallreduce", lambda x: m.wait(m.iallreduce(x, SUM)), X,
       {"MPI_Iallreduce": (1, BYTES)}, "log(P)")  # fmt: skip
simple(
    "ireduce_scatterv",
    lambda x: m.wait(m.ireduce_scatterv(x, COUNTS, SUM)),
    jnp.ones(sum(COUNTS), jnp.float32),
    {"MPI_Iallreduce": (1, 16), "MPI_Ireduce_scatter": (1, 0)},
    "2 * log(P)",
)


# ---- Grids

CART = WORLD.Create_cart([SIZE], periods=[True])


@row("halo_exchange", {"MPI_Isend": (NEIGHBORS, 80)}, "neighbors")
def _halo():
    return lambda x: m.halo_exchange(x, CART), (jnp.ones((10, 10), jnp.float32),)


# ---- Spectral transforms, solvers and ghosts


@row(
    "fft.fftn on slabs",
    {"MPI_Isend": (OTHERS, 8 * 2 * 2 * 3 * OTHERS)},
    "P - 1",
    "each slab of the result has rows of each slab of the array",
)
def _fftn():
    slabs = mpi4jax.Layout((2 * SIZE, 2 * SIZE, 3), {0: SIZE})
    return lambda x: m.fft.fftn(x, slabs), (jnp.ones((2, 2 * SIZE, 3), jnp.complex64),)


def cg(iterations: int) -> None:
    """Count two reductions per iteration, and five before the first and after the last one."""

    def make() -> Any:
        diagonal = jnp.arange(1.0, 101.0)

        def solve(b: Any) -> Any:
            return m.linalg.cg(lambda x: diagonal * x, b, tol=0.0, maxiter=iterations)

        return solve, (jnp.ones(100),)

    calls = 5 + 2 * iterations
    name = f"linalg.cg, {iterations} iterations"
    row(name, {"MPI_Allreduce": (calls, ANY)}, f"{calls} * log(P)")(make)


cg(5)
cg(10)


def with_one_reduction(iterations: int) -> None:
    """Count one reduction per iteration, and four before the first and after the last one."""

    def solved(method: Callable[..., Any], **how: Any) -> Callable[[], Any]:
        def make() -> Any:
            diagonal = jnp.arange(1.0, 101.0)

            def solve(b: Any) -> Any:
                return method(lambda x: diagonal * x, b, tol=0.0, maxiter=iterations, **how)

            return solve, (jnp.ones(100),)

        return make

    formula = f"{4 + iterations} * log(P)"
    calls = {"MPI_Allreduce": (4, ANY), "MPI_Iallreduce": (iterations, ANY)}
    name = f"linalg.cg, pipelined, {iterations} iterations"
    row(name, calls, formula)(solved(m.linalg.cg, pipelined=True))
    calls = {"MPI_Allreduce": (4 + iterations, ANY)}
    name = f"linalg.bicgstab, merged, {iterations} iterations"
    row(name, calls, formula)(solved(m.linalg.bicgstab, merged=True))


with_one_reduction(5)
with_one_reduction(10)


@row("ghosts.Plan.fill", {"MPI_Isend": (NEIGHBORS, 40 * NEIGHBORS)}, "neighbors")
def _fill():
    plan = m.ghosts.Plan([RANK], [(RANK - 1) % SIZE, (RANK + 1) % SIZE])
    return plan.fill, (jnp.ones((1, 10), jnp.float32),)


@row(
    "ghosts.Plan of consecutive ids",
    {
        "MPI_Comm_dup": (1, 0),
        "MPI_Comm_free": (1, 0),
        # Errors twice, the ends of the ids, and their number.
        "MPI_Allreduce": (4, 8 + 16 + 8 + 8),
        "MPI_Ibarrier": (3, 0),
        # Each rank's own entries of the directory; questions; requests.
        "MPI_Issend": (2 * NEIGHBORS, 16 * NEIGHBORS),
        "MPI_Isend": (NEIGHBORS, 16 * NEIGHBORS),  # answers
    },
    "8 * log(P) + 3 * neighbors",
)
def _plan():
    return lambda: m.ghosts.Plan([RANK], [(RANK - 1) % SIZE, (RANK + 1) % SIZE]), ()


# ---- Functions that are not traced. The bytes of objects that rank 0 broadcasts depend on paths.

simple("assert_equal", m.assert_equal, X, {"MPI_Allreduce": (1, 40)}, "log(P)")

ARRAYS = 30


@row(
    "checkpoints.save",
    {
        # Errors and descriptions (24 bytes), blocks (24 bytes for each array), and errors again.
        "MPI_Allreduce": (3, 48 + 24 * ARRAYS),
        "MPI_Gather": (1, 8 * 5),  # a table: whether there is a block, and its ends on two axes
        "MPI_Bcast": (4, ANY),
    },
    "8 * log(P)",
)
def _save():
    rows = mpi4jax.Layout((2 * SIZE, 3), {0: SIZE})
    tree = {f"w{i}": np.ones((2, 3)) for i in range(ARRAYS)}
    return lambda: m.checkpoints.save(Path(sys.argv[1]).parent / "last", tree, rows), ()


def with_check(row: Row) -> Row:
    """The row with MPI4JAX_CHECK=1: ranks compare two numbers of 8 bytes before the collective."""
    name = "MPI_Iallreduce" if row.name.startswith("i") else "MPI_Allreduce"
    calls, size = row.calls.get(name, (0, 0))
    compared = {**row.calls, name: (calls + 1, size + 16)}
    return row._replace(calls=compared, formula=f"{row.formula} + log(P)")


def main(path: str) -> None:
    rows = [row for row in ROWS if not sys.argv[2:] or row.name in sys.argv[2:]]
    results = []
    for plain in rows:
        this = with_check(plain) if os.environ.get("MPI4JAX_CHECK") == "1" else plain
        f, arguments = this.make()
        compiled = mpi4jax.jit(f) if arguments else f
        jax.block_until_ready(compiled(*arguments))
        counts = counted(lambda: compiled(*arguments))  # noqa: B023
        shown = {name: (count.calls, count.bytes) for name, count in counts.items()}
        for name, (_, size) in this.calls.items():
            if size == ANY and name in shown:
                shown[name] = shown[name][0], ANY
        found, expected = messages(counts), this.messages()
        results.append([this.name, [shown, found], [this.calls, expected]])
    everything = WORLD.gather(results)
    if everything is not None:
        with open(path, "w") as file:
            json.dump(everything, file)


if __name__ == "__main__":
    main(sys.argv[1])
