"""Seven ratios that matter, in two minutes: `make bench-quick`.

    python benches/suite/quick.py           # compares with quick.json; names what is 10 % worse
    python benches/suite/quick.py --keep    # and writes quick.json anew

A ratio is of two times of one run, taken in turns, so it says more about this package than about
the machine. It counts as worse if not only its median but also its lower quartile is 10 % above the
median that was kept. A ~ marks a median that is not known to 5 %. If one is worse, the exit status
is 1 on the machine of quick.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import measurements
from contenders import Job
from measurements import NEW
from run import LARGE, enough

KEPT = Path(__file__).with_name("quick.json")
WORSE = 1.10
# Name: operation, bytes, which time, divided by the sum of which.
FIGURES = {
    "an eager allreduce / a jitted one": ("allreduce", 4, "eager", ["jit"]),
    "an eager allreduce with a token / a jitted one with a token": (
        "allreduce", 4, "eager, token", ["jit, token"],
    ),
    "a jitted allreduce / (a jitted call of nothing + MPI)": (
        "allreduce", 4, "jit", ["noop", "raw"],
    ),
    "an allreduce in a jitted loop / MPI": ("allreduce", 4, "loop", ["raw"]),
    "a sendrecv of 64 KiB in a jitted loop / MPI": ("sendrecv", 2**16, "loop", ["raw"]),
    "a jitted allgather of 16 MiB / MPI": ("allgather", 2**24, "jit", ["raw"]),
    "a jitted allreduce of 16 MiB, donated / MPI": ("allreduce", 2**24, "donated", ["raw"]),
}  # fmt: skip


def ratios(job: Job, figure, rounds: int, seconds: float) -> list[float]:
    """Of a figure, in each round."""
    op, nbytes, above, below = figure
    modes = [above, *below]
    for mode in modes:
        if nbytes >= LARGE and mode != "raw":
            job.warm(mode, op, nbytes)
    counts = {mode: enough(job, mode, op, nbytes, seconds) for mode in modes}
    found = []
    for _ in range(rounds):
        times = {mode: job.measure(mode, op, nbytes, counts[mode])[0] for mode in modes}
        found.append(times[above] / sum(times[mode] for mode in below))
    return found


def worse(measured: dict[str, list[float]], kept: dict[str, float]) -> list[str]:
    """Return which figures have become 10 % worse, in words."""
    found = []
    for name, values in measured.items():
        median, low, _ = measurements.spread(values)
        if name in kept and low > WORSE * kept[name]:
            found.append(f"{name}: {median:.2f}, it was {kept[name]:.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="write quick.json anew")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.02, help="of one measurement")
    parser.add_argument("--output", type=Path, help="write the medians there too")
    args = parser.parse_args()

    begin = time.monotonic()
    with Job(NEW, sys.executable, 2) as job:
        machine = measurements.machine(job.versions)
        measured = {
            name: ratios(job, figure, args.rounds, args.seconds) for name, figure in FIGURES.items()
        }
    for name, values in measured.items():
        ratio = measurements.ratio_name(*measurements.spread(values), measurements.interval(values))
        print(f"{name:60} {ratio}")
    print(f"{machine}; {time.monotonic() - begin:.0f} s")
    medians = {name: round(measurements.spread(values)[0], 3) for name, values in measured.items()}
    now = json.dumps({"machine": machine, "ratios": medians}, indent=1) + "\n"
    if args.output:
        args.output.write_text(now)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": "", "ratios": {}}
    named = worse(measured, kept["ratios"])
    for words in named:
        print(f"worse: {words}")
    if args.keep:
        KEPT.write_text(now)
        return 0
    if named and kept["machine"] != machine:
        print(f"quick.json is of another machine: {kept['machine']}")
    return int(bool(named) and kept["machine"] == machine)


if __name__ == "__main__":
    sys.exit(main())
