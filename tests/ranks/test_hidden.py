"""What JAX's runtime tokens gave, and a program whose effect is hidden keeps."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, SIZE

import mpi4jax
from mpi4jax import _native, notoken

WAITS = {"flush": mpi4jax.flush, "effects_barrier": jax.effects_barrier}
waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)


def slow(x):
    work = jnp.ones((300, 300))
    return 0 * lax.fori_loop(0, 60, lambda i, w: jnp.tanh(w @ work), work)[0, 0] + x


def started_in_a_thread(work, wait, capfd):
    """What is printed until ``wait`` returns of the ops that ``work`` starts in a thread."""
    mpi4jax.flush()
    capfd.readouterr()
    _native.set_debug(True)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        wait()
        return capfd.readouterr().out
    finally:
        _native.set_debug(False)


@waits
def test_ops_of_a_thread_that_has_ended_are_waited_for(wait, capfd):
    first = jax.jit(slow)
    first(1.0)

    def eager():
        notoken.send(first(1.0), MPI.PROC_NULL)

    def compiled_there():
        jax.jit(lambda x: notoken.send(x, MPI.PROC_NULL))(first(1.0))

    for work in (eager, compiled_there):
        assert "MPI_Send done with code 0" in started_in_a_thread(work, wait, capfd)


@waits
def test_arrays_of_another_thread_are_waited_for(wait, capfd):
    first, total = jax.jit(slow), jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))
    total(first(1.0))
    kept = []
    printed = started_in_a_thread(lambda: kept.append(total(first(1.0))), wait, capfd)
    assert "MPI_Allreduce done with code 0" in printed


@pytest.mark.min_ranks(2)
@waits
def test_an_op_that_runs_in_another_thread_is_waited_for(wait, capfd):
    """It waits for rank 0, which comes once it runs on all others."""
    comm, signals = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    barrier = jax.jit(lambda: notoken.barrier(comm=comm))
    barrier()
    mpi4jax.flush()
    if comm.rank == 0:
        for _ in range(1, SIZE):
            signals.recv()
        barrier()
        mpi4jax.flush()
    else:
        capfd.readouterr()
        _native.set_debug(True)
        try:
            threading.Thread(target=barrier).start()
            printed = ""
            while "MPI_Barrier" not in printed:
                time.sleep(0.01)
                printed += capfd.readouterr().out
            assert "done" not in printed
            signals.send(None, dest=0)
            wait()
            assert "MPI_Barrier done with code 0" in printed + capfd.readouterr().out
        finally:
            _native.set_debug(False)
    signals.Free()
    comm.Free()


@pytest.mark.parametrize("wait", [mpi4jax.flush, None], ids=["waited", "not waited"])
def test_after_an_op_that_failed_its_communicator_is_out_of_step(wait):
    """The first error comes again, from whatever is next, until there is a new communicator."""
    comm = MPI.COMM_WORLD.Dup()
    notoken.allreduce(1.0, MPI.SUM, comm=comm)
    failing = jax.jit(lambda r: notoken.recv(r, MPI.PROC_NULL, comm=comm) + failing_op(comm, r))
    with pytest.raises(Exception, match="must be a rank"):
        jax.block_until_ready(failing(jnp.float32(1)))
    if wait:
        wait()
    for _ in range(2):
        with pytest.raises(Exception, match=r"allreduce.*earlier operation.*must be a rank"):
            jax.block_until_ready(notoken.allreduce(1.0, MPI.SUM, comm=comm))
    other = MPI.COMM_WORLD.Dup()
    assert float(notoken.allreduce(1.0, MPI.SUM, comm=other)) == SIZE
    other.Free()
    comm.Free()


def failing_op(comm, x):
    """An op that asks for a rank that there is not, when it runs."""
    dest = (x * 0).astype(jnp.int32) + SIZE
    return notoken.sendrecv(x, x, LEFT, dest, comm=comm)
