"""Operations that are started, in programs like those of program.py, which run before."""

import jax
import numpy as np
import pytest
from mpi4py import MPI
from program import equal, left, matches, on, rank, right, root, run, size

import mpi4jax
from mpi4jax import notoken as nt


def arrays(n: int, dtype: type = np.float32) -> np.ndarray:
    return np.stack([np.arange(n) + r for r in range(size)]).astype(dtype)


shift = [(r, (r + 1) % size) for r in range(size)]


def waited(f, *args):
    return run(lambda *xs: mpi4jax.wait(f(*xs)), *args)


for n, dtype in [(1, np.float32), (5, np.int16), (3_000_001, np.float32)]:
    every = arrays(n, dtype)
    x, total = every[rank], every.sum(0, dtype=dtype)
    equal(waited(mpi4jax.iallreduce, x), total)
    equal(waited(lambda x: mpi4jax.ireduce(x, MPI.SUM, root), x), total if rank == root else x)
    equal(waited(lambda x: mpi4jax.ibcast(x, root), x), every[root])
    equal(waited(mpi4jax.iallgather, x), every)
    equal(waited(lambda x: mpi4jax.iscatter(x, root), every if rank == root else x), x)
    equal(waited(lambda x: mpi4jax.ipermute(x, shift), x), every[left])

    def several(x: jax.Array) -> tuple[jax.Array, ...]:
        """Beside operations that wait at once: enough of them for a CUDA graph."""
        request = mpi4jax.iallreduce(x)
        rows = nt.allgather(x)
        for _ in range(4):
            x = nt.allreduce(x, MPI.SUM)
        return mpi4jax.wait(request), rows, nt.allgather(x)

    compiled = mpi4jax.jit(several)
    for _ in range(3):
        sums, rows, last = map(np.asarray, compiled(on(x)))
        equal(sums, total)
        equal(rows, every)
        equal(last, np.stack([(total * np.asarray(size**3, dtype)).astype(dtype)] * size))

every = arrays(300_000)
x, total = every[rank], every.sum(0)
# From function to function, and eagerly.
start, end = mpi4jax.jit(mpi4jax.iallreduce), mpi4jax.jit(mpi4jax.wait)
requests = [start(on(x)) for _ in range(5)]
for request in requests[::-1]:
    equal(np.asarray(end(request)), total)
request = mpi4jax.iallreduce(on(x))
equal(np.asarray(mpi4jax.wait(request)), total)
mpi4jax.wait(mpi4jax.ibarrier())
with pytest.raises((ValueError, RuntimeError), match=r"has been waited for before, started.py:\d"):
    jax.block_until_ready(mpi4jax.wait(request))
with pytest.raises((ValueError, RuntimeError), match="the request was never started"):
    jax.block_until_ready(end(jax.tree.map(lambda h: on(np.zeros_like(h)), start(on(x)))))

if matches:
    # The second has come already. It goes into no memory from which the first is still copied to
    # the GPU: there is no other memory that is large enough.
    every = arrays(4_000_000)

    def exchange(x: jax.Array) -> list[jax.Array]:
        sent = [mpi4jax.isend(nt.bcast(x, root), right, tag=5), mpi4jax.isend(x, right, tag=6)]
        nt.barrier()
        found = [mpi4jax.wait(mpi4jax.irecv(x, left, tag=tag)) for tag in (5, 6)]
        mpi4jax.waitall(sent)
        return found

    for _ in range(3):
        of_root, of_left = run(exchange, every[rank])
        equal(of_root, every[root])
        equal(of_left, every[left])
else:
    with pytest.raises(Exception, match="MPI4JAX_NCCL_MESSAGES=staged"):
        waited(lambda x: mpi4jax.irecv(x, left), x)

rows = np.stack([x] * size)
exchanged = lambda x: mpi4jax.wait(mpi4jax.ialltoall(x))
(back,) = run(lambda x, c: jax.vjp(exchanged, x)[1](c), rows, rows)
equal(back, arrays(300_000))
