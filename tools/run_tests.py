"""Runs tests under mpiexec, or, for those that start jobs themselves, without it.

    python tools/run_tests.py [-n 1,2,3,4] [PATHS] [-k EXPRESSION] [any other option of pytest]
    python tools/run_tests.py -n 0 tests/jobs        # without mpiexec, several at a time

A test passes if it passes on every rank. The log of each rank is kept in a file of its own.
"""

import argparse
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpirun import end_jobs_at_sigterm, environment_outside_mpi, mpirun

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "logs"
# Programs that ranks have compiled for each other (tests/forks/compiled_once.py).
COMPILED = ROOT / ".cache" / "compiled"

ALL = os.environ.get("MPI4JAX_TEST_ALL") == "1"

# Of a whole run, in seconds; each test has its own limit.
TIME_LIMIT = 7200 if ALL else 2700

# Each rank into its own files, for every MPI in the same way: the launcher says who it is.
RANK_COMMAND = (
    'rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}; cd "$0"; '
    'MPI4JAX_TEST_RESULTS="$1/rank$rank.results"; export MPI4JAX_TEST_RESULTS; '
    'log="$1/rank$rank.log"; shift; exec "$@" > "$log" 2>&1'
)

# A rank that has waited in vain has all its threads in C: the timer's is a thread of its own.
ON_RANKS = ["-o", "timeout_method=thread", "-o", "faulthandler_timeout=110"]
# Jobs spend most of their time in waiting. Tests that share what took long to make stay together.
STARTING_JOBS = ["-n", "4", "--dist", "loadgroup"]

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONUNBUFFERED": "1",
    # Ranks share the cores of one machine.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

# Half of a run would be XLA making machine code for programs that run once. The order of a program
# and who overwrites whose memory are decided before that.
QUICK_COMPILER = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # no module of its own for each few functions
)


def sleeping_yield() -> dict[str, str]:
    """Return what makes ranks that wait sleep: they would take the cores from those that they wait
    for."""
    compiler, source = shutil.which("cc"), ROOT / "tools" / "yield.c"
    if compiler is None:
        return {}
    library = ROOT / ".cache" / "yield.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{threading.get_native_id()}")
        subprocess.run([compiler, "-O", "-shared", "-fPIC", "-o", made, source], check=True)
        made.rename(library)
    return {"LD_PRELOAD": str(library)}


@dataclass
class Results:
    """What became of each test of each run, the runs named like `n=2`."""

    passed: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, other: "Results") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def fail_what_never_ran(self) -> None:
        """Count tests as failed that are for numbers of ranks with which no run was made."""
        ran = {test.partition("[")[0] for _, test in [*self.passed, *self.failed]}
        others = {
            test.partition("[")[0]: reason
            for _, test, reason in self.skipped
            if reason.startswith("for n")
        }
        self.failed += [
            (f"no run ({why})", test) for test, why in others.items() if test not in ran
        ]

    def counts(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"

    def report(self) -> None:
        """Names of what was skipped and what failed; the counts alone on the last line."""
        skipped: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for run, test, reason in self.skipped:
            reason = re.sub(r", here n=\d+$", "", reason)
            skipped.setdefault((test.partition("[")[0], reason), []).append((run, test))
        for (function, reason), places in skipped.items():
            runs, cases = dict.fromkeys(run for run, _ in places), {test for _, test in places}
            name = cases.pop() if len(cases) == 1 else f"{function} ({len(cases)} cases)"
            print(f"skipped: {name}: {reason}: in {'; '.join(runs)}")
        for run, test in self.failed:
            print(f"FAILED: {test} in {run}")
        print(self.counts(), flush=True)


def merge(run: str, folder: Path) -> Results:
    """Return one result per test, the worst of all ranks."""
    outcomes: dict[str, set[str]] = {}
    reasons: dict[str, str] = {}
    for file in folder.glob("rank*.results"):
        of_rank: dict[str, str] = {}
        for line in file.read_text().splitlines():
            outcome, test, reason = line.split("\t")
            # A failed teardown comes after a passed call, and a later pass must not hide it.
            if of_rank.get(test) != "failed":
                of_rank[test] = outcome
            reasons[test] = reason or reasons.get(test, "")
        for test, outcome in of_rank.items():
            outcomes.setdefault(test, set()).add(outcome)
    results = Results()
    for test, seen in outcomes.items():
        if seen & {"failed", "started"}:
            results.failed.append((run, test))
        elif seen == {"skipped"}:
            results.skipped.append((run, test, reasons[test]))
        else:
            results.passed.append((run, test))
    return results


def show(log: Path) -> None:
    """What went wrong on one rank: pytest's report, or the end of the log where there is none."""
    text = log.read_text(errors="replace").strip() if log.exists() else "(no log)"
    report = re.search(r"^=+ (FAILURES|ERRORS) =+$.*", text, re.MULTILINE | re.DOTALL)
    if report:
        print(f"----- {log.relative_to(ROOT)}\n{report[0]}")
    elif text and not re.search(r"^=+ \d+ (passed|skipped).* =+\Z", text, re.MULTILINE):
        print(f"----- the end of {log.relative_to(ROOT)}\n" + "\n".join(text.splitlines()[-80:]))


@functools.cache
def known_flags(python: str) -> str:
    """Return the flags of QUICK_COMPILER that jaxlib has: XLA does not start with a flag unknown
    to it."""

    def known(flag: str) -> bool:
        environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flag}
        command = [python, "-c", "import jax; jax.devices()"]
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0

    return " ".join(filter(known, QUICK_COMPILER))


def run_tests(
    ranks: int,
    arguments: list[str],
    *,
    python: str = sys.executable,
    name: str = "",
    time_limit: float = TIME_LIMIT,
    quick_compiler: bool = True,
    path: str = "",
    share: int | None = None,
) -> Results:
    """Return one run of pytest on a number of ranks, with another PATH if one is given.

    Its share is of the cases that no run has all of (tests/conftest.py).
    """
    run = " ".join(filter(None, [name, f"n={ranks}"]))
    folder = LOGS / re.sub(r"[^\w.=-]+", "-", run)
    LOGS.mkdir(parents=True, exist_ok=True)
    lock = open(f"{folder}.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would mix their results: the second waits
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **ENVIRONMENT,
        **sleeping_yield(),
        **os.environ,
        **({"PATH": path} if path else {}),
    }
    # Else every rank of every job would compile mpi4jax's Python files and the tests once more.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if quick_compiler:
        environment.setdefault("XLA_FLAGS", known_flags(python))
        COMPILED.mkdir(parents=True, exist_ok=True)
        environment.setdefault("MPI4JAX_TEST_COMPILED", str(COMPILED))
    environment.setdefault("MPI4JAX_TEST_SHARE", str(ranks if share is None else share))
    how = ON_RANKS if ranks else STARTING_JOBS
    command = [python, "-m", "pytest", "-v", "-ra", *how, *arguments]
    if not ranks:
        environment = {**environment_outside_mpi(), **environment}
    start = time.monotonic()
    with open(folder / "mpiexec.log", "w") as log:
        status = mpirun(
            ranks,
            ["sh", "-c", RANK_COMMAND, str(ROOT), str(folder), *command],
            python=python,
            time_limit=time_limit,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    results = merge(run, folder)
    if status is None:
        results.failed.append((run, f"the whole run: stopped after {time_limit:g} s"))
    elif status != 0 and not results.failed:
        results.failed.append((run, f"the whole run: mpiexec's status is {status}"))
    if results.failed:
        for log_of_rank in sorted(folder.glob("rank*.log")):
            show(log_of_rank)
        show(folder / "mpiexec.log")
    lock.close()
    print(f"{run}: {results.counts()} ({time.monotonic() - start:.0f} s)", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", default="1,2,3,4", metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS")
    options, arguments = parser.parse_known_args()
    end_jobs_at_sigterm()
    results = Results()
    for ranks in options.n.split(","):
        results.add(run_tests(int(ranks), arguments, time_limit=options.time_limit))
    results.report()
    return 1 if results.failed or not results.passed else 0


if __name__ == "__main__":
    sys.exit(main())
