"""One rank of a contender: measures what benches/suite/run.py asks for, over a socket.

    mpiexec -n 2 python benches/suite/worker.py SOCKET CONTENDER [LIBRAY OF raw.c]

The contender "gloo" is JAX alone, with its own collectives between processes.
"""

import ctypes
import gc
import importlib
import os
import resource
import socket
import sys
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI
from serving import serve

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
above, below = (rank + 1) % size, (rank - 1) % size
GLOO = sys.argv[2] == "gloo"

if GLOO:
    ours = False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    mesh = jax.make_mesh((size,), ("ranks",))
    spec = PartitionSpec("ranks")
else:
    import mpi4jax

    # What both packages have: operations without tokens, in ours a module of its own.
    ours = hasattr(mpi4jax, "jit")
    ops = importlib.import_module("mpi4jax.notoken") if ours else mpi4jax


def without_result(operation):
    """Return the same with a result that costs nothing, and that tells when it has ended."""

    def alone(x):
        operation(x)
        return jnp.zeros(1)

    return alone


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

# What has no result on this rank, or gives it its own operand back. A jitted function would copy
# that, which no C program does.
HANDS_BACK = {"barrier", "bcast"} if rank == 0 else {"barrier", "gather", "reduce"}

# The same of JAX's own, under shard_map: x is one rank's part of a global array.
RING = [(r, (r + 1) % size) for r in range(size)]
GLOO_OPERATIONS = {
    "allgather": lambda x: lax.all_gather(x, "ranks"),
    "allreduce": lambda x: lax.psum(x, "ranks"),
    "alltoall": lambda x: lax.all_to_all(x, "ranks", 0, 0),
    "sendrecv": lambda x: lax.ppermute(x, "ranks", RING),
}


def sharded_jit(function):
    """jit of a function of one rank's part."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def prepare_gloo(mode, op, nbytes):
    local = np.zeros((size, nbytes // 4) if op == "alltoall" else nbytes // 4, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
    operation = GLOO_OPERATIONS[op]
    if mode == "jit":
        return repeat(sharded_jit(operation), x)
    assert mode == "chain", mode

    @jax.jit
    def looped(x, iterations):
        def part(x):
            return lax.fori_loop(0, iterations, lambda _, x: operation(x), x)

        return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    return lambda iterations: jax.block_until_ready(looped(x, iterations))


def psum():
    """The function that gloo runs, with a mesh of ranks."""
    spec = PartitionSpec("ranks")
    return mpi4jax.shard_map(
        lambda x: lax.psum(x, "ranks"),
        mesh=mpi4jax.Mesh(axis_names="ranks", comm=comm),
        in_specs=spec,
        out_specs=PartitionSpec(),
    )


@cache
def input_of(op, nbytes):
    shape = (nbytes // 4,)
    return jax.block_until_ready(jnp.zeros((size, *shape) if OPERATIONS[op][2] else shape))


def repeat(function, x):
    """Calls from Python, each waited for."""

    def run(iterations):
        for _ in range(iterations):
            jax.block_until_ready(function(x))

    return run


def handed_on(function, x):
    """Calls from Python, each of which takes over the result of the one before."""
    at = [jnp.array(x)]

    def run(iterations):
        for _ in range(iterations):
            at[0] = function(at[0])
            at[0].block_until_ready()

    return run


def in_loop(operation, x, chained):
    """Return one call that loops inside: each time on x, or on the result of the time before."""
    result = jax.eval_shape(operation, x)

    @jax.jit
    def looped(x, iterations):
        if chained:
            return lax.fori_loop(0, iterations, lambda _, x: operation(x), x)
        first = jnp.zeros(result.shape, result.dtype)
        return lax.fori_loop(0, iterations, lambda _, y: operation(x), first)

    return lambda iterations: jax.block_until_ready(looped(x, iterations))


@cache
def raw():
    """raw.c"""
    library = ctypes.CDLL(sys.argv[3])
    library.run.restype = ctypes.c_double
    return library


def address():
    return ctypes.c_void_p(MPI._addressof(comm))


@cache
def prepare(mode, op, nbytes):
    """Return a function that does `iterations` of them and returns seconds, or None to be timed."""
    if GLOO:
        return prepare_gloo(mode, op, nbytes)
    operation, on_numpy, _ = OPERATIONS[op]
    x = input_of(op, nbytes)
    if mode == "raw":
        return lambda n: raw().run(op.encode(), address(), nbytes // 4, ctypes.c_long(n))
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
    if mode.endswith("token"):
        token = jnp.zeros((), jnp.float32)
        with_token = {
            "allreduce": lambda x: mpi4jax.allreduce(x, op=MPI.SUM, token=token, comm=comm)
        }
        return repeat(with_token[op] if mode.startswith("eager") else jax.jit(with_token[op]), x)
    if mode == "psum":
        return repeat(jax.jit(psum()), x)
    if mode == "donated":
        return handed_on(jax.jit(operation, donate_argnums=0), x)
    if mode == "chain":
        return in_loop(operation, x, chained=True)
    if op in HANDS_BACK:
        operation = without_result(operation)
    if mode == "jit":
        return repeat(jax.jit(operation), x)
    if mode == "loop":
        return in_loop(operation, x, chained=False)
    raise ValueError(mode)


def faults():
    """Pages that this process has had to be given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(mode, op, nbytes, iterations):
    """Seconds and page faults of one operation."""
    run = prepare(mode, op, nbytes)
    run(1)
    gc.disable()
    comm.Barrier()
    before = faults()
    begin = time.perf_counter()
    inside = run(iterations)
    outside = time.perf_counter() - begin
    after = faults()
    gc.enable()
    seconds = inside if isinstance(inside, float) else outside
    return {"seconds": seconds / iterations, "faults": (after - before) / iterations}


def warm(mode, op, nbytes, seconds):
    """Run until malloc has settled: it keeps more memory the more has come back to it."""
    run = prepare(mode, op, nbytes)
    run(1)
    end, last = time.perf_counter() + seconds, None
    while True:
        before = faults()
        run(5)
        now = faults() - before
        steady = last is not None and abs(now - last) <= 5 + 0.02 * last
        last = now
        # Every rank runs as often: each waits for the other.
        if not comm.allreduce(not steady and time.perf_counter() < end, MPI.LOR):
            return


def bind(cores):
    """Run this rank, and the threads that it starts later, on its core of these."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank]})


if __name__ == "__main__":
    serve({"measure": measure, "warm": warm, "bind": bind})
