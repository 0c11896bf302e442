"""Is this installation in order? ``python -m mpi4jax``, alone and under mpiexec.

Prints what was found, tests every op, measures, and says what to do where something is off. The
exit status is 0 if nothing is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native, notoken as nt
from mpi4jax._job import job, watch
from mpi4jax._op.spec import SPECS
from mpi4jax._setup import loader

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

# What launchers tell a rank about how many there are.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
MEASURED_BYTES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)


def say(*words: Any) -> None:
    if rank == 0:
        print(*words, flush=True)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(advice: list[str]) -> None:
    """What there is, and what is wrong with it."""
    info = _native.mpi_info()
    say(f"mpi4jax      {mpi4jax.__version__}")
    say(
        f"module       {Path(_native.__file__ or '').name}: mpi4py's MPI_Comm and MPI_Status have "
        "{} and {} bytes".format(*loader.sizes(MPI))
    )
    say(f"             compiled for {info['vendor']} {info['version']}")
    say(f"Python       {platform.python_version()}, {platform.platform()}")
    for package in ("jax", "jaxlib", "numpy", "mpi4py"):
        say(f"{package:12} {version(package)}")
    say(f"MPI          {str(info['library_version']).splitlines()[0]}")
    say(f"             {info['library']}, which mpi4py has loaded")
    say(f"threads      {info['thread_level']}")
    say(f"CUDA-aware   {info['cuda_aware']}")
    say(f"CUDA         {'yes' if mpi4jax.has_cuda_support() else 'no driver with a device'}")
    transports = str(mpi4jax.transport_info()).splitlines()
    for line in transports if mpi4jax.has_cuda_support() else transports[:1]:
        say(f"transport    {line}")
    say(f"devices      {', '.join(str(d) for d in jax.local_devices())}")
    hosts = comm.gather(platform.node())
    if hosts is not None:
        names = {host: hosts.count(host) for host in hosts}
        say(f"ranks        {size} on {', '.join(f'{h} ({n})' for h, n in names.items())}")
    limit = watch.timeout()
    say(f"time-out     {f'{limit:g} s' if limit else 'none'}, dumps in {job.directory(size)}")

    told = max((int(os.environ.get(name, "0") or 0) for name in SIZE_VARIABLES), default=0)
    if size == 1 and told > 1:
        advice.append(
            f"the launcher has started {told} ranks, but each is alone: mpiexec belongs to another "
            f"MPI than {info['library']}; use the mpiexec of that MPI (with the PyPI packages, the "
            "one beside python), or choose the other one with MPI4PY_LIBMPI"
        )
    if info["thread_level"] != "multiple":
        advice.append(
            f"MPI grants thread level '{info['thread_level']}': mpi4py calls beside running ops "
            "are not safe; leave mpi4py.rc.thread_level as it is, or use an MPI "
            "that has MPI_THREAD_MULTIPLE"
        )
    if hasattr(os, "sched_getaffinity"):
        here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        mine = os.sched_getaffinity(0)
        cores = set().union(*here.allgather(mine))
        if here.size > len(cores):
            advice.append(
                f"note: {here.size} ranks share {len(cores)} core(s) of {platform.node()}: "
                "while they wait, they are in each other's way"
            )
        elif len(mine) == 1 < (os.cpu_count() or 1):
            advice.append(
                "note: the launcher binds this rank to one core, so XLA computes with one thread; "
                "with Open MPI, --map-by slot:PE=4 gives each rank four, --bind-to none all"
            )
        here.Free()


class _Data:
    """What the tests of the ops are made of: ``x`` on this rank, ``all_x[j]`` on rank ``j``."""

    def __init__(self, all_x: np.ndarray[Any, Any]):
        self.ops, self.comm, self.rank, self.size = nt, comm, rank, size
        self.last, self.left, self.right = size - 1, (rank - 1) % size, (rank + 1) % size
        self.x, self.all_x = all_x[rank], all_x
        self.blocks = np.stack([self.x + 10 * j for j in range(size)])  # [to]
        self.of_all = np.stack([all_x + 10 * j for j in range(size)])  # [to, from]


def self_test(advice: list[str]) -> None:
    """Every op, eager and compiled, for two types."""
    failures = []
    for dtype in (np.float32, np.int32):
        all_x = np.arange(3 * size, dtype=dtype).reshape(size, 3)
        for name, spec in SPECS.items():
            call, expected = spec.self_test(_Data(all_x))
            for how, run in (("eager", call), ("compiled", mpi4jax.jit(call))):
                y = run()
                if expected is not None and not np.array_equal(y, expected.astype(dtype)):
                    failures.append(
                        f"{name} of {np.dtype(dtype).name}, {how}: {y}, expected {expected}"
                    )
    everyones = comm.allgather(failures)
    for number, of_rank in enumerate(everyones):
        advice.extend(f"rank {number}: {failure}" for failure in of_rank)
    outcome = "FAILED" if any(everyones) else "passed"
    say(f"self-test    {len(SPECS)} ops, eager and compiled: {outcome}")


def _seconds(call: Callable[[], Any], repeat: int) -> float:
    """The best of some rounds, on the slowest rank."""
    best = float("inf")
    call()
    for _ in range(5):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        best = min(best, (time.perf_counter() - start) / repeat)
    return comm.allreduce(best, MPI.MAX)


def measure() -> None:
    """Time and bandwidth beside mpi4py's, which needs NumPy arrays."""
    columns = ("allreduce", "in a loop", "mpi4py", "sendrecv", "mpi4py")
    say(f"\n{'bytes':>10} " + " ".join(f"{column:>12}" for column in columns))
    left, right = (rank - 1) % size, (rank + 1) % size
    fast = 0.0
    for nbytes in MEASURED_BYTES:
        n = nbytes // 4
        x, a, b = jnp.ones(n, np.float32), np.ones(n, np.float32), np.ones(n, np.float32)
        loops = 20 if nbytes < 1 << 20 else 4

        def loop(x: Any, loops: int = loops) -> Any:
            return jax.lax.fori_loop(0, loops, lambda i, x: nt.allreduce(x, MPI.MAX), x)

        def shift(x: Any) -> Any:
            return nt.sendrecv(x, x, left, right)

        f, g, h = (
            mpi4jax.jit(lambda x: nt.allreduce(x, MPI.MAX)),
            mpi4jax.jit(loop),
            mpi4jax.jit(shift),
        )
        repeat = 200 if nbytes < 1 << 16 else 5

        def wait(call: Any, x: Any = x) -> Callable[[], Any]:
            return lambda: call(x).block_until_ready()

        times = (
            _seconds(wait(f), repeat),
            _seconds(wait(g), max(1, repeat // loops)) / loops,
            _seconds(lambda a=a, b=b: comm.Allreduce(a, b, MPI.MAX), repeat),  # type: ignore[misc]
            _seconds(wait(h), repeat),
            _seconds(lambda a=a, b=b: comm.Sendrecv(a, right, 0, b, left), repeat),  # type: ignore[misc]
        )
        fast = max(fast, nbytes / times[3])
        say(f"{nbytes:10} " + " ".join(f"{1e6 * t:9.2f} us" for t in times))
    say(f"best sendrecv bandwidth: {fast / 1e9:.2f} GB/s")


def settings() -> None:
    """What the environment says to MPI, JAX and mpi4jax, and what the machine is."""
    prefixes = ("MPI4JAX_", "MPI4PY_", "JAX_", "XLA_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_")
    for name in sorted(name for name in os.environ if name.startswith(prefixes)):
        say(f"setting      {name}={os.environ[name]}")
    parent = _native.process(os.getppid())
    say(f"processors   {os.cpu_count()}, {platform.machine()}")
    say(f"parent       {parent[1] if parent else 'not known'}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpi4jax", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="do not measure")
    parser.add_argument("--report", action="store_true", help="what an issue needs; do not measure")
    options = parser.parse_args(arguments)
    advice: list[str] = []
    if options.report:
        say("Please copy everything below into an issue, and add what you did.\n")
    describe(advice)
    if options.report:
        settings()
    self_test(advice)
    if not (options.quick or options.report):
        measure()
    problems = [words for words in advice if not words.startswith("note:")]
    for words in advice:
        say(f"\n{'' if words.startswith('note:') else 'PROBLEM: '}{words}")
    if not problems:
        say("\nall is well")
    return int(bool(comm.allreduce(len(problems))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
