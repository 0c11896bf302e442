"""A row a fault: what goes wrong, and what a user must be told about it, how soon.

The rows are in faults_*.py.

A program starts with PRELUDE, in the file `fault.py`; its lines are counted from FIRST_LINE.
"""

from dataclasses import dataclass, field

PRELUDE = """\
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
comm, rank, size = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
x = jnp.ones(3)
if "LATE" not in os.environ:
    with mpi4jax.time_limit(40): mpi4jax.default_comm()
def wait(y): return jax.block_until_ready(y)
late, _, seconds = os.environ.get("MPI4JAX_TEST_LATE", "").partition(":")
if late == str(rank): time.sleep(float(seconds))
"""
FIRST_LINE = PRELUDE.count("\n") + 1

# In seconds. Rows run without one, as users do: what ends then has been proved to hang.
TIMEOUT = 2
TIMED = {"MPI4JAX_TIMEOUT": str(TIMEOUT)}
CHECK = {"MPI4JAX_CHECK": "1"}

HUNG = rf"has not completed after MPI4JAX_TIMEOUT={TIMEOUT} s"
DIFFERENT = "the operations of the ranks do not match, before they run"
HUNG_STATUS = 97
ENDS_JOB = "an uncaught exception on this rank aborts the job"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and how it ends.

    Attributes:
        program: runs on every rank.
        says: regular expressions, all found in the output of the job.
        status: mpiexec's exit status; None stands for any error.
        ranks: how many of them.
        env: environment variables.
        silent: regular expressions, none found in the output.
        time_limit: seconds from the start of mpiexec, on a busy machine.
        library: what the MPI library's name has in it, if others behave differently.
        prelude: what the program starts with.
        fork: ranks are forked (run_job). Not where MPI aborts the job when a process ends: MPICH's
            mpiexec then merges the exit statuses of processes of its own.
    """

    program: str
    says: tuple[str, ...]
    status: int | None = None
    ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    time_limit: float = 55
    library: str = ""
    prelude: str = PRELUDE
    fork: bool = True
