"""What runs in the benchmarks: this package and mpi4jax 0.9.1, each in jobs of its own."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "build_support")]

import mpirun  # noqa: E402
import toolchain  # noqa: E402

REFERENCE = "mpi4jax==0.9.1.post2"
CACHE = ROOT / ".cache" / "benches"
PATIENCE = 120  # seconds to wait for one answer
WORKER = Path(__file__).with_name("worker.py")


def mpicc() -> str:
    mpi = toolchain.find_mpi()
    if mpi is None:
        raise SystemExit("the benchmarks need an mpicc, for raw.c and for mpi4jax 0.9.1")
    return mpi.mpicc


def raw_library() -> Path:
    """raw.c as a shared library."""
    source = Path(__file__).with_name("raw.c")
    key = hashlib.sha256(source.read_bytes() + mpicc().encode()).hexdigest()[:8]
    library = CACHE / f"raw-{key}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([mpicc(), "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def environment_with(package: str, name: str, depends_on: list) -> tuple[Path, list[str]]:
    """Return the directory of an environment that is made once, and the pip that fills it.

    There is no pip if it is there already: who has filled it makes the file `complete`.
    """
    key = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:8]
    folder = CACHE / f"{name}-{key}"
    if (folder / "complete").exists():
        return folder, []
    print(f"Installing {package} in {folder.relative_to(ROOT)} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    return folder, [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]


def reference_python() -> str:
    """Return the Python of an environment with mpi4jax 0.9.1, and all else as in this one."""
    same = ["jax", "jaxlib", "numpy", "mpi4py"]
    same += [name for name in toolchain.PYPI_MPIS if toolchain.pypi_wheel(mpicc()) == name]
    same = [f"{name}=={importlib.metadata.version(name)}" for name in same]
    depends_on = [REFERENCE, "source", mpicc(), sys.version, same]
    folder, pip = environment_with(REFERENCE, "reference", depends_on)
    python = str(folder / "bin" / "python")
    if not pip:
        return python
    # With what it is built with: not with pip's build isolation, which has no MPI.
    build = ["setuptools>=82.0.1", "wheel", "nanobind>=2"]
    subprocess.run([*pip, *same, *build], check=True)
    compiler = folder / "bin" / "mpicc"
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MPICC": str(compiler if compiler.exists() else mpicc()),
    }
    environment["CC"] = environment["MPICC"]
    options = ["--no-build-isolation", "--no-deps", "--no-binary", "mpi4jax"]
    subprocess.run([*pip, *options, REFERENCE], check=True, env=environment)
    (folder / "complete").touch()
    return python


def environment(python: str, more: Mapping[str, str] = {}) -> dict[str, str]:
    """For jobs of `python`: what the tests' jobs get, and the mpiexec of its own environment."""
    path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
    outside = mpirun.environment_outside_mpi()
    if python != sys.executable:
        outside.pop("PYTHONPATH", None)
    return {**outside, "PATH": path, **more}


class Job:
    """The ranks of one contender, which measure when told to and sleep in between."""

    def __init__(
        self,
        contender: str,
        python: str,
        ranks: int,
        mpiexec: Sequence[str] = (),
        options: Sequence[str] = (),
        worker: Path = WORKER,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] = {},
        patience: int = PATIENCE,
    ):
        self.contender, self.patience = contender, patience
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "socket")
        if worker == WORKER:
            arguments = [str(raw_library())]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            command = [*(mpiexec or [mpirun.find_mpiexec(python)]), *options]
            command += ["-n", str(ranks), python, str(worker), path]
            command += [contender, *arguments]
            self.process = subprocess.Popen(
                command, env=environment(python, env), start_new_session=True
            )
            self.files = [self.accept(listener) for _ in range(ranks)]
        greetings = [self.hear(file) for file in self.files]
        self.versions = greetings[0]["versions"]

    def accept(self, listener):
        listener.settimeout(1)
        for _ in range(self.patience):
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(self.patience)
                return connection.makefile("rw")
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with status {self.process.returncode}")
        mpirun._kill(self.process)
        raise RuntimeError(f"it was not ready after {self.patience} s")

    def hear(self, file) -> dict:
        line = file.readline()
        if not line:
            raise RuntimeError(f"{self.contender} has ended")
        return json.loads(line)

    def measure(self, mode: str, op: str, nbytes: int, iterations: int) -> tuple[float, float]:
        """Seconds and page faults of one operation, on the rank that has most of each."""
        answers = self.ask("measure", mode=mode, op=op, nbytes=nbytes, iterations=iterations)
        return max(a["seconds"] for a in answers), max(a["faults"] for a in answers)

    def warm(self, mode: str, op: str, nbytes: int, seconds: float = 0.5) -> None:
        """Let it run until page faults are steady, or for so long."""
        self.ask("warm", mode=mode, op=op, nbytes=nbytes, seconds=seconds)

    def ask(self, function: str, **arguments) -> list:
        """Return what a function of worker.py returns on each rank."""
        for file in self.files:
            file.write(json.dumps({"function": function, **arguments}) + "\n")
            file.flush()
        return [self.hear(file)["answer"] for file in self.files]

    def close(self) -> None:
        for file in self.files:
            file.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            mpirun._kill(self.process)
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
