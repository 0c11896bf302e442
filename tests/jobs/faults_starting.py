"""Faults: what goes wrong while ranks import the package, or before."""

from typing import Any

from faults import ENDS_JOB, Fault

BEFORE = """\
import os, sys, time
from mpi4py import MPI
import jax, jax.numpy as jnp
comm, rank, size = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
late, _, seconds = os.environ.get("MPI4JAX_TEST_LATE", "").partition(":")
if late == str(rank): time.sleep(float(seconds))
"""
IMPORT = """
import mpi4jax
from mpi4jax import notoken as nt
nt.allreduce(jnp.ones(3), MPI.SUM).block_until_ready()
mpi4jax.flush(); print('the end', rank)
"""


def setting(name: str, value: str, rank: int = 1) -> str:
    return f"if rank == {rank}: os.environ['{name}'] = '{value}'"


def fails(first: str, *says: str) -> Fault:
    """A rank that fails in the import aborts the job."""
    says = (f"r1 .*{ENDS_JOB}", *says)
    return Fault(first + IMPORT, says, ranks=3, silent=("the end",), prelude=BEFORE, fork=False)


def names(program: str, words: str, *says: str, **more: Any) -> Fault:
    """A report names settings that differ between ranks."""
    says = (*says, "settings differ between ranks: " + words)
    return Fault(program, says, prelude=BEFORE, fork=False, **more)


def differ(first: str, words: str) -> Fault:
    """Settings differ between ranks when they make the default communicator."""
    return names(first + IMPORT, words, ranks=3, silent=("the end",))


FAULTS = {
    "an import that fails on a rank, for a wrong setting": fails(
        setting("MPI4JAX_TIMEOUT", "ten"), "MPI4JAX_TIMEOUT must be a number of seconds"
    ),
    "an import that fails on a rank, for a transport": fails(
        setting("MPI4JAX_TRANSPORT", "pigeon"), "unknown transport"
    ),
    "an import that fails on a rank, for a file that it lacks": fails(
        "if rank == 1: sys.modules['mpi4jax.layouts'] = None", "mpi4jax.layouts"
    ),
    "an import that fails on a rank, for its native module": fails(
        "import ctypes\nif rank == 1: ctypes.CDLL = None", "NoneType.*not callable"
    ),
    "an import that fails on a rank, for a thread level": fails(
        "if rank == 1: MPI.Query_thread = lambda: MPI.THREAD_FUNNELED",
        r"Init_thread\(MPI.THREAD_MULTIPLE\)",
    ),
    "an import that fails and is caught": Fault(
        setting("MPI4JAX_TIMEOUT", "ten")
        + "\ntry: import mpi4jax\nexcept ValueError: pass\nprint('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        silent=("mpi4jax:",),
        prelude=BEFORE,
        fork=False,
    ),
    **{
        f"{name}={value} that differs between ranks": differ(
            setting(name, value, rank), rf'{name} is .*"{value}" on rank {rank}'
        )
        for name, value, rank in [
            ("MPI4JAX_CHECK", "1", 0),
            ("MPI4JAX_WAIT", "sleep", 1),
            ("MPI4JAX_TRANSPORT", "ucx", 1),
            ("MPI4JAX_TRANSPORT", "auto", 0),
            ("MPI4JAX_TRANSPORT", "nccl", 2),
        ]
    },
    **{
        f"{name}={value} that differs between ranks of a communicator of the program's": names(
            setting(name, value, rank)
            + "\nimport mpi4jax; from mpi4jax import notoken as nt\n"
            + "c = comm.Split(rank > 0, 0)\n"
            + "jax.block_until_ready(nt.allreduce(jnp.ones(3), MPI.SUM, comm=c))",
            f"{name} is "
            + (
                f'"{value}" on rank 1, unset on rank 2'
                if rank == 1
                else f'unset on rank 1, "{value}" on rank 2'
            ),
            ranks=3,
        )
        for name, value, rank in [("MPI4JAX_CHECK", "1", 1), ("MPI4JAX_CHECK", "1", 2)]
    },
    "a setting that differs between groups of ranks": Fault(
        setting("MPI4JAX_CHECK", "1", 0)
        + "\nimport mpi4jax; from mpi4jax import notoken as nt\n"
        + "c = comm.Split(rank > 0, 0)\n"
        + "jax.block_until_ready(nt.allreduce(jnp.ones(3), MPI.SUM, comm=c))\n"
        + "nt.send(jnp.ones(3), 1, comm=comm) if rank == 0 else None\n"
        + "jax.block_until_ready(nt.recv(jnp.ones(3), 0, comm=comm)) if rank == 1 else None\n"
        + "print('the end', rank)",
        ("the end 0", "the end 1", "the end 2"),
        status=0,
        ranks=3,
        silent=("mpi4jax:",),
        prelude=BEFORE,
        fork=False,
    ),
    "settings that differ, where one rank alone asks for UCX and none for the communicator": names(
        setting("MPI4JAX_TRANSPORT", "ucx") + "\nimport mpi4jax\nprint('the end', rank)",
        'MPI4JAX_TRANSPORT is unset on rank 0, "ucx" on rank 1',
    ),
    # A rank that has finished takes no part in the start of UCX.
    "settings that differ, where one rank asks for UCX after the other has finished": names(
        # MPI_Finalize calls it after what the package attaches.
        "key = MPI.Comm.Create_keyval(delete_fn=lambda *_: open('finished', 'w').close())\n"
        "if rank == 0: MPI.COMM_SELF.Set_attr(key, 1)\n"
        "while rank == 1 and not os.path.exists('finished'): time.sleep(0.1)\n"
        + setting("MPI4JAX_TRANSPORT", "ucx")
        + "\nimport mpi4jax\nif rank == 0: MPI.Finalize()",
        'MPI4JAX_TRANSPORT is unset on rank 0, "ucx" on rank 1',
    ),
    "settings that differ, where a rank raises": names(
        setting("MPI4JAX_CHECK", "1")
        + "\nimport mpi4jax\ncomm.Barrier()\nif rank == 0: raise ValueError('MPI_ERR_TRUNCATE')\n"
        + "comm.Barrier()",
        'MPI4JAX_CHECK is unset on rank 0, "1" on rank 1',
        "r0 .*an uncaught exception",
        status=1,
    ),
    "settings that differ, where one rank alone makes the default communicator": names(
        setting("MPI4JAX_TRANSPORT", "auto")
        + "\nimport mpi4jax; from mpi4jax import notoken as nt\n"
        + "nt.send(jnp.ones(3), 0, comm=comm) if rank == 1 else None\n"
        + "jax.block_until_ready(nt.recv(jnp.ones(3), 1, comm=comm)) if rank == 0 else None",
        'MPI4JAX_TRANSPORT is unset on rank 0, "auto" on rank 1',
        status=1,
    ),
    "settings that differ, and mean the same or concern one rank": Fault(
        "os.environ['MPI4JAX_CHECK'] = ('', 'samples', 'Samples', '0')[rank]\n"
        "os.environ['MPI4JAX_TRANSPORT'] = ('', 'mpi', 'staged', 'mpi')[rank]\n"
        "if rank == 0: os.environ['MPI4JAX_USE_CUDA_MPI'] = '0'\n"
        "os.environ['MPI4JAX_REPORT_AFTER'] = str(20 + rank)" + IMPORT,
        ("the end 0", "the end 1", "the end 2", "the end 3"),
        status=0,
        ranks=4,
        silent=("mpi4jax:",),
        prelude=BEFORE,
        fork=False,
    ),
    # ---- Launchers that do not fit
    "ranks that the launcher has started alone": Fault(
        "", (), status=0, ranks=1, prelude=BEFORE + IMPORT, fork=False, silent=("mpi4jax:",)
    ),
    **{
        f"more ranks in {name} than MPI has": Fault(
            f"os.environ.update({{'{name}': '3', '{own}': '0'}})" + IMPORT,
            (rf"r0 .* has started 3 ranks \({name}\), but MPI has 1 rank", "the end 0"),
            status=0,
            ranks=1,
            prelude=BEFORE,
            fork=False,
        )
        for name, own in [
            ("SLURM_NTASKS", "SLURM_PROCID"),
            ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
            ("PMIX_SIZE", "PMIX_RANK"),
        ]
    },
    "a process of a batch script of a job of several tasks": Fault(
        "os.environ.update(SLURM_JOB_ID='7', SLURM_NTASKS='3')" + IMPORT,
        ("the end 0",),
        status=0,
        ranks=1,
        silent=("mpi4jax:",),
        prelude=BEFORE,
        fork=False,
    ),
    # ---- Communicators that are freed when Python ends
    **{
        f"a communicator that is freed {words}": Fault(
            "class C:\n"
            "    def __init__(self):\n"
            f"        self.c = comm.{made}\n"
            f"        {use}\n"
            "    def __del__(self): self.c.Free()\n"
            f"{keep}\nprint('the end', rank)",
            ("the end 0", "the end 1"),
            status=0,
            fork=False,
        )
        for words, made, use, keep in [
            ("when the module's names go", "Dup()", "nt.barrier(comm=self.c)", "keep = C()"),
            (
                "when builtins go",
                "Dup()",
                "nt.barrier(comm=self.c)",
                "import builtins; builtins.keep = C()",
            ),
            (
                "in a cycle",
                "Create_cart([size], periods=[True])",
                "nt.halo_exchange(jnp.ones(5), self.c)",
                "keep = C(); keep.me = keep",
            ),
        ]
    },
}
