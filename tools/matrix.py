"""Runs the tests here and in the environments that users have, built the way users build.

    python tools/matrix.py [any option of pytest]

Here: what HERE lists. Then a selection in the rows of MATRIX, each in an environment of its own
with a wheel that pip built from the source distribution, in isolation, for an MPI from PyPI.
MPI4JAX_TEST_ALL=1 asks for everything on 1 to 4 and 8 ranks, with XLA's compiler as users have it.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mpirun import STOPPED, end_jobs_at_sigterm
from run_tests import ALL, ROOT, Results, run_tests

CACHE = ROOT / ".cache"


def files(names: str) -> list[str]:
    return [f"tests/ranks/test_{name}.py" for name in names.split()]


# How often, and with what. Errors at trace time need no job; values and order depend on how many
# others there are, roots and halos and communicators also on whether there are any, or a middle.
EVERY_RANK = ["tests/ranks"]
ANY_ROOT = "tests/ranks/test_ops.py::test_any_root"
HERE = {
    2: EVERY_RANK,
    3: files("ops order ad_oracle any_source"),
    1: [*files("halo comms jit docstrings tokens"), ANY_ROOT],
    4: [*files("halo comms status"), ANY_ROOT],
}
if ALL:
    HERE = dict.fromkeys((1, 2, 3, 4, 8), EVERY_RANK)
# Beside them: most of their time the jobs that these start wait for something.
STARTING_JOBS = ["tests/unit", "tests/jobs", "tests/gpu"]

# What depends on JAX's version, and on the MPI; on 2 ranks, and beside it without mpiexec.
WAYS = [f"tests/ranks/test_ops.py::test_{test}" for test in ("ways_to_call", "moves_every_bit")]
OF_JAX = (
    [*WAYS, *files("order ad_oracle ad_order jit")],
    ["tests/unit", "tests/jobs/test_aborts.py"],
)
OF_MPI = files("ops order status"), ["tests/jobs/test_faults.py"]


class Row(NamedTuple):
    """An environment, and what runs in it."""

    python: str  # "" is this one
    jax: str  # "" is the newest for that Python
    mpi: str
    tests: tuple[list[str], list[str]]
    quick_compiler: bool

    def __str__(self) -> str:
        python = self.python or "{}.{}".format(*sys.version_info)
        return f"python{python}-jax{self.jax or '-newest'}-{self.mpi}"


MATRIX = [
    Row("", "0.7.0", "openmpi", OF_JAX, not ALL),
    Row("3.12", "", "openmpi", OF_JAX, False),
    Row("3.13", "", "mpich", OF_MPI, not ALL),
]

# What the wheels are made of.
SOURCES = [
    *("Cargo.*", "build.rs", "pyproject.toml", "setup.py", "MANIFEST.in", "build_support/*.py"),
    *("src/**/*", "python/**/*.py", "python/**/*.pyi"),
]


def call(*command: str | Path, **environment: str) -> None:
    """Run a command that must succeed; its output is shown only if it does not."""
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode != 0:
        raise SystemExit(f"{process.stdout}\nfailed: {' '.join(map(str, command))}")


def sources_hash() -> str:
    files = {file for pattern in SOURCES for file in ROOT.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files - {ROOT / "python/mpi4jax/_build_info.py"}):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def build_wheel(mpi: str) -> Path:
    """The wheel for an MPI from PyPI, by way of the source distribution."""
    folder = CACHE / "wheels" / mpi / sources_hash()
    if not folder.exists():
        print(f"building the source distribution and its wheel for {mpi}", flush=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        sdist, wheel = folder.parent / "sdist", folder.parent / "wheel"
        call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", sdist)
        call(
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", wheel),
            next(sdist.glob("*.tar.gz")),
            MPI4JAX_BUILD_MPI=mpi,
            CARGO_TARGET_DIR=str(ROOT / "target" / "sdist"),
        )
        wheel.rename(folder)
    return next(folder.glob("*.whl"))


def find_python(version: str) -> str | None:
    """A Python of that version which can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}*/bin/python{version}")]
    for python in map(str, filter(None, candidates)):
        # A shim of pyenv is there also where it has nothing to run.
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None


def environment(name: str, python: str, jax: str, wheel: Path) -> str:
    """The Python of an environment with the wheel in it."""
    folder = CACHE / "venvs" / name
    stamp = folder / "installed.txt"
    installed = f"{wheel.parent.name} {jax}"
    if not stamp.exists() or stamp.read_text() != installed:
        print(f"installing {name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        call(python, "-m", "venv", "--without-pip", folder)
        pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
        pins = [f"jax=={jax}", f"jaxlib=={jax}"] if jax else []
        call(*pip, "install", f"{wheel}[test]", *pins)
        stamp.write_text(installed)
    return str(folder / "bin" / "python")


def prepared(row: Row) -> str | None:
    """The Python of a row's environment; None: there is no such Python."""
    python = find_python(row.python) if row.python else sys.executable
    return python and environment(str(row), python, row.jax, build_wheel(row.mpi))


def main() -> int:
    end_jobs_at_sigterm()
    options, results = sys.argv[1:], Results()

    def jobs_and_environments() -> tuple[Results, list[str | None]]:
        jobs = run_tests(0, [*STARTING_JOBS, *options], quick_compiler=not ALL)
        return jobs, [prepared(row) for row in MATRIX]

    with ThreadPoolExecutor(2) as pool:
        try:
            beside = pool.submit(jobs_and_environments)
            for ranks, arguments in HERE.items():
                results.add(run_tests(ranks, [*arguments, *options], quick_compiler=not ALL))
            jobs, pythons = beside.result()
            results.add(jobs)
            for row, python in zip(MATRIX, pythons, strict=True):
                if python is None:
                    reason = f"there is no Python {row.python} here"
                    results.skipped.append((str(row), "all", reason))
                    continue
                run = functools.partial(
                    run_tests, python=python, name=str(row), quick_compiler=row.quick_compiler
                )
                on_two_ranks, without_mpiexec = row.tests
                beside_it = pool.submit(run, 0, [*without_mpiexec, *options])
                results.add(run(2, [*on_two_ranks, *options]))
                results.add(beside_it.result())
        except BaseException:
            STOPPED.set()
            raise
    results.report()
    return 1 if results.failed or not results.passed else 0


if __name__ == "__main__":
    sys.exit(main())
