"""Operations on a GPU that fail, or never complete."""

import pytest
from stand_ins import ALLREDUCE, fails


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_NCCL_ASYNC_ERROR": "1"}, "an earlier operation returned error code 3"),
        ({"FAKE_CUDA_STREAM_DEVICE": "1"}, "NCCL's communicators were made for JAX's first local"),
    ],
)
def test_nccl_reports_errors(python, fakes, settings, words):
    fails(python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "nccl", **settings}), words)


STUCK = ALLREDUCE + "import time; time.sleep(60)"


def test_what_never_ends_on_the_gpu_is_reported(python, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_TIMEOUT": 3}
    result = python(STUCK, {**env, "FAKE_CUDA_STUCK": 1})
    words = (
        "allreduce on mpi4jax.default, which is on the GPU, has not completed after MPI4JAX_TIME"
    )
    fails(result, words, "allreduce #3")


def test_what_the_gpu_does_before_an_operation_is_no_time_of_it(python, fakes):
    """The host has put the operation on the stream; the GPU comes to it after the time limit."""
    code = ALLREDUCE + "import time; time.sleep(5); print('healthy')"
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_TIMEOUT": 2, "FAKE_CUDA_BUSY": 4}
    result = python(code, env)
    assert "healthy" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("transport", "function"), [("staged", "cuStreamSynchronize"), ("nccl", "cuEventRecord")]
)
def test_an_error_of_the_driver_ends_the_job(python, fakes, transport, function):
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": transport, "FAKE_CUDA_LOST": 1})
    fails(result, f"{function} returned error code 700")


def test_what_nccl_reports_later_is_seen_by_the_watchdog(python, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "FAKE_NCCL_ASYNC_ERROR": 3}
    fails(python(STUCK, env), "failed: an earlier operation returned error code 3")


OF_TWO_LENGTHS = """
import jax.numpy as jnp
from mpi4py import MPI
from mpi4jax import notoken as nt
print("result", nt.allreduce(jnp.ones(1000 + MPI.COMM_WORLD.rank), MPI.SUM)[:2])
"""


@pytest.mark.parametrize("transport", ["staged", "cuda-mpi", "nccl"])
def test_operands_that_do_not_match_have_no_result(mpirun, fakes, transport):
    """The first run of a line waits for the comparison, as on a CPU."""
    env = {**fakes, "MPI4JAX_TEST_CUDA_ON_CPU": "reached", "MPI4JAX_TRANSPORT": transport}
    result = mpirun(2, "-c", OF_TWO_LENGTHS, env=env)
    fails(result, "the operations of the ranks do not match", "1000 x float32", "1001 x float32")
    assert "result" not in result.stdout
