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


ADVICE = "write `import mpi4jax.notoken as mpi4jax`, or set MPI4JAX_NOTOKEN=1"
HEAD = """
import jax, jax.numpy as jnp, numpy as np
import mpi4jax
x = jnp.ones(3)
"""
# Lines of programs for 0.8 and newer, and whether there is a warning before the error they meet.
LINES = {
    "y = mpi4jax.allreduce(x) + 1": True,
    "def f(y): return y.shape\nf(mpi4jax.allgather(x))": True,
    "def f(i, x): return mpi4jax.allreduce(x)\njax.lax.fori_loop(0, 3, f, x)": True,
    "y, _ = mpi4jax.allreduce(x)\n(1, 2) + 1": False,  # its own mistake
    "y, t = mpi4jax.allreduce(x)\nmpi4jax.bcast(x, token=t) + 1": False,  # it knows of tokens
}
# The same of lines that meet no error. The second one is not warned of: it is said once.
ITEMS = {
    "y = mpi4jax.allreduce(x)[0]\ny = mpi4jax.bcast(x)[0]": True,
    "y, token = mpi4jax.allreduce(x)\ny[0]": False,
    "f = jax.jit(mpi4jax.allreduce)\ny, token = f(x)": False,
    "token = mpi4jax.barrier()\nmpi4jax.allreduce(x)": False,
    "y = mpi4jax.allreduce(x, token=mpi4jax.create_token())[0]\ny = mpi4jax.bcast(x)[0]": False,
}


@pytest.mark.parametrize(
    "lines, env", [*((i, {}) for i in ITEMS), (min(ITEMS), {"MPI4JAX_NOTOKEN": 0})]
)
def test_an_item_of_a_result_and_a_token(mpirun, tmp_path, lines, env):
    (tmp_path / "program.py").write_text(HEAD + lines)
    job = mpirun(1, "program.py", env=env)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("(result, token), which program.py:") == (ITEMS[lines] and not env), (
        job.stderr
    )


@pytest.mark.parametrize("lines", LINES)
def test_a_warning_before_an_error_about_a_tuple(mpirun, tmp_path, lines):
    (tmp_path / "program.py").write_text(HEAD + lines)
    job = mpirun(1, "program.py")
    assert job.returncode == 1, job.stderr
    assert (ADVICE in job.stderr) == LINES[lines], job.stderr
