"""Faults: ranks that end, and wrong arguments."""

from faults import ENDS_JOB, FIRST_LINE, HUNG, HUNG_STATUS, PRELUDE, Fault

FAULTS = {
    # ---- Ranks that end
    "a rank that raises": Fault(
        "if rank == 1: raise ValueError('broken')\nwait(nt.allreduce(x, MPI.SUM))",
        (f"r1 .*{ENDS_JOB}", f'fault.py", line {FIRST_LINE}', "ValueError: broken"),
        status=1,
    ),
    # ---- The line that a report adds
    **{
        f"a token taken for a part of the result: {wrong}": Fault(
            f"comm.Barrier(); {wrong}",
            (
                words,
                r"functions of a plain `import mpi4jax` return \(result, token\); with `im",
            ),
            status=1,
        )
        for wrong, words in [
            ("a, b, c = mpi4jax.allgather(x)", "not enough values to unpack"),
            ("mpi4jax.allreduce(x) + (0 if rank < 0 else 1)", "can only concatenate tuple"),
            ("jax.grad(lambda x: mpi4jax.allreduce(x.sum()))(x)", "Output was"),
            ("jnp.sin(mpi4jax.allreduce(x))", "class 'tuple'"),
        ]
    },
    "a tuple of a program without tokens": Fault(
        "del mpi4jax; (1, 2) + nt.allreduce(x).sum()",
        ("'tuple'",),
        status=1,
        silent=("plain `import mpi4jax`",),
    ),
    "unequal blocks without cells": Fault(
        "cart = comm.Create_cart([size], [False])\n"
        "wait(nt.gather_blocks(jnp.ones(4 - rank), cart))",
        (r"in gatherv #1 .*, of .*unequal blocks need 'cells'",),
        status=1,
    ),
    "a thread that raises": Fault(
        "def bad(): raise ValueError('broken')\n"
        "if rank == 1: threading.Thread(target=bad).start(); time.sleep(60)\n"
        "wait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*in a thread of this rank .Thread-1 .bad.. aborts the job", "ValueError: broken"),
        status=1,
    ),
    "a forked child that raises, which is no rank": Fault(
        "child = os.fork()\n"
        "if child == 0: sys.excepthook(ValueError, ValueError('broken'), None); os._exit(3)\n"
        "os.waitpid(child, 0)\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        ("ValueError: broken", "the end 0", "the end 1"),
        status=0,
        silent=("mpi4jax:",),
    ),
    "an exception that is caught": Fault(
        "try:\n    if rank == 1: raise ValueError('broken')\nexcept ValueError: pass\n"
        "try:\n    if rank == 1: sys.exit(3)\nexcept SystemExit: pass\n"
        "t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        silent=("mpi4jax:",),
    ),
    # MPI_Finalize calls it after what the package has attached.
    "what is attached to COMM_SELF takes long": Fault(
        "if rank == 0: wait(nt.recv(x, 1, tag=5, comm=comm))\nMPI.Finalize()",
        ("recv from 1, tag 5 .* can never complete: rank 1 has finished",),
        status=HUNG_STATUS,
        prelude=(
            "import time\nfrom mpi4py import MPI\n"
            "key = MPI.Comm.Create_keyval(delete_fn=lambda *_: time.sleep(3))\n"
            "MPI.COMM_SELF.Set_attr(key, 1)\n"
        )
        + PRELUDE,
    ),
    "a rank that raises, where that does not end the job": Fault(
        "if rank == 1: raise ValueError('broken')\nwait(nt.allreduce(x, MPI.SUM))",
        ("ValueError: broken", "allreduce #1 .* can never complete: rank 1 has finished"),
        status=HUNG_STATUS,
        env={"MPI4JAX_ABORT": "0"},
        silent=(ENDS_JOB,),
    ),
    "exit with an error": Fault(
        "if rank == 1: sys.exit(3)\nwait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*exit with status 3 on this rank aborts the job",),
        status=3,
    ),
    "a rank that finishes while the others wait": Fault(
        "wait(nt.allreduce(x, MPI.SUM))\nif rank < 2: wait(nt.allreduce(x, MPI.SUM))",
        (
            "allreduce #2 .* can never complete: rank 2 has finished",
            "ranks 0-1 are in allreduce #2",
            "rank 2 is finished",
        ),
        status=HUNG_STATUS,
        ranks=3,
    ),
    **{
        f"{words} with an error": Fault(
            f"if rank == 1: {call}\nwait(nt.allreduce(x, MPI.SUM))",
            ("r1 .*exit with status 3 on this rank aborts the job",),
            status=3,
            library="Open MPI",
            silent=("has finished",),
        )
        for words, call in [("SystemExit", "raise SystemExit(3)"), ("exit()", "exit(3)")]
    },
    "a barrier in a finally": Fault(
        "try:\n    if rank == 1: raise ValueError('the cause')\n"
        "    wait(nt.allreduce(jnp.ones(100000), MPI.SUM))\n"
        "finally: wait(nt.barrier()); mpi4jax.flush()",
        ("rank 1 is handling ValueError: the cause", "allreduce #1", "barrier #1"),
    ),
    "a rank that is killed": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait(nt.allreduce(x, MPI.SUM))",
        ("[Kk]illed|signal 9|KILLED",),
        silent=("has finished", HUNG, ENDS_JOB),  # it is MPI that aborts the job
    ),
    # Nobody knows for how long it is stopped: the time limit counts from its end.
    "a rank that is stopped for a while": Fault(
        "f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM)).lower(x).compile()\n"
        "pids = comm.allgather(os.getpid())\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "else: threading.Timer(14, os.kill, (pids[1], signal.SIGCONT)).start()\n"
        "wait(f(x)); print('the end')",
        ("the end",),
        status=0,
        env={"MPI4JAX_TIMEOUT": "8"},
        silent=("has not completed",),
    ),
    # ---- Arguments
    "a freed communicator": Fault(
        "c = comm.Dup()\nf = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM, comm=c))\n"
        "wait(f(x)); mpi4jax.flush(); g = f.lower(x).compile(); c.Free()\n"
        "if rank == 1: wait(g(x))\nwait(nt.allreduce(x, MPI.SUM))",
        ("communicator .* has been freed", "allreduce", f"r1 .*{ENDS_JOB}"),
        status=1,
    ),
}
