"""What goes wrong in random jobs (random_jobs.py), and what is said of it."""

import random_outside

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
