"""Rows of the table of counts: operations."""

import jax.numpy as jnp
from counts_rows import (
    BLOCKS,
    BYTES,
    IS_ROOT,
    NEIGHBORS,
    RANK,
    SIZE,
    SUM,
    N,
    X,
    row,
    simple,
)

import mpi4jax.notoken as m

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
simple("sendrecv", lambda x: m.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE), X,
       {"MPI_Sendrecv": (1, BYTES)}, "1")  # fmt: skip
RING = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
simple("permute", lambda x: m.permute(x, RING), X, {"MPI_Isend": (1, BYTES)}, "1")


@row("allreduce of a tree of 200 leaves", {"MPI_Allreduce": (1, 4 * 200 * 10)}, "log(P)")
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


# Ranks exchange their counts and whether these are valid, and then send rows.
simple(
    "ragged_alltoall to two neighbors",
    lambda x: m.ragged_alltoall(x, jnp.minimum(jnp.array(TO_NEIGHBORS), 1), 2)[0],
    jnp.ones((2, 10), jnp.float32),
    {
        "MPI_Alltoall": (1, 4),
        "MPI_Allreduce": (1, 8),
        "MPI_Isend": (NEIGHBORS, 40 * NEIGHBORS),
    },
    "P - 1 + log(P) + neighbors",
    "a rank does not know who sends to it: a count of 4 bytes goes to each other rank",
)
# The destinations of rows are data.
simple(
    "migrate to two neighbors",
    lambda x: m.migrate(x, jnp.array([(RANK - 1) % SIZE, (RANK + 1) % SIZE]), 2)[0],
    jnp.ones((2, 10), jnp.float32),
    {"MPI_Alltoall": (1, 4), "MPI_Allreduce": (1, 8), "MPI_Isend": (NEIGHBORS, 80)},
    "P - 1 + log(P) + neighbors",
    "it calls ragged_alltoall",
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
