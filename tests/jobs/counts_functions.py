"""Rows of the table of counts: functions that call several operations, or that are not traced."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from counts_rows import (
    ANY,
    BYTES,
    CART,
    IS_ROOT,
    LINE,
    NEIGHBORS,
    OTHERS,
    RANK,
    SIZE,
    WORLD,
    AtMost,
    N,
    X,
    row,
    simple,
)
from jax.sharding import PartitionSpec as P

import mpi4jax
import mpi4jax.notoken as m

# ---- Grids


@row("halo_exchange", {"MPI_Isend": (NEIGHBORS, 80)}, "neighbors")
def _halo():
    return lambda x: m.halo_exchange(x, CART), (jnp.ones((10, 10), jnp.float32),)


simple("halo_add", lambda x: m.halo_add(x, CART), jnp.ones((10, 10), jnp.float32),
       {"MPI_Isend": (NEIGHBORS, 80)}, "neighbors")  # fmt: skip
# With two ranks, both edges lead to one rank, in one message.
simple("neighbor_allgather", lambda x: m.neighbor_allgather(x, CART), X,
       {"MPI_Isend": (NEIGHBORS, 2 * BYTES)}, "neighbors")  # fmt: skip
simple("neighbor_alltoall", lambda x: m.neighbor_alltoall(x, CART), jnp.ones((2, 10)),
       {"MPI_Isend": (NEIGHBORS, 80)}, "neighbors")  # fmt: skip
simple(
    "grids.overlapped",
    lambda x: m.grids.overlapped(lambda y: y[:-2] + y[2:], x, CART, axes=[0]),
    jnp.ones((10, 3), jnp.float32),
    # Each message begins with its length, as in ialltoallv.
    {
        "MPI_Ialltoallw": (1, 24 + 8 * NEIGHBORS),
        "MPI_Type_create_struct": (2 * NEIGHBORS, 0),
        "MPI_Type_commit": (2 * NEIGHBORS, 0),
    },
    "neighbors",
)
WHOLE = jnp.ones((2 * SIZE, 3), jnp.float32)
simple(
    "scatter_blocks",
    lambda x: m.scatter_blocks(x, CART, axes=[0]),
    WHOLE,
    {"MPI_Scatter": (1, 8), "MPI_Scatterv": (1, 24 * OTHERS if IS_ROOT else 0)},
    "log(P) + (P - 1 if root else 0)",
    "the root has a block for each other rank",
)
simple(
    "gather_blocks",
    lambda x: m.gather_blocks(x, CART, axes=[0]),
    jnp.ones((2, 3), jnp.float32),
    {"MPI_Gather": (1, 8), "MPI_Gatherv": (1, 0 if IS_ROOT else 24)},
    "log(P) + (0 if root else 1)",
)
simple("maxloc", lambda x: m.maxloc(x, jnp.arange(N)), X,
       {"MPI_Allreduce": (2, 2 * BYTES)}, "2 * log(P)")  # fmt: skip
simple("pvary, its gradient", jax.grad(lambda x: m.pvary(x).sum()), X,
       {"MPI_Allreduce": (1, BYTES)}, "log(P)")  # fmt: skip
# The largest element, and the sums of integers.
simple("reproducible_sum", m.reproducible_sum, X, {"MPI_Allreduce": (2, 52)}, "2 * log(P)")


# ---- shard_map, and training

MESH = mpi4jax.Mesh((SIZE,), ("i",))


def sharded(name: str, f: Any, specs: Any, args: Any, *rest: Any) -> None:
    mapped = mpi4jax.shard_map(f, mesh=MESH, in_specs=specs[0], out_specs=specs[1])
    row(name, *rest)(lambda: (mapped, args))


ROWS_OF_RANKS, EQUAL = P("i"), P()
sharded("shard_map with a psum", lambda x: jax.lax.psum(x, "i"), (ROWS_OF_RANKS, EQUAL), (X,),
        {"MPI_Allreduce": (1, BYTES)}, "log(P)")  # fmt: skip
sharded(
    "training.global_norm",
    lambda x: m.training.global_norm({"a": x, "b": x}, P("i")),
    (ROWS_OF_RANKS, EQUAL),
    (X,),
    {"MPI_Allreduce": (1, 4)},
    "log(P)",
)
sharded(
    "training.unshard",
    lambda x: m.training.unshard(x, P("i"), "i"),
    (ROWS_OF_RANKS, ROWS_OF_RANKS),
    (X,),
    {"MPI_Allgather": (1, BYTES)},
    "log(P)",
)


@row(
    "Mesh of two axes, and their communicators",
    # A duplicate of `comm`, which is made here too; one for both axes, as one has all ranks.
    {"MPI_Comm_dup": (2, 0), "MPI_Comm_split": (1, 0)},
    "3 * log(P)",
)
def _mesh():
    def make() -> None:
        mesh = mpi4jax.Mesh((SIZE, 1), ("a", "b"), comm=WORLD.Dup())
        mesh.comm(("a",)), mesh.comm(("b",))

    return make, ()


@row("training.batches, 4 steps and the end", {"MPI_Allgather": (5, 20)}, "5 * log(P)")
def _batches():
    return lambda: [x for x, _ in m.training.batches([jnp.ones(3)] * 4)], ()


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


def with_more_reductions(iterations: int) -> None:
    """Count two reductions per iteration of minres and lsmr, three of bicgstab."""
    diagonal = jnp.arange(1.0, 101.0)
    for name, first, each in (("minres", 6, 2), ("lsmr", 7, 2), ("bicgstab", 5, 3)):
        method = getattr(m.linalg, name)
        solve = lambda b, method=method: method(
            lambda x: diagonal * x, b, tol=0.0, maxiter=iterations
        )
        calls = first + each * iterations
        simple(f"linalg.{name}, {iterations} iterations", solve, jnp.ones(100),
               {"MPI_Allreduce": (calls, ANY)}, f"{calls} * log(P)")  # fmt: skip


with_more_reductions(5)


def gmres(restart: int, restarts: int) -> None:
    """Count two reductions for each vector, and two for each restart."""
    diagonal = jnp.arange(1.0, 101.0)
    calls = 3 + restarts * (2 * restart + 2)
    simple(
        f"linalg.gmres, {restarts} times {restart} vectors",
        lambda b: m.linalg.gmres(
            lambda x: diagonal * x, b, tol=0.0, restart=restart, maxiter=restarts
        ),
        jnp.ones(100),
        {"MPI_Allreduce": (calls, ANY)},
        f"{calls} * log(P)",
    )


gmres(3, 2)
simple("linalg.vdot", lambda x: m.linalg.vdot(x, x), X, {"MPI_Allreduce": (1, 4)}, "log(P)")
# Whether a solver of another library has failed on a rank.
simple("linalg.host_solve", lambda b: m.linalg.host_solve(lambda x: x, b), X,
       {"MPI_Allreduce": (1, 1)}, "log(P)")  # fmt: skip


@row(
    "linalg.multigrid of two levels",
    {"MPI_Isend": (8 * LINE, 32 * LINE), "MPI_Allreduce": (1, 16 * SIZE)},
    "log(P) + 8 * line",
)
def _multigrid():
    """Count eight halo exchanges, and the residual on the grid of 4 cells of each rank."""
    cart = WORLD.Create_cart([SIZE], periods=[False])
    block = m.grids.Block((8 * SIZE,), cart, width=1)

    def operator(block: Any) -> Any:
        def apply(u: Any) -> Any:
            u = m.halo_exchange(block.with_ghosts(u), block, border=0.0)
            return 2 * u[1:-1] - u[:-2] - u[2:]

        return apply, jnp.full(block.shape, 2.0)

    cycle = m.linalg.multigrid(block, operator, border=0.0, levels=2)
    return cycle, (jnp.ones(block.shape),)


simple(
    "redistribute of slabs",
    lambda x: m.redistribute(
        x, *(mpi4jax.Layout((2 * SIZE, 2 * SIZE), {axis: SIZE}) for axis in (0, 1))
    ),
    jnp.ones((2, 2 * SIZE), jnp.float32),
    {"MPI_Isend": (OTHERS, 16 * OTHERS)},
    "P - 1",
    "each slab of the result has rows of each slab of the array",
)


@row("ghosts.Plan.add", {"MPI_Isend": (NEIGHBORS, 40 * NEIGHBORS)}, "neighbors")
def _add():
    plan = m.ghosts.Plan([RANK], [(RANK - 1) % SIZE, (RANK + 1) % SIZE])
    return plan.add, (jnp.ones((2, 10), jnp.float32),)


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


SLABS = mpi4jax.Layout((2 * SIZE, 3), {0: SIZE})
TREE = {f"w{i}": np.ones((2, 3)) for i in range(ARRAYS)}
# Errors and descriptions (24 bytes), blocks (24 bytes for each array), and errors again.
SAVING = {
    "MPI_Allreduce": (3, 48 + 24 * ARRAYS),
    "MPI_Gather": (1, 8 * 5),  # a table: whether there is a block, and its ends on two axes
    # The directory, and the numbers of the files to remove.
    "MPI_Bcast": (4, AtMost(500 + 5 * SIZE)),
}


def directory(name: str) -> Path:
    return Path(sys.argv[1]).parent / name


@row("checkpoints.save", SAVING, "8 * log(P)")
def _save():
    return lambda: m.checkpoints.save(directory("last"), TREE, SLABS), ()


@row(
    "checkpoints.AsyncCheckpointer.save",
    # Also the level of threads, and a barrier that its thread waits for.
    {
        **SAVING,
        "MPI_Allreduce": (4, 48 + 24 * ARRAYS + 8),
        "MPI_Comm_dup": (1, 0),
        "MPI_Comm_free": (1, 0),
        "MPI_Ibarrier": (1, 0),
    },
    "11 * log(P)",
)
def _save_meanwhile():
    def save() -> None:
        with m.checkpoints.AsyncCheckpointer() as checkpointer:
            checkpointer.save(directory("meanwhile"), TREE, SLABS)

    return save, ()


@row(
    "checkpoints.load",
    # Rank 0 broadcasts the index: some 30 bytes of each array, and 40 of each rank's block, from
    # which each rank knows the files that it reads.
    {"MPI_Allreduce": (1, 24), "MPI_Bcast": (2, AtMost(500 + 35 * ARRAYS + 40 * SIZE))},
    "3 * log(P)",
)
def _load():
    m.checkpoints.save(directory("to load"), TREE, SLABS)
    return lambda: m.checkpoints.load(directory("to load"), TREE, SLABS), ()


@row("checkpoints.latest", {"MPI_Bcast": (2, AtMost(500))}, "2 * log(P)")
def _latest():
    return lambda: m.checkpoints.latest(directory("runs")), ()


if importlib.util.find_spec("tensorstore"):

    @row(
        "output.append",
        # Errors, blocks, the largest block, the arguments, and whether all have written; the
        # metadata, and that they are published.
        {
            "MPI_Allreduce": (5, 3 * 24 + (24 + 16) * ARRAYS),
            "MPI_Bcast": (4, AtMost(600 + 200 * ARRAYS)),
        },
        "9 * log(P)",
    )
    def _append():
        times, dims = itertools.count(), dict.fromkeys(TREE, "yx")
        path = directory("output")
        return lambda: m.output.append(path, TREE, SLABS, time=next(times), dims=dims), ()
