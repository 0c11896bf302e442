"""Messages that are started, and waited for later; and operations that are made of them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, LEFT, RANK, RIGHT, SIZE, Started, each
from table import STARTED, cases

import mpi4jax


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_messages_of_parts_keep_their_order():
    """Of operations that are told of parts, started and not, whatever is waited for first."""
    there, back = [[(r, (r + step) % SIZE) for r in range(SIZE)] for step in (1, -1)]
    x = jnp.arange(3.0) + 10 * RANK

    @jax.jit
    def f(x):
        first = mpi4jax.ipermute(x, there)
        rows = mpi4jax.iallgatherv(x[None], [1] * SIZE)
        second = mpi4jax.ipermute(2 * x, there)
        third = mpi4jax.notoken.permute(3 * x, back)
        return mpi4jax.wait(second), third, mpi4jax.waitall([rows, first])

    second, third, (rows, first) = f(x)
    of_rank = lambda rank: np.arange(3.0) + 10 * rank
    close(first, of_rank(LEFT))
    close(second, 2 * of_rank(LEFT))
    close(third, 3 * of_rank(RIGHT))
    close(rows, [of_rank(rank) for rank in range(SIZE)])


def test_both_sides_of_a_sendrecv():
    """Trees that differ, of several dtypes; traced peers; nobody."""

    @jax.jit
    def f(x, left, right):
        given = {"a": x, "b": jnp.int32(RANK)}
        like = {"b": jnp.zeros((), jnp.int32), "c": [jnp.zeros(2)]}
        return mpi4jax.wait(mpi4jax.isendrecv(given, like, left, right, sendtag=3, recvtag=3))

    found = f(jnp.arange(2.0) + RANK, LEFT, RIGHT)
    close(found["c"][0], np.arange(2.0) + LEFT)
    assert int(found["b"]) == LEFT
    x = jnp.ones(2)
    close(mpi4jax.wait(mpi4jax.isendrecv(x, 2 * x, MPI.PROC_NULL, MPI.PROC_NULL)), [2.0, 2.0])
    with pytest.raises(TypeError, match="isendrecv: argument 'sendbuf' must be an array"):
        mpi4jax.isendrecv("x", x, LEFT, RIGHT)  # and no receive is under way
    request = mpi4jax.isendrecv(x, x, LEFT, RIGHT)
    assert repr(request) == "<request of isendrecv>"
    mpi4jax.wait(request)

    def twice(x):
        request = mpi4jax.isendrecv(x, x, LEFT, RIGHT)
        return mpi4jax.wait(request) + mpi4jax.wait(request)

    with pytest.raises(ValueError, match=r"request of i(send|recv) has been waited for before"):
        jax.jit(twice)(x)


def _scaled(total, x, y):
    return total * x["a"] + y


def test_a_request_of_a_function_of_the_result():
    """In a loop that carries it, and its derivative; errors name the function."""

    def initiate(x):
        return mpi4jax.iallreduce(x).then(_scaled, {"a": x}, 1.0, name="scale")

    def f(x):
        def step(request, _):
            y = mpi4jax.wait(request)
            return initiate(y), y

        request, _ = jax.lax.scan(step, initiate(x), length=2)
        return mpi4jax.wait(request)

    def expected(x):
        for _ in range(3):
            x = SIZE * x * x + 1.0
        return x

    close(jax.jit(f)(jnp.float32(0.5)), expected(0.5))
    # The transpose of the sum gives each rank the cotangent of the sum.
    close(jax.grad(lambda x: mpi4jax.wait(initiate(x)))(jnp.float32(2.0)), 2.0 + SIZE * 2.0)
    request = initiate(jnp.float32(1.0))
    assert repr(request) == "<request of iscale>"
    assert mpi4jax.wait(request.then(jnp.negative)) == -(SIZE + 1.0)
    with pytest.raises(TypeError, match="iscale returns a request, not a token"):
        _ = [*request]


def test_messages_in_both_directions():
    def f(x):
        from_left, from_right = (
            mpi4jax.irecv(x, rank, tag=t) for rank, t in ((LEFT, 1), (RIGHT, 2))
        )
        sends = [mpi4jax.isend(x, RIGHT, tag=1), mpi4jax.isend(2 * x, LEFT, tag=2)]
        inside = jnp.cumsum(mpi4jax.after(from_left, x))
        right = mpi4jax.wait(from_right, after=inside)
        left = mpi4jax.wait(from_left)
        mpi4jax.waitall(sends)
        return left + 3 * right + inside

    x = jnp.arange(3.0) + RANK
    expected = np.arange(3.0) + LEFT + 6 * (np.arange(3.0) + RIGHT) + np.cumsum(x)
    close(f(x), expected)
    close(jax.jit(f)(x), expected)
    weights = np.array([1.0, 10.0, 100.0]) * (RANK + 1)
    of_rank = lambda rank: np.array([1.0, 10.0, 100.0]) * (rank + 1)
    expected = of_rank(RIGHT) + 6 * of_rank(LEFT) + np.cumsum(of_rank(RANK)[::-1])[::-1]
    close(jax.jit(jax.grad(lambda x: jnp.sum(weights * f(x))))(x), expected)


def test_what_is_received_at_last():
    """Traced peers, wildcards, nobody, a template that is described."""
    x = jnp.arange(2.0) + RANK

    @jax.jit
    def f(x, left, right):
        request = mpi4jax.irecv(x, left, tag=jnp.int32(5))
        mpi4jax.wait(mpi4jax.isend(x, right, tag=jnp.int32(5)))
        return mpi4jax.wait(request)

    close(f(x, LEFT, RIGHT), np.arange(2.0) + LEFT)
    close(f(x, MPI.PROC_NULL, MPI.PROC_NULL), x)
    request = mpi4jax.irecv(jax.ShapeDtypeStruct((2,), np.float32), MPI.ANY_SOURCE, tag=7)
    send = mpi4jax.isend(x, RIGHT, tag=7)
    close(mpi4jax.wait(request), np.arange(2.0) + LEFT)
    assert mpi4jax.wait(send) is None
    nobody = mpi4jax.irecv(x, MPI.PROC_NULL)
    close(mpi4jax.wait(nobody), x)
    # A blocking receive and one that is started get each other's messages.
    request = mpi4jax.isend(x, RIGHT, tag=2)
    close(mpi4jax.notoken.recv(x, LEFT, tag=2), np.arange(2.0) + LEFT)
    mpi4jax.wait(request)


# ---- Communicators that are freed while something is under way


class Lost(Started):
    """Each operation is started, and nobody waits for it."""

    def __getattr__(self, name):
        return getattr(mpi4jax, f"i{name}")


@each([case for case in cases() if case.name in STARTED and not case.row.call])
def test_a_communicator_is_freed_before_what_was_started_has_ended(case, capfd):
    """Open MPI goes on with a collective that is under way there, and crashes."""
    comm = COMM.Dup()
    if RANK == SIZE - 1:
        time.sleep(1.3 if case.name == "allreduce" else 0.02)
    jax.block_until_ready(jax.tree.leaves(case.run(Lost(), case.operands()[RANK], comm)))
    comm.Free()
    COMM.Barrier()
    found = capfd.readouterr().err
    if MPI.get_vendor()[0] == "MPICH":
        # It frees a communicator when its last collective has ended: at the end of the process.
        return
    assert f"i{case.name} #1 " in found, found
    assert "was not waited for before its communicator was freed (mpi4jax.wait)" in found, found


def test_a_communicator_is_freed_before_a_program_has_come_to_its_operation():
    comm = COMM.Dup()

    @jax.jit
    def f(x):
        x = jax.lax.fori_loop(0, 20, lambda _, x: jnp.sin(x @ x), x)
        return mpi4jax.notoken.allreduce(x * 0 + 1, MPI.SUM, comm=comm)

    y = f(jnp.ones((300, 300)))
    comm.Free()
    close(y, np.full((300, 300), SIZE))


@pytest.mark.parametrize("other", ["ipermute", "iallreduce", "iexscan"])
def test_several_are_waited_for_after_their_communicator_was_freed(other):
    """MPICH frees it within one of the waits: what is left cannot be ended before that has."""
    comm, x = COMM.Dup(), jnp.ones((300, 300))
    ring = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
    argument = ring if other == "ipermute" else MPI.SUM
    first = mpi4jax.iallreduce(x, MPI.SUM, comm=comm)
    second = getattr(mpi4jax, other)(x, argument, comm=comm)
    jax.block_until_ready(jax.tree.leaves((first, second)))
    comm.Free()
    close(mpi4jax.wait(first), x * SIZE)
    n = {"ipermute": 1, "iallreduce": SIZE, "iexscan": RANK}[other]
    close(mpi4jax.wait(second), x * n)
    # What had the communicator's number may be another's now.
    close(mpi4jax.notoken.allreduce(x, MPI.SUM), x * SIZE)


def test_a_communicator_is_freed_by_a_callback():
    """There nothing can be waited for: the program that calls it has not ended."""
    comm = COMM.Dup()
    assert float(mpi4jax.notoken.allreduce(1.0, MPI.SUM, comm=comm)) == SIZE

    def free(x):
        comm.Free()
        return x

    @jax.jit
    def f(x):
        x = jax.lax.fori_loop(0, 20, lambda _, x: jnp.sin(x @ x), x)
        return jax.pure_callback(free, jax.ShapeDtypeStruct((), np.float32), x[0, 0])

    f(jnp.ones((300, 300))).block_until_ready()
    assert comm == MPI.COMM_NULL
