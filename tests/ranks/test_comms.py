"""Communicators are mpi4py's, used by value, and may be freed."""

import gc
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, assert_equal, each, jits
from table import cases

import mpi4jax
from mpi4jax import _native, notoken
from mpi4jax._call import eager
from mpi4jax._op import comm as _comm
from mpi4jax._op.operation import OPERATIONS

WORLD = MPI.COMM_WORLD


def check_all(comm, world_ranks, jit):
    """Every op, on a communicator of these ranks."""
    todo = cases(roots=(comm.size - 1,))
    operands = {
        str(case): [
            np.arange(r, r + np.prod(shape), dtype=np.float32).reshape(shape)
            for rank, r in enumerate(world_ranks)
            for shape in [case.shape((3,), rank, comm.size)]
        ]
        for case in todo
    }
    run = jit(lambda xs: {str(c): c.run("notoken", xs[str(c)], comm) for c in todo})
    results = run({name: xs[comm.rank] for name, xs in operands.items()})
    for case in todo:
        expected = case.expected(operands[str(case)], comm.rank)
        assert_equal(results[str(case)], expected, what=str(case))


@jits
def test_split(jit):
    """Even and odd ranks, in reverse order."""
    comm = WORLD.Split(RANK % 2, -RANK)
    check_all(comm, [r for r in reversed(range(SIZE)) if r % 2 == RANK % 2], jit)
    mpi4jax.flush()
    comm.Free()


@jits
@pytest.mark.parametrize(
    "comm", [MPI.COMM_WORLD, MPI.COMM_SELF, None], ids=["world", "self", "default"]
)
def test_predefined(comm, jit):
    if comm is None:
        assert_equal(jit(lambda: notoken.allgather(RANK))(), np.arange(SIZE, dtype=np.int32))
    else:
        check_all(comm, range(SIZE) if comm == MPI.COMM_WORLD else [RANK], jit)


def test_pvary():
    """It sums the cotangents of the ranks of its communicator alone."""
    comm = WORLD.Split(RANK % 2, RANK)
    gradient = jax.grad(lambda x: (RANK + 1) * mpi4jax.pvary(x, comm=comm))(1.0)
    assert float(gradient) == sum(rank + 1 for rank in range(RANK % 2, SIZE, 2))
    mpi4jax.flush()
    comm.Free()


def test_default_communicator():
    comm = mpi4jax.default_comm()
    assert comm is mpi4jax.default_comm()
    assert MPI.Comm.Compare(comm, WORLD) == MPI.CONGRUENT
    # A clone: messages of the user's on COMM_WORLD do not meet ours.
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    request = WORLD.isend("mine", right, tag=7)
    y = notoken.sendrecv(jnp.float32(RANK), jnp.float32(0), left, right, sendtag=7)
    assert float(y) == left
    assert WORLD.recv(source=left, tag=7) == "mine"
    request.wait()


def test_two_communicators_do_not_mix():
    """Equal tags and ranks, received in the other order than sent."""
    a, b = WORLD.Dup(), WORLD.Dup()
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    if SIZE > 1:
        requests = [a.isend(np.float32(1), right), b.isend(np.float32(2), right)]

        @mpi4jax.jit
        def f(x):
            first = notoken.sendrecv(x, x, left, right, comm=b)
            return first, notoken.sendrecv(x + 1, x, left, right, comm=a)

        b.recv(source=left), a.recv(source=left)
        [request.wait() for request in requests]
        y, z = f(jnp.float32(RANK))
        assert (float(y), float(z)) == (left, left + 1)
    mpi4jax.flush()
    a.Free()
    b.Free()


@pytest.mark.min_ranks(2)  # an intercommunicator has two groups
def test_intercommunicator():
    local = WORLD.Split(RANK > 0, RANK)
    inter = local.Create_intercomm(0, WORLD, 1 if RANK == 0 else 0)
    with pytest.raises(TypeError, match=r"barrier: argument 'comm' .* got Intercomm"):
        notoken.barrier(comm=inter)
    inter.Free()
    local.Free()


# ---- By value


def test_names():
    """The name a user gave is the one in messages and in programs."""
    comm = WORLD.Dup()
    comm.Set_name("ocean")
    f = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM, comm=comm))
    assert r"\22ocean\22" in f.lower(1.0).as_text()
    twin = comm.Dup()
    twin.Set_name("ocean")
    g = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM, comm=twin))
    assert r"\22ocean\22" not in g.lower(1.0).as_text()
    assert "ocean#" in g.lower(1.0).as_text()
    with pytest.raises(ValueError, match=rf"communicator ocean has size {SIZE}"):
        notoken.bcast(1.0, SIZE, comm=comm)
    comm.Free()
    twin.Free()


# ---- Freed


def finish(f):
    jax.block_until_ready(f())
    mpi4jax.flush()


def freed():
    comm = WORLD.Create_cart([SIZE], [True])
    comm.Set_name("short-lived")
    return comm


def test_freed_before_the_call():
    comm = freed()
    other = MPI.Intracomm(comm)
    y = notoken.allreduce(1.0, MPI.SUM, comm=comm)
    jax.block_until_ready(y)
    comm.Free()
    with pytest.raises(ValueError, match="allreduce: argument 'comm' is the null communicator"):
        notoken.allreduce(1.0, MPI.SUM, comm=comm)
    with pytest.raises(ValueError, match=r"allreduce: .* short-lived, which has been freed"):
        notoken.allreduce(1.0, MPI.SUM, comm=other)


@pytest.mark.one_in(3)
@each([*cases(), "recv"])
def test_freed_after_compilation(case):
    comm = freed()
    if case == "recv":  # from itself: from MPI.PROC_NULL it calls nothing
        f = jax.jit(lambda: notoken.recv(np.zeros(1, np.float32), comm.rank, comm=comm))
        request = comm.Isend(np.ones(1, np.float32), comm.rank)
    else:
        x = case.operands(payload=(1,))[RANK]
        f = jax.jit(lambda: case.run("notoken", x, comm))
    finish(f)
    if case == "recv":
        request.Wait()
    comm.Free()
    with pytest.raises((ValueError, RuntimeError), match="communicator short-lived has been freed"):
        finish(f)
    # What comes later is not harmed.
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


@pytest.mark.ranks(1)
def test_communicators_leave_nothing_behind():
    """Thousands, made and freed one at a time."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for i in range(3000):
        if i == 500:
            gc.collect()
            before = resident()
        comm = WORLD.Dup()
        _comm.as_comm("test", comm)
        comm.Free()
    gc.collect()
    assert resident() - before < 4 << 20


@pytest.mark.ranks(1)
def test_freed_reductions_leave_no_programs_behind():
    """A program of an eager operation takes some 1.4 MiB."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def once() -> None:
        op = MPI.Op.Create(lambda a, b, t: None, commute=True)
        jax.block_until_ready(notoken.allreduce(jnp.ones(3), op))
        jax.block_until_ready(notoken.scan(jnp.ones(3), op))
        op.Free()

    for _ in range(8):
        once()
    before, programs = resident(), len(eager.PROGRAMS)
    for _ in range(16):
        once()
    assert len(eager.PROGRAMS) == programs
    # Without this, 2 x 16 x 1.4 MiB.
    assert resident() - before < 22 << 20


def test_a_reduction_that_is_freed_after_compilation():
    def maximum(a, b, _):
        y = np.frombuffer(b, np.float32)
        np.maximum(np.frombuffer(a, np.float32), y, out=y)

    op = MPI.Op.Create(maximum, commute=True)
    f = jax.jit(lambda x: notoken.allreduce(x, op))
    x = jnp.full(3, RANK, jnp.float32)
    assert float(f(x)[0]) == SIZE - 1
    mpi4jax.flush()
    op.Free()
    with pytest.raises((ValueError, RuntimeError), match=r"'op', .*, has been freed"):
        jax.block_until_ready(f(x))


@pytest.mark.min_ranks(3)
def test_some_ranks_only():
    """Messages between two ranks do not involve the others."""
    f = jax.jit(lambda x, peer: notoken.sendrecv(x, x, peer, peer), static_argnums=1)
    if RANK in (0, SIZE - 1):
        peer = SIZE - 1 - RANK
        assert float(f(jnp.float32(RANK), peer)) == peer


FIRST = {
    "allgatherv": lambda x, grid: notoken.allgatherv(x, [5] * grid.size, comm=grid),
    "gatherv": lambda x, grid: notoken.gatherv(x, [5] * grid.size, comm=grid),
    "alltoallv": lambda x, grid: (
        notoken.alltoallv(x, *[[5] + [0] * (SIZE - 1)] * 2, comm=grid)
        if grid.rank == 0
        else notoken.alltoallv(x[:0], [0] * SIZE, [0] * SIZE, comm=grid)
    ),
    "halo_exchange": lambda x, grid: notoken.halo_exchange(x, grid),
    "permute": lambda x, grid: notoken.permute(x, [(0, 1), (1, 0)], comm=grid),
    "ragged_alltoall": lambda x, grid: notoken.ragged_alltoall(
        x, jnp.zeros(grid.size, int).at[0].set(5), capacity=5 * grid.size, comm=grid
    ),
    "exscan": lambda x, grid: jax.grad(lambda x: notoken.exscan(x, comm=grid).sum())(x),
    "scan": lambda x, grid: jax.grad(lambda x: notoken.scan(x, comm=grid).sum())(x),
}


def test_all_ops_that_make_a_communicator_are_tried():
    assert {name for name, op in OPERATIONS.items() if op.row.private} <= FIRST.keys()


@pytest.mark.min_ranks(3)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("op", FIRST)
def test_a_communicator_is_made_while_rank_0_waits_for_a_result(op, jit):
    """Open MPI makes communicators from COMM_WORLD before others."""
    x = jnp.ones((200, 200)) / 200

    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, x: jnp.sin(x @ x / 200), x)[0, :5]

    # Of allgatherv, the way that it takes where an int does not count the rows.
    _native.set_count_limit(4 if op == "allgatherv" else None)
    try:
        for _ in range(3):
            grid = WORLD.Create_cart([WORLD.size], periods=[True])
            f = lambda x, grid=grid: FIRST[op](slow(x), grid)
            y = (jax.jit(f) if jit else f)(x)
            if grid.rank == 0:
                jax.block_until_ready(y)
        mpi4jax.flush()
    finally:
        _native.set_count_limit(None)
