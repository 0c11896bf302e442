"""Which GPU a rank computes on, and what is said where ranks share one."""

import pytest

from mpi4jax._setup import gpus

CHOICE = """
import jax, logging, os
logging.basicConfig(level="INFO")
if "CHOSEN" in os.environ:
    jax.config.update("jax_cuda_visible_devices", os.environ["CHOSEN"])
if "STARTED" in os.environ:
    jax.devices()
import mpi4jax
from mpi4jax._jax import compat
print(compat.visible_gpus())
"""


@pytest.mark.parametrize(
    ("settings", "visible", "device", "words"),
    [
        ({"MPI_LOCALRANKID": 1}, 4, "1", "local rank 1 computes on GPU 1 of 4\n"),
        ({"MPI_LOCALRANKID": 5}, 4, "1", "GPU 1 of 4, which ranks share"),
        ({"MPI_LOCALRANKID": 1}, 1, "all", None),
        # As Slurm shows all GPUs of a node to each of its ranks.
        ({"SLURM_LOCALID": 3, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "3", "GPU 3 of 4"),
        ({"MPI_LOCALRANKID": 1, "CHOSEN": "3"}, 4, "3", None),
        ({"MPI_LOCALRANKID": 1, "STARTED": "1"}, 4, "all", None),
        ({}, 4, "all", None),
    ],
)
def test_each_rank_of_a_node_computes_on_its_own_gpu(
    python, fakes, settings, visible, device, words
):
    result = python(CHOICE, {**fakes, "FAKE_CUDA_DEVICES": visible, **settings})
    assert result.stdout == f"{device}\n", result.stderr
    assert words in result.stderr if words else "computes on GPU" not in result.stderr


SHARED = """
import logging, os
import jax, jax.numpy as jnp
logging.basicConfig()
if "CHOSEN" in os.environ:
    jax.config.update("jax_cuda_visible_devices", os.environ["CHOSEN"])
import mpi4jax
from mpi4jax import notoken as nt
assert nt.allreduce(jnp.ones(3))[0] == 2
print(mpi4jax.transport_info().gpu)
"""
BESIDE_IDLE = {"FAKE_CUDA_DEVICES": "4", "CHOSEN": "2"}


@pytest.mark.parametrize(
    ("settings", "transport", "warned"),
    [
        ({"FAKE_CUDA_DEVICES": "4"}, "nccl", False),
        (BESIDE_IDLE, "staged", True),
        ({"FAKE_CUDA_DEVICES": "1"}, "staged", False),
        # Nothing that all ranks do together, on one host; and as on several hosts.
        ({**BESIDE_IDLE, "MPI4JAX_TRANSPORT": "staged"}, "staged", False),
        ({**BESIDE_IDLE, "MPI4JAX_TRANSPORT": "staged", "MPI4JAX_TEST_HOST": "a"}, "staged", True),
        ({**BESIDE_IDLE, "MPI4JAX_TEST_HOST": "a"}, "staged", True),
    ],
)
def test_ranks_that_share_a_gpu_beside_an_idle_one(mpirun, fakes, settings, transport, warned):
    env = {**fakes, "FAKE_CUDA_SHARED": "1", "MPI4JAX_TRANSPORT": "auto", **settings}
    result = mpirun(2, "-c", SHARED, env=env)
    assert result.stdout.split() == [transport] * 2, result.stderr
    words = "ranks 0, 1 on "
    assert result.stderr.count(words) == warned, result.stderr
    assert result.stderr.count("while 3 of the GPUs that they see are idle") == warned


def test_the_self_test_prints_gpus_and_their_memory(mpirun, fakes):
    env = {**fakes, "FAKE_CUDA_SHARED": "1"}
    code = "import runpy, sys; sys.argv = ['x']; runpy.run_module('mpi4jax', run_name='__main__')"
    result = mpirun(2, "-c", code, env=env)
    assert result.stdout.count(": GPU 0 of 1, UUID 01000000...") == 2, result.stdout + result.stderr
    assert "PROBLEM: 2 ranks compute on one GPU, and each allocates 75% of its" in result.stdout


@pytest.mark.parametrize(
    ("settings", "ranks", "transport", "change"),
    [
        ({}, 1, "nccl", None),
        ({}, 2, "staged", "MEM_FRACTION=0.45"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 2, "staged", None),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 2, "staged", None),
        ({"XLA_CLIENT_MEM_FRACTION": ".3"}, 3, "staged", None),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}, 1, "staged", None),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}, 1, "nccl", "MEM_FRACTION=0.9,"),
    ],
)
def test_memory_that_ranks_and_nccl_take(monkeypatch, settings, ranks, transport, change):
    for name in ("PYTHON_CLIENT_PREALLOCATE", "PYTHON_CLIENT_ALLOCATOR", "CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_{name}", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    words = gpus.memory_to_change(ranks, transport)
    assert change in words if change else words is None
