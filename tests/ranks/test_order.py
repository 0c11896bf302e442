"""Every op runs exactly once, in program order, whatever happens to its results."""

import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from mpi4py import MPI
from reference import COMM, RANK, SIZE, each, jits
from table import cases

import mpi4jax
from mpi4jax import notoken


@pytest.fixture
def calls(logged):
    """``calls(f, *args)``: the result of ``f`` and the MPI calls it made: [(name, items)]."""

    def record(f, *args):
        y, lines = logged(lambda: f(*args))
        found = []
        for line in (line.split(" | ")[2] for line in lines if " done with " not in line):
            items = re.search(r"(\d+) items", line)
            found.append((line.split()[0], int(items[1]) if items else None))
        return y, found

    return record


# ---- One at a time


@pytest.mark.one_in(3)
@each(cases())
def test_unused_results(case, calls):
    """In functions and loops whose results, too, are unused."""
    x = case.operands()[RANK]

    def op(x):
        case.run("notoken", x)
        return x

    def custom(x):
        f = jax.custom_jvp(op)
        f.defjvp(lambda primals, tangents: (op(*primals), tangents[0]))
        return f(x)

    ways = {
        "plain": (1, op),
        "jit": (1, jax.jit(op)),
        "jit in jit": (1, jax.jit(lambda x: jax.jit(op)(x))),
        "checkpoint": (1, jax.checkpoint(op)),
        "custom_jvp": (1, custom),
        "scan": (3, lambda x: lax.scan(lambda c, _: (c, op(x)), 0, None, length=3)),
        "fori_loop": (2, lambda x: lax.fori_loop(0, 2, lambda i, c: (op(x), c)[1], 0)),
        "while_loop": (
            2,
            lambda x: lax.while_loop(lambda i: (op(x), i < 1)[1], lambda i: i + 1, 0),
        ),
        "cond": (1, lambda x: lax.cond(jnp.sum(x) < np.inf, op, lambda x: x, x)),
        "vmap": (1, lambda x: jax.vmap(op)(jnp.stack([x, x]))),
    }

    def f(x):
        for _, g in ways.values():
            g(x)
        return x

    _, found = calls(jax.jit(f), x)
    names = [name for name, _ in found]
    times = sum(n for n, _ in ways.values())
    one = [case.row.mpi]
    if case.name == "recv":  # from MPI.PROC_NULL there is nothing to call
        one = ["MPI_Send", "MPI_Recv"] if RANK else ["MPI_Send"]
    assert names == one * times


@jits
def test_equal_ops_are_not_merged(jit, calls):
    def f(x):
        ys = [notoken.allreduce(x, MPI.SUM) for _ in range(3)]
        notoken.send(x, MPI.PROC_NULL)
        notoken.send(x, MPI.PROC_NULL)
        notoken.barrier()
        notoken.barrier()
        return ys

    _, found = calls(jit(f), jnp.ones(4))
    expected = [("MPI_Allreduce", 4)] * 3 + [("MPI_Send", 4)] * 2 + [("MPI_Barrier", None)] * 2
    assert found == expected


@pytest.mark.min_ranks(2)
def test_order_across_calls():
    """Eager calls and compiled ones, of both kinds, overtake neither each other nor themselves."""
    work = jnp.ones((60, 60))

    def slow(x):
        return x + 0 * lax.fori_loop(0, 20, lambda i, w: jnp.tanh(w @ work), work)[0, 0]

    send = {
        "eager": lambda x: notoken.send(x, 1),
        "jax.jit": jax.jit(lambda x: notoken.send(x, 1)),
        "slow": mpi4jax.jit(lambda x: notoken.send(slow(x), 1)),
        "slow too": jax.jit(lambda x: notoken.send(slow(x), 1)),
    }
    receive = [
        lambda x: notoken.recv(x, 0),
        jax.jit(lambda x: notoken.recv(x, 0)),
        mpi4jax.jit(lambda x: notoken.recv(x, 0)),
    ]
    names = np.random.default_rng(5).choice(list(send), 60)
    received = []
    for i, name in enumerate(names):
        if RANK == 0:
            send[name](jnp.float32(i))
        elif RANK == 1:
            received.append(receive[i % 3](jnp.float32(-1)))
    if RANK == 1:
        assert [float(y) for y in received] == list(range(60))


@pytest.mark.min_ranks(2)
def test_mpi4py_in_between():
    """With `flush` between them, calls of mpi4py and ours on one communicator keep their order."""
    comm = MPI.COMM_WORLD.Dup()
    work = jnp.ones((100, 100))

    @mpi4jax.jit
    def send(x):
        y = lax.fori_loop(0, 30, lambda i, w: jnp.tanh(w @ work), work)
        notoken.send(x + 0 * y[0, 0], 1, comm=comm)

    for i in range(20):
        if RANK == 0:
            send(jnp.float32(i))
            mpi4jax.flush()
            comm.Send(np.float32(i + 0.5), 1)
        elif RANK == 1:
            buffer = np.zeros(1, np.float32)
            if i % 2:
                first = float(notoken.recv(jnp.float32(0), 0, comm=comm))
                comm.Recv(buffer, 0)
                second = float(buffer[0])
            else:
                comm.Recv(buffer, 0)
                first = float(buffer[0])
                second = float(notoken.recv(jnp.float32(0), 0, comm=comm))
            assert (first, second) == (i, i + 0.5)
    mpi4jax.flush()
    comm.Free()


@pytest.mark.min_ranks(2)
@jits
def test_barrier_waits(jit, tmp_path):
    """No rank is past it before the last one has come."""
    folder = Path(COMM.bcast(str(tmp_path)))
    barrier = jit(mpi4jax.barrier)
    barrier()
    for late in range(SIZE):
        here = folder / f"rank{late}"
        if late == RANK:
            time.sleep(0.2)
            here.touch()
        barrier().block_until_ready()
        assert here.exists()


# ---- Beside ordered effects of JAX's

AROUND = {
    "top": lambda f: f,
    "jit": jax.jit,
    "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0],
    "branch": lambda f: lambda x: lax.cond(x[0] < 100, f, lambda x: x, x),
    "checkpoint": jax.checkpoint,
    "loop and behind": lambda f: lambda x: f(lax.fori_loop(0, 2, lambda _, x: f(x), x)),
}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("around", AROUND)
def test_ordered_callbacks_and_operations_have_one_order(around):
    """Messages of one tag, every second one sent by a callback through mpi4py."""
    comm, sent = MPI.COMM_WORLD, []

    def send(x):
        comm.Send(np.float32([len(sent)]), 1, 7)
        sent.append(1)
        return x

    def f(x):
        notoken.send(jnp.float32([-1]), 1, tag=7, comm=comm)
        y = io_callback(send, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)
        notoken.send(jnp.float32([-2]), 1, tag=7, comm=comm)
        return notoken.bcast(x, 0, comm=MPI.COMM_SELF) + 0 * y

    g = AROUND[around](f)
    if RANK == 0:
        jax.block_until_ready(jax.jit(g)(jnp.ones(3)))
        mpi4jax.flush()
        comm.Send(np.float32([-3]), 1, 7)
    if RANK == 1:
        found, x = [], np.zeros(1, np.float32)
        while x[0] != -3:
            comm.Recv(x, 0, 7)
            found.append(int(x[0]))
        times = len(found) // 3
        assert found == [n for i in range(times) for n in (-1, i, -2)] + [-3]
        assert times == {"loop": 2, "scan": 2, "loop and behind": 3}.get(around, 1)
    comm.Barrier()


@pytest.mark.parametrize("around", AROUND)
def test_two_ordered_effects_beside_operations(around):
    """XLA aborts the process where one token is two results."""
    seen = []

    def f(x):
        jax.debug.callback(lambda: seen.append("debug"), ordered=True)
        y = notoken.allreduce(x, MPI.SUM)
        io_callback(lambda: seen.append("io"), None, ordered=True)
        return notoken.bcast(x, 0) + 0 * y

    jax.block_until_ready(jax.jit(AROUND[around](f))(jnp.ones(3)))
    jax.effects_barrier()
    times = {"loop": 2, "scan": 2, "loop and behind": 3}.get(around, 1)
    assert seen == ["debug", "io"] * times


def test_what_a_callback_has_written_is_there_behind_a_barrier(tmp_path):
    file = Path(MPI.COMM_WORLD.bcast(str(tmp_path / "written"), 0))

    @jax.jit
    def f(x):
        def write(_):
            time.sleep(0.2)
            file.write_text("all")

        if RANK == 0:
            io_callback(write, None, x, ordered=True)
        notoken.barrier()
        return io_callback(
            lambda: np.bool_(file.exists()), jax.ShapeDtypeStruct((), bool), ordered=True
        )

    assert f(jnp.ones(3))
