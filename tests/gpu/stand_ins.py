"""What tests on fakes of the CUDA driver and NCCL share; conftest.py has the fixtures."""

import textwrap
from pathlib import Path

import pytest

import mpi4jax

HERE = Path(__file__).resolve().parent
RANKS = HERE.parent / "ranks"

# What the environment that the tests run in may have set; and a driver, which it may have.
NOWHERE = {
    "MPI4JAX_TRANSPORT": "",
    "MPI4JAX_USE_CUDA_MPI": "",
    "MPI4JAX_LIBCUDA": "/nowhere/libcuda.so.1",
}

INFO = "import mpi4jax; print(mpi4jax.transport_info()); print(mpi4jax.has_cuda_support())"

ALLREDUCE = textwrap.dedent("""
    import jax.numpy as jnp
    from mpi4py import MPI
    from mpi4jax import notoken as nt
    for _ in range(3):
        print(nt.allreduce(jnp.ones(3), MPI.SUM))
""")


def fails(result, *words):
    assert result.returncode != 0
    assert all(word in result.stderr for word in words), result.stderr


def passes(mpirun, files, expression, env, time_limit):
    """Tests of tests/ranks, by a job of two ranks."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", expression]
    result = mpirun(2, *command, env=env, time_limit=time_limit)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" passed") == 2, result.stdout
    assert " failed" not in result.stdout, result.stdout


def skip_without_ucx():
    why = mpi4jax.transport_info().unavailable.get("cpu:ucx")
    if why is not None:
        pytest.skip(f"no UCX: {why}")
