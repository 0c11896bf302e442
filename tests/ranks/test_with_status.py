"""`recv_with_status` and `sendrecv_with_status`: source, tag and length, as traced values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, jits

import mpi4jax.notoken as mpi4jax


def numbers(received):
    assert all(x.dtype == jnp.int32 and x.shape == () for x in received)
    return [*map(int, received)]


def ring(x, template, tag=0):
    return mpi4jax.sendrecv_with_status(x, template, LEFT, RIGHT, sendtag=tag)


@jits
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex64])
@pytest.mark.parametrize("length", [0, 3, 5])
def test_of_sendrecv(jit, dtype, length):
    """A message may be shorter than its template: zeros follow."""
    x = jnp.full(length, RANK + 1, dtype)
    y, received = jit(lambda x: ring(x, jnp.ones(5, dtype), RANK + 3))(x)
    assert numbers(received) == [LEFT, LEFT + 3, length]
    np.testing.assert_array_equal(y, [LEFT + 1] * length + [0] * (5 - length))
    assert y.dtype == dtype


@jits
def test_nobody_sends(jit):
    x = jnp.full(3, 2.0)
    for source in (MPI.PROC_NULL, jnp.int32(MPI.PROC_NULL)):
        f = jit(lambda x, source: mpi4jax.recv_with_status(x, source))
        if source is MPI.PROC_NULL:
            f = lambda x, _: jit(lambda x: mpi4jax.recv_with_status(x, MPI.PROC_NULL))(x)
        y, received = f(x, source)
        np.testing.assert_array_equal(y, x)
        assert numbers(received) == [MPI.PROC_NULL, MPI.ANY_TAG, 0]


def test_pytrees():
    tree = {"a": jnp.full((2, 2), RANK), "b": (jnp.arange(3),)}
    y, received = ring(tree, tree)
    np.testing.assert_array_equal(y["a"], np.full((2, 2), LEFT))
    np.testing.assert_array_equal(y["b"][0], np.arange(3))
    assert numbers(received) == [LEFT, 0, 7]
    with pytest.raises(
        TypeError, match=r"recv_with_status: the template must have arrays of one dtype.*got"
    ):
        mpi4jax.recv_with_status({"a": jnp.ones(2), "b": jnp.arange(2)}, 0)
    with pytest.raises(TypeError, match=r"recv_with_status: .*'x'"):
        mpi4jax.recv_with_status((3,), 0)
    with pytest.raises(ValueError, match="recv_with_status: argument 'source'"):
        mpi4jax.recv_with_status(jnp.ones(3), SIZE)


def test_without_a_status_a_short_message_is_an_error_still():
    """Also where a derivative records what a wildcard has matched."""
    comm = mpi4jax.default_comm()
    lowered = jax.jit(lambda x: jax.grad(lambda x: mpi4jax.recv(x, comm=comm).sum())(x)).lower(
        jnp.ones(3)
    )
    assert "envelope_result" in lowered.as_text()
    assert "may_be_short" not in lowered.as_text()


@pytest.mark.min_ranks(2)
def test_manager_and_workers():
    """One program: workers ask, the manager answers whoever asks, and tags say what is meant."""
    tasks, work, stop = 20, 1, 2

    @jax.jit
    def manager(costs):
        def serve(state):
            following, working, results, served = state
            result, said = mpi4jax.recv_with_status(jnp.zeros(2))
            task, value = result[0].astype(int), result[1]
            results = jnp.where((jnp.arange(tasks) == task) & (said.elements == 2), value, results)
            there = following < tasks
            answer = jnp.where(there, costs[jnp.minimum(following, tasks - 1)], 0)
            message = jnp.stack([following.astype(float), answer])
            mpi4jax.send(message, said.source, tag=jnp.where(there, work, stop))
            served = served.at[said.source].add(there)
            return following + there, working - ~there, results, served

        state = (jnp.int32(0), jnp.int32(SIZE - 1), jnp.zeros(tasks), jnp.zeros(SIZE, jnp.int32))
        return jax.lax.while_loop(lambda state: state[1] > 0, serve, state)

    @jax.jit
    def worker():
        def step(state):
            message, said = mpi4jax.recv_with_status(jnp.zeros(2), 0)
            answer = message.at[1].set(message[1] ** 2)
            there = said.tag == work
            jax.lax.cond(there, lambda: mpi4jax.send(answer, 0), lambda: None)
            return there, state[1] + there

        mpi4jax.send(jnp.zeros(1), 0)  # the first question: a short message
        return jax.lax.while_loop(lambda state: state[0], step, (jnp.bool_(True), jnp.int32(0)))[1]

    costs = jnp.arange(tasks, dtype=jnp.float32) + 1
    if RANK == 0:
        following, working, results, served = manager(costs)
        assert (int(following), int(working)) == (tasks, 0)
        np.testing.assert_array_equal(results, np.asarray(costs) ** 2)
        assert served.sum() == tasks
    else:
        served = np.zeros(SIZE, np.int32)
        done = int(worker())
        served[RANK] = done
    total = mpi4jax.allreduce(jnp.asarray(served), op=MPI.SUM)
    assert int(total.sum()) == 2 * tasks, "each task was done once"


@jits
def test_derivatives(jit):
    """The array is differentiated; from any source, its cotangent goes back to the sender."""

    def f(x):
        y, received = mpi4jax.sendrecv_with_status(x, x, MPI.ANY_SOURCE, RIGHT, sendtag=4)
        return y * (received.source + received.tag + received.elements), received

    x = jnp.full(3, RANK + 1.0)
    scale = lambda rank: rank + 4 + 3
    (y, received), (t, _) = jit(lambda x: jax.jvp(f, [x], [2 * x]))(x)
    np.testing.assert_allclose(y, np.full(3, (LEFT + 1.0) * scale(LEFT)))
    np.testing.assert_allclose(t, 2 * np.asarray(y))
    assert numbers(received) == [LEFT, 4, 3]
    g = jit(jax.grad(lambda x: f(x)[0].sum()))(x)
    np.testing.assert_allclose(g, np.full(3, scale(RANK)))


def test_vmap():
    f = lambda x: ring(x, x)
    y, received = jax.vmap(f)(jnp.full((2, 3), RANK))
    np.testing.assert_array_equal(y, np.full((2, 3), LEFT))
    assert [x.tolist() for x in received] == [[LEFT] * 2, [0] * 2, [6] * 2]
