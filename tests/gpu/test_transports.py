"""All ops through each transport, without a GPU."""

import pytest
from stand_ins import HERE, NOWHERE, RANKS, passes, skip_without_ucx

from run_tests import ALL

# Tests of tests/ranks, by their files. How ops are called and transformed (in loops, under vmap) is
# the same for all transports.
OPS = "chain or any_root or (shapes and 2) or different or user"
# XLA packs and unpacks the messages. XLA's CPU converts float8 for that, and NaNs change.
SUMS = "sums and 16 or whole and trees"
HALOS = f"whole and (axes or vmap or (model and 2d and 1-True)) or {SUMS}"
STARTED = "not derivatives and not freed and not value and not carries and not vmap"
DERIVATIVES = "value and jax.jit and allreduce or derivatives and reduce_scatter-"
# NCCL reduces no numbers of a byte or less but integers.
REDUCED = "reduces_every and not float4 and not float8 and not int2"
# Values at the edges of dtypes, and ranks without rows, on each transport that reduces by itself.
EDGES = {"values": "int8 or float32 or bfloat16", "no_rows": "inside and (rank and 0)"}
# Transports whose dtypes the suite in tests/rust does not all try; what else is set.
RUNS = {
    "staged-gpu": (
        {"ops": OPS, "halo": SUMS, "overlap": f"{STARTED} or {DERIVATIVES}", **EDGES},
        {},
    ),
    # Nonblocking operations are staged, as with "staged".
    "cuda-mpi-gpu": ({"ops": OPS, "halo": HALOS, **EDGES}, {}),
    "nccl-gpu": ({"ops": f"{OPS} or {REDUCED}", "halo": HALOS, **EDGES}, {}),
    "nccl-gpu, messages staged": ({"overlap": STARTED}, {"MPI4JAX_NCCL_MESSAGES": "staged"}),
    "ucx-cpu": ({"ops": OPS}, {}),
    "ucx-gpu": ({"ops": OPS}, {}),
}
FILES = {
    "ops": ["test_ops.py"],
    "halo": ["test_halo.py"],
    "no_rows": ["test_no_rows.py"],
    "values": ["test_values.py"],
    "overlap": ["test_overlap.py", "test_overlap_messages.py"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS)
def test_all_ops(mpirun, fakes, run):
    tests, settings = RUNS[run]
    if ALL and "ops" in tests:
        tests = {**tests, "ops": f"{OPS} or moves_every or reduces_every"}
    transport, _, place = run.partition(",")[0].rpartition("-")
    if transport == "ucx":
        skip_without_ucx()
    reached = "reached" if transport in ("cuda-mpi", "ucx") else "1"
    env = {**fakes, "MPI4JAX_TEST_CUDA_ON_CPU": reached} if place == "gpu" else NOWHERE
    env = {**env, "MPI4JAX_TRANSPORT": transport, **settings}
    files = [RANKS / file for name in tests for file in FILES[name]]
    expression = " or ".join(f"test_{name} and ({wanted})" for name, wanted in tests.items())
    passes(mpirun, files, expression, env, time_limit=250)


def test_what_runs_on_a_machine_with_a_gpu(mpirun, fakes):
    """The scripts in this directory, so that they are known to be right before."""
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_NCCL_MESSAGES": "nccl"}
    result = mpirun(2, HERE / "ops.py", "300001", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "GPU: nccl (MPI4JAX_TRANSPORT=nccl" in result.stdout
