"""Start programs on several ranks, and the programs of mpi4jax that are run by themselves.

    mpi4jax run -n 4 program.py [ARGUMENTS...]
    mpi4jax check | report | timeline [ARGUMENTS...]
    mpi4jax check program.py

The module is not a part of the package mpi4jax, whose import initializes MPI: the process that
starts mpiexec must not be an MPI process itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import mpi4jax_check

ENVIRONMENT = {
    # Open MPI refuses to run as root unless told twice (4 and 5 by different names).
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # It also refuses more ranks than cores, and ties each rank to one core.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

MODULES = {
    "check": (
        "mpi4jax",
        "check this installation (as python -m mpi4jax), or how a program asks JAX about the job",
    ),
    "report": ("mpi4jax.report", "say what the ranks of a job did last"),
    "timeline": ("mpi4jax.timeline", "merge the timelines of the ranks of a job"),
}

# How Open MPI marks a line of a rank.
_TAG = re.compile(rb"\[[^][\n]*?,(\d+)\]<(?:stdout|stderr)>: ?")
# Reports of mpi4jax begin with their rank.
_REPORT = re.compile(rb"r\d+ \| ")


def find_mpiexec(python: str) -> str:
    """Return the mpiexec of the MPI that mpi4py loads: it too looks in python's environment
    first."""
    if name := os.environ.get("MPIEXEC"):
        return name
    path = os.pathsep.join([os.path.dirname(python), *os.get_exec_path()])
    mpiexec = shutil.which("mpiexec", path=path)
    if mpiexec is None:
        raise SystemExit(f"mpi4jax run: found no mpiexec beside {python} or on PATH; load an MPI")
    return mpiexec


def prefix_of(python: str) -> dict[str, str]:
    """How Open MPI 4.1 from PyPI finds itself. Its mpiexec is a wrapper that says so to ranks."""
    folder = Path(python).parent
    return {"OPAL_PREFIX": str(folder.parent)} if (folder / "orterun_wrapper").exists() else {}


def with_python(command: list[str]) -> list[str]:
    """Return the command of a program; one that ends with .py runs under this Python."""
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _prefixes(mpiexec: str) -> list[str]:
    """Return the options with which an mpiexec says which rank has written a line."""
    words = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in words or "OpenRTE" in words:
        return ["--tag-output"]
    return ["-prepend-pattern", "r%r | "] if "HYDRA" in words or "Intel" in words else []


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy lines; a line of a rank begins with it, in the place of Open MPI's mark."""
    for line in source:
        first, *tagged = _TAG.split(line)
        for rank, text in zip(tagged[::2], tagged[1::2], strict=True):
            mark = b"" if _REPORT.match(text) else b"r%s | " % rank
            target.write(mark + text.rstrip(b"\n") + b"\n")
        if first:
            target.write(first)
        target.flush()


def run(
    ranks: int, command: list[str], *, plain: bool = False, env: dict[str, str] | None = None
) -> int:
    """Run a command on ranks, and return its exit status.

    Args:
        ranks: number of ranks.
        command: program and its arguments.
        plain: whether lines are written as the ranks write them.
        env: environment variables of the ranks, in addition to this process's own.
    """
    mpiexec = find_mpiexec(sys.executable)
    options = [] if plain else _prefixes(mpiexec)
    pipe = None if plain else subprocess.PIPE
    process = subprocess.Popen(
        [mpiexec, *options, "-n", str(ranks), *command],
        env={**ENVIRONMENT, **prefix_of(sys.executable), **os.environ, **(env or {})},
        stdout=pipe,
        stderr=pipe,
    )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to mpiexec, too
    ends = [(process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)]
    copies = [threading.Thread(target=_copy, args=pair) for pair in ends if pair[0]]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    status = process.wait()
    return 128 - status if status < 0 else status


def _file_of(module: str) -> Path:
    """Return the file of a module of a package, which is not imported."""
    package, _, name = module.partition(".")
    found = importlib.util.find_spec(package)
    folders = (found.submodule_search_locations if found else None) or []
    return next(path for folder in folders if (path := Path(folder, f"{name}.py")).exists())


def main() -> int:
    parser = argparse.ArgumentParser(prog="mpi4jax", description="Run programs of mpi4jax.")
    commands = parser.add_subparsers(dest="name", required=True)
    words = "start a program on several ranks of this host"
    start = commands.add_parser("run", help=words, description=f"{words.capitalize()}.")
    start.add_argument("-n", dest="ranks", type=int, required=True, help="number of ranks")
    start.add_argument("--plain", action="store_true", help="do not mark lines with their rank")
    start.add_argument(
        "--jax-distributed",
        action="store_true",
        help="start jax.distributed too: JAX then sees the processes and devices of all ranks",
    )
    start.add_argument("-m", dest="is_module", action="store_true", help="run a Python module")
    start.add_argument("command", metavar="program", help="a program, or a file that ends with .py")
    start.add_argument("arguments", nargs=argparse.REMAINDER)
    for name, (_, words) in MODULES.items():
        commands.add_parser(name, help=words, add_help=False)
    options, rest = parser.parse_known_args()
    if options.name == "check" and not all(word.startswith("-") for word in rest):
        return mpi4jax_check.main(rest)
    if options.name in MODULES:
        module = MODULES[options.name][0]
        program = ["-m", module]
        if options.name == "timeline":  # its file alone, because there may be no MPI
            program = ["-P", str(_file_of(module))]
        os.execv(sys.executable, [sys.executable, *program, *rest])
    if rest:
        start.error(f"unrecognized arguments: {' '.join(rest)}")
    command = [options.command, *options.arguments]
    command = [sys.executable, "-m", *command] if options.is_module else with_python(command)
    env = {"MPI4JAX_JAX_DISTRIBUTED": "1"} if options.jax_distributed else {}
    return run(options.ranks, command, plain=options.plain, env=env)


if __name__ == "__main__":
    sys.exit(main())
