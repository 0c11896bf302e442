"""Communicators are mpi4py's, used by value, and may be freed."""

import gc
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, SPECS, assert_equal, compilations

import mpi4jax
from mpi4jax import _native, notoken

WORLD = MPI.COMM_WORLD
JITS = {"eager": lambda f: f, "jax.jit": jax.jit, "mpi4jax.jit": mpi4jax.jit}
jits = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)


def calls(comm, x):
    """Every op once, on a communicator."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    null = MPI.PROC_NULL
    ring = comm if comm.Get_topology() == MPI.CART else comm.Create_cart([comm.size], [True])
    return {
        "allgather": lambda: notoken.allgather(x, comm=comm),
        "allreduce": lambda: notoken.allreduce(x, MPI.SUM, comm=comm),
        "alltoall": lambda: notoken.alltoall(jnp.stack([x] * comm.size), comm=comm),
        "barrier": lambda: notoken.barrier(comm=comm),
        "bcast": lambda: notoken.bcast(x, comm.size - 1, comm=comm),
        "gather": lambda: notoken.gather(x, 0, comm=comm),
        "halo_exchange": lambda: notoken.halo_exchange(
            jnp.stack([x, x]), ring, axes=0, width=[(0, 1)]
        )[1],
        "recv": lambda: notoken.recv(x, null, comm=comm),
        "reduce": lambda: notoken.reduce(x, MPI.SUM, 0, comm=comm),
        "scan": lambda: notoken.scan(x, MPI.SUM, comm=comm),
        "scatter": lambda: notoken.scatter(
            jnp.stack([x] * comm.size) if comm.rank == 0 else x, 0, comm=comm
        ),
        "send": lambda: notoken.send(x, null, comm=comm),
        "sendrecv": lambda: notoken.sendrecv(x, x, left, right, comm=comm),
    }


def expected(comm, xs):
    """The results, from the operands of the communicator's ranks."""
    rank = comm.rank
    return {
        "allgather": np.stack(xs),
        "allreduce": sum(xs),
        "alltoall": np.stack(xs),
        "barrier": None,
        "bcast": xs[-1],
        "gather": np.stack(xs) if rank == 0 else xs[rank],
        "halo_exchange": xs[(rank + 1) % comm.size],
        "recv": xs[rank],
        "reduce": sum(xs) if rank == 0 else xs[rank],
        "scan": sum(xs[: rank + 1]),
        "scatter": xs[0],
        "send": None,
        "sendrecv": xs[rank - 1],
    }


def check_all(comm, world_ranks, jit):
    x = jnp.full(3, RANK, jnp.float32)
    xs = [np.full(3, r, np.float32) for r in world_ranks]
    ops = calls(comm, x)
    assert set(ops) == set(SPECS)
    results = jit(lambda: {name: op() for name, op in ops.items()})()
    for name, y in expected(comm, xs).items():
        assert_equal(results[name], y)


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


def test_other_kinds_of_communicator():
    ring = WORLD.Create_cart([SIZE], periods=[True])
    left, right = ring.Shift(0, 1)
    y = notoken.sendrecv(jnp.float32(RANK), jnp.float32(0), left, right, comm=ring)
    assert float(y) == left
    shared = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert float(notoken.allreduce(1.0, MPI.SUM, comm=shared)) == shared.size
    mpi4jax.flush()
    ring.Free()
    shared.Free()


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


# ---- By value


def test_two_handles_compile_once():
    comm = WORLD.Dup()
    x = jnp.ones(11)
    notoken.allreduce(x, MPI.SUM, comm=comm)
    with compilations() as compiled:
        for _ in range(5):
            handle, reduction = MPI.Intracomm(comm), MPI.Op(MPI.SUM)
            assert handle is not comm
            assert reduction is not MPI.SUM
            y = notoken.allreduce(x, reduction, comm=handle)
            assert_equal(y, np.full(11, SIZE, np.float32))
    assert len(compiled) == 0
    mpi4jax.flush()
    comm.Free()


def test_one_program_for_all_communicators():
    """Where the host reads operands; on GPUs one for each."""
    comms = [WORLD.Dup() for _ in range(3)]
    x = jnp.ones(12)
    with compilations() as compiled:
        for comm in comms * 3:
            notoken.bcast(x, 0, comm=comm)
    assert len(compiled) <= (3 if _native.is_gpu_on_cpu() else 1)
    mpi4jax.flush()
    [comm.Free() for comm in comms]


def test_equations_compare_by_value():
    comm = WORLD.Dup()
    a, b = (
        jax.make_jaxpr(lambda: notoken.bcast(1.0, 0, comm=MPI.Intracomm(comm)))() for _ in range(2)
    )
    other = jax.make_jaxpr(lambda: notoken.bcast(1.0, 0, comm=WORLD))()
    params = [jaxpr.eqns[-1].params["comm"] for jaxpr in (a, b, other)]
    assert params[0] == params[1]
    assert hash(params[0]) == hash(params[1])
    assert params[0] != params[2]
    comm.Free()


def test_names():
    """The name a user gave is the one in messages and in programs."""
    comm = WORLD.Dup()
    comm.Set_name("ocean")
    f = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM, comm=comm))
    assert '"ocean"' in f.lower(1.0).as_text()
    twin = comm.Dup()
    twin.Set_name("ocean")
    g = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM, comm=twin))
    assert '"ocean"' not in g.lower(1.0).as_text()
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


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("jit", [jax.jit, mpi4jax.jit], ids=["jax.jit", "mpi4jax.jit"])
def test_freed_after_compilation(name, jit):
    comm = freed()
    f = jit(calls(comm, jnp.float32(1))[name])
    if name == "recv":  # from MPI.PROC_NULL it calls nothing
        f = jit(lambda: notoken.recv(np.zeros(1, np.float32), comm.rank, comm=comm))
        request = comm.Isend(np.ones(1, np.float32), comm.rank)
    finish(f)
    if name == "recv":
        request.Wait()
    comm.Free()
    with pytest.raises((ValueError, RuntimeError), match="communicator short-lived has been freed"):
        finish(f)
    # What comes later is not harmed.
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


def test_freed_communicator_in_an_eager_function_that_was_compiled():
    """Its successor may have the same handle and the same name."""
    x = jnp.ones(13)
    for i in range(4):
        comm = freed()
        y = notoken.allreduce(x * i, MPI.SUM, comm=comm)
        assert_equal(y, np.full(13, i * SIZE, np.float32))
        comm.Free()


def test_many_communicators():
    for i in range(9):
        comm = WORLD.Split(RANK % (i % 3 + 1), RANK)
        assert float(notoken.allreduce(1.0, MPI.SUM, comm=comm)) == comm.size
        comm.Free()
    gc.collect()
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


def test_what_was_made_from_a_communicator_goes_with_it():
    """Suffix scans and halo exchanges have communicators of their own."""
    x = jnp.arange(4.0)
    suffix = jax.vjp(lambda x: notoken.scan(x, MPI.SUM, comm=WORLD), x)[1](x)[0]
    for _ in range(3):
        cart = WORLD.Create_cart([SIZE], [True])
        pulled = jax.vjp(lambda x, comm=cart: notoken.scan(x, MPI.SUM, comm=comm), x)[1](x)[0]
        assert_equal(pulled, suffix)
        ghosts = notoken.halo_exchange(jnp.full(3, float(RANK)), cart)
        ring = (np.arange(RANK - 1, RANK + 2) % SIZE).astype(np.float32)
        assert_equal(ghosts, ring)
        cart.Free()


@pytest.mark.ranks(1)
def test_disconnect():
    comm = freed()
    notoken.barrier(comm=comm)
    mpi4jax.flush()
    comm.Disconnect()
    with pytest.raises(ValueError, match="null communicator"):
        notoken.barrier(comm=comm)


# ---- Parts of the job


@pytest.mark.ranks(1)
@pytest.mark.parametrize("program", [
    "y = notoken.sendrecv(x, x, 1 - rank, 1 - rank)",
    "y = jax.jit(lambda x: notoken.sendrecv(x, x, 1 - rank, 1 - rank))(x)",
])  # fmt: skip
def test_default_communicator_on_two_of_four_ranks(mpirun, tmp_path, program):
    """It is made on first use, which is collective: the other ranks join in when they exit."""
    file = tmp_path / "program.py"
    file.write_text(
        textwrap.dedent(f"""
            import jax, jax.numpy as jnp
            from mpi4py import MPI
            import mpi4jax
            from mpi4jax import notoken
            rank = MPI.COMM_WORLD.rank
            if rank < 2:
                x = jnp.float32(rank)
                {program}
                print("got", float(y), "from", 1 - rank, flush=True)
        """)
    )
    job = mpirun(4, file)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")[:2]) == ["got 0.0 from 0", "got 1.0 from 1"]


@pytest.mark.min_ranks(3)
def test_some_ranks_only():
    """Messages between two ranks do not involve the others."""
    f = jax.jit(lambda x, peer: notoken.sendrecv(x, x, peer, peer), static_argnums=1)
    if RANK in (0, SIZE - 1):
        peer = SIZE - 1 - RANK
        assert float(f(jnp.float32(RANK), peer)) == peer
