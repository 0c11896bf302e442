"""One row a fault: what goes wrong, and what a user must be told about it, how soon.

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
if "LATE" not in os.environ: mpi4jax.default_comm()
def wait(y): return jax.block_until_ready(y)
"""
FIRST_LINE = PRELUDE.count("\n") + 1

# The time-out that rows run under, in seconds.
TIMEOUT = 2
CHECK = {"MPI4JAX_CHECK": "1"}
FOREVER = {"MPI4JAX_TIMEOUT": "300"}

HUNG = rf"has not ended after MPI4JAX_TIMEOUT={TIMEOUT} s"
DIFFERENT = "the ranks are about to do different things"
ENDS_JOB = "an uncaught exception on this rank ends the job"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and how it ends.

    Attributes:
        program: runs on every rank.
        says: regular expressions, all found in the output of the job.
        status: mpiexec's exit status; None stands for any error.
        ranks: how many of them.
        env: environment variables, beside the time-out.
        silent: regular expressions, none found in the output.
        time_limit: seconds from the start of mpiexec, on a busy machine.
        often: whether it is run each time, not only by `make test-all`.
    """

    program: str
    says: tuple[str, ...]
    status: int | None = None
    ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    time_limit: float = 55
    often: bool = False


FAULTS = {
    # ---- Ranks that do different things, under MPI4JAX_CHECK
    "wrong op": Fault(
        "wait(nt.allreduce(x, MPI.SUM) if rank else nt.scan(x, MPI.SUM))",
        (
            DIFFERENT,
            r"expected rank 0: scan #1 \(SUM, 3 x float32\)",
            r"actual   rank 1: allreduce #1",
        ),
        env=CHECK,
        often=True,
    ),
    "wrong reduction": Fault(
        "wait(nt.allreduce(x, MPI.SUM if rank else MPI.MAX))",
        (DIFFERENT, r"rank 0: allreduce #1 \(MAX", r"rank 1: allreduce #1 \(SUM"),
        env=CHECK,
    ),
    "wrong dtype": Fault(
        "wait(nt.allreduce(x if rank else x.astype(int), MPI.SUM))",
        (DIFFERENT, "rank 0: .* 3 x int32", "rank 1: .* 3 x float32"),
        env=CHECK,
    ),
    "wrong count": Fault(
        "wait(nt.allreduce(jnp.ones(3 + rank // 2), MPI.SUM))",
        (
            DIFFERENT,
            "expected rank 0: .* 3 x",
            "expected rank 1: .* 3 x",
            "actual   rank 2: .* 4 x",
        ),
        ranks=3,
        env=CHECK,
    ),
    "wrong root": Fault(
        "wait(nt.bcast(x, root=rank))",
        (DIFFERENT, r"rank 0: bcast #1 \(root 0", r"rank 1: bcast #1 \(root 1"),
        env=CHECK,
    ),
    "wrong order": Fault(
        "f = lambda: nt.allreduce(x, MPI.SUM)\n"
        "g = lambda: nt.bcast(x, 0)\n"
        "wait([f(), g()] if rank else [g(), f()])",
        (DIFFERENT, "rank 0: bcast #1", "rank 1: allreduce #1"),
        env=CHECK,
    ),
    "wrong order in a compiled function": Fault(
        "f = jax.jit(lambda x: nt.bcast(nt.allreduce(x, MPI.SUM), 0))\n"
        "g = jax.jit(lambda x: nt.allreduce(nt.bcast(x, 0), MPI.SUM))\n"
        "wait(f(x) if rank else g(x))",
        (DIFFERENT, rf"rank 0: bcast #1 .*, fault.py:{FIRST_LINE + 1}", "rank 1: allreduce #1"),
        env=CHECK,
        often=True,
    ),
    "wrong count in a loop": Fault(
        "n = 3 + rank\n"
        "step = lambda i, x: nt.allreduce(x, MPI.SUM)\n"
        "f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, n, step, x))\n"
        "wait(f(x)); wait(nt.bcast(x, 0))",
        (DIFFERENT, "rank 0: bcast #4", "rank 1: allreduce #4"),
        env=CHECK,
        often=True,
    ),
    "different schedules": Fault(
        "@mpi4jax.jit(check=True)\n"
        "def step(x):\n"
        "    x = nt.allreduce(x, MPI.SUM)\n"
        "    if rank == 1: x = nt.bcast(x, 0)\n"
        "    return nt.allreduce(x, MPI.MAX)\n"
        "wait(step(x))",
        (
            "ScheduleError: .*the ranks' versions of step differ on mpi4jax.default, at step 2",
            rf"rank 0 of .*: allreduce \(MAX, 3 x float32\), fault.py:{FIRST_LINE + 4}",
            rf"rank 1 of .*: bcast \(root 0, 3 x float32\), fault.py:{FIRST_LINE + 3}",
            ENDS_JOB,
        ),
        status=1,
        env=FOREVER,
        often=True,
    ),
    "equal schedules": Fault(
        "@mpi4jax.jit(check=True)\n"
        "def step(x):\n"
        "    nt.gather(x, 1)\n"
        "    x = nt.scatter(jnp.ones((size, 3)) if rank == 0 else x, 0)\n"
        "    return jax.lax.fori_loop(0, 3, lambda i, x: nt.allreduce(x, MPI.SUM), x)\n"
        "wait(step(x)); wait(mpi4jax.jit(jax.grad(lambda x: step(x).sum()), check=True)(x))",
        (),
        status=0,
        silent=("mpi4jax", "Error"),
        often=True,
    ),
    "wrong source line": Fault(
        "f = jax.jit(lambda x: nt.allreduce(x, MPI.SUM))\n"
        "g = jax.jit(lambda x: nt.allreduce(x, MPI.SUM))\n"
        "wait(f(x) if rank else g(x))",
        (DIFFERENT, f"rank 0: .*fault.py:{FIRST_LINE + 1}", f"rank 1: .*fault.py:{FIRST_LINE}"),
        env={"MPI4JAX_CHECK": "2"},
    ),
    "a line per role is no fault": Fault(
        "if rank:\n    y = jax.jit(lambda x: nt.bcast(x, 0))(x)\n"
        "else:\n    y = jax.jit(lambda x: nt.bcast(x, 0))(x)\n"
        "wait(y); y = wait(nt.sendrecv(x, x, 1 - rank, 1 - rank))\n"
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(x))",
        (),
        status=0,
        env=CHECK,
        silent=("mpi4jax:",),
    ),
    "wrong dtype of a message": Fault(
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(x.astype(int), 0))",
        (
            "a message is not what is received",
            r"expected rank 1: recv from 0, any tag \(3 x int32\)",
            r"actual   rank 0: send to 1, tag 0 \(3 x float32\)",
        ),
        env=CHECK,
        often=True,
    ),
    "wrong size of a message": Fault(
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(jnp.ones(4)))",
        (
            "a message is not what is received",
            r"expected rank 1: recv from any rank.*\(4 x",
            r"actual   rank 0: send to 1.*\(3 x",
        ),
        env=CHECK,
    ),
    # ---- The same without
    "a message too short": Fault(
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(jnp.ones(5), 0))",
        (
            "r1 .*MPI_Recv received 3 items from rank 0, expected 5",
            rf"in recv from 0, any tag \(5 x float32\) .*, fault.py:{FIRST_LINE}",
        ),
        often=True,
    ),
    "a message too long": Fault(
        "f = mpi4jax.jit(lambda x: nt.recv(x, 0))\n"
        "nt.send(x, 1) if rank == 0 else wait(f(jnp.ones(2)))",
        (
            "r1 .*MPI_Recv returned error code .*: .*[Tt]runcat",
            rf"in recv from 0, any tag \(2 x float32\) on mpi4jax.default, fault.py:{FIRST_LINE}",
            "MPI4JAX_CHECK=1 compares",
        ),
        often=True,
    ),
    "different communicators": Fault(
        "other = comm.Dup(); other.Set_name('other')\n"
        "wait(nt.allreduce(x, MPI.SUM, comm=comm if rank else other))",
        (
            HUNG,
            "rank 0 is in allreduce #1 .* on other",
            "rank 1 is in allreduce #1 .* on MPI_COMM_WORLD",
        ),
        often=True,
    ),
    # ---- Ranks that wait
    "receives that wait for each other": Fault(
        "wait(nt.recv(x, 1 - rank, tag=7))",
        (
            HUNG,
            "rank 0 is in recv from 1, tag 7",
            "rank 1 is in recv from 0, tag 7",
            r"rank 0 is in recv from 1, tag 7 .*, fault.py:\d+",
            r"mpi4jax.report /",
        ),
        status=124,
        often=True,
    ),
    "a ring of receives": Fault(
        "f = mpi4jax.jit(lambda x: nt.recv(x, (rank + 1) % size))\nwait(f(x))",
        (
            HUNG,
            *(f"rank {r} is in recv from {(r + 1) % 3}.*fault.py:{FIRST_LINE}" for r in range(3)),
        ),
        status=124,
        ranks=3,
    ),
    "one rank elsewhere": Fault(
        "f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM))\n"
        "g = mpi4jax.jit(lambda x: nt.recv(x, 1, tag=0))\n"
        "wait(f(x)); wait(g(x) if rank == 3 else f(x))",
        (
            HUNG,
            f"ranks 0-2 are in allreduce #2 .*fault.py:{FIRST_LINE}",
            f"rank 3 is in recv from 1, tag 0 .*fault.py:{FIRST_LINE + 1}",
        ),
        status=124,
        ranks=4,
        often=True,
    ),
    "a send without a receiver at exit": Fault(
        "if rank == 0: nt.send(jnp.ones(1 << 20), 1)",
        (
            r"send to 1, tag 0 \(1048576 x float32\).* cannot end: rank 1 has finished",
            "rank 1 is finished",
        ),
        status=124,
        env=FOREVER,
        often=True,
    ),
    "a small send without a receiver at exit": Fault(
        "if rank == 0: nt.send(x, 1, tag=4)\nwait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*warning: a message from 0, tag 4, .* was never received",),
        status=0,
    ),
    "a time-out in jit": Fault(
        "f = jax.jit(lambda x: nt.allreduce(x, MPI.SUM))\n"
        "if rank == 0: wait(f(x))\n"
        "else: time.sleep(60)",
        (
            HUNG,
            f"rank 0 is in allreduce #1 .*fault.py:{FIRST_LINE}",
            rf"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE + 2}",
        ),
        status=124,
    ),
    "a time-out in a scan": Fault(
        "step = lambda c, i: (nt.allreduce(c, MPI.SUM), i)\n"
        "f = mpi4jax.jit(lambda x, i: jax.lax.scan(step, x, i)[0])\n"
        "wait(f(x, jnp.arange(3 + 2 * (rank == 0))))\ntime.sleep(60)",
        (
            HUNG,
            f"rank 0 is in allreduce #4 .*fault.py:{FIRST_LINE}",
            "rank 1 .*last one was allreduce #3",
        ),
        status=124,
        often=True,
    ),
    "a time-out in the backward pass": Fault(
        "def f(x):\n"
        "    return nt.recv(x, 1).sum() if rank == 0 else nt.send(x, 0) or x.sum()\n"
        "wait(jax.grad(f)(x) if rank == 1 else f(x)); wait(nt.allreduce(x, MPI.SUM))",
        (HUNG, "rank 0 is in allreduce #1", "rank 1 is in recv from 0, tag 0"),
        status=124,
    ),
    "a rank that does not come to make the default communicator": Fault(
        "wait(nt.allreduce(x, MPI.SUM)) if rank == 0 else time.sleep(60)",
        (
            rf"the making of the default communicator \(which takes all ranks\) {HUNG}",
            f"rank 0 is in the making of .*Python is at .*fault.py:{FIRST_LINE}",
            f"rank 1 is in no operation.*fault.py:{FIRST_LINE}",
        ),
        status=124,
        env={"LATE": "1"},
        often=True,
    ),
    "a time-out under mpi4jax.jit": Fault(
        "f = mpi4jax.jit(lambda x: nt.bcast(x, 1))\nif rank == 0: wait(f(x))\nelse: time.sleep(60)",
        (HUNG, rf"rank 0 is in bcast #1 \(root 1, 3 x float32\).*fault.py:{FIRST_LINE}"),
        status=124,
    ),
    "a rank that spins": Fault(
        "if rank == 1:\n    while True: pass\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, rf"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE + 1}"),
        status=124,
        often=True,
    ),
    "a rank that spins in a compiled function": Fault(
        "f = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] > 0, lambda c: c + 1, x))\n"
        "if rank == 1: wait(f(x))\n"
        "wait(nt.allreduce(x, MPI.SUM))",
        (HUNG, rf"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE + 1}"),
        status=124,
    ),
    "a rank that is slow, where a time-out does not end the job": Fault(
        "if rank == 1: time.sleep(4)\nwait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        (HUNG, "rank 1 is in no operation", "the job goes on", "the end 0", "the end 1"),
        status=0,
        env={"MPI4JAX_ON_TIMEOUT": "continue"},
        often=True,
    ),
    "a rank that is slow, without a time-out": Fault(
        "if rank == 1: time.sleep(4)\nwait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        env={"MPI4JAX_TIMEOUT": "0"},
        silent=("mpi4jax:",),
    ),
    "a dump directory that cannot be written to": Fault(
        "if rank == 1: time.sleep(60)\nwait(nt.allreduce(x, MPI.SUM))",
        (
            HUNG,
            "rank 0 is in allreduce #1",
            f"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE}",
            "no dumps are left: writing to /proc/none/.* failed",
        ),
        status=124,
        env={"MPI4JAX_DUMP_DIR": "/proc/none"},
    ),
    "neither a dump directory nor a channel through MPI": Fault(
        "if rank == 1: time.sleep(60)\nwait(nt.allreduce(x, MPI.SUM))",
        (
            HUNG,
            "rank 0 is in allreduce #1",
            "the other ranks cannot be asked: writing to /proc/none/.* failed",
        ),
        status=124,
        env={"MPI4JAX_DUMP_DIR": "/proc/none", "MPI4JAX_CHANNEL": "files"},
        often=True,
    ),
    "an MPI that one thread may call": Fault(
        "if rank == 1: time.sleep(60)\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, "rank 0 is in allreduce #1", "rank 1 is in no operation", "mpi4jax.report /"),
        status=124,
        env={"MPI4PY_RC_THREAD_LEVEL": "serialized"},
    ),
    "two threads that both need the default communicator first": Fault(
        "work = lambda: mpi4jax.default_comm()\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        env={"LATE": "1"},
        silent=("mpi4jax:",),
    ),
    # ---- Ranks that end
    "a rank that raises": Fault(
        "if rank == 1: raise ValueError('broken')\nwait(nt.allreduce(x, MPI.SUM))",
        (f"r1 .*{ENDS_JOB}", f'fault.py", line {FIRST_LINE}', "ValueError: broken"),
        status=1,
        env=FOREVER,
        often=True,
    ),
    "a callback that raises": Fault(
        "def bad(x): raise ValueError('broken')\n"
        "f = jax.jit(lambda x: nt.allreduce(jax.pure_callback(bad, x, x), MPI.SUM))\n"
        "wait(f(x) if rank == 1 else nt.allreduce(x, MPI.SUM))",
        (f"r1 .*{ENDS_JOB}", "ValueError: broken"),
        status=1,
        env=FOREVER,
    ),
    "a thread that raises": Fault(
        "def bad(): raise ValueError('broken')\n"
        "if rank == 1: threading.Thread(target=bad).start(); time.sleep(60)\n"
        "wait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*in a thread of this rank ends the job", "ValueError: broken"),
        status=1,
        env=FOREVER,
        often=True,
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
    "a rank that is interrupted": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "wait(nt.allreduce(x, MPI.SUM))",
        (f"r1 .*{ENDS_JOB}", "KeyboardInterrupt"),
        status=130,
        env=FOREVER,
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
    "a rank that raises, where that does not end the job": Fault(
        "if rank == 1: raise ValueError('broken')\nwait(nt.allreduce(x, MPI.SUM))",
        ("ValueError: broken", "allreduce #1 .* cannot end: rank 1 has finished"),
        status=124,
        env={"MPI4JAX_ABORT": "0", **FOREVER},
        silent=(ENDS_JOB,),
    ),
    "sys.exit with an error": Fault(
        "if rank == 1: sys.exit('broken')\nwait(nt.allreduce(x, MPI.SUM))",
        ("broken", "r1 .*exit with status 1 on this rank ends the job"),
        status=1,
        env=FOREVER,
    ),
    "exit with an error": Fault(
        "if rank == 1: exit(3)\nwait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*exit with status 3 on this rank ends the job",),
        status=3,
        env=FOREVER,
        often=True,
    ),
    "raise SystemExit": Fault(
        "if rank == 1: raise SystemExit(3)\nwait(nt.allreduce(x, MPI.SUM))",
        ("allreduce #1 .* cannot end: rank 1 has finished",),
        status=124,
        env=FOREVER,
    ),
    "a rank that finishes while the others wait": Fault(
        "wait(nt.allreduce(x, MPI.SUM))\nif rank < 2: wait(nt.allreduce(x, MPI.SUM))",
        (
            "allreduce #2 .* cannot end: rank 2 has finished",
            "ranks 0-1 are in allreduce #2",
            "rank 2 is finished",
        ),
        status=124,
        ranks=3,
        env=FOREVER,
        often=True,
    ),
    "a rank that finishes while another is in no operation": Fault(
        "wait(nt.allreduce(x, MPI.SUM))\nif rank == 1: time.sleep(15)\nprint('the end', rank)",
        (
            r"r0 .*this rank has finished, and has waited for the other ranks for 1\d s",
            rf"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE + 1}",
            "the job goes on",
            "the end 1",
        ),
        status=0,
    ),
    "a sender that finishes": Fault(
        "if rank == 0: wait(nt.recv(x, 1))",
        ("recv from 1.* cannot end: rank 1 has finished",),
        status=124,
        env=FOREVER,
    ),
    "a rank that is killed": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait(nt.allreduce(x, MPI.SUM))",
        ("[Kk]illed|signal 9|KILLED",),
        silent=("has finished", HUNG, ENDS_JOB),  # it is MPI that ends the job
        env=FOREVER,
        often=True,
    ),
    "a rank that crashes": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\nwait(nt.allreduce(x, MPI.SUM))",
        ("[Ss]egmentation|signal 11|SEGV",),
        silent=("has finished", HUNG, ENDS_JOB),  # it is MPI that ends the job
        env=FOREVER,
    ),
    "a rank that is stopped": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, "rank 0 is in allreduce #1", r"rank 1 is stopped: process \d+"),
        status=124,
    ),
    "out of memory": Fault(
        "f = jax.jit(lambda: nt.allgather(jnp.zeros(1 << 45, np.uint8) + (rank + 1)))\n"
        "wait(f() if rank == 1 else nt.allreduce(x, MPI.SUM))",
        (f"r1 .*{ENDS_JOB}", "RESOURCE_EXHAUSTED|[Oo]ut of memory"),
        status=1,
        env=FOREVER,
    ),
    # ---- Arguments
    "a bad rank": Fault(
        "if rank == 1: nt.send(x, 2)\nwait(nt.allreduce(x, MPI.SUM))",
        (
            r"ValueError: send: argument 'dest' must be a rank from 0 to 1.*, got 2",
            f"r1 .*{ENDS_JOB}",
        ),
        status=1,
        env=FOREVER,
    ),
    "a bad tag": Fault(
        "if rank == 1: nt.recv(x, 0, tag=-7)\nwait(nt.allreduce(x, MPI.SUM))",
        (r"ValueError: recv: argument 'tag' must be .*, got -7",),
        status=1,
        env=FOREVER,
    ),
    "a bad root": Fault(
        "if rank == 1: nt.bcast(x, 5)\nwait(nt.allreduce(x, MPI.SUM))",
        (r"ValueError: bcast: argument 'root' must be .*, got 5",),
        status=1,
        env=FOREVER,
    ),
    "a freed communicator": Fault(
        "c = comm.Dup()\nf = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM, comm=c))\n"
        "wait(f(x)); mpi4jax.flush(); g = f.lower(x).compile(); c.Free()\n"
        "if rank == 1: wait(g(x))\nwait(nt.allreduce(x, MPI.SUM))",
        ("communicator .* has been freed", "allreduce", f"r1 .*{ENDS_JOB}"),
        status=1,
        env=FOREVER,
        often=True,
    ),
    "a bad setting": Fault(
        "",
        ("MPI4JAX_TIMEOUT must be a number of seconds, 0 for no time-out, got 'soon'",),
        env={"MPI4JAX_TIMEOUT": "soon"},
    ),
}
