"""Every op in programs that XLA compiles for a GPU without a kernel, on tests/fake_gpu/plugin.c.

The transport is the environment's. Values are checked here; FAKE_CUDA_LOG has what XLA did besides.
"""

from unittest import mock

import jax
import numpy as np
import pytest
from jax._src import hardware_utils
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt
from mpi4jax._grid import faces

# JAX looks for the files of NVIDIA's kernel module, which no library can make.
hardware_utils.has_visible_nvidia_gpu = lambda: True

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
root = size - 1
equal = np.testing.assert_array_equal
info = mpi4jax.transport_info()
# NCCL matches nothing.
matches = "messages: nccl" not in info.gpu_reason


def on(x: np.ndarray) -> jax.Array:
    array = jax.device_put(x)
    assert {device.platform for device in array.devices()} == {"gpu"}
    return array


def run(f, *args: np.ndarray):
    return jax.tree.map(np.asarray, mpi4jax.jit(f)(*map(on, args)))


def all_ops(n: int, dtype: type) -> None:
    every = np.stack([np.arange(n) + r for r in range(size)]).astype(dtype)
    x = every[rank]
    total = every.sum(0, dtype=dtype)
    equal(run(lambda x: nt.allreduce(x, MPI.SUM), x), total)
    equal(run(lambda x: nt.reduce(x, MPI.SUM, root), x), total if rank == root else x)
    equal(run(lambda x: nt.scan(x, MPI.SUM), x), every[: rank + 1].sum(0, dtype=dtype))
    equal(run(lambda x: nt.bcast(x, root), x), every[root])
    equal(run(lambda x: nt.allgather(x), x), every)
    equal(run(lambda x: nt.gather(x, root), x), every if rank == root else x)
    equal(run(lambda x: nt.scatter(x, root), every if rank == root else x), x)
    rows = np.stack([x + np.asarray(r, dtype) for r in range(size)])
    equal(run(lambda x: nt.alltoall(x), rows), every + np.asarray(rank, dtype))
    equal(run(lambda x: nt.sendrecv(x, x, left, right), x), every[left])
    nt.barrier()
    if size > 1 and rank == 0:
        run(lambda x: nt.send(x, 1), x)
    if size > 1 and rank == 1:
        equal(run(lambda x: nt.recv(x, 0), x), every[0])

    def several(x: jax.Array) -> tuple[jax.Array, ...]:
        """Enough of them for a CUDA graph."""
        total = nt.allreduce(x, MPI.SUM)
        rows = nt.allgather(total)
        for _ in range(4):
            x = nt.sendrecv(x, x, left, right)
        return x, nt.bcast(total, root), nt.alltoall(rows), rows

    # More than once, with other arrays: XLA makes a graph of what comes again.
    compiled = mpi4jax.jit(several)
    for _ in range(3):
        y, sums, *columns = map(np.asarray, compiled(on(x)))
        equal(y, every[(rank - 4) % size])
        equal(sums, total)
        for column in columns:
            equal(column, np.stack([total] * size))

    for f in (lambda x: nt.allreduce(x, MPI.SUM), lambda x: nt.sendrecv(x, x, left, right)):
        given = on(x)
        result = np.asarray(mpi4jax.jit(f, donate_argnums=0)(given))
        assert given.is_deleted()
        equal(result, np.asarray(f(on(x))))


for n, dtype in [(1, np.float32), (5, np.int16), (7, np.complex64), (3_000_001, np.float32)]:
    all_ops(n, dtype)

x = np.arange(3, dtype=np.float32) + rank
total = sum(np.arange(3, dtype=np.float32) + r for r in range(size))


def with_tokens(x: jax.Array) -> jax.Array:
    y, token = mpi4jax.allreduce(x, op=MPI.SUM)
    y, _ = mpi4jax.bcast(y, root, token=token)
    return y


equal(np.asarray(jax.jit(with_tokens)(on(x))), total)
for y in run(lambda x, t: jax.jvp(lambda x: nt.allreduce(x, MPI.SUM), (x,), (t,)), x, x):
    equal(y, total)
rows = np.stack([x + r for r in range(size)])
(back,) = run(lambda x, ct: jax.vjp(nt.alltoall, x)[1](ct), rows, rows)
equal(back, np.stack([np.arange(3) + r + rank for r in range(size)]))
batch = np.stack([x, x + 1])
equal(run(jax.vmap(lambda x: nt.allreduce(x, MPI.SUM)), batch), np.stack([total, total + size]))
flags = np.array([rank == 0, True, False])
equal(run(lambda x: nt.allreduce(x, MPI.LAND), flags), [size == 1, True, False])
equal(run(lambda x: nt.allreduce(x, MPI.MAX), x), np.arange(3) + size - 1)

# XLA packs and unpacks ghost cells with kernels. Instead, the first block is what is sent here, and
# its result what has come: two cells go to the left, one of each block, and two to the right.
ring = comm.Create_cart([size], [True])
without_kernels = {
    "packed": lambda boxes, leaves, like: leaves[0],
    "filled": lambda boxes, leaves, cells, add: [cells, leaves[1]],
}
with mock.patch.multiple(faces, **without_kernels):

    def exchanges(x: jax.Array, y: jax.Array) -> jax.Array:
        """Enough of them for a CUDA graph."""
        for _ in range(5):
            x, y = nt.halo_exchange([x, y], ring)
        return x

    def moved(every: list[np.ndarray]) -> list[np.ndarray]:
        return [np.append(every[r - 1][2:], every[(r + 1) % size][:2]) for r in range(size)]

    compiled = mpi4jax.jit(exchanges)
    for n in range(3):
        every = [np.arange(4, dtype=np.float32) + 10 * r + 100 * n for r in range(size)]
        cells = compiled(on(every[rank]), on(-every[rank]))
        for _ in range(5):
            every = moved(every)
        equal(np.asarray(cells), every[rank])

status = MPI.Status()
equal(run(lambda x: nt.sendrecv(x, x, left, right, status=status), x), np.arange(3) + left)
assert (status.Get_source(), status.Get_count(MPI.FLOAT)) == (left, 3)
if matches:
    shift = run(lambda x: nt.sendrecv(x, x, MPI.ANY_SOURCE, right, sendtag=4, recvtag=4), x)
    equal(shift, np.arange(3) + left)

other = comm.Dup()
on_other = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM, comm=other))
equal(np.asarray(on_other(on(x))), total)
other.Free()
with pytest.raises((RuntimeError, ValueError), match="has been freed"):
    on_other(on(x)).block_until_ready()

# What is under way at exit is waited for.
for _ in range(4):
    nt.allreduce(on(x), MPI.SUM)
if rank == 0:
    print(info)
