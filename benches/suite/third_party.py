"""Compare third-party and small programs with this package and with mpi4jax 0.9.1: `make bench`.

    python benches/suite/third_party.py                                 # as in `make bench`
    python benches/suite/third_party.py --programs cg acc --ranks 4     # only these, and 4 ranks

The programs are the ocean model Veros, from PyPI, and the ones in benches/programs/on_small.py.
With this package they run with MPI4JAX_NOTOKEN=1, since they are written for mpi4jax 0.8 or newer.
Both contenders are in memory at once and take steps in turns, and their results are compared.
The measured times go into the table of
docs/measurements.md; rows that were not measured again stay if they are of that machine and day.
"""

import argparse
import datetime
import importlib.metadata
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
from contenders import ROOT, Job, environment_with, reference_python
from measurements import KNOWN, NEW, OLD, interval, machine, ratio_of, rounds_of, spread, time_name

# Veros names one version of each; what counts here is that both contenders have the same.
VEROS = "veros==1.7.0"
NEEDED = ["click", "entrypoints", "requests", "scipy", "h5netcdf", "h5py", "pillow", "loguru"]
NEEDED += ["tqdm", "setuptools<81", "cython"]
TRAINING = ["flax", "equinox", "optax"]
ENVIRONMENT = {NEW: {"PYTHONPATH": str(ROOT / "python"), "MPI4JAX_NOTOKEN": "1"}, OLD: {}}
PAGE = ROOT / "docs" / "measurements.md"
BEGIN = "<!-- The table is made by benches/suite/third_party.py: do not edit. -->\n\n"
END = "\n<!-- Here the table ends. -->\n"
# What sums over some thousand cells or weights may differ by after these steps, relatively.
TOLERANCE = 1e-6
TITLES = ["program", "ranks", "time of a step", "with 0.9.1", "0.9.1 / mpi4jax"]


class Program(NamedTuple):
    title: str
    worker: str
    steps: int  # in a round


PROGRAMS = {
    "acc_basic": Program("Veros, `acc_basic`", "on_veros.py", 5),
    "acc": Program("Veros, `acc`", "on_veros.py", 5),
    "nnx": Program("training, `nnx.jit`", "on_small.py", 50),
    "equinox": Program("training, `eqx.filter_jit`", "on_small.py", 50),
    "cg": Program("conjugate gradient, `jax.jit`", "on_small.py", 5),
}


def python_with_programs() -> str:
    """Return the Python of an environment with all programs, on top of the one with mpi4jax
    0.9.1."""
    reference = Path(reference_python())
    needed = NEEDED + [f"{name}=={importlib.metadata.version(name)}" for name in TRAINING]
    folder, pip = environment_with("programs", "programs", [str(reference), VEROS, needed])
    python = str(folder / "bin" / "python")
    if not pip:
        return python
    (below,) = reference.parent.parent.glob("lib/python*/site-packages")
    (here,) = folder.glob("lib/python*/site-packages")
    (here / "reference.pth").write_text(f"{below}\n")
    subprocess.run([*pip, *needed], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", VEROS], check=True)
    mpiexec = reference.with_name("mpiexec")
    if mpiexec.exists():
        (folder / "bin" / "mpiexec").symlink_to(mpiexec)
    (folder / "complete").touch()
    return python


def difference(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two results."""
    a, b = np.array(a), np.array(b)
    return float(np.max(abs(a - b) / np.maximum(abs(b), 1e-30)))


def compare(python: str, name: str, ranks: int, rounds: int, seconds: float):
    """Seconds of a step in each round, of each contender, whose results agree; and versions.

    There are more rounds than that until their ratio is known, if there are seconds left.
    """
    program = PROGRAMS[name]
    worker = ROOT / "benches" / "programs" / program.worker
    with ExitStack() as stack:
        jobs = {}
        for who, env in ENVIRONMENT.items():
            job = Job(who, python, ranks, worker=worker, arguments=[name], env=env, patience=1200)
            stack.callback(job.close)
            job.ask("start")
            jobs[who] = job
        times: dict[str, list[float]] = {who: [] for who in jobs}
        begin = time.monotonic()
        while len(times[NEW]) < rounds or (
            time.monotonic() < begin + seconds
            and interval(rounds_of([times[OLD]], [times[NEW]])) > KNOWN
        ):
            for who, job in jobs.items():
                times[who].append(max(job.ask("step", count=program.steps)))
        results = [job.ask("result")[0] for job in jobs.values()]
        versions = jobs[NEW].versions
    if not (differ := difference(*results)) <= TOLERANCE:
        raise RuntimeError(f"{program.title}: the results differ by {differ:.1e}, relatively")
    print(f"{program.title}: {len(times[NEW])} rounds; the results differ by {differ:.0e}")
    return times, versions


def row(name: str, ranks: int, times: dict[str, list[float]]) -> list[str]:
    """Of the table."""
    medians = [time_name(spread(times[who])[0]) for who in (NEW, OLD)]
    ratio = ratio_of([times[OLD]], [times[NEW]])
    return [PROGRAMS[name].title, str(ranks), *medians, ratio]


def when_and_where(versions: dict) -> str:
    return f"On {datetime.datetime.now(datetime.UTC).date()}; {machine(versions)}."


def merged(text: str, rows: list[list[str]], where: str) -> str:
    """Return a page with the rows in its table, and those that it had if they are from there
    too."""
    before, _, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not end:
        raise ValueError("the page has no place for the table")
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    kept = {(old[0], old[1]): old for old in cells} if where in table else {}
    kept |= {(new[0], new[1]): new for new in rows}
    titles = [program.title for program in PROGRAMS.values()]
    found = [one for one in kept.values() if one[0] in titles]
    found.sort(key=lambda one: (titles.index(one[0]), int(one[1])))
    lines = [*report.grid(TITLES, found), where]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [name for name in PROGRAMS if name != "acc"]
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=default)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12, help="at least")
    parser.add_argument("--seconds", type=float, default=20, help="for more rounds, of each row")
    parser.add_argument("--page", type=Path, default=PAGE, help="with the table")
    args = parser.parse_args()
    python = python_with_programs()
    for name in args.programs:
        for ranks in args.ranks:
            times, versions = compare(python, name, ranks, args.rounds, args.seconds)
            new = row(name, ranks, times)
            print(" | ".join(new), flush=True)
            page = merged(args.page.read_text(), [new], when_and_where(versions))
            args.page.write_text(page)


if __name__ == "__main__":
    main()
