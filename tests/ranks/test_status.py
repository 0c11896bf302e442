"""`status=`, wildcards, and messages from and to nobody."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import APIS, LEFT, RANK, RIGHT, SIZE, Threaded, assert_equal, jits

import mpi4jax
from mpi4jax import notoken

both_apis = pytest.mark.parametrize("api", [Threaded, lambda: notoken], ids=APIS)


def envelope(status):
    return status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)


@both_apis
@jits
def test_status_of_sendrecv(jit, api):
    status = MPI.Status()
    x = jnp.full(5, RANK, jnp.float32)
    y = jit(lambda x: api().sendrecv(x, x, LEFT, RIGHT, sendtag=RANK + 3, status=status))(x)
    jax.block_until_ready(y)
    assert envelope(status) == (LEFT, LEFT + 3, 5)
    assert_equal(y, np.full(5, LEFT, np.float32))


@pytest.mark.min_ranks(2)
@both_apis
@jits
def test_status_of_recv(jit, api):
    if RANK == 0:
        for source in range(1, SIZE):
            status = MPI.Status()
            receive = lambda x, source=source, status=status: api().recv(x, source, status=status)
            y = jit(receive)(jnp.zeros(2))
            jax.block_until_ready(y)
            assert envelope(status) == (source, 10 + source, 2)
            assert_equal(y, np.full(2, source, np.float32))
    else:
        jit(lambda x: api().send(x, 0, tag=10 + RANK))(jnp.full(2, RANK, jnp.float32))


@pytest.mark.min_ranks(2)
@both_apis
def test_an_eager_receive_returns_when_its_status_is_written(api):
    """Also if the template is not there yet, the sender is late, and nobody reads the result."""
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, x: x @ x / 300, x)[0, :6])
    compute(jnp.ones((300, 300))).block_until_ready()
    notoken.barrier()
    if RANK == 0:
        time.sleep(0.3)
        api().send(jnp.ones(6), 1, tag=9)
    elif RANK == 1:
        status = MPI.Status()
        api().recv(compute(jnp.ones((300, 300))), 0, status=status)
        assert envelope(status) == (0, 9, 6)


@jits
def test_status_is_written_by_each_execution(jit):
    status = MPI.Status()

    def with_tag(tag):
        return jit(lambda x: notoken.sendrecv(x, x, LEFT, RIGHT, sendtag=tag, status=status))

    functions = {tag: with_tag(tag) for tag in (1, 2, 3)}
    for tag in (1, 2, 1, 3, 1, 1):
        status.Set_tag(0)
        jax.block_until_ready(functions[tag](jnp.ones(3)))
        assert envelope(status) == (LEFT, tag, 3)


def test_status_outlives_its_last_reference():
    x = jnp.ones(3)
    functions = []
    for tag in range(5):
        status = MPI.Status()
        functions.append(
            mpi4jax.jit(
                lambda x, t=tag, s=status: notoken.sendrecv(x, x, LEFT, RIGHT, sendtag=t, status=s)
            )
        )
        functions[-1](x)
    del status
    gc.collect()
    others = [MPI.Status() for _ in range(50)]
    for f in functions * 3:
        jax.block_until_ready(f(x))
    empty = MPI.Status()
    assert all(envelope(s) == envelope(empty) for s in others)


@jits
def test_shorter_message(jit):
    """With a status the rest of the result is zeros; without one the job ends (test_errors.py)."""
    status = MPI.Status()
    x, template = jnp.arange(1.0, 4.0), jnp.full((2, 4), 7.0)
    y = jit(lambda x: notoken.sendrecv(x, template, LEFT, RIGHT, status=status))(x)
    jax.block_until_ready(y)
    assert_equal(y, np.array([[1, 2, 3, 0], [0, 0, 0, 0]], np.float32))
    assert envelope(status) == (LEFT, 0, 3)


@pytest.mark.min_ranks(2)
@jits
def test_wildcards(jit):
    """All others send to rank 0, which takes what comes."""
    if RANK == 0:
        status = MPI.Status()
        receive = jit(lambda x: notoken.recv(x, status=status))
        seen = {}
        for _ in range(SIZE - 1):
            y = jax.block_until_ready(receive(jnp.zeros(2)))
            assert_equal(y, np.full(2, status.Get_source(), np.float32))
            seen[status.Get_source()] = status.Get_tag()
        assert seen == {r: 20 + r for r in range(1, SIZE)}
    else:
        notoken.send(jnp.full(2, RANK, jnp.float32), 0, tag=20 + RANK)


@pytest.mark.min_ranks(2)
@jits
def test_tags_select(jit):
    """Received in another order than sent. Two small messages: MPI buffers them."""

    @jit
    def f(x):
        if RANK == 0:
            notoken.send(x + 1, 1, tag=1)
            notoken.send(x + 2, 1, tag=2)
        elif RANK == 1:
            two = notoken.recv(x, 0, tag=2)
            return two, notoken.recv(x, tag=1)
        return x, x

    two, one = f(jnp.float32(0))
    if RANK == 1:
        assert (float(two), float(one)) == (2, 1)


@jits
def test_largest_tag(jit):
    # Derivatives use the upper half.
    largest = 2 ** ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1).bit_length() - 2) - 1
    status = MPI.Status()
    f = jit(
        lambda x: notoken.sendrecv(
            x, x, LEFT, RIGHT, sendtag=largest, recvtag=largest, status=status
        )
    )
    jax.block_until_ready(f(jnp.ones(1)))
    assert status.Get_tag() == largest


@both_apis
@jits
def test_nobody(jit, api):
    x, template = jnp.ones(3), jnp.full(2, 5.0)
    assert_equal(jit(lambda t: api().recv(t, MPI.PROC_NULL))(template), np.full(2, 5, np.float32))
    jit(lambda x: api().send(x, MPI.PROC_NULL))(x)
    y = jit(lambda x, t: api().sendrecv(x, t, MPI.PROC_NULL, MPI.PROC_NULL))(x, template)
    assert_equal(y, np.full(2, 5, np.float32))


@jits
def test_status_of_a_receive_from_nobody(jit):
    notoken.sendrecv(jnp.ones(3), jnp.ones(3), LEFT, RIGHT, status=(status := MPI.Status()))
    y = jit(lambda x: notoken.sendrecv(x, x, MPI.PROC_NULL, MPI.PROC_NULL, status=status))(
        jnp.ones(3)
    )
    jax.block_until_ready(y)
    assert envelope(status) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
    status = MPI.Status()
    y = jit(lambda x: notoken.recv(x, MPI.PROC_NULL, status=status))(jnp.ones(3))
    jax.block_until_ready(y)
    assert envelope(status) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
