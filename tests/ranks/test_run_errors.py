"""Errors when an operation runs: their type, their words, and which ranks raise them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import COMM, RANK, SIZE
from table import ROWS, STARTED, good

from mpi4jax import notoken

ERRORS = (ValueError, jax.errors.JaxRuntimeError)
EARLIER = "not run, because an earlier operation on communicator "


# Which operation fails first.
MADE_OF = {
    "halo_exchange": "ialltoallv",
    "ragged_alltoall": "ragged_alltoall",
    "sendrecv": "irecv",
}


def failed_comm():
    """A communicator on which an operation has failed, on all ranks."""
    comm = COMM.Create_cart([SIZE], periods=[True])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^ragged_alltoall: argument 'capacity'"):
        notoken.ragged_alltoall(jnp.ones(SIZE), [1] * SIZE, SIZE - 1, comm=comm)
    return comm


def arguments(name, comm):
    given = good(name)
    if name == "halo_exchange":
        return {**given, "cart": comm}
    if name == "recv":
        given["source"] = 0  # nothing is received from PROC_NULL
    if name == "scatterv" and RANK != 0:
        given["x"] = given["x"][:1]
    return {**given, "comm": comm}


@pytest.mark.parametrize("name", ROWS)
def test_an_eager_call_raises_one_type_with_the_words_of_the_operation(name):
    comm = failed_comm()
    for _ in range(2):  # the second call is dispatched from C++
        with pytest.raises(jax.errors.JaxRuntimeError) as e:
            jax.block_until_ready(getattr(notoken, name)(**arguments(name, comm)))
        assert str(e.value).startswith(f"{name}: {EARLIER}"), e.value
        assert "First error: ragged_alltoall: argument 'capacity'" in str(e.value)
    comm.Free()


@pytest.mark.parametrize("name", ["allreduce", "bcast", "sendrecv"])
def test_a_compiled_call_puts_the_name_of_the_code_before_the_words(name):
    comm = failed_comm()
    others = arguments(name, comm)
    sent = next(iter(others))
    x = others.pop(sent)
    f = jax.jit(lambda x: getattr(notoken, name)(**{sent: x}, **others))
    for expected in (jax.errors.JaxRuntimeError, ERRORS):
        with pytest.raises(expected) as e:
            jax.block_until_ready(f(x))
        assert f"{name}: {EARLIER}" in str(e.value)
        assert str(e.value).startswith("FAILED_PRECONDITION: ")
        assert "mpi4jax: " not in str(e.value)
        assert f"r{RANK} |" not in str(e.value)
    comm.Free()


@pytest.mark.parametrize("name", STARTED)
def test_a_nonblocking_call_raises_the_same_type(name):
    comm = failed_comm()
    first = MADE_OF.get(name, f"i{name}")
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"^{first}: {EARLIER}"):
        getattr(notoken, f"i{name}")(**arguments(name, comm))
    comm.Free()


def test_a_second_wait_raises_the_same_type():
    request = notoken.iallreduce(jnp.ones(3))
    notoken.wait(request)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"^wait for iallreduce: the request"):
            notoken.wait(request)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["ragged_alltoall", "migrate"])
def test_too_little_room_on_one_rank_is_an_error_on_all(name, jit):
    comm = COMM.Dup()
    last = SIZE - 1
    room = SIZE - 1 if last == RANK else 2 * SIZE
    numbers = np.arange(SIZE, dtype=np.int32) if name == "migrate" else np.ones(SIZE, np.int32)
    call = (jax.jit if jit else lambda f: f)(
        lambda numbers: getattr(notoken, name)(jnp.ones(SIZE), numbers, room, comm=comm)
    )
    with pytest.raises(ERRORS) as e:
        jax.block_until_ready(call(numbers))
    words = f"{name}: argument 'capacity' must be at least the {SIZE} rows that rank {last}"
    words += " receives"
    each = ", ".join(f"1 from rank {rank}" for rank in range(SIZE))
    words += f" ({each}), got {SIZE - 1}" if last == RANK else ", got less there"
    line = "migrate at test_run_errors.py:" if name == "migrate" else "test_run_errors.py:"
    assert f"{words} when it ran, {line}" in str(e.value)
    # All ranks have raised it, so they can go on together.
    assert COMM.allreduce(1) == SIZE
    comm.Free()
