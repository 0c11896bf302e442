"""GPUs of AMD, by fakes of HIP and RCCL. The other tests of this directory use fakes of CUDA."""

import pytest
from libraries import compile_hip
from stand_ins import NOWHERE, RANKS, passes

INFO = """
import mpi4jax
print(mpi4jax.transport_info())
print(mpi4jax.has_hip_support(), mpi4jax.has_cuda_support())
"""


@pytest.fixture(scope="module")
def hip(tmp_path_factory):
    return {**NOWHERE, **compile_hip(tmp_path_factory.mktemp("hip"))}


@pytest.mark.parametrize("transport", ["staged", "cuda-mpi", "nccl"])
def test_all_ops(mpirun, hip, transport):
    reached = "reached" if transport == "cuda-mpi" else "1"
    env = {**hip, "MPI4JAX_TRANSPORT": transport, "MPI4JAX_TEST_CUDA_ON_CPU": reached}
    passes(
        mpirun, [RANKS / "test_ops.py"], "chain or any_root or (shapes and 2)", env, time_limit=250
    )


def test_the_runtime_and_its_devices_are_named(python, hip):
    out = python(INFO, hip).stdout
    assert "GPU: staged (the default)" in out
    assert out.endswith("True False\n")
    none = python(INFO, {**hip, "FAKE_CUDA_DEVICES": "0"}).stdout
    assert "HIP finds no device" in none
    assert none.endswith("False False\n")
    broken = python(INFO, {**hip, "FAKE_CUDA_BROKEN": "100"}).stdout
    assert "hipInit returned error code 100: no ROCm-capable device is detected" in broken


def test_a_missing_library_is_named(python, hip):
    out = python(INFO, {**hip, "MPI4JAX_LIBHIP": "/nowhere/libamdhip64.so.7"}).stdout
    assert "not rocm:staged: libamdhip64.so.7 cannot be loaded (/nowhere/" in out
    assert "cuda:" not in out


def test_direct_mpi_is_chosen_by_the_variable_for_hip(python, hip):
    env = {**hip, "MPI4JAX_TEST_CUDA_ON_CPU": "reached"}
    assert (
        "GPU: cuda-mpi (MPI4JAX_USE_HIP_MPI=1)"
        in python(INFO, {**env, "MPI4JAX_USE_HIP_MPI": "1"}).stdout
    )
    assert "GPU: staged (the default)" in python(INFO, {**env, "MPI4JAX_USE_CUDA_MPI": "1"}).stdout


def test_programs_are_lowered_for_rocm(python):
    code = """
import jax, jax.numpy as jnp
from mpi4py import MPI
import mpi4jax.notoken as mpi4jax
def f(x): return mpi4jax.allreduce(x, MPI.SUM)
for function in (f, jax.grad(lambda x: f(x).sum())):
    text = jax.jit(function).trace(jnp.ones(3)).lower(lowering_platforms=("rocm",)).as_text()
    print("mpi4jax_allreduce" in text)
"""
    assert python(code, NOWHERE).stdout == "True\nTrue\n"
