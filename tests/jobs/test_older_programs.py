"""Programs that were written for older packages of this name run as they are."""

import pytest

# From 0.8 on: results alone. Before: tokens.
NEWER = """
import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
assert mpi4jax.has_cuda_support() in (True, False) and not mpi4jax.has_sycl_support()


@jax.jit
def everything(x):
    total = mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)
    total = total + mpi4jax.bcast(x, 0, comm=comm)
    total = total + mpi4jax.allgather(x, comm=comm).sum(axis=0)
    if rank == 0:
        mpi4jax.send(total, dest=1, tag=3, comm=comm)
    elif rank == 1:
        total = mpi4jax.recv(total, source=0, tag=3, comm=comm)
    right, left = (rank + 1) % size, (rank - 1) % size
    return mpi4jax.sendrecv(total, total, source=left, dest=right, comm=comm)


y = everything(jnp.full(3, 1.0 + rank))
mpi4jax.barrier(comm=comm)
gradient = jax.grad(lambda x: mpi4jax.allreduce(x**2, op=MPI.SUM, comm=comm))(1.0 + rank)
print(y.tolist(), gradient)
"""
TOKENS = """
from functools import partial

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax
from mpi4jax._src.utils import HashableMPIType, unpack_hashable, wrap_as_hashable

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
assert mpi4jax.has_cuda_support() in (True, False)
wrapped = wrap_as_hashable(comm)
assert wrap_as_hashable(wrapped) is wrapped and wrapped == HashableMPIType(MPI.COMM_WORLD)
assert wrapped != HashableMPIType(MPI.COMM_SELF) and unpack_hashable(MPI.SUM) is MPI.SUM


@partial(jax.jit, static_argnames="comm")
def everything(x, comm):
    comm = unpack_hashable(comm)
    token = jax.lax.create_token()
    total, token = mpi4jax.allreduce(x, op=MPI.SUM, comm=comm, token=token)
    y, token = mpi4jax.bcast(x, 0, comm=comm, token=token)
    z, token = mpi4jax.allgather(x, comm=comm, token=token)
    total = total + y + z.sum(axis=0)
    if rank == 0:
        token = mpi4jax.send(total, dest=1, tag=3, comm=comm, token=token)
    elif rank == 1:
        total, token = mpi4jax.recv(total, source=0, tag=3, comm=comm, token=token)
    right, left = (rank + 1) % size, (rank - 1) % size
    y, token = mpi4jax.sendrecv(total, total, source=left, dest=right, comm=comm, token=token)
    return y


y = everything(jnp.full(3, 1.0 + rank), wrapped)
y = everything(jnp.full(3, 1.0 + rank), HashableMPIType(comm))
assert everything._cache_size() == 1
token = mpi4jax.barrier(comm=comm)
gradient = jax.grad(lambda x: mpi4jax.allreduce(x**2, op=MPI.SUM, comm=comm)[0])(1.0 + rank)
print(y.tolist(), gradient)
"""


@pytest.mark.parametrize("text, env", [(NEWER, {"MPI4JAX_NOTOKEN": 1}), (TOKENS, {})])
def test_older_programs(mpirun, tmp_path, text, env):
    (tmp_path / "program.py").write_text(text)
    job = mpirun(2, "program.py", env=env)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[7.0, 7.0, 7.0] 2.0", "[7.0, 7.0, 7.0] 4.0"]


# Of programs that use pairs rightly, some look as one for 0.9 that takes a pair for its result.
PAIRS = """
import mpi4jax, jax.numpy as jnp

x = jnp.arange(3)
def total(x):
    return mpi4jax.allreduce(x)
pair = total(x)
y, token = pair
first = mpi4jax.allreduce(x)[0]
named = dict(zip(("y", "token"), mpi4jax.allreduce(x)))
print(y.tolist(), first.tolist(), named["y"].tolist())
"""


def test_pairs_are_not_warned_of(mpirun, tmp_path):
    (tmp_path / "program.py").write_text(PAIRS)
    job = mpirun(1, "program.py", env={"PYTHONWARNINGS": "error"})
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.splitlines() == ["[0, 1, 2] [0, 1, 2] [0, 1, 2]"]
