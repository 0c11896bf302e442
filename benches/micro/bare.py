"""Where the time of an allreduce of 4 bytes in a compiled loop goes: MPI, XLA, this package.

    python tools/mpirun.py -n 2 benches/micro/bare.py

- *MPI*: the loop of raw.c.
- *handler*: a compiled loop of a handler that only calls MPI (bare.cc); what it adds is XLA's.
- *nothing*: the same of a handler that returns at once.
- *mpi4jax*: the compiled loop of `mpi4jax.allreduce`.

They take turns. Each line: nanoseconds on the slowest rank, the median over all rounds, and
quartiles.
"""

import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "suite"))

import contenders

CALLS, ROUNDS = 2_000, 250  # a round is shorter than a time slice
comm = MPI.COMM_WORLD
X = jnp.ones(1)


def library():
    """bare.cc as a shared library, made by the first rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = comm.bcast(f"{folder}/bare.so")
        if comm.rank == 0:
            options = f"-x c++ -std=c++17 -O3 -shared -fPIC -I{jax.ffi.include_dir()}".split()
            source = Path(__file__).with_suffix(".cc")
            command = [contenders.mpicc(), *options, source, "-o", path, "-lstdc++"]
            subprocess.run(command, check=True)
        comm.Barrier()
        handlers = ctypes.CDLL(path)
        comm.Barrier()  # before the directory goes
    return handlers


def handler(handlers, name):
    symbol = getattr(handlers, name)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="cpu")
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(X.shape, X.dtype), has_side_effect=True)
    return in_loop(call)


def in_loop(operation):
    looped = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda _, y: operation(x), x))

    def run(calls):
        comm.Barrier()
        start = time.perf_counter()
        jax.block_until_ready(looped(X, calls))
        return time.perf_counter() - start

    return run


def raw():
    run = ctypes.CDLL(str(contenders.raw_library())).run
    run.restype = ctypes.c_double
    address = ctypes.c_void_p(MPI._addressof(comm))
    return lambda calls: run(b"allreduce", address, X.size, ctypes.c_long(calls))


def main():
    handlers = library()
    contestants = {
        "MPI": raw(),
        "handler": handler(handlers, "bare_allreduce"),
        "nothing": handler(handlers, "bare_nothing"),
        "mpi4jax": in_loop(lambda x: mpi4jax.allreduce(x, op=MPI.SUM)),
    }
    found = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            run(1)
            seconds = comm.allreduce(run(CALLS), op=MPI.MAX)
            found[name].append(1e9 * seconds / CALLS)
    if comm.rank == 0:
        for name, times in found.items():
            low, median, high = statistics.quantiles(times, n=4)
            print(f"{name:8} {median:6.0f} ({low:.0f} to {high:.0f})")


main()
