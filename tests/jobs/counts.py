"""Counts what each function of the package sends from a rank, for `test_counts.py`.

It is run on ranks, with counts.c preloaded. `counts_operations.py` and `counts_functions.py` have
the expected counts: for a function, add a `row` there.
"""

import ctypes
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import counts_functions  # noqa: F401
import counts_operations  # noqa: F401
import jax
from counts_rows import ANY, OTHERS, ROWS, SIZE, WORLD, AtMost, Row

import mpi4jax
import mpi4jax.notoken as m

LOG = (SIZE - 1).bit_length()  # ceil(log2(SIZE))

# How many messages a rank sends, at most, in a call of MPI, with the best algorithm for short ones.
TREE = {
    *("MPI_Allgather", "MPI_Allgatherv", "MPI_Allreduce", "MPI_Barrier", "MPI_Bcast", "MPI_Exscan"),
    *("MPI_Gather", "MPI_Reduce", "MPI_Reduce_scatter", "MPI_Reduce_scatter_block", "MPI_Scan"),
    *("MPI_Comm_dup", "MPI_Comm_split", "MPI_Scatter"),
}
PAIRS = {"MPI_Alltoall"}
LOCAL = {"MPI_Comm_free", "MPI_Type_commit", "MPI_Type_contiguous", "MPI_Type_create_struct"}


class Count(NamedTuple):
    calls: int
    bytes: int
    messages: int


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


# These take more than a second to compile.
SLOW = {f"linalg.{name}" for name in ("bicgstab", "gmres", "lsmr", "minres", "multigrid")}


# ---- Whether each public function has a row

# Functions that send what another one sends, or no more. `ibcast` and the like are as `bcast`.
SAME = {
    "minloc": "maxloc",
    "ineighbor_allgather": "neighbor_allgather",
    **dict.fromkeys(["send", "recv", "recv_with_status", "sendrecv_with_status"], "sendrecv"),
    **{f"fft.{name}": "fft.fftn" for name in mpi4jax.fft.__all__ if name[-1] == "n"},
    **{f"sharding.{name}": "gatherv" for name in ("cut", "join")},  # without a root, allgatherv
    "sharding.make_mesh": "Mesh",
    "sharding.NamedSharding": "Mesh",
    "sharding.Mesh": "Mesh",
    "sharding.global_shard_map": "shard_map",
    "training.clip_by_global_norm": "training.global_norm",
    "linalg.norm": "linalg.vdot",
    "ghosts.Plan": "ghosts.Plan.fill",
}
# What sends nothing by itself.
NOTHING = {
    *(
        "MEAN",
        "auto_tokenize",
        "Received",
        "Request",
        "TransportInfo",
        "after",
        "flush",
        "has_cuda_support",
    ),
    *("has_hip_support", "has_sycl_support", "jit", "time_limit", "transport_info", "wait"),
    *("Layout", "waitall", "fft.frequencies", "fft.spectral_layout", "grids.Block"),
    *("grids.balanced", "grids.dirichlet", "grids.neumann", "grids.regions", "linalg.Info"),
    *("linalg.Reason", "linalg.block_jacobi", "sharding.PartitionSpec", "sharding.device_put"),
    *("sharding.make_array_from_callback", "sharding.with_sharding_constraint"),
    *("training.fsdp_specs", "training.specs_for"),
    "sharding.jit",  # a comparison of hashes, once for each compilation
    "default_comm",  # test_counts.py: the first operation
}


def public() -> Iterator[str]:
    """The names of all public functions and classes."""
    for name in m.__all__:
        value = getattr(m, name)
        if isinstance(value, types.ModuleType):
            yield from (f"{name}.{inner}" for inner in value.__all__)
        else:
            yield name


def without_row() -> list[str]:
    """The public functions that have no row, and share none."""
    functions = {row.function for row in ROWS}
    wrong = (SAME.keys() | SAME.values() | NOTHING) - {*public()} - functions
    assert not wrong, f"no functions: {wrong}"
    known = functions | SAME.keys() | NOTHING
    methods = {name.rpartition(".")[0] for name in functions}
    return [n for n in public() if n not in known | methods and n.removeprefix("i") not in known]


def with_check(row: Row) -> Row:
    """The row with MPI4JAX_CHECK=1: ranks compare two numbers of 8 bytes before the collective."""
    name = "MPI_Iallreduce" if row.name.startswith("i") else "MPI_Allreduce"
    calls, size = row.calls.get(name, (0, 0))
    compared = {**row.calls, name: (calls + 1, size + 16)}
    return row._replace(calls=compared, formula=f"{row.formula} + log(P)")


def main(path: str) -> None:
    assert not (missing := without_row()), f"functions without a row: {missing}"
    names = sys.argv[2:]
    if names == ["--quick"]:
        names = [row.name for row in ROWS if row.function not in SLOW]
    rows = [row for row in ROWS if not names or row.name in names]
    results = []
    for plain in rows:
        this = with_check(plain) if os.environ.get("MPI4JAX_CHECK") == "1" else plain
        f, arguments = this.make()
        compiled = mpi4jax.jit(f) if arguments else f
        jax.block_until_ready(compiled(*arguments))
        counts = counted(lambda: compiled(*arguments))  # noqa: B023
        shown = {name: (count.calls, count.bytes) for name, count in counts.items()}
        for name, (_, size) in this.calls.items():
            if name in shown and (
                size == ANY or (isinstance(size, AtMost) and shown[name][1] <= size)
            ):
                shown[name] = shown[name][0], size
        found, expected = messages(counts), this.messages()
        results.append([this.name, [shown, found], [this.calls, expected]])
    everything = WORLD.gather(results)
    if everything is not None:
        with open(path, "w") as file:
            json.dump(everything, file)


if __name__ == "__main__":
    main(sys.argv[1])
