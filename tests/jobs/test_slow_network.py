"""What a slow network still carries proves nothing."""

import os

import pytest
import slow_network
from faults import HUNG_STATUS, PRELUDE
from mpi4py import MPI

pytestmark = pytest.mark.skipif(
    "Open MPI" not in MPI.Get_library_version(), reason="its messages take another way"
)
SIZE = 7_000_000  # 28 MB, for 14 s; two would be allowed for so many bytes

# A message of mpi4py's is under way while both ranks wait in operations.
BOTH_WAIT = f"""
if rank == 1:
    q = comm.Isend(np.ones({SIZE}, np.float32), 0, tag=3)
    wait(nt.recv(x, 0, tag=4, comm=comm)); q.Wait()
else:
    y = nt.recv(jnp.zeros({SIZE}, jnp.float32), 1, tag=3, comm=comm)
    nt.send(y[:3], 1, tag=4, comm=comm)
mpi4jax.flush(); print("the end", rank)
"""
# The same where the wait that is served first is about a few bytes behind it.
BEHIND_IT = f"""
y = np.ones({SIZE}, np.float32)
if rank == 1:
    q = comm.Isend(y, 0, tag=3); nt.send(x, 0, tag=5, comm=comm)
    wait(nt.recv(x, 0, tag=4, comm=comm)); q.Wait()
else:
    q = comm.Irecv(y, 1, tag=3); z = nt.recv(x, 1, tag=5, comm=comm)
    nt.send(z, 1, tag=4, comm=comm); mpi4jax.flush(); q.Wait()
mpi4jax.flush(); print("the end", rank)
"""
DEADLOCK = "wait(nt.recv(x, 1 - rank, tag=7, comm=comm))"


@pytest.mark.parametrize(
    ("program", "expected"),
    [(BOTH_WAIT, 0), (BEHIND_IT, 0), (DEADLOCK, HUNG_STATUS)],
    ids=["both wait", "behind it", "deadlock"],
)
def test_what_moves_is_no_deadlock(run_job, tmp_path, program, expected):
    (tmp_path / "program.py").write_text(PRELUDE + program)
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path)}
    env |= slow_network.environment(os.environ.get("LD_PRELOAD", ""))
    result = run_job(2, "program.py", cwd=tmp_path, env=env, time_limit=80, fork=False)
    output = result.stdout + result.stderr
    assert result.returncode == expected, output
    assert output.count("the end") == (0 if expected else 2), output
