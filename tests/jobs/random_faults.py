"""What goes wrong in random jobs (random_jobs.py), and what is said of it."""

import c_threads
import random_mismatches
import random_outside
from random_mismatches import MISMATCHES

# What the output says of each fault, which is on `{rank}`, in `{line}`. Where ranks have done parts
# of collectives through mpi4py, the output says that a rank has ended, which proves nothing.
SAYS = {
    "ends early": r"can never complete: rank {rank} has finished",
    "sleeps": r"rank {rank} is in no operation.*program.py:{line}",
    "raises": r"r{rank} \| mpi4jax: an uncaught exception on this rank aborts the job",
    "is killed": r"[Kk]illed|signal 9|KILLED|has died",
    "receives what nobody sends": r"rank {rank} is in recv from .*, tag 999.*program.py:{line}",
    "waits for what nobody sends": r"rank {rank} is in wait for irecv from .*, tag 999 .*y:{line}",
    "does not start": r"rank {rank}(?: is in|:) barrier .*program.py:{line}",
    "ends before it starts": r"can never complete: rank {rank} has finished",
    "receives from each other": r"deadlock",
    "takes communicators in another order": r"deadlock",
    "never waits": r"iallreduce .*program.py:{line} was never waited for",
    "has another setting": r"settings differ between ranks: .*{value} on rank {rank}\b",
    **random_outside.SAYS,
    **random_mismatches.SAYS,
}
FAULTS = {
    "ends early": "return",
    "sleeps": "time.sleep(1000)",
    "raises": "raise ValueError('broken')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "receives what nobody sends": "nt.recv(mine(0), {peer}, tag=999, comm=world); mpi4jax.flush()",
    "waits for what nobody sends": "r0 = mpi4jax.irecv(mine(0), {peer}, tag=999, comm=world)"
    "; mpi4jax.wait(r0); mpi4jax.flush()",
    "does not start": "nt.barrier(comm={comm}); mpi4jax.flush()",
    "ends before it starts": "return",
    "receives from each other": "nt.recv(mine(0), {peer}, tag=998, comm=world); mpi4jax.flush()",
    "takes communicators in another order": "nt.barrier(comm=a0); mpi4jax.flush(); nt.barrier("
    "comm=b0); mpi4jax.flush()",
    "never waits": "r0 = mpi4jax.iallreduce(mine(0), MPI.SUM, comm={comm})",
    **random_outside.FAULTS,
}
# What no other rank has.
DIFFERENT_SETTINGS = {"MPI4JAX_CHECK": "1", "MPI4JAX_TRANSPORT": "auto"}
# What the others start before, and wait for.
STARTED = ("does not start", "ends before it starts", "never waits")


class Faults:
    """The mistake at the end, of a `Maker`."""

    def inject(self) -> None:
        """One rank does something wrong, and the others need it next."""
        self.imports([r for r in self.alive if r in self.late])
        if self.other is not None:
            self.job.fault = ("has another setting", self.other, 0)
            self.job.add(self.alive, "nt.barrier(comm=mpi4jax.default_comm())")
            return
        comm = self.random.choice([c for c in self.usable() if len(c.ranks) > 1])
        name, r = self.random.choice([*FAULTS, *MISMATCHES]), self.random.choice(comm.ranks)
        if "thread that computes" in name and c_threads.library() is None:
            name = "sleeps"
        # All ranks use the default communicator.
        if name == "differs behind a root that is far ahead" and len(self.alive) < self.job.size:
            name = "differs on the last of 40 communicators"
        others = [other for other in comm.ranks if other != r]
        self.finish(lambda one: one.rank == r)
        if name in MISMATCHES:
            waits, line = getattr(self, MISMATCHES[name][0])(comm, wrong=r)
            self.job.fault = (name, waits, line)
            self.job.add(comm.ranks, f"nt.barrier(comm={comm.name}); mpi4jax.flush()")
            return
        if name in STARTED:
            self.job.add(others, FAULTS["never waits"].format(comm=comm.name))
        if name == "receives from each other":
            self.job.add([others[0]], FAULTS[name].format(peer=r))
        if name == "takes communicators in another order":
            self.job.tells_apart &= len(comm.ranks) == self.job.size
            self.job.add(comm.ranks, f"a0, b0 = {comm.name}.Dup(), {comm.name}.Dup()")
            text = FAULTS[name].replace("a0", "c0").replace("b0", "a0").replace("c0", "b0")
            self.job.add(others, text)
        self.job.add([r], FAULTS[name].format(peer=others[0], comm=comm.name))
        self.job.fault = (name, r, self.job.line())
        if name in STARTED:
            self.job.add(others, "mpi4jax.wait(r0); mpi4jax.flush()")
        self.job.add(comm.ranks, f"nt.barrier(comm={comm.name}); mpi4jax.flush()")
        if name == "never waits":
            self.finish(lambda _: True)
