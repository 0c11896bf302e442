"""Processes that a rank starts for work of its own, as data loaders do, are no ranks."""

PROGRAM = """
import multiprocessing
from mpi4py import MPI
import jax.numpy as jnp
import mpi4jax
from mpi4jax import notoken as nt

def work(i):
    return i * i, MPI.COMM_WORLD.size

if __name__ == "__main__":
    x = nt.allreduce(jnp.ones(()))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(work, range(4))
    print("worked", results == [(i * i, 1) for i in range(4)], nt.allreduce(x), flush=True)
"""


def test_worker_pools(run_job, tmp_path):
    """A worker imports the program, and with it MPI: it is alone there. `forkserver` starts its
    server by the same function."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = run_job(2, program, cwd=tmp_path, fork=False, env={"JAX_PLATFORMS": "cpu"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("worked True 4.0") == 2, job.stdout + job.stderr
    assert "mpi4jax:" not in job.stderr
