"""Speed of the operations against raw MPI, mpi4py and mpi4jax 0.9.1, as ratios in one run.

    python benches/run.py                             # allreduce and sendrecv, into benches/results
    python benches/run.py --ops all --bytes 4 1024
    python benches/run.py --output docs/benchmarks

All contenders are started once for each number of ranks. They then take turns, A B A B ..., so
that what else happens on the machine happens to all of them. Measurements are short and many: a
figure is the least of its rounds, and a ratio that of two such figures. The spread is that of the
ratios within the rounds.
"""

import argparse
import json
import sys
from pathlib import Path

import report
from contenders import ROOT, Job, reference_python
from report import NEW, OLD, Key

ALL = ["allgather", "allreduce", "alltoall", "barrier", "bcast"]
ALL += ["gather", "reduce", "scan", "scatter", "sendrecv"]
BYTES = [4, 2**10, 2**16, 2**20, 2**24]
# Who measures what. The no-op has no operation and no size.
MODES = {
    NEW: ["raw", "mpi4py", "noop", "eager", "mpi4jax.jit", "jax.jit", "loop", "chain"],
    OLD: ["eager", "jax.jit", "loop", "chain"],
}
# Only these have results that can go in again.
CHAINED = {"allreduce", "alltoall", "bcast", "scan", "sendrecv"}


def compare(jobs: dict[str, Job], op: str, nbytes: int, rounds: int, seconds: float):
    """{(contender, mode): seconds of one operation in each round}."""
    turns = [(job, mode) for name, job in jobs.items() for mode in MODES[name]]
    turns = [(job, mode) for job, mode in turns if mode != "chain" or op in CHAINED]
    iterations = {turn: enough(*turn, op, nbytes, seconds) for turn in turns}
    times = {(job.contender, mode): [] for job, mode in turns}
    for _ in range(rounds):
        for job, mode in turns:
            time = job.measure(mode, op, nbytes, iterations[job, mode])
            times[job.contender, mode].append(time)
    return times


def enough(job: Job, mode: str, op: str, nbytes: int, seconds: float) -> int:
    """How many iterations take about that long."""
    iterations = 1
    while True:
        passed = iterations * job.measure(mode, op, nbytes, iterations)
        if passed > seconds / 2:
            # A call that loops makes its arrays anew: that must not count for much.
            least = 20 if mode in ("loop", "chain") else 1
            return max(least, round(iterations * seconds / passed))
        iterations *= min(10, round(seconds / passed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=["allreduce", "sendrecv"], help="or: all")
    parser.add_argument("--bytes", nargs="+", type=int, default=BYTES, help="of a rank's block")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.005, help="of one measurement")
    parser.add_argument("--no-reference", action="store_true", help="leave mpi4jax 0.9.1 out")
    parser.add_argument("--output", type=Path, default=ROOT / "benches" / "results")
    args = parser.parse_args()
    operations = ALL if args.ops == ["all"] else args.ops
    if unknown := set(operations) - set(ALL):
        parser.error(f"unknown operations: {', '.join(sorted(unknown))}")

    pythons = {NEW: sys.executable}
    if not args.no_reference:
        pythons[OLD] = reference_python()

    results: dict[Key, list[float]] = {}
    for ranks in args.ranks:
        jobs = {}
        try:
            for contender, python in pythons.items():
                jobs[contender] = Job(contender, python, ranks)
            for op in operations:
                for nbytes in [4] if op == "barrier" else args.bytes:
                    print(f"{op}, {ranks} ranks, {report.size_name(nbytes)}", flush=True)
                    times = compare(jobs, op, nbytes, args.rounds, args.seconds)
                    for (contender, mode), values in times.items():
                        results[Key(ranks, op, nbytes, contender, mode)] = values
        finally:
            for job in jobs.values():
                job.close()

    machine = report.machine(jobs[NEW].versions)
    args.output.mkdir(parents=True, exist_ok=True)
    table = report.markdown(results, machine)
    (args.output / "latency.md").write_text(table)
    raw = {"machine": machine, "results": [[*key, values] for key, values in results.items()]}
    (args.output / "latency.json").write_text(json.dumps(raw))
    report.plot(results, operations[0], args.output / "latency.png")
    print(table)
    print(f"In {args.output}: latency.md, latency.json, latency.png")


if __name__ == "__main__":
    main()
