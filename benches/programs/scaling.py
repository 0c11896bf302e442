"""Strong and weak scaling of the shallow-water model: the table of docs/performance.md.

    mpiexec -n 2 python benches/programs/scaling.py --size 3600 1800

Each rank is bound to one core, and XLA computes with one thread there. In each round, the model
runs on the first rank, on the first two, four and so on, in turns; the other ranks wait. Strong
scaling has the given grid on any number of ranks, weak scaling has that grid for each rank.

One rank has both walls of the channel, and each wall is a pass over its arrays. So one rank also
runs with the southern wall alone, which is the work of each of two ranks.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from mpi4py import MPI

COMM = MPI.COMM_WORLD
CORES = sorted(os.sched_getaffinity(0))
if COMM.size > len(CORES):
    raise SystemExit(f"{COMM.size} ranks, and {len(CORES)} cores: each rank needs a core")
os.sched_setaffinity(0, {CORES[COMM.rank]})  # before JAX counts the cores

import jax  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
import shallow_water  # noqa: E402
from shallow_water import Fields, Grid, Model, Parameters  # noqa: E402


def southern_wall(grid: Grid, fields: Fields) -> Fields:
    u, v, h = fields
    return Fields(u.at[0].set(u[1]), v.at[0].set(0.0), h.at[0].set(h[1]))


class Run:
    """A model on the first ranks."""

    def __init__(self, ranks: int, p: Parameters, seconds: float):
        self.ranks, self.p, self.comm = ranks, p, COMM.Split(COMM.rank >= ranks)
        if COMM.rank < ranks:
            self.model = Model(p, self.comm, halo=True)
            self.state = self.model.initial_state()
            # A call also allocates memory: there are many steps to a call.
            for self.steps in (2, 20):
                seconds_per_step = self.time()
            steps = 2 * round(seconds / seconds_per_step / 2)
            self.steps = self.comm.bcast(max(20, steps))
        COMM.Barrier()

    def time(self) -> float:
        """Seconds per step."""
        jax.block_until_ready(self.state)
        self.comm.Barrier()
        begin = time.perf_counter()
        jax.block_until_ready(self.model.advance(self.state, self.steps))
        self.comm.Barrier()
        return (time.perf_counter() - begin) / self.steps


def wait_for_all() -> None:
    """A barrier in which a rank sleeps: one that spins would disturb those that compute."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=2, metavar=("NX", "NY"), default=[360, 180])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one run")
    args = parser.parse_args()
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= COMM.size]
    nx, ny = args.size
    p = Parameters(nx, ny)
    strong = {n: Run(n, p, args.seconds) for n in counts}
    weak = {n: Run(n, replace(p, ny=n * ny, height=n * p.height), args.seconds) for n in counts[1:]}
    shallow_water.walls = southern_wall
    one_wall = Run(1, p, args.seconds)
    runs = (one_wall, *strong.values(), *weak.values())
    times: dict[Run, list[float]] = {run: [] for run in runs}
    for _ in range(args.rounds):
        for run, found in times.items():
            if COMM.rank < run.ranks:
                found.append(run.time())
            wait_for_all()
    if COMM.rank != 0:
        return
    alone, equal = times[strong[1]], times[one_wall]
    print("| cells | ranks | time of a step | to 1 rank | to 1 rank with one wall |")
    print(f"| {nx} x {ny}, one wall | 1 | {milliseconds(equal)} |  |  |")
    for n, run in [*strong.items(), *weak.items()]:
        found, cells = times[run], f"{run.p.nx} x {run.p.ny}"
        ratios = (
            quartiles([a / b for a, b in zip(before, found, strict=True)])
            for before in (alone, equal)
        )
        print(f"| {cells} | {n} | {milliseconds(found)} | {' | '.join(ratios)} |")


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
