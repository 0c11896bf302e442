"""How often the host waits for the stream in a compiled call of each operation, with NCCL.

Each line of the output is a name and that number. The names with more than 0 are what
`docs/transports.md` lists; MPI4JAX_LIBCUDA names a driver that counts (fake/cuda.c, or count.c).
"""

import ctypes
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
n, rank = comm.size, comm.rank
right, left = (rank + 1) % n, (rank - 1) % n
ring = [(k, (k + 1) % n) for k in range(n)]
cart = comm.Create_cart([n], [True])
mesh = mpi4jax.Mesh((n,), ("i",))
driver = ctypes.CDLL(os.environ["MPI4JAX_LIBCUDA"])
driver.count_of_waits.restype = ctypes.c_long
equal = np.testing.assert_array_equal


def sharded(f):
    return mpi4jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def of_all(x):
    """What each rank has, where rank r has x + r."""
    return np.stack([np.asarray(x + np.asarray(k, x.dtype)) for k in range(n)])


x = jnp.arange(12.0) % 5 + 1
counts = jnp.ones(n, jnp.int32)
stacked = jnp.stack([x] * n)

# Name: function, operand on rank 0 (on rank r it is larger by r), and its result from the operands
# of all ranks.
CASES = {
    "allgather": (nt.allgather, x, lambda a: a),
    "allgatherv": (lambda x: nt.allgatherv(x, [12] * n), x, lambda a: a.ravel()),
    "allreduce SUM": (lambda x: nt.allreduce(x, MPI.SUM), x, lambda a: a.sum(0)),
    "alltoall": (nt.alltoall, stacked, lambda a: a[:, rank]),
    "barrier": (lambda x: (nt.barrier(), x)[1], x, lambda a: a[rank]),
    "bcast": (lambda x: nt.bcast(x, 0), x, lambda a: a[0]),
    "gather": (lambda x: nt.gather(x, 0), x, lambda a: a if rank == 0 else a[rank]),
    "halo_exchange": (
        lambda x: nt.halo_exchange(x, cart),
        x,
        lambda a: [a[left][-2], *a[rank][1:-1], a[right][1]],
    ),
    "iallreduce": (
        lambda x: mpi4jax.wait(mpi4jax.iallreduce(x, op=MPI.MAX)),
        x,
        lambda a: a.max(0),
    ),
    "permute": (lambda x: nt.permute(x, ring), x, lambda a: a[left]),
    "permute to one": (
        lambda x: nt.permute(x, [(0, n - 1)]),
        x,
        lambda a: a[0] * (rank == n - 1),
    ),
    "ragged_alltoall": (
        lambda x: nt.ragged_alltoall(x, counts, n + 1)[0],
        x,
        lambda a: [*a[:, rank], 0],
    ),
    "reduce": (
        lambda x: nt.reduce(x, MPI.SUM, 0),
        x,
        lambda a: a.sum(0) if rank == 0 else a[rank],
    ),
    "reduce_scatter": (nt.reduce_scatter, stacked, lambda a: a.sum(0)[rank]),
    "reduce_scatterv": (
        lambda x: nt.reduce_scatterv(x, [12 - n + 1] + [1] * (n - 1)),
        x,
        lambda a: a.sum(0)[: 12 - n + 1] if rank == 0 else a.sum(0)[12 - n + rank][None],
    ),
    "scatter": (lambda x: nt.scatter(x if rank == 0 else x[0], 0), stacked, lambda a: a[0][rank]),
    "sendrecv": (lambda x: nt.sendrecv(x, x, left, right), x, lambda a: a[left]),
    "sendrecv_with_status": (
        lambda x: jnp.stack(nt.sendrecv_with_status(x, x, left, right)[1]),
        x,
        lambda a: [left, 0, 12],
    ),
    "shard_map ppermute": (sharded(lambda x: lax.ppermute(x, "i", ring)), jnp.ones(n), None),
    "shard_map psum": (sharded(lambda x: lax.psum(x, "i") + 0 * x), jnp.ones(n), None),
}

SMALL = jnp.array([[3, 1, 0, 2], [0, 0, 2, 0]])
FOLDS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
}


def prefix(fold, a, end):
    """The reduction of the first rows; zeros of none."""
    return functools.reduce(fold, a[:end]).astype(a.dtype) if end else np.zeros_like(a[0])


for dtype in ("bool", "int16", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"):
    for name, fold in FOLDS.items():
        if (name == "BAND" and dtype != "int16") or (name[0] == "L" and "int" not in dtype):
            continue
        if (dtype == "complex64" and name != "PROD") or (dtype == "bool" and name == "PROD"):
            continue
        block = SMALL.astype(dtype)
        if name in ("SUM", "MAX") and dtype == "bool":
            continue
        op = getattr(MPI, name)
        case = f"{name} of {dtype}"
        CASES[f"allreduce {case}"] = (
            lambda x, op=op: nt.allreduce(x, op),
            block,
            lambda a, f=fold: prefix(f, a, n),
        )
        if dtype in ("int16", "float32"):
            CASES[f"reduce {case}"] = (
                lambda x, op=op: nt.reduce(x, op, 0),
                block,
                lambda a, f=fold: a[rank] if rank else prefix(f, a, n),
            )
            CASES[f"scan {case}"] = (
                lambda x, op=op: nt.scan(x, op),
                block,
                lambda a, f=fold: prefix(f, a, rank + 1),
            )
            CASES[f"exscan {case}"] = (
                lambda x, op=op: nt.exscan(x, op),
                block,
                lambda a, f=fold: prefix(f, a, rank),
            )
CASES["scan of a large array"] = (nt.scan, jnp.ones(1 << 18), lambda a: a[: rank + 1].sum(0))
CASES["gradient of a scan"] = (
    jax.grad(lambda x: (nt.scan(x) ** 2).sum()),
    x,
    lambda a: 2 * sum(a[: k + 1].sum(0) for k in range(rank, n)),
)
CASES["shard_map pmax"] = (sharded(lambda x: lax.pmax(x, "i") + 0 * x), jnp.ones(n), None)


def waits_of(f, operand, expected):
    f = jax.jit(f)
    operand = jax.block_until_ready(
        operand if expected is None else operand + np.asarray(rank, operand.dtype)
    )
    result = jax.block_until_ready(f(operand))
    if expected is not None:
        equal(result, expected(of_all(CASES[name][1])))
    before = driver.count_of_waits()
    for _ in range(4):
        jax.block_until_ready(f(operand))
    return (driver.count_of_waits() - before) / 4


for name, case in CASES.items():
    waits = waits_of(*case)
    most = comm.allreduce(waits, MPI.MAX)
    if rank == 0:
        print(f"{name}: {most:g}", flush=True)
