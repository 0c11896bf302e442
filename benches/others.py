"""Programs of others, unmodified, on this package and on mpi4jax 0.9.1: `benches/others.py`.

The ocean model Veros, from PyPI. Its setups run with MPI4JAX_NOTOKEN=1 here, because it is written
for mpi4jax 0.8 and newer. Both contenders are in memory at once, take steps in turns, and their
results are compared. Programs are started in an environment of their own, in .cache/benches.
"""

import argparse
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import report
from contenders import ROOT, Job, environment_with, reference_python
from report import NEW, OLD

# Veros names one version of each; what counts here is that both contenders have the same.
VEROS = "veros==1.7.0"
NEEDED = ["click", "entrypoints", "requests", "scipy", "h5netcdf", "h5py", "pillow", "loguru"]
NEEDED += ["tqdm", "setuptools<81", "cython"]
ENVIRONMENT = {NEW: {"PYTHONPATH": str(ROOT / "python"), "MPI4JAX_NOTOKEN": "1"}, OLD: {}}
# What sums over some thousand cells and steps may differ by.
TOLERANCE = 1e-6


def python_with_veros() -> str:
    """The Python of an environment with Veros, on top of the one with mpi4jax 0.9.1."""
    reference = Path(reference_python())
    folder, pip = environment_with(VEROS, "programs", [str(reference), VEROS, NEEDED])
    python = str(folder / "bin" / "python")
    if not pip:
        return python
    (below,) = reference.parent.parent.glob("lib/python*/site-packages")
    (here,) = folder.glob("lib/python*/site-packages")
    (here / "reference.pth").write_text(f"{below}\n")
    subprocess.run([*pip, *NEEDED], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", VEROS], check=True)
    mpiexec = reference.with_name("mpiexec")
    if mpiexec.exists():
        (folder / "bin" / "mpiexec").symlink_to(mpiexec)
    (folder / "complete").touch()
    return python


def difference(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two results."""
    a, b = np.array(a), np.array(b)
    return float(np.max(abs(a - b) / np.maximum(abs(b), 1e-30)))


def compare(python: str, setup: str, ranks: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, of each contender; their results agree."""
    worker = Path(__file__).with_name("on_veros.py")
    with ExitStack() as stack:
        jobs = {}
        for name, env in ENVIRONMENT.items():
            job = Job(name, python, ranks, worker=worker, arguments=[setup], env=env, patience=1200)
            stack.callback(job.close)
            job.ask("start")
            jobs[name] = job
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, job in jobs.items():
                times[name].append(max(job.ask("step", count=steps)))
        results = [job.ask("result")[0] for job in jobs.values()]
    if (differ := difference(*results)) > TOLERANCE:
        raise RuntimeError(f"the results differ by {differ:.1e}, relatively")
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setups", nargs="+", default=["acc_basic"], help="of Veros")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    args = parser.parse_args()
    python = python_with_veros()
    for setup in args.setups:
        for ranks in args.ranks:
            times = compare(python, setup, ranks, args.rounds, args.steps)
            ratio = report.ratio_of([times[OLD]], [times[NEW]])
            new, old = (report.spread(times[name])[0] * 1e3 for name in (NEW, OLD))
            words = f"{new:.1f} ms a step, 0.9.1 {old:.1f} ms; 0.9.1 / mpi4jax {ratio}"
            print(f"Veros {setup}, n = {ranks}: {words}", flush=True)


if __name__ == "__main__":
    main()
