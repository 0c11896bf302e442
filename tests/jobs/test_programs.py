"""Programs as users start them: how they end, and what they print."""

import re
import textwrap

import pytest

# ---- Work that is pending at the end

EXITS = {
    "sends to itself": """
        f = jit(lambda x: notoken.sendrecv(x + 0 * slow(x), x, rank, rank))
        f(jnp.ones(10))
    """,
    "one sends last": """
        f = jit(lambda x: notoken.send(x + 0 * slow(x), 1 - rank))
        g = jit(lambda x: notoken.recv(x, 1 - rank))
        f(jnp.ones(100_000)) if rank == 0 else g(jnp.ones(100_000))
    """,
    "leaves by sys.exit": """
        jit(lambda x: notoken.allreduce(x + 0 * slow(x), MPI.SUM))(jnp.ones(10))
        import sys
        sys.exit(0)
    """,
    "has an exit handler of its own": """
        y = jit(lambda x: notoken.allreduce(x + 0 * slow(x), MPI.SUM))(jnp.ones(10))
        handlers.append(lambda: y.is_ready() or os._exit(3))
    """,
    "calls MPI.Finalize": """
        import time
        time.sleep(rank)
        f = jit(lambda x: notoken.allreduce(x + 0 * slow(x), MPI.SUM))
        y = f(jnp.ones(10))
        mpi4jax.iallreduce(jnp.ones(3))
        MPI.Finalize()
        assert y[0] == size
        x = jnp.ones(10)
        alone = lambda x: notoken.allreduce(x, comm=MPI.COMM_SELF)
        for late in (f, notoken.allreduce, mpi4jax.iallreduce, alone):
            try:
                jax.block_until_ready(late(x))
            except (RuntimeError, *[ValueError] * (late is f)) as error:  # ours; JAX's
                assert "MPI_Finalize has been called" in str(error)
            else:
                raise AssertionError(late)
    """,
}  # fmt: skip


@pytest.mark.parametrize("ranks, name", [(1, "sends to itself"), *((2, name) for name in EXITS)])
def test_exit_with_pending_work(mpirun, tmp_path, ranks, name):
    """What was started is finished before MPI_Finalize: no hang, no error, nothing lost."""
    file = tmp_path / "program.py"
    head = """
        import atexit, os
        import jax, jax.numpy as jnp
        from mpi4py import MPI
        handlers = []
        atexit.register(lambda: [f() for f in handlers])  # runs after what mpi4jax registers
        import mpi4jax
        from mpi4jax import notoken
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        work = jnp.ones((200, 200))
        def slow(x):
            return jax.lax.fori_loop(0, 100, lambda i, w: jnp.tanh(w @ work), work)[0, 0]
        jit = mpi4jax.jit
    """
    file.write_text(textwrap.dedent(head) + textwrap.dedent(EXITS[name]))
    job = mpirun(ranks, file, env={"MPI4JAX_DEBUG": "1"})
    assert job.returncode == 0, job.stderr
    lines = [line for line in job.stdout.splitlines() if " | MPI_" in line]
    started = [line.split(" | ")[1] for line in lines if " done with " not in line]
    done = [line.split(" | ")[1] for line in lines if " done with code 0 " in line]
    assert sorted(started) == sorted(done)
    assert done


# ---- Exported programs, saved by one job and run by another

SAVE = """
    import sys
    from pathlib import Path

    import jax, jax.export, jax.numpy as jnp, mpi4jax
    from mpi4jax import notoken
    from mpi4py import MPI

    file = Path(sys.argv[1] + str(MPI.COMM_WORLD.rank))
    call = jax.export.DisabledSafetyCheck.custom_call
    rows = MPI.COMM_WORLD.Dup()
    rows.Set_name("rows")
"""
SAVE_IT = """
    def f(x):
        notoken.send(x, MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank)
        y = notoken.recv(x, tag=0)
        return notoken.allreduce(y * rows.rank, MPI.SUM, comm=rows)

    checks = [call(f"mpi4jax_{op}") for op in ("allreduce", "send", "recv")]
    exported = jax.export.export(jax.jit(f), disabled_checks=checks)(jnp.ones(3))
    file.write_bytes(exported.serialize())
"""
RUN_IT = """
    f = jax.export.deserialize(file.read_bytes()).call
    try:
        jax.block_until_ready(f(jnp.ones(3)))
    except jax.errors.JaxRuntimeError as error:
        assert "no communicator" in str(error) and "Set_name" in str(error), error
    else:
        raise AssertionError("the communicator is not known yet")
    mpi4jax.barrier(comm=rows), mpi4jax.barrier()
    for g in (f, jax.jit(f), mpi4jax.jit(f), mpi4jax.jit(lambda x: [f(x), f(2 * x)][1] / 2)):
        assert g(jnp.ones(3)).tolist() == [1] * 3
    # It was lowered in another process, which alone knew the line.
    last = mpi4jax._native.operations()
    assert any(line.endswith("on rows, save.py:f") for line in last), last
"""


def test_communicators_are_found_again_by_name(mpirun, tmp_path):
    for name, program in (("save.py", SAVE_IT), ("run.py", RUN_IT)):
        file = tmp_path / name
        file.write_text(textwrap.dedent(SAVE + program))
        job = mpirun(2, file, tmp_path / "exported")
        assert job.returncode == 0, job.stderr


CACHED = """
    import sys
    import jax, jax.numpy as jnp, mpi4jax
    from jax import monitoring
    from mpi4jax import _native, notoken
    from mpi4py import MPI

    events = []
    monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1] + str(MPI.COMM_WORLD.rank))

    @jax.jit
    def step(x):
        y = notoken.allreduce(x, MPI.SUM)  # first
        return y + notoken.bcast(x, 0)  # second

    x = jnp.ones(3)
    mpi4jax.barrier()
    events.clear()
    jax.block_until_ready(step(x))
    last = _native.operations()
    source = open(__file__).read().splitlines()
    for op, mark in (("allreduce", "# first"), ("bcast", "# second")):
        line = 1 + next(i for i, text in enumerate(source) if text.endswith(mark))
        assert any(f"{op} #" in o and o.endswith(f"program.py:{line}") for o in last), last
    assert events.count(sys.argv[2]) == 1, events
"""


def test_a_line_that_moves_is_found_in_the_compilation_cache(mpirun, tmp_path):
    """And reports say where it is now."""
    file = tmp_path / "program.py"
    for above, event in (("", "cache_misses"), ("# one more line\n" * 3, "cache_hits")):
        file.write_text(above + textwrap.dedent(CACHED))
        job = mpirun(2, file, tmp_path / "cache", event)
        assert job.returncode == 0, job.stderr


def test_blocks_that_differ_across_the_axis(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax

cart = MPI.COMM_WORLD.Create_cart([2, 1])
mpi4jax.halo_exchange(jnp.zeros((4, 5 + cart.rank)), cart)
mpi4jax.flush()
print("not reached")
""")
    job = mpirun(2, program)
    assert job.returncode not in (0, None)
    assert "not reached" not in job.stdout
    assert re.search("truncat|24 bytes of ghost cells|20 bytes of ghost cells", job.stderr, re.I)


# ---- Arrays of `jax.distributed`

GLOBAL = """
import socket
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI
comm = MPI.COMM_WORLD
# After MPI has opened its ports, and just before JAX opens this one.
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
port = comm.bcast(port)
jax.distributed.initialize(f"localhost:{port}", comm.size, comm.rank, local_device_ids=[0])
import mpi4jax
from mpi4jax import notoken

mesh = jax.make_mesh((comm.size,), ("i",))
for spec in PartitionSpec("i"), PartitionSpec():
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), np.ones(4, np.float32))
    for f in (
        notoken.allreduce,
        jax.jit(notoken.allreduce),
        lambda x: notoken.bcast({"a": x, "b": 1.0}, 0),
        jax.grad(lambda x: notoken.allreduce(x).sum()),
        mpi4jax.iallreduce,
        notoken.assert_equal,
    ):
        try:
            jax.block_until_ready(f(x))
        except ValueError as error:
            assert "must run on one device" in str(error), error
            assert "x.addressable_data(0)" in str(error), error
        else:
            raise AssertionError(f)
    assert notoken.allreduce(x.addressable_data(0)).tolist() == [comm.size] * 4
print("ok")
"""


def test_arrays_of_several_processes_are_refused(mpirun, tmp_path):
    (tmp_path / "program.py").write_text(GLOBAL)
    job = mpirun(2, "program.py", fork=False)
    assert (job.returncode, job.stdout.count("ok\n")) == (0, 2), job.stderr  # beside Gloo's words
