"""What the guard of collectives costs, in both placements of the cores.

    python benches/suite/placements.py --minutes 30 [--ops allreduce sendrecv]

The ranks of a job run on two cores that are near to each other or far apart: cores of one cluster
with a common cache, or of two. A cache line travels several times as long between far ones. On a
machine whose kernel knows its caches, the ranks are bound to a pair of each kind. A virtual machine
does not know them, and its host moves its cores: there each round is sorted by the latency of MPI
in it, measured before and after.

All contenders take turns in each round; a round in which the placement changed counts for none. A
figure is the median of its placement's rounds.
"""

import argparse
import datetime
import itertools
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import measurements
from contenders import Job, reference_python
from measurements import NEW, OLD
from run import ALL, FAILURES, enough

UNCHECKED = "MPI4JAX_CHECK=0"
APART = 1.25  # what the latencies of two placements differ by at least
FEW = 5  # rounds that say nothing about a placement


def pairs() -> dict[str, list[int]]:
    """Return two cores that share a cache, and two that do not, where the kernel knows both."""
    cores = sorted(os.sched_getaffinity(0))
    sharing = {}
    for core in cores:
        caches = Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*")
        last = max(caches, key=lambda cache: (cache / "level").read_text(), default=None)
        sharing[core] = (last / "shared_cpu_list").read_text() if last else ""
    found = {}
    for other in cores[1:]:
        found.setdefault(
            "near" if sharing[other] == sharing[cores[0]] else "far", [cores[0], other]
        )
    return found if len(found) == 2 else {}


def sorted_by_latency(rounds: list[dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of each placement: they are parted where the latencies differ most."""
    ordered = sorted(rounds, key=lambda each: each["raw"])
    steps = [b["raw"] / a["raw"] for a, b in itertools.pairwise(ordered)]
    at = max(range(len(steps)), key=steps.__getitem__, default=0) + 1
    near, far = ordered[:at], ordered[at:]
    if min(len(near), len(far)) < FEW or median(far, "raw") < APART * median(near, "raw"):
        return {"one placement only": ordered}
    return {"near": near, "far": far}


def median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in rounds)


def measure(jobs: dict[str, Job], op: str, counts: dict[str, int]) -> dict[str, float] | None:
    """Return the times of a round, or None if the placement changed in it."""

    def latency() -> float:
        return jobs[NEW].measure("raw", "allreduce", 4, counts["raw"])[0]

    before = latency()
    times = {name: job.measure("loop", op, 4, counts[name])[0] for name, job in jobs.items()}
    after = latency()
    if max(before, after) > APART**0.5 * min(before, after):
        return None
    return {"raw": (before + after) / 2, **times}


def table(op: str, rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the lines of an operation: a row for each placement."""
    lines = []
    for placement, of in rounds.items():
        names = [name for name in of[0] if name != "raw"]
        cells = [op, placement, str(len(of)), f"{median(of, 'raw') * 1e6:.2f}"]
        cells += [f"{median(of, name) * 1e6:.2f}" for name in names]
        for other in names[1:]:
            ratios = [each[NEW] / each[other] for each in of]
            spread = measurements.spread(ratios)
            cells.append(measurements.ratio_name(*spread, measurements.interval(ratios)))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=ALL, default=["allreduce", "sendrecv"])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pause", type=float, default=0, help="seconds between two rounds")
    parser.add_argument("--seconds", type=float, default=0.02, help="of one measurement")
    parser.add_argument("--no-reference", action="store_true", help="leave mpi4jax 0.9.1 out")
    args = parser.parse_args()

    contenders = {NEW: (sys.executable, {}), UNCHECKED: (sys.executable, {"MPI4JAX_CHECK": "0"})}
    if not args.no_reference:
        try:
            contenders[OLD] = reference_python(), {}
        except FAILURES as error:
            print(f"mpi4jax 0.9.1 could not be installed: {error}")
    bound = pairs()
    found: dict[str, dict[str, list[dict[str, float]]]] = {op: {} for op in args.ops}
    for placement, cores in (bound or {"": []}).items():
        with ExitStack() as stack:
            jobs = {}
            for name, (python, env) in contenders.items():
                jobs[name] = stack.enter_context(Job(name, python, 2, env=env))
                if cores:
                    jobs[name].ask("bind", cores=cores)
            counts = {
                op: {name: enough(job, "loop", op, 4, args.seconds) for name, job in jobs.items()}
                for op in args.ops
            }
            latency = enough(jobs[NEW], "raw", "allreduce", 4, args.seconds)
            end = time.monotonic() + 60 * args.minutes / max(1, len(bound))
            while time.monotonic() < end:
                for op in args.ops:
                    times = measure(jobs, op, {"raw": latency, **counts[op]})
                    if times is not None:
                        found[op].setdefault(placement, []).append(times)
                time.sleep(args.pause)
            versions = jobs[NEW].versions
    names = list(contenders)
    head = ["operation of 4 B in a loop", "cores", "rounds", "MPI's allreduce, us"]
    head += [f"{name}, us" for name in names] + [f"{NEW} / {name}" for name in names[1:]]
    print(f"{measurements.machine(versions)}; {datetime.date.today()}")
    print("| " + " | ".join(head) + " |")
    print("| --- | --- |" + " ---: |" * (len(head) - 2))
    for op, rounds in found.items():
        print(*table(op, rounds if bound else sorted_by_latency(rounds[""])), sep="\n")


if __name__ == "__main__":
    main()
