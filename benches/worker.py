"""One rank of a contender: measures what benches/run.py asks for, over a socket.

    mpiexec -n 2 python benches/worker.py SOCKET CONTENDER [LIBRAY OF raw.c]

Between measurements it waits in a read, which leaves the processor to the other contenders.
"""

import ctypes
import gc
import importlib
import json
import socket
import sys
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import mpi4jax

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
above, below = (rank + 1) % size, (rank - 1) % size

# What both packages have: operations without tokens, in ours a module of its own.
ours = hasattr(mpi4jax, "jit")
ops = importlib.import_module("mpi4jax.notoken") if ours else mpi4jax

# name: (the operation on JAX arrays, on NumPy arrays with mpi4py, whether x holds a block for each)
OPERATIONS = {
    "allgather": (lambda x: ops.allgather(x, comm=comm), comm.Allgather, False),
    "allreduce": (lambda x: ops.allreduce(x, op=MPI.SUM, comm=comm), comm.Allreduce, False),
    "alltoall": (lambda x: ops.alltoall(x, comm=comm), comm.Alltoall, True),
    "barrier": (lambda x: ops.barrier(comm=comm), lambda x, y: comm.Barrier(), False),
    "bcast": (lambda x: ops.bcast(x, 0, comm=comm), lambda x, y: comm.Bcast(x), False),
    "gather": (lambda x: ops.gather(x, 0, comm=comm), comm.Gather, False),
    "reduce": (lambda x: ops.reduce(x, MPI.SUM, 0, comm=comm), comm.Reduce, False),
    "scan": (lambda x: ops.scan(x, MPI.SUM, comm=comm), comm.Scan, False),
    "scatter": (lambda x: ops.scatter(x, 0, comm=comm), comm.Scatter, rank == 0),
    "sendrecv": (
        lambda x: ops.sendrecv(x, x, below, above, comm=comm),
        lambda x, y: comm.Sendrecv(x, above, recvbuf=y, source=below),
        False,
    ),
}


@cache
def input_of(op, nbytes):
    shape = (nbytes // 4,)
    return jax.block_until_ready(jnp.zeros((size, *shape) if OPERATIONS[op][2] else shape))


def repeat(function, x):
    """Calls from Python, each waited for."""

    def run(iterations):
        for _ in range(iterations):
            y = function(x)
            if y is not None:
                y.block_until_ready()

    return run


def in_loop(jit, operation, x, chained):
    """One call that loops inside: each time on x, or on the result of the time before."""
    result = jax.eval_shape(operation, x)

    @jit
    def looped(x, iterations):
        if chained:
            return lax.fori_loop(0, iterations, lambda _, x: operation(x), x)
        first = None if result is None else jnp.zeros(result.shape, result.dtype)
        return lax.fori_loop(0, iterations, lambda _, y: operation(x), first)

    return lambda iterations: jax.block_until_ready(looped(x, iterations))


@cache
def prepare(mode, op, nbytes):
    """A function that does `iterations` of them and returns seconds, or None to be timed."""
    operation, on_numpy, _ = OPERATIONS[op]
    x = input_of(op, nbytes)
    if mode == "raw":
        library = ctypes.CDLL(sys.argv[3])
        library.run.restype = ctypes.c_double
        address = ctypes.c_void_p(MPI._addressof(comm))
        return lambda n: library.run(op.encode(), address, nbytes // 4, ctypes.c_long(n))
    if mode == "mpi4py":
        # Written to, or all of an array would be one page of zeros.
        a = np.full(x.shape, 0, np.float32)
        b = np.full(() if op == "barrier" else jax.eval_shape(operation, x).shape, 0, np.float32)

        def run(iterations):
            for _ in range(iterations):
                on_numpy(a, b)

        return run
    if mode == "noop":
        return repeat(jax.jit(lambda x: x), jnp.zeros(1))
    if mode == "eager":
        return repeat(operation, x)
    if mode == "jax.jit":
        return repeat(jax.jit(operation), x)
    if mode == "mpi4jax.jit":
        return repeat(mpi4jax.jit(operation), x)
    if mode in ("loop", "chain"):
        return in_loop(mpi4jax.jit if ours else jax.jit, operation, x, mode == "chain")
    raise ValueError(mode)


def measure(mode, op, nbytes, iterations):
    """Seconds of one operation."""
    run = prepare(mode, op, nbytes)
    run(1)
    gc.disable()
    comm.Barrier()
    begin = time.perf_counter()
    inside = run(iterations)
    outside = time.perf_counter() - begin
    gc.enable()
    return (inside if isinstance(inside, float) else outside) / iterations


def main():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    with connection.makefile("rw") as driver:

        def say(**message):
            driver.write(json.dumps(message) + "\n")
            driver.flush()

        library, *_ = MPI.Get_library_version().splitlines()[0].split(",")
        versions = {"jax": jax.__version__, "mpi": library}
        say(contender=sys.argv[2], rank=rank, versions=versions)
        for line in driver:
            say(seconds=measure(**json.loads(line)))


if __name__ == "__main__":
    main()
