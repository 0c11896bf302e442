"""Which transport the environment chooses, what is said about it, and which GPU a rank gets."""

import pytest
from mpi4py import MPI
from stand_ins import ALLREDUCE, INFO, fails

import mpi4jax


def test_info_names_what_is_used():
    info = mpi4jax.transport_info()
    assert info.cpu_error is None
    assert all((info.cpu, info.cpu_reason, info.gpu, info.gpu_reason))
    assert f"CPU: {info.cpu} ({info.cpu_reason})" in str(info)


def test_default(python):
    out = python(INFO, {}).stdout
    assert "CPU: mpi (the default)\nGPU: staged (the default), which cannot be used: " in out
    assert "/nowhere/libcuda.so.1" in out, "the reason"
    assert out.endswith("False\n")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"MPI4JAX_TRANSPORT": "pigeon"}, ["pigeon", "mpi, staged, cuda-mpi, nccl, ucx, auto"]),
        ({"MPI4JAX_USE_CUDA_MPI": "perhaps"}, ["MPI4JAX_USE_CUDA_MPI=perhaps", "expected 1", "0"]),
        (
            {"MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_USE_CUDA_MPI": "1"},
            ["contradicts", "cuda-mpi", "mpi, staged, cuda-mpi, nccl, ucx, auto"],
        ),
        ({"MPI4JAX_TRANSPORT": "cuda-mpi", "MPI4JAX_USE_CUDA_MPI": "0"}, ["contradicts", "staged"]),
        ({"MPI4JAX_STAGING_MIB": "1GB"}, ["MPI4JAX_STAGING_MIB=1GB", "a number of MiB"]),
        ({"MPI4JAX_NCCL_MESSAGES": "fast"}, ["MPI4JAX_NCCL_MESSAGES=fast", "nccl, staged"]),
    ],
)
def test_wrong_settings_are_errors_at_import(python, settings, words):
    fails(python("import mpi4jax", settings), "ValueError", *words)


@pytest.mark.parametrize(
    ("settings", "cpu", "gpu"),
    [
        ({"MPI4JAX_USE_CUDA_MPI": "1"}, "mpi", "cuda-mpi"),
        ({"MPI4JAX_USE_CUDA_MPI": "0"}, "mpi", "staged"),
        ({"MPI4JAX_TRANSPORT": "nccl"}, "mpi", "nccl"),
        ({"MPI4JAX_TRANSPORT": "staged"}, "staged", "staged"),
        ({"MPI4JAX_TRANSPORT": "cuda-mpi", "MPI4JAX_USE_CUDA_MPI": "1"}, "mpi", "cuda-mpi"),
        ({"MPI4JAX_TRANSPORT": "auto"}, "mpi", "staged"),
    ],
)
def test_settings_choose(python, settings, cpu, gpu):
    code = "import mpi4jax; i = mpi4jax.transport_info(); print(i.cpu, i.gpu)"
    result = python(code, settings)
    assert result.stdout == f"{cpu} {gpu}\n", result.stderr


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "nccl"),
        ({"FAKE_CUDA_SHARED": "1"}, "staged"),
        ({"FAKE_CUDA_SHARED": "1", "FAKE_CUDA_DEVICES": "4"}, "nccl"),
        ({"FAKE_NCCL_VERSION": "1"}, "staged"),
    ],
)
def test_auto(mpirun, fakes, settings, chosen):
    """NCCL where each of the two ranks has a GPU of its own."""
    code = "import mpi4jax; print(mpi4jax.transport_info().gpu)"
    result = mpirun(2, "-c", code, env={**fakes, "MPI4JAX_TRANSPORT": "auto", **settings})
    assert result.stdout.split() == [chosen] * 2, result.stderr


def test_cuda_mpi_without_support_names_the_others(python, fakes):
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "cuda-mpi"})
    if result.returncode == 0:
        pytest.skip(f"this {MPI.get_vendor()[0]} is CUDA-aware, or cannot say")
    fails(result, "CUDA-aware", "staged", "nccl")


def test_one_log_line_says_what_was_chosen(python):
    code = "import logging; logging.basicConfig(level='INFO'); import mpi4jax"
    lines = python(code, {}).stderr.splitlines()
    (line,) = [line for line in lines if "transports:" in line]
    assert "mpi on CPU (the default), staged on GPU (the default)" in line


def test_import_leaves_jax_to_be_configured(python):
    """Its devices are chosen when they are first asked for; `jax.distributed` comes before that."""
    code = """
import jax, mpi4jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jax.config.update("jax_num_cpu_devices", 3)
print(jax.local_device_count())
"""
    result = python(code, {})
    assert result.stdout == "3\n", result.stderr


IN_ANOTHER_ORDER = """
import jax, jax.numpy as jnp, mpi4jax
from mpi4py import MPI
from mpi4jax import notoken as nt
a, b = MPI.COMM_WORLD.Clone(), MPI.COMM_WORLD.Clone()
for comm in (a, b):
    nt.allreduce(jnp.ones(1), comm=comm)
order = [a, b] if MPI.COMM_WORLD.rank == 0 else [b, a]
started = lambda x: [mpi4jax.iallreduce(x, comm=comm) for comm in order]
f = jax.jit(lambda x: [mpi4jax.wait(request) for request in started(x)])
print([float(y[0]) for y in f(jnp.ones(3))], mpi4jax.transport_info().gpu)
"""


def test_auto_carries_what_mpi_carries(mpirun, fakes):
    """Ranks may start operations on two communicators in different orders."""
    env = {**fakes, "MPI4JAX_TRANSPORT": "auto", "MPI4JAX_TIMEOUT": "20"}
    result = mpirun(2, "-c", IN_ANOTHER_ORDER, env=env)
    assert result.stdout == "[2.0, 2.0] nccl\n" * 2, result.stdout + result.stderr
