"""Operations in several threads."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, Started, assert_equal, each
from table import cases
from test_overlap import STARTED

import mpi4jax
from mpi4jax import notoken


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def in_threads(work, count=2):
    errors = []

    def run(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors


def test_threads_with_a_communicator_each():
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]

    def work(i):
        f = jax.jit(
            lambda x: notoken.sendrecv(
                notoken.allreduce(x, MPI.SUM, comm=comms[i]), x, LEFT, RIGHT, comm=comms[i]
            )
        )
        for k in range(10):
            assert float(f(jnp.float32(k + i))) == (k + i) * SIZE
            assert float(notoken.allreduce(jnp.float32(k), MPI.SUM, comm=comms[i])) == k * SIZE

    in_threads(work)
    mpi4jax.flush()
    [comm.Free() for comm in comms]


FIRST_CALLS = {
    "arrays": lambda x, comm: notoken.allreduce(x, comm=comm),
    "trees": lambda x, comm: notoken.allreduce((x, 1), comm=comm),
    "numbers": lambda x, comm: notoken.allreduce(2.0, comm=comm),
    "derivatives": lambda x, comm: jax.jvp(lambda x: notoken.allreduce(x, comm=comm), (x,), (x,)),
    "requests": lambda x, comm: mpi4jax.wait(mpi4jax.iallreduce(x, comm=comm)),
    "status": lambda x, comm: notoken.sendrecv(x, x, LEFT, RIGHT, comm=comm, status=MPI.Status()),
    "no arrays": lambda x, comm: notoken.barrier(comm=comm),
}


@pytest.mark.min_ranks(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", FIRST_CALLS)
def test_no_first_call_waits_for_that_of_another_thread(call):
    """Neighbors begin with different communicators. JAX compiles the program in the first call,
    once more after `jax.clear_caches`, and for another data type."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]

    def work(i, dtype):
        time.sleep(0.3 * ((i + RANK) % 2))
        jax.block_until_ready(FIRST_CALLS[call](jnp.ones(3, dtype), comms[i]))

    for _ in range(2):
        jax.clear_caches()
        in_threads(functools.partial(work, dtype=jnp.float32))
    in_threads(functools.partial(work, dtype=jnp.float16))
    mpi4jax.flush()
    [comm.Free() for comm in comms]


@pytest.fixture
def two_comms():
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    comms = [MPI.COMM_WORLD.Create_cart([SIZE], [True]) for _ in range(2)]
    yield comms
    mpi4jax.flush()
    [comm.Free() for comm in comms]


ON_A_COMM = [case for case in cases() if case.name != "recv"]


@pytest.mark.min_ranks(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("api", ["blocking", "non-blocking"])
@each(ON_A_COMM)
def test_two_threads_in_opposite_order(case, api, two_comms):
    """Neighbors begin with different communicators, each in a thread of its own. Nothing that one
    thread holds while it waits is needed by the other."""
    if api == "non-blocking" and case.name not in STARTED:
        pytest.skip("has no non-blocking form")
    xs = case.operands()

    def work(i):
        for _ in range(2):
            time.sleep(0.1 * ((i + RANK) % 2))
            y = case.run(notoken if api == "blocking" else Started(), xs[RANK], two_comms[i])
            assert_equal(y, case.expected(xs))

    in_threads(work)


# Its case gives its operand; the start waits for the counts of the other ranks.
EXCEPTIONS = ("barrier", "ragged_alltoall")


class Starts:
    """The API as if it had only operations that are started."""

    def __getattr__(self, name):
        return getattr(mpi4jax, f"i{name}")


@pytest.mark.min_ranks(2)
@pytest.mark.timeout(60)
@each([case for case in ON_A_COMM if case.name in STARTED and case.name not in EXCEPTIONS])
def test_a_start_waits_for_nobody(case, two_comms):
    """Neighbors start on two communicators in different orders, and rank 1 starts when it has
    heard from rank 0, which has started then. They wait in different orders, too."""
    xs = case.operands()

    for pair in (two_comms, two_comms[::-1]):
        if RANK == 1:
            MPI.COMM_WORLD.recv(source=0, tag=7)
        order = pair if RANK % 2 else pair[::-1]
        requests = [case.run(Starts(), xs[RANK], comm) for comm in order]
        jax.block_until_ready(requests)
        if RANK == 0:
            MPI.COMM_WORLD.send(None, 1, tag=7)
        for request in requests[:: (-1 if RANK == 0 else 1)]:
            assert_equal(mpi4jax.wait(request), case.expected(xs))
