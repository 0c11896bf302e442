"""Ops that return before they have ended: computation beside them goes on while a rank is late."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from mpi4py import MPI
from reference import COMM, RANK, SIZE, assert_equal

import mpi4jax
from mpi4jax import _detached, notoken

pytestmark = [
    pytest.mark.min_ranks(2),
    pytest.mark.skipif(
        MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="MPI allows one thread at a time"
    ),
]

# docs/sharp-bits.md
FREES_LATE = MPI.get_vendor()[0] != "Open MPI"

m = jnp.eye(400)
x = jnp.arange(200.0) + RANK


def total(x):
    return notoken.allreduce(x, MPI.SUM)


@pytest.fixture(scope="module")
def beside():
    """A communicator for messages of the tests."""
    comm = COMM.Dup()
    yield comm
    comm.Free()


def products(m):
    return lax.fori_loop(0, 3, lambda _, m: m @ m, m)


def at_top(x, m, tell):
    return total(x), tell(products(m))


def unrolled(x, m, tell):
    y = total(x)
    for _ in range(12):
        m = m @ m
    return y, tell(m)


def in_a_branch(x, m, tell):
    return lax.cond(x[1] > 0, lambda x, m: at_top(x, m, tell), lambda x, m: (x, m), x, m)


def in_a_loop(x, m, tell):
    def body(carry, _):
        x, m = carry
        return (total(x), tell(products(m))), None

    return lax.scan(body, (x, m), None, length=2)[0]


def two(x, m, tell):
    return total(total(x)), tell(products(m))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("f", "calls", "told"),
    [(at_top, 1, 1), (unrolled, 1, 1), (in_a_branch, 1, 1), (in_a_loop, 2, 2), (two, 2, 1)],
)
def test_computation_ends_before_the_other_ranks_begin(beside, f, calls, told):
    """The other ranks begin when they are told that the computation of rank 0 has ended."""

    def tell(m):
        def send(m):
            for rank in range(1, SIZE):
                beside.send(None, rank)
            return m

        return io_callback(send, jax.ShapeDtypeStruct(m.shape, m.dtype), m)

    if RANK == 0:
        y, n = jax.jit(lambda x, m: f(x, m, tell))(x, m)
    else:
        y, n = x, m
        for turn in range(calls):
            if turn < told:
                beside.recv(source=0)
            y = total(y)
    expected = SIZE * np.arange(200, dtype=np.float32) + SIZE * (SIZE - 1) / 2
    assert_equal(y, expected * SIZE ** (calls - 1))
    assert_equal(n, np.eye(400, dtype=np.float32))


def test_order_of_several_communicators():
    """Each op waits for the one before, on whichever communicator."""
    comms = [COMM.Dup() for _ in range(3)]

    @jax.jit
    def f(x, m):
        found = []
        for i in range(30):
            # No op depends on the result of another.
            x_i = x[i : i + 100] * (i + 1)
            if i % 5 == 4:
                left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
                found.append(notoken.sendrecv(x_i, x_i, left, right, comm=comms[i % 3]))
            else:
                found.append(notoken.allreduce(x_i, MPI.MAX, comm=comms[i % 3]))
            m = m @ m
        return found, m

    assert "_detached(%" in f.lower(x, m).as_text()
    for _ in range(5):
        found, n = f(x, m)
        for i, y in enumerate(found):
            rank = (RANK - 1) % SIZE if i % 5 == 4 else SIZE - 1
            assert_equal(y, (np.arange(100, dtype=np.float32) + i + rank) * (i + 1))
        assert_equal(n, np.eye(400, dtype=np.float32))
    mpi4jax.flush()
    for comm in comms:
        comm.Free()


def test_programs_that_run_ahead():
    """A program begins after all operations of the one before have ended, of whatever thread."""
    f = jax.jit(lambda x, m: (total(x), products(m)))
    ys = [f(x * i, m)[0] for i in range(20)]
    mpi4jax.flush()
    for i, y in enumerate(ys):
        assert y.is_ready()
        assert_equal(y, i * (SIZE * np.arange(200, dtype=np.float32) + SIZE * (SIZE - 1) / 2))


@pytest.mark.parametrize("setting", ["0", "1"])
def test_a_communicator_is_freed_meanwhile(monkeypatch, setting):
    """Freeing it waits for what is under way, on rank 0 for a late rank; or MPI frees it later."""
    monkeypatch.setenv("MPI4JAX_DETACH", setting)
    comm = COMM.Dup()
    f = jax.jit(lambda x, m: (notoken.allreduce(x, MPI.SUM, comm=comm), products(m)))
    assert ("_detached(%" in f.lower(x, m).as_text()) == (setting == "1")
    jax.block_until_ready(f(x, m))
    if RANK == SIZE - 1:
        time.sleep(0.5)
    y, _ = f(x, m)
    time.sleep(0.1)  # so that it is under way
    comm.Free()
    assert y.is_ready() or FREES_LATE
    assert_equal(y, SIZE * np.arange(200, dtype=np.float32) + SIZE * (SIZE - 1) / 2)
    with pytest.raises((ValueError, RuntimeError), match="has been freed"):
        jax.block_until_ready(f(x, m))


def test_gradient():
    def f(x, m):
        y, n = total(x**2), products(m * x[0])
        return jnp.sum(y * x) + jnp.sum(n)

    plain = jax.grad(f, argnums=(0, 1))(x, m)
    for got, expected in zip(jax.jit(jax.grad(f, argnums=(0, 1)))(x, m), plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_errors(monkeypatch):
    """What is wrong is said in the words that the op has where it waits."""
    words = []
    for setting in "0", "1":
        monkeypatch.setenv("MPI4JAX_DETACH", setting)
        comm = COMM.Dup()
        comm.Set_name("of errors")

        def send(x, m, comm=comm):
            counts = jnp.full(SIZE, 2, jnp.int32)
            rows, _ = notoken.ragged_alltoall(x[: 2 * SIZE], counts, 1, comm=comm)
            return rows, products(m)

        f = jax.jit(send)
        assert ("_detached(%" in f.lower(x, m).as_text()) == (setting == "1")
        for _ in range(2):  # the second time, the communicator has failed before
            with pytest.raises((ValueError, RuntimeError)) as error:
                jax.block_until_ready(f(x, m))
            text = str(error.value)
            words.append(text[text.index("ragged_alltoall") :])
        comm.Free()
    assert words[:2] == words[2:]
    assert words[0] != words[1]


def test_everything_detached(monkeypatch):
    """Loops, branches and derivatives of small ops, all of which return before they have ended."""
    monkeypatch.setattr(_detached, "WORTH", 0)

    def f(x):
        def turn(c, i):
            c = lax.cond(i % 2 == 0, lambda c: total(c) / SIZE, lambda c: c + 1, c)
            return notoken.bcast(c, 0), jnp.sum(c)

        y, sums = lax.scan(turn, x, jnp.arange(6))
        return jnp.sum(y**2) + jnp.sum(sums)

    assert "_detached(%" in jax.jit(f).lower(x).as_text()
    value, gradient = jax.jit(jax.value_and_grad(f))(x)
    monkeypatch.setattr(_detached, "WORTH", 10**8)
    plain_value, plain_gradient = jax.value_and_grad(f)(x)
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-6)
