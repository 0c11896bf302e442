"""Every op on arrays on a GPU, under jit, grad and vmap.

    python ops.py [elements of the largest array]

It ends with 77 where the transport cannot be used.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken as nt

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
root = size - 1
equal = np.testing.assert_array_equal
ring = comm.Create_cart([size], [True])

info = mpi4jax.transport_info()
# NCCL matches nothing.
matches = "messages: nccl" not in info.gpu_reason
if comm.allreduce(info.gpu_error is not None, MPI.LOR):
    print(info)
    sys.exit(77)


def check(n: int) -> None:
    one = np.arange(n, dtype=np.float32)
    every = np.stack([one + r for r in range(size)])
    x = jnp.asarray(every[rank])
    equal(nt.allreduce(x, MPI.SUM), every.sum(0))
    equal(nt.allreduce(x, MPI.MAX), every.max(0))
    small = (every % 100).astype(np.int16)
    equal(nt.allreduce(jnp.asarray(small[rank]), MPI.SUM), small.sum(0, dtype=np.int16))
    equal(nt.scan(x, MPI.SUM), every[: rank + 1].sum(0))
    equal(nt.allgather(x), every)
    equal(nt.bcast(x, root), every[root])
    equal(nt.gather(x, root), every if rank == root else every[rank])
    equal(nt.reduce(x, MPI.SUM, root), every.sum(0) if rank == root else every[rank])
    equal(nt.scatter(jnp.asarray(every) if rank == root else x, root), every[rank])
    equal(nt.alltoall(jnp.stack([x * r for r in range(size)])), every * rank)
    equal(nt.reduce_scatter(jnp.stack([x * r for r in range(size)])), every.sum(0) * rank)
    equal(nt.allgatherv(x, [n] * size), every.ravel())
    equal(nt.permute(x, [(r, (r + 1) % size) for r in range(size)]), every[left])
    to_next = jnp.zeros(size, int).at[right].set(1)
    rows, came = jax.jit(lambda x, counts: nt.ragged_alltoall(x, counts, 2))(x[None], to_next)
    equal(rows, np.stack([every[left], 0 * one]))
    equal(came, np.arange(size) == left)
    nt.barrier()
    equal(nt.sendrecv(x, x, left, right), every[left])
    # Inside of jit, where NCCL writes the length on its stream.
    got, status = jax.jit(lambda x: nt.sendrecv_with_status(x, x, left, right))(x)
    equal(got, every[left])
    equal([int(status.source), int(status.tag), int(status.elements)], [left, 0, n])
    if matches:
        equal(nt.sendrecv(x, x, left, right, sendtag=3, recvtag=3), every[left])
    blocks = {"a": jnp.stack([x] * 3), "b": jnp.stack([x, x + 1, x, x])}
    filled = nt.halo_exchange(blocks, ring, axes=0)
    equal(filled["a"], np.stack([every[left], every[rank], every[right]]))
    equal(filled["b"], np.stack([every[left], every[rank] + 1, every[rank], every[right] + 1]))
    if n == 1000:  # columns of a large block travel by themselves
        filled = nt.halo_exchange(jnp.broadcast_to(x, (2000, n)), ring, axes=1)
        row = np.concatenate([every[left, -2:-1], every[rank, 1:-1], every[right, 1:2]])
        equal(filled, np.broadcast_to(row, (2000, n)))
    tag, anyone = (5, MPI.ANY_SOURCE) if matches else (0, 0)
    if size > 1 and rank == 0:
        nt.send(x, 1)
        nt.send(x + 1, 1, tag=tag)
    if size > 1 and rank == 1:
        equal(nt.recv(x, 0), every[0])
        equal(nt.recv(x, anyone, tag=tag), every[0] + 1)


largest = int(sys.argv[1]) if sys.argv[1:] else 3_000_001
for n in (0, 1, 1000, largest):
    check(n)

loop = mpi4jax.jit(
    lambda x: jax.lax.fori_loop(0, 100, lambda i, a: nt.allreduce(a, MPI.SUM) / size, x)
)
for _ in range(3):
    equal(loop(jnp.ones(3)), np.ones(3))
grad = mpi4jax.jit(jax.grad(lambda x: (nt.allreduce(x, MPI.SUM) ** 2).sum()))
equal(grad(jnp.ones(3)), 2 * size * np.ones(3))
shift = mpi4jax.jit(jax.grad(lambda x: (nt.sendrecv(x, x, left, right) * (rank + 1)).sum()))
equal(shift(jnp.ones(2)), np.full(2, right + 1.0))
ghosts = mpi4jax.jit(jax.grad(lambda x: nt.halo_exchange(x, ring)[jnp.array([0, 2])].sum()))
equal(ghosts(jnp.ones(3)), [0, 2, 0])
equal(jax.vmap(lambda x: nt.allreduce(x, MPI.SUM))(jnp.ones((4, 2))), np.full((4, 2), size))
if rank == 0:
    print("|", str(info).splitlines()[1])
