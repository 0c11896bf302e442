"""Check this installation: ``python -m mpi4jax``, alone and under mpiexec.

Prints what was found, tests some operations, and says what to do about each problem. The exit
status is 0 if there is no problem.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native, notoken as nt
from mpi4jax._job import job, watch
from mpi4jax._setup import gpus, loader

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
TESTED = ("allreduce", "bcast", "alltoall", "sendrecv")


def say(*words: Any) -> None:
    if rank == 0:
        print(*words, flush=True)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(advice: list[str]) -> None:
    """Print the libraries, devices and ranks that were found, and add advice about problems."""
    info = _native.mpi_info()
    say(f"mpi4jax      {mpi4jax.__version__}, the implementation with a core in Rust")
    say(
        f"module       {Path(_native.__file__ or '').name}: mpi4py's MPI_Comm and MPI_Status have "
        "{} and {} bytes".format(*loader.sizes(MPI))
    )
    say(f"             compiled for {info['vendor']} {info['version']}")
    say(f"Python       {platform.python_version()}, {platform.platform()}")
    for package in ("jax", "jaxlib", "numpy", "mpi4py"):
        say(f"{package:12} {version(package)}")
    say(f"MPI          {MPI.Get_library_version().splitlines()[0].rstrip(chr(0))}")
    say(f"             {info['library']}, which mpi4py has loaded")
    say(f"threads      {_LEVELS[MPI.Query_thread()]}")
    has_gpu = _native.has_gpu_support()
    if _native.is_rocm():
        say(f"ROCm-aware   {info['rocm_aware']}")
        say(f"HIP          {'yes' if has_gpu else 'no runtime with a device'}")
    else:
        say(f"CUDA-aware   {info['cuda_aware']}")
        say(f"CUDA         {'yes' if has_gpu else 'no driver with a device'}")
    transports = str(mpi4jax.transport_info()).splitlines()
    for line in transports if has_gpu else transports[:1]:
        say(f"transport    {line}")
    say(f"devices      {', '.join(str(d) for d in jax.local_devices())}")
    _describe_gpus(advice)
    hosts = comm.gather(platform.node())
    if hosts is not None:
        names = {host: hosts.count(host) for host in hosts}
        say(f"ranks        {size} on {', '.join(f'{h} ({n})' for h, n in names.items())}")
    timeout = watch.seconds("MPI4JAX_TIMEOUT")
    limit = "none" if math.isinf(timeout) else f"{timeout:g} s"
    say(f"timeout      {limit}, dumps in {job.directory(size)}")

    told, _ = job.told_ranks()
    if size == 1 and told > 1:
        advice.append(alone(told, str(info["library"])))
    if hasattr(os, "sched_getaffinity"):
        here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        mine = os.sched_getaffinity(0)
        cores = set().union(*here.allgather(mine))
        if here.size > len(cores):
            advice.append(
                f"note: {here.size} ranks share {len(cores)} core(s) of {platform.node()}: "
                "a waiting rank keeps a core busy and slows down the others"
            )
        elif len(mine) == 1:
            advice.extend(bound(here.size, os.cpu_count() or 1))
        here.Free()


def alone(told: int, library: str) -> str:
    """Return advice for a launcher that has started several ranks, each as a job of its own."""
    words = f"the launcher has started {told} ranks, but each is alone: "
    if job.is_of_srun():
        return (
            f"{words}the MPI plugin of srun does not fit {library}; choose another one with "
            "srun --mpi=NAME (srun --mpi=list lists the names), or choose the MPI library that "
            "fits with MPI4PY_LIBMPI"
        )
    return (
        f"{words}mpiexec belongs to another MPI than {library}; use the mpiexec of that MPI (with "
        "the PyPI packages, the one next to python), or choose the other one with MPI4PY_LIBMPI"
    )


def bound(ranks: int, cores: int) -> list[str]:
    """Return advice for a host whose ranks are each bound to one of its cores."""
    each = min(4, cores // ranks)
    if each < 2:
        return []
    words = (
        "note: the launcher binds this rank to one core, so XLA computes with one thread; with "
        f"Open MPI, use --map-by slot:PE={each} for {each} cores, or --bind-to none for all"
    )
    return [words]


def _describe_gpus(advice: list[str]) -> None:
    """Print the GPU of each rank, and add advice about them."""
    all_gpus = comm.allgather(gpus.own())
    for number, gpu in enumerate(all_gpus):
        if gpu is not None:
            say(f"GPU          rank {number}: {gpu}")
    found = [comm.allgather(gpus.sharing(comm))]
    mine = all_gpus[rank]
    if mine is not None:
        ranks = sum(gpu is not None and gpu.uuid == mine.uuid for gpu in all_gpus)
        memory = gpus.memory_to_change(ranks, mpi4jax.transport_info().gpu)
    found.append(comm.allgather(None if mine is None else memory))
    advice.extend(dict.fromkeys(words for of_all in found for words in of_all if words))


def self_test(advice: list[str]) -> None:
    """Test four operations of different kinds, eager and compiled, for two dtypes."""
    failures = []
    left, right = (rank - 1) % size, (rank + 1) % size
    for dtype in (np.float32, np.int32):
        all_x = np.arange(3 * size, dtype=dtype).reshape(size, 3)
        x = all_x[rank]
        tests: list[tuple[Callable[[Any], Any], Any, Any]] = [
            (nt.allreduce, x, all_x.sum(0)),
            (lambda x: nt.bcast(x, size - 1), x, all_x[-1]),
            (nt.alltoall, np.stack([x + j for j in range(size)]), all_x + rank),
            (lambda x: nt.sendrecv(x, x, left, right), x, all_x[left]),
        ]
        for (call, given, expected), name in zip(tests, TESTED, strict=True):
            for how, run in (("eager", call), ("compiled", jax.jit(call))):
                y = run(given)
                if not np.array_equal(y, expected):
                    failures.append(f"{name} of {y.dtype}, {how}: {y}, expected {expected}")
    everyones = comm.allgather(failures)
    for number, of_rank in enumerate(everyones):
        advice.extend(f"rank {number}: {failure}" for failure in of_rank)
    outcome = "FAILED" if any(everyones) else "passed"
    say(f"self-test    {', '.join(TESTED)}, eager and compiled: {outcome}")


def settings() -> None:
    """Print the variables of MPI, JAX and mpi4jax, and the machine."""
    prefixes = ("MPI4JAX_", "MPI4PY_", "JAX_", "XLA_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_")
    for name in sorted(name for name in os.environ if name.startswith(prefixes)):
        say(f"setting      {name}={os.environ[name]}")
    parent = _native.process(os.getppid())
    say(f"processors   {os.cpu_count()}, {platform.machine()}")
    say(f"parent       {parent[1] if parent else 'not known'}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpi4jax",
        description="Check this installation of mpi4jax, and test some operations on all ranks.",
    )
    parser.add_argument("--report", action="store_true", help="print what a bug report needs")
    options = parser.parse_args(arguments)
    advice: list[str] = []
    if options.report:
        say("Please copy everything below into an issue, and add what you did.\n")
    describe(advice)
    if options.report:
        settings()
    self_test(advice)
    problems = [words for words in advice if not words.startswith("note:")]
    for words in advice:
        say(f"\n{'' if words.startswith('note:') else 'PROBLEM: '}{words}")
    if not problems:
        say("\nall is well")
    return int(bool(comm.allreduce(len(problems))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
