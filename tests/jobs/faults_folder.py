"""Faults: the folder in which ranks keep their states is removed while the job runs.

Cleaners of temporary folders and epilogs of batch systems do so. Nothing else changes: what cannot
end is ended, what is right goes on, and one line in a job says what has happened.
"""

from faults import HUNG_STATUS, PRELUDE, Fault

REMOVES = (
    PRELUDE
    + """\
import shutil
def remove(once=1):
    wait(nt.barrier()); mpi4jax.flush()
    for _ in range(once):
        if rank == size - 1: shutil.rmtree(f"mpi4jax-{os.geteuid()}")
        time.sleep(6 if once > 1 else 0)
    MPI.COMM_WORLD.Barrier()
"""
)
HERE = REMOVES.count("\n") + 1

# Two hosts, as far as files show: each pair of ranks has a folder.
HOSTS = """\
import os
number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) // 2
os.environ["MPI4JAX_DUMP_DIR"] = f"host{number}"
os.makedirs(f"host{number}", exist_ok=True)
"""

REMOVED = r"r\d \| mpi4jax: .*mpi4jax-\d+/.* was removed while the job runs .*it is made again"
TWICE = rf"(?s)({REMOVED}).*({REMOVED})"
GOES_ON = (REMOVED, "the end 0", "the end 1")

FAULTS = {
    "a folder that is removed before a deadlock": Fault(
        "remove(); wait(nt.recv(x, (rank - 1) % size))",
        (REMOVED, rf"deadlock: rank 0 is in recv from 2, .*fault.py:{HERE}, and waits for rank 2"),
        status=HUNG_STATUS,
        ranks=3,
        silent=(TWICE,),
        prelude=REMOVES,
    ),
    "a folder that is removed in a deadlock": Fault(
        "if rank == 1:\n"
        "  def later(): time.sleep(1); shutil.rmtree(f'mpi4jax-{os.geteuid()}')\n"
        "  threading.Thread(target=later, daemon=True).start()\n"
        "wait(nt.recv(x, 1 - rank))",
        (REMOVED, "deadlock: rank 0 is in recv from 1, "),
        status=HUNG_STATUS,
        silent=(TWICE,),
        prelude=REMOVES,
    ),
    "a folder that is removed twice": Fault(
        "remove(2); wait(nt.recv(x, (rank - 1) % size))",
        (TWICE, "deadlock: rank 0 is in recv from 1, "),
        status=HUNG_STATUS,
        prelude=REMOVES,
    ),
    "a folder that is removed, and a rank that finishes": Fault(
        "remove(); wait(nt.allreduce(x, MPI.SUM))\n"
        "if rank == 1: sys.exit(0)\nwait(nt.allreduce(x, MPI.SUM))",
        (REMOVED, "cannot end: rank 1 has finished"),
        status=HUNG_STATUS,
        ranks=3,
        prelude=REMOVES,
    ),
    "a folder that is removed before the first operation": Fault(
        "comm.Barrier()\nif rank == 1: shutil.rmtree(f'mpi4jax-{os.geteuid()}')\ncomm.Barrier()\n"
        "wait(nt.recv(x, (rank - 1) % size))",
        (REMOVED, "deadlock: rank 0 is in recv from 2, "),
        status=HUNG_STATUS,
        ranks=3,
        env={"LATE": "1"},
        prelude=REMOVES,
    ),
    "a folder that is removed, and data types that differ": Fault(
        "remove(); wait(nt.allreduce(jnp.ones(3, jnp.int32 if rank else jnp.float32), MPI.SUM))\n"
        "time.sleep(12)",
        (REMOVED, "the operations of the ranks do not match", "SUM, 3 x int32"),
        status=1,
        env={"LATE": "1"},  # default_comm() makes it one of the program's
        prelude=REMOVES,
    ),
    "a folder that is removed at the end, and data types that differ": Fault(
        "remove(); wait(nt.allreduce(jnp.ones(3, jnp.int32 if rank else jnp.float32), MPI.SUM))",
        ("the operations of the ranks do not match", "SUM, 3 x int32"),
        status=1,
        env={"LATE": "1"},  # default_comm() makes it one of the program's
        prelude=REMOVES,
    ),
    "a folder that is removed, and nothing else": Fault(
        "remove(); time.sleep(8); wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        GOES_ON,
        status=0,
        silent=(TWICE, "do not match", "cannot end"),
        prelude=REMOVES,
    ),
    "a folder that is removed, and a rank that is late": Fault(
        "remove()\nif rank == 1: time.sleep(24)\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        (*GOES_ON, rf"for rank 1, which is in Python at .*fault.py:{HERE + 1}.*the job goes on"),
        status=0,
        env={"MPI4JAX_REPORT_AFTER": "17"},
        silent=(TWICE,),
        prelude=REMOVES,
    ),
    "a folder that is removed on one host of two": Fault(
        "wait(nt.barrier()); mpi4jax.flush()\n"
        "if rank == 3: shutil.rmtree(f'host1/mpi4jax-{os.geteuid()}')\ncomm.Barrier()\n"
        "wait(nt.recv(x, (rank - 1) % size))",
        (REMOVED, r"deadlock: rank \d is in recv"),
        status=HUNG_STATUS,
        ranks=4,
        silent=(TWICE,),
        prelude=HOSTS + REMOVES,
        library="Open MPI",
    ),
}
