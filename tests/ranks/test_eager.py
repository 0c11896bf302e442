"""Calls outside of any function that is compiled."""

import gc
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import (
    LEFT,
    ON_GPU,
    RANK,
    RIGHT,
    SIZE,
    assert_close,
    assert_equal,
    compilations,
    each,
)
from table import cases

import mpi4jax
from mpi4jax import _native, notoken
from mpi4jax._call import eager
from mpi4jax._op import comm as _comm

X = jnp.arange(3, dtype=np.float32) + 10 * RANK

on_cpu = pytest.mark.skipif(ON_GPU, reason="on GPUs operands are not read")


@on_cpu
def test_one_program_for_all_tags_peers_communicators_and_statuses():
    def call(comm, step, tag, status=None):
        return notoken.sendrecv(
            X, X, (RANK - step) % SIZE, (RANK + step) % SIZE, sendtag=tag, comm=comm, status=status
        )

    call(None, 1, 0), call(None, 1, 0, MPI.Status()), mpi4jax.flush()
    notoken.allreduce(X, MPI.SUM)
    with compilations() as compiled:
        for _ in range(3):
            comm = MPI.COMM_WORLD.Dup()
            for tag in (3, 4):
                for step in range(SIZE):
                    status = MPI.Status()
                    y = call(comm, step, tag, status)
                    assert_equal(y, np.asarray(X) - 10 * RANK + 10 * ((RANK - step) % SIZE))
                    assert (status.Get_source(), status.Get_tag()) == ((RANK - step) % SIZE, tag)
                    call(comm, step, tag)
            notoken.allreduce(X, MPI.SUM, comm=comm)
            mpi4jax.flush()
            comm.Free()
    assert not compiled


def late():
    """All ranks meet, and the last one comes later."""
    MPI.COMM_WORLD.Barrier()
    if RANK == SIZE - 1:
        time.sleep(0.05)


@pytest.mark.parametrize("tree", [False, True], ids=["array", "tree"])
@each(cases())
def test_arrays_of_numpy_may_be_refilled(case, tree):
    """Once an operation has returned, as after MPI's; the last rank comes late to it."""

    def wrap(x):
        return {"a": x, "b": x} if tree else x

    xs = case.operands(payload=(1 << 16,))
    x = xs[RANK].copy()
    late()
    y = case.run("notoken", wrap(x))
    x[:] = 1e9
    expected = case.expected(xs)
    jax.tree.map(lambda y: assert_close(y, expected), y) if case.name != "barrier" else None


FUNCTIONS = {
    "assert_equal": lambda x: notoken.assert_equal(x * 1),
    "bcast in a derivative": lambda x: jax.jvp(lambda t: notoken.bcast(x, 0) * t, (1.0,), (1.0,)),
    "iallreduce": lambda x: notoken.wait(notoken.iallreduce(x)),
    "reproducible_sum": lambda x: notoken.reproducible_sum(x, axis=0),
    "linalg.norm": mpi4jax.linalg.norm,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("offset", [0, 1])  # XLA reads aligned arrays in their place
def test_functions_may_be_given_arrays_of_numpy_that_are_refilled(name, offset):
    def call(refill):
        x = np.arange(offset, offset + (1 << 18), dtype=np.float32)[offset:]
        late()
        y = FUNCTIONS[name](x)
        x[:] = 1e9 if refill else x
        return y

    jax.tree.map(lambda a, b: assert_equal(a, np.asarray(b)), call(True), call(False))


def test_reductions_of_the_users_are_told_apart():
    """Each has the handle of the one before, maybe."""
    folds = [np.add, np.maximum, np.multiply, np.maximum]
    x, everyones = np.float32(RANK + 2), np.arange(2, SIZE + 2, dtype=np.float32)
    for fold in folds:

        def reduce_into(a, b, _, fold=fold):
            y = np.frombuffer(b, np.float32)
            fold(np.frombuffer(a, np.float32), y, out=y)

        op = MPI.Op.Create(reduce_into, commute=True)
        for _ in range(3):
            assert_equal(notoken.allreduce(x, op), fold.reduce(everyones))
        mpi4jax.flush()
        op.Free()


def test_a_communicator_in_the_place_of_another():
    for color in (0, RANK, 0):
        comm = MPI.COMM_WORLD.Split(color)
        for _ in range(3):
            assert_equal(
                notoken.allreduce(np.float32(1), MPI.SUM, comm=comm), np.float32(comm.size)
            )
        mpi4jax.flush()
        comm.Free()
        for _ in range(2):
            with pytest.raises(ValueError, match="the null communicator"):
                notoken.allreduce(np.float32(1), MPI.SUM, comm=comm)


def test_nothing_is_kept_of_a_communicator():
    def use(comm):
        notoken.allreduce(X, MPI.SUM, comm=comm)
        notoken.sendrecv(X, {"a": X}["a"], LEFT, RIGHT, comm=comm)
        jax.grad(lambda x: notoken.allreduce(x, MPI.SUM, comm=comm).sum())(X)
        jax.jit(lambda x: notoken.allreduce(x, MPI.SUM, comm=comm))(X)
        mpi4jax.flush()

    # One life to make what is made once.
    comm = MPI.COMM_WORLD.Dup()
    use(comm)
    comm.Free()
    programs = len(eager.PROGRAMS)
    comm = MPI.COMM_WORLD.Dup()
    use(comm)
    kept = weakref.ref(_comm.as_comm("", comm))
    comm.Free()
    del comm
    jax.clear_caches()
    gc.collect()
    assert kept() is None
    if not _native.is_gpu_on_cpu():
        assert len(eager.PROGRAMS) == programs


def test_two_threads_use_a_communicator_first():
    """It is registered once: a second registration would make programs of the first one fail."""
    for _ in range(30):
        comm = MPI.COMM_WORLD.Dup()
        barrier, found = threading.Barrier(2), []

        def work(comm=comm, barrier=barrier, found=found):
            barrier.wait()
            found.append(_comm.as_comm("test", comm))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] is found[1]
        comm.Free()


# ---- Costs


def python_calls(f):
    """Return the Python functions that ``f`` calls when it is called once more."""
    for _ in range(3):
        f()
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
    try:
        f()
    finally:
        sys.setprofile(None)
    return [frame.f_code.co_qualname for frame in seen[1:]]


@on_cpu
@pytest.mark.parametrize("api", [notoken, mpi4jax], ids=["without", "with a token"])
def test_an_eager_call_makes_few_python_calls(api):
    """One look-up finds its program; a token is one more result, not another program."""
    how = {} if api is notoken else {"token": mpi4jax.create_token()}
    called = python_calls(lambda: api.allreduce(X, op=MPI.SUM, comm=MPI.COMM_WORLD, **how))
    assert len(called) <= 16, called
    called = python_calls(lambda: api.sendrecv(X, X, LEFT, RIGHT, sendtag=3, **how))
    assert len(called) <= 28, called  # it checks ranks, tags, a template and a status


@on_cpu
def test_like_calls_after_the_caches_of_jax_are_cleared():
    """Their programs are compiled anew before they communicate."""
    call = lambda x: notoken.allreduce(x, comm=MPI.COMM_WORLD)
    for _ in range(3):
        assert_equal(call(X), np.asarray(X) * SIZE + 10 * (SIZE * (SIZE - 1) // 2 - SIZE * RANK))
    jax.clear_caches()
    with compilations() as compiled:
        call(X)
    assert compiled
    with compilations() as compiled:
        call(X)
    assert not compiled


# ---- Lines


@on_cpu
@pytest.mark.parametrize("way", ["arrays", "trees", "derivatives"])
def test_an_error_names_the_callers_line(way, monkeypatch):
    """Although the program was compiled for another caller."""
    monkeypatch.setattr(eager, "_on_device", break_destination(eager._on_device))
    x = {"arrays": X, "trees": (X, 1), "derivatives": X}[way]

    comm = MPI.COMM_WORLD.Dup()

    def call():
        return notoken.sendrecv(x, x, MPI.PROC_NULL, RIGHT, comm=comm)

    def run():
        out = jax.jvp(lambda _: call(), (X,), (X,)) if way == "derivatives" else call()
        jax.block_until_ready(out)

    line = call.__code__.co_firstlineno + 1
    with pytest.raises(Exception, match=rf"test_eager\.py:{line}\b"):
        run()
    comm.Free()


@on_cpu
def test_lines_of_one_function_are_told_apart(monkeypatch):
    comm = MPI.COMM_WORLD.Dup()

    def call(first):
        if first:
            return notoken.sendrecv(X, X, MPI.PROC_NULL, MPI.PROC_NULL, comm=comm)
        return notoken.sendrecv(X, X, MPI.PROC_NULL, MPI.PROC_NULL, comm=comm)

    call(True)
    monkeypatch.setattr(eager, "_on_device", break_destination(eager._on_device))
    line = call.__code__.co_firstlineno + 3
    with pytest.raises(Exception, match=rf"test_eager\.py:{line}\b"):
        jax.block_until_ready(call(False))
    comm.Free()


@pytest.mark.parametrize("size", [1001, 300_007])
def test_first_calls_under_debug_nans(size):
    """The first call does nothing: its result is memory that may hold anything."""
    with jax.debug_nans(False):
        for _ in range(5):
            (jnp.full(size, np.nan, np.float32) + 1).block_until_ready()
    with jax.debug_nans(True):
        assert_equal(notoken.allreduce(np.ones(size, np.float32)), np.full(size, SIZE, np.float32))


def break_destination(on_device):
    def broken(source, recvtag, dest, *others):
        return on_device(source, recvtag, SIZE + 40, *others)

    return broken


# ---- Templates

LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("nested", [False, True], ids=["array", "tree"])
def test_what_is_received_can_be_described(jit, nested):
    def tree(x):
        return {"a": x, "b": [x]} if nested else x

    def f(x):
        y = notoken.sendrecv(tree(x), tree(LIKE), LEFT, RIGHT)
        z = notoken.bcast(tree(x if RANK == 0 else LIKE), 0)
        block = notoken.scatter(tree(jnp.stack([x] * SIZE) if RANK == 0 else LIKE), 0)
        return y, z, block, notoken.recv(tree(LIKE), MPI.PROC_NULL)

    y, z, block, nobody = (jax.jit(f) if jit else f)(X)
    for out, rank in ((y, LEFT), (z, 0), (block, 0)):
        for leaf in jax.tree.leaves(out):
            assert_equal(leaf, np.asarray(X) + 10 * (rank - RANK))
    assert jax.tree.structure(y) == jax.tree.structure(tree(X))
    assert all(not leaf.any() for leaf in jax.tree.leaves(nobody))


def test_keys_can_be_described():
    key = jax.random.key(RANK)
    like = jax.ShapeDtypeStruct(key.shape, key.dtype)
    y = notoken.sendrecv(key, like, LEFT, RIGHT)
    assert_equal(jax.random.key_data(y), jax.random.key_data(jax.random.key(LEFT)))
