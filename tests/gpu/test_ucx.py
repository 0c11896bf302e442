"""Messages through UCX, between CPUs."""

import textwrap

import pytest
from stand_ins import NOWHERE, fails, skip_without_ucx

MESSAGES = textwrap.dedent("""
    import numpy as np, jax, jax.numpy as jnp, mpi4jax
    from mpi4py import MPI
    from mpi4jax import notoken as nt
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    assert mpi4jax.transport_info().cpu == "ucx"

    for n in (0, 1, 1000, 1_000_000):
        y = nt.sendrecv(jnp.full(n, rank), jnp.zeros(n, int), left, right)
        np.testing.assert_array_equal(y, np.full(n, left))

    if size > 1:
        other = comm.Dup()
        # The first use of a communicator is collective.
        nt.barrier(comm=comm), nt.barrier(comm=other)
        if rank == 0:
            for tag, where in ((1, comm), (2, comm), (1, other)):
                nt.send(jnp.float32(tag + 10 * (where is other)), 1, tag=tag, comm=where)
        if rank == 1:
            got = [nt.recv(jnp.float32(0), 0, tag=2, comm=comm)]
            got += [nt.recv(jnp.float32(0), MPI.ANY_SOURCE, comm=other)]
            got += [nt.recv(jnp.float32(0), 0, comm=comm)]
            assert list(map(float, got)) == [2, 11, 1], got
        nt.barrier(comm=comm), nt.barrier(comm=other)

        if rank:
            nt.send(jnp.full(3, rank, jnp.float32), 0, tag=10 + rank)
        else:
            status = MPI.Status()
            for _ in range(size - 1):
                y = np.asarray(nt.recv(jnp.zeros(8), MPI.ANY_SOURCE, status=status))
                assert (status.source, status.tag) == (y[0], 10 + y[0])
                assert status.Get_count(MPI.FLOAT) == 3 and not y[3:].any()

    edge = nt.sendrecv(
        jnp.float32(rank), jnp.float32(-5),
        rank - 1 if rank else MPI.PROC_NULL, rank + 1 if rank + 1 < size else MPI.PROC_NULL,
    )
    assert edge == (rank - 1 if rank else -5)
    # Nobody receives this before its sender is at the end of its program.
    if size > 1 and rank == 0:
        nt.send(jnp.arange(1000.0), size - 1)
    mpi4jax.flush()
    comm.Barrier()
    if size > 1 and rank == size - 1:
        np.testing.assert_array_equal(nt.recv(jnp.zeros(1000), 0), np.arange(1000.0))
    print("good")
""")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_messages_through_ucx(mpirun, ranks):
    skip_without_ucx()
    result = mpirun(ranks, "-c", MESSAGES, env={**NOWHERE, "MPI4JAX_TRANSPORT": "ucx"})
    assert result.stdout.count("good") == ranks, result.stderr


def test_a_short_message_through_ucx_is_fatal(python):
    skip_without_ucx()
    code = textwrap.dedent("""
        import jax.numpy as jnp
        from mpi4py import MPI
        from mpi4jax import notoken as nt
        print(nt.sendrecv(jnp.zeros(3), jnp.zeros(5), 0, 0))
    """)
    result = python(code, {"MPI4JAX_TRANSPORT": "ucx"})
    fails(result, "r0 | ", "3 items from rank 0, expected 5")
