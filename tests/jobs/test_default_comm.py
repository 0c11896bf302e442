"""At their end, ranks wait for the making of the default communicator only if a rank makes it."""

import subprocess
import textwrap

import pytest
from mpi4py import MPI

# A forked rank does not find MPICH's launcher.
OPEN_MPI = "Open MPI" in MPI.Get_library_version()

HEAD = """
import os, time
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""

PROGRAMS = {
    "one never imports": """
        own = MPI.COMM_WORLD.Split(rank < 2)
        if rank < 2:
            import mpi4jax, numpy as np
            from mpi4jax import notoken
            y = notoken.allreduce(np.float32(rank), MPI.SUM, comm=own)
            assert float(y) == 1
    """,
    "one never imports and works on": """
        if rank < 2:
            import mpi4jax
        else:
            time.sleep(8)
    """,
    "nobody uses it": """
        import mpi4jax
        time.sleep(0.5 * rank)
    """,
    # Rank 0 has not waited for them, so they have what all ranks have.
    "two use it after another has ended": """
        from pathlib import Path
        ended = Path("ended")
        # MPI_Finalize calls it after what the package attaches.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: ended.touch())
        if rank == 0:
            MPI.COMM_SELF.Set_attr(key, 1)
        while rank == 2 and not ended.exists():
            time.sleep(0.1)
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank == 0:
            MPI.Finalize()
        while rank == 1 and not ended.exists():
            time.sleep(0.1)
        if rank > 0:
            y = notoken.sendrecv(np.float32(rank), np.float32(0), 3 - rank, 3 - rank)
            assert float(y) == 3 - rank
            assert mpi4jax.default_comm() == MPI.COMM_WORLD
    """,
    "two use it before another has ended": """
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank > 0:
            y = notoken.sendrecv(np.float32(rank), np.float32(0), 3 - rank, 3 - rank)
            assert float(y) == 3 - rank
            assert mpi4jax.default_comm() != MPI.COMM_WORLD
            MPI.COMM_WORLD.send(None, 0, tag=7)
        else:
            [MPI.COMM_WORLD.recv(source=r, tag=7) for r in (1, 2)]
    """,
    "two use it while another is in a barrier": """
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank < 2:
            y = notoken.sendrecv(np.float32(rank), np.float32(0), 1 - rank, 1 - rank)
            assert float(y) == 1 - rank
        MPI.COMM_WORLD.Barrier()
    """,
    # It takes no messages of what makes it.
    "two use it while another receives from any source with any tag": """
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank == 0:
            assert MPI.COMM_WORLD.recv() == "hello"
        else:
            time.sleep(3 if rank == 1 else 0)
            y = notoken.sendrecv(np.float32(rank), np.float32(0), 3 - rank, 3 - rank)
            assert float(y) == 3 - rank
            if rank == 1:
                MPI.COMM_WORLD.send("hello", 0)
        assert float(notoken.allreduce(np.float32(rank), MPI.SUM)) == 3
    """,
    # Communicators of the program are made in another order than the default one.
    "one imports late, after communicators were made": """
        if rank == 2:
            a, b = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Split(0, rank)
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank < 2:
            a, b = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Split(0, rank)
        for c in (a, None, b):
            assert float(notoken.allreduce(np.float32(rank), MPI.SUM, comm=c)) == 3
    """,
    # As a cleaner of /dev/shm, or systemd at the end of a session, does.
    "one imports after the board was removed": """
        if rank == 0:
            import mpi4jax
            from mpi4jax._job import job
            board = mpi4jax._native.board_place() / job.board(size)
            board.unlink()
        MPI.COMM_WORLD.Barrier()
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank == 1:
            assert mpi4jax.default_comm() != MPI.COMM_WORLD
        assert float(notoken.allreduce(np.float32(rank), MPI.SUM)) == 3
        assert rank > 0 or not board.exists()
    """,
    "one never imports, and all make communicators": """
        if rank < 2:
            import mpi4jax, numpy as np
            from mpi4jax import notoken
        a, b = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Split(rank < 2)
        assert a.allreduce(rank) == 3
        if rank < 2:
            assert float(notoken.allreduce(np.float32(rank), MPI.SUM, comm=b)) == 1
    """,
    # What is registered before the package is called after what it does at its end.
    "an exit handler serves another rank": """
        import atexit
        def serve():
            time.sleep(7)
            notoken.send(np.float32(1), 0)
            mpi4jax.flush()
        if rank == 1:
            atexit.register(serve)
        import mpi4jax, numpy as np
        from mpi4jax import notoken
        if rank == 0:
            notoken.recv(np.float32(0), 1).block_until_ready()
    """,
    # A rank that has ended serves a message that MPI has not carried yet.
    "a message is under way at the end": """
        import mpi4jax, numpy as np
        large = np.frombuffer(MPI.Alloc_mem(1 << 25))  # Python does not free it at its end
        if rank == 0:
            MPI.COMM_WORLD.Isend(large, 1)
        elif rank == 1:
            time.sleep(2)
            MPI.COMM_WORLD.Recv(large, 0)
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_end(run_job, tmp_path, name):
    file = tmp_path / "program.py"
    file.write_text(HEAD + textwrap.dedent(PROGRAMS[name]) + "\nprint('the end', rank)\n")
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path)}
    job = run_job(3, file, cwd=tmp_path, time_limit=60, env=env, fork=OPEN_MPI)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.split("\n"))[1:] == [f"the end {rank}" for rank in range(3)]
    assert not list(tmp_path.glob("mpi4jax-*/*")), "files are left"


OTHER_BUILD = """
import numpy as np
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
if rank == 0:
    import mpi4jax
    from mpi4jax._job import job
    with open(mpi4jax._native.board_place() / job.board(size), "r+b") as board:
        board.write(b"another!")  # the number of the layout
MPI.COMM_WORLD.Barrier()
from mpi4jax import notoken
print("sum", float(notoken.allreduce(np.float32(rank), MPI.SUM)))
"""


def test_ranks_of_two_builds_say_so_and_go_on(run_job, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(OTHER_BUILD)
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path)}
    job = run_job(2, file, cwd=tmp_path, time_limit=60, env=env, fork=OPEN_MPI)
    assert job.stdout.split() == ["sum", "1.0"] * 2, job.stdout + job.stderr
    assert "r1 | mpi4jax: no board in " in job.stderr, job.stderr
    assert ": another build of mpi4jax has made it; the job runs, but" in job.stderr
    assert "r0 | mpi4jax: a rank of this job cannot use the board of this rank" in job.stderr


def test_finalize_without_an_operation(mpirun):
    """Each rank says that it has finished before it waits for the others to do so."""
    program = "import mpi4jax; from mpi4py import MPI; MPI.Finalize(); print('done')"
    result = mpirun(2, "-c", program, time_limit=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done", "done"]


IN_A_CONTAINER = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
if rank == 1 and "INSIDE" not in os.environ:
    os.environ["INSIDE"] = "1"
    os.execvp("unshare", ["unshare", "-m", sys.executable, __file__])
import numpy as np
import mpi4jax
from mpi4jax import notoken
assert float(notoken.allreduce(np.float32(rank))) == 1
print("right")
"""


def test_one_rank_is_in_a_container_that_shares_memory(run_job, tmp_path):
    """All ranks must make the default communicator in the same way."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces may be made here")
    file = tmp_path / "program.py"
    file.write_text(IN_A_CONTAINER)
    job = run_job(2, file, cwd=tmp_path, time_limit=60, env={"JAX_PLATFORMS": "cpu"}, fork=False)
    assert job.stdout.count("right") == 2, job.stdout + job.stderr
