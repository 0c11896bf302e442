"""Which job a process belongs to: a name that its ranks share, and no other job has.

It is found without messages, because some ranks may import the package late, or never. In doubt,
each rank takes its own name: ranks without a common directory are better than two jobs with one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import _native
from .._setup.gpus import LOCAL_RANKS

# Launchers, whose child processes are ranks. There may be shells between a launcher and a rank. A
# rank whose parent was a launcher exits when the launcher does.
LAUNCHERS = (
    "hydra_pmi_proxy", "slurmstepd", "prterun", "prted", "orted", "mpirun", "mpiexec",
    "mpiexec.hydra", "mpiexec.gforker",
)  # fmt: skip
# Options of Hydra's proxies that name the mpiexec of their job, and the job's number.
_HYDRA = ("--control-port", "--upstream-host", "--upstream-port", "--pgid")


def _ancestors() -> Iterator[tuple[int, str]]:
    """Yield the process number and the name of the parent, of its parent, and so on."""
    pid = os.getppid()
    for _ in range(16):
        process = _native.process(pid)
        if process is None:
            return
        yield pid, process[1]
        pid = process[0]


def _start(pid: int) -> str:
    """Return when a process was started, in units of the operating system."""
    process = _native.process(pid)
    return str(process[2]) if process else ""


def _options(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return "-".join(v for k, v in itertools.pairwise(words) if k in _HYDRA)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return _native.process_space()  # macOS has no other one


def _space() -> str:
    """Return a name that processes share if they are on one machine and see each other's process
    numbers."""
    with contextlib.suppress(OSError):
        return _digest(_boot(), os.readlink("/proc/self/ns/pid"))
    return _native.process_space()


# The number of ranks on this host, and in all, in variables of Open MPI and Hydra.
_SIZES = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


def on_one_host() -> bool:
    """Return whether the launcher says that all ranks are on this host."""
    env = os.environ
    return env.get("SLURM_STEP_NUM_NODES") == "1" or any(
        local in env and env[local] == env.get(everywhere) for local, everywhere in _SIZES
    )


def _launched() -> str:
    """Return the launcher's name for the job, or ``""``."""
    env = os.environ
    if name := env.get("PMIX_NAMESPACE"):
        if not on_one_host():
            return name
        # Launchers in containers may have equal host names and pids, and choose equal job names.
        # But all ranks of a host have the same server, on a port that only it has.
        server = next((v for k, v in sorted(env.items()) if k.startswith("PMIX_SERVER_URI")), "")
        return f"{name}-{_digest(_boot(), server) if server else _space()}"
    slurm = "-".join(filter(None, (env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID"))))
    pid, name = next(((p, n) for p, n in _ancestors() if n in LAUNCHERS), (0, ""))
    if name == "hydra_pmi_proxy":
        # The server may have started several jobs in one Slurm allocation.
        with contextlib.suppress(OSError):
            if options := _options(pid):
                return "-".join(filter(None, ("hydra", slurm, options)))
    if name == "slurmstepd" and slurm:
        return f"slurm-{slurm}"
    # HPE's PALS and Flux have processes on a host that may start ranks of several jobs.
    return next(filter(None, map(env.get, ("PALS_APID", "FLUX_JOB_ID", "PMI_JOBID"))), "")


def job(size: int) -> str:
    """Return a name that the processes of this job of ``size`` ranks share."""
    name, launcher = _launched(), next((p for p, n in _ancestors() if n in LAUNCHERS), 0)
    if size == 1 or not (name or launcher):
        # One shell, or an unknown launcher, may start many jobs, so this rank gets a job name of
        # its own.
        name = f"{name or os.uname().nodename}-{os.getpid()}-{_space()}"
    elif not name:
        name = f"{os.uname().nodename}-{launcher}-{_start(launcher)}-{_space()}"
    plain = "".join(c if c.isalnum() or c in "-_.@" else "_" for c in name)
    return plain if len(plain) <= 100 else hashlib.sha256(plain.encode()).hexdigest()[:32]


# Launchers' variables for the number of processes and the rank of this process.
_LAUNCHED = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MPI_LOCALNRANKS", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("PALS_LOCAL_SIZE", "PALS_RANKID"),
)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def local_rank(default: int) -> int:
    """Return the number of this process among the processes of its node, if known."""
    return next((n for n in map(_number, LOCAL_RANKS) if n >= 0), default)


def told_ranks() -> tuple[int, str]:
    """Return the least number of ranks that the launcher has started, and the variable that says
    so."""
    # The process of a batch script has the job's number of tasks too, but srun has not started it.
    in_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    told = [
        max((_number(of_all), of_all), (_number(own) + 1, own))
        for of_all, own in _LAUNCHED
        if not (of_all == "SLURM_NTASKS" and in_script)
    ]
    return max(told)


def is_of_srun() -> bool:
    """Return whether srun has started this process, and not an mpiexec inside a job of Slurm."""
    # In a container, slurmstepd may not be visible.
    nearest = next((n for _, n in _ancestors() if n in LAUNCHERS), "slurmstepd")
    return "SLURM_STEP_ID" in os.environ and nearest == "slurmstepd"


def missing_ranks(size: int) -> str:
    """Return a warning if a launcher has started more ranks than MPI has, or ``""``."""
    told, name = told_ranks()
    # Only the process with number 0 reports the problem.
    if told <= size or any(_number(own) > 0 for _, own in _LAUNCHED):
        return ""
    has = f"{size} ranks" if size > 1 else "1 rank"
    return (
        f"the launcher has started {told} ranks ({name}), but MPI has {has}: each is a job of its "
        "own, and they do not communicate. The launcher belongs to another MPI than mpi4py "
        "uses, or starts none (with Slurm: srun --mpi=list); python -m mpi4jax names the MPI"
    )


def _launcher() -> int:
    """Return the number of the process that has started the ranks of this host, or 0."""
    # If ranks are not descendants of the launcher, its process number is in the name of the job.
    name, _, pid = os.environ.get("PMIX_NAMESPACE", "").partition("@")[0].rpartition("-")
    with contextlib.suppress(ValueError):
        process = _native.process(int(pid)) if name.startswith("prterun-") else None
        if process and process[1] == "prterun":
            return int(pid)
    return next((p for p, n in _ancestors() if n in LAUNCHERS), 0)


def shares_board() -> bool:
    """Return whether all ranks are certainly on this host, and map the same board.

    A container may have another ``/dev/shm`` than its host, or the same one.
    """
    with contextlib.suppress(OSError):
        same = os.path.samefile(f"/proc/{_launcher()}/root{_SHARED_MEMORY}", _SHARED_MEMORY)
        return same and on_one_host() and not os.environ.get(_HOST)
    return False


_SHARED_MEMORY = "/dev/shm"  # `place` in `src/board/mod.rs`
# In tests, it makes the ranks of one host appear to be on several hosts.
_HOST = "MPI4JAX_TEST_HOST"


def board(size: int) -> str:
    """Return the name of this job's board on this host."""
    host = os.uname().nodename + os.environ.get(_HOST, "")
    return f"{job(size)}-{_digest(host)}"


def directory(size: int) -> Path:
    """Return the directory for the reports of this job's ranks on this host.

    It is in a directory of this user. Several hosts may share that directory, so each host has a
    directory of its own in it.
    """
    base = os.environ.get("MPI4JAX_DUMP_DIR") or tempfile.gettempdir()
    name = job(size) if size == 1 or on_one_host() else f"{job(size)}+{os.uname().nodename}"
    return Path(base).absolute() / f"mpi4jax-{os.geteuid()}" / name


def rank_names(ranks: list[int]) -> str:
    """Return ranks as words, such as ``ranks 0-2, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    names = (f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
