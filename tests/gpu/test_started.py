"""Operations that are started, and waited for later, on arrays on a GPU."""

import re
import textwrap

from stand_ins import skip_without_ucx

COUNTED = textwrap.dedent("""
    import jax, jax.numpy as jnp, mpi4jax
    x = jnp.ones(1000)
    f = jax.jit(lambda x: mpi4jax.wait(mpi4jax.iallreduce(x), after=x + 1))
    for _ in range(10):
        assert float(f(x)[0]) == 1
""")


def test_there_is_one_copy_each_way_and_memory_is_used_again(python, fakes, tmp_path):
    log = tmp_path / "cuda.log"
    result = python(COUNTED, {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": log})
    assert result.returncode == 0, result.stderr
    words = ("copies", "waits", "allocations", "events", "copied")
    found = {word: int(re.search(rf"{word} (\d+)", log.read_text())[1]) for word in words}
    handle = 3 * 4
    # The handle is read once. The driver takes by value what is written: it, and zeros of `after`.
    assert found["copied"] == 10 * (2 * 4000 + handle)
    assert found["copies"] == 10 * (2 + 1 + 3 + 1)
    # The start waits for the operand, the wait for the handle and for the result.
    assert found["waits"] == 10 * 3
    assert (found["allocations"], found["events"]) == (2, 0)


def test_what_nccl_carries_waits_on_the_host_for_requests_alone(python, fakes, tmp_path):
    cuda, nccl = tmp_path / "cuda.log", tmp_path / "nccl.log"
    logs = {"FAKE_CUDA_LOG": cuda, "FAKE_NCCL_LOG": nccl}
    result = python(COUNTED, {**fakes, "MPI4JAX_TRANSPORT": "nccl", **logs})
    assert result.returncode == 0, result.stderr
    # Requests are read from the memory of the GPU, each by a copy that is waited for.
    assert "waits 10 allocations 1 " in cuda.read_text()
    assert cuda.read_text().endswith(f" copied {10 * 3 * 4}\n")
    assert "operations 10 " in nccl.read_text()


def test_messages_that_would_not_be_met_are_refused(python, fakes):
    code = "import jax, mpi4jax; mpi4jax.irecv(jax.numpy.ones(3), 0)"
    result = python(code, {**fakes, "MPI4JAX_TRANSPORT": "nccl"})
    assert result.returncode != 0
    assert "irecv: " in result.stderr
    assert "do not meet the messages of MPI; MPI4JAX_NCCL_MESSAGES=staged" in result.stderr


def test_with_ucx_they_are_refused_too(python, fakes):
    skip_without_ucx()
    settings = {"MPI4JAX_TRANSPORT": "ucx", "MPI4JAX_TEST_CUDA_ON_CPU": "reached"}
    code = "import jax, mpi4jax; x = jax.numpy.ones(3); mpi4jax.isend({}, 0)"
    reduced = "mpi4jax.wait(mpi4jax.iallreduce(x))"
    result = python(code.format(reduced), {**fakes, **settings})
    assert "isend: " in result.stderr
    assert "MPI4JAX_TRANSPORT=ucx, send and recv do not meet" in result.stderr
