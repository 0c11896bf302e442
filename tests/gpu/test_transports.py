"""All ops through each transport, without a GPU."""

import pytest
from stand_ins import HERE, NOWHERE, RANKS, passes, skip_without_ucx

from run_tests import ALL

# Of test_ops.py. How ops are called (in loops, under vmap) is the same for all transports.
OPS = "chain or any_root or (shapes and 2) or different or user"
# Transports of which the suite in tests/rust does not try every dtype. NCCL reduces none of a byte
# or less but integers.
RUNS = {
    "staged-gpu": OPS,
    "cuda-mpi-gpu": OPS,
    "nccl-gpu": f"{OPS} or (reduces_every and not float4 and not float8 and not int2)",
    "ucx-cpu": OPS,
    "ucx-gpu": OPS,
}
if ALL:
    RUNS = dict.fromkeys(RUNS, f"{OPS} or moves_every or reduces_every")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("run", RUNS)
def test_all_ops(mpirun, fakes, run):
    transport, _, place = run.rpartition("-")
    if transport == "ucx":
        skip_without_ucx()
    reached = "reached" if transport in ("cuda-mpi", "ucx") else "1"
    env = {**fakes, "MPI4JAX_TEST_CUDA_ON_CPU": reached} if place == "gpu" else NOWHERE
    env = {**env, "MPI4JAX_TRANSPORT": transport}
    passes(mpirun, [RANKS / "test_ops.py"], RUNS[run], env, time_limit=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["staged", "cuda-mpi", "nccl"])
def test_halos(mpirun, fakes, transport):
    """XLA packs and unpacks the messages. XLA's CPU converts float8 for that, and NaNs change."""
    reached = "reached" if transport == "cuda-mpi" else "1"
    env = {**fakes, "MPI4JAX_TEST_CUDA_ON_CPU": reached, "MPI4JAX_TRANSPORT": transport}
    wanted = "whole and (trees or axes or vmap or (model and 2d and 1-True))"
    passes(mpirun, [RANKS / "test_halo.py"], f"{wanted} or sums and 16", env, time_limit=150)


def test_what_runs_on_a_machine_with_a_gpu(mpirun, fakes):
    """The scripts in this folder, so that they have no faults of their own when they get there."""
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_NCCL_MESSAGES": "nccl"}
    result = mpirun(2, HERE / "ops.py", "300001", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "GPU: nccl (MPI4JAX_TRANSPORT=nccl" in result.stdout
