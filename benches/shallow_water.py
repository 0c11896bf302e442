"""The shallow-water example on this package and on mpi4jax 0.9.1, in turns.

python benches/shallow_water.py --size 3600 1800 --steps 50
"""

import argparse
import re
import statistics
import subprocess
import sys

from contenders import ROOT, environment, reference_python
from report import NEW, OLD

import mpirun


def steps_per_second(python: str, ranks: int, arguments: list[str]) -> float:
    script = [str(ROOT / "examples" / "shallow_water.py"), "--benchmark", *arguments]
    if python != sys.executable:
        script.insert(0, str(ROOT / "benches" / "on_reference.py"))
    command = [mpirun.find_mpiexec(python), "-n", str(ranks), python, *script]
    job = subprocess.run(
        command, env=environment(python), check=True, stdout=subprocess.PIPE, text=True
    )
    return float(re.search(r"([\d.]+) steps per second", job.stdout)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs=2, default=["3600", "1800"], metavar=("NX", "NY"))
    parser.add_argument("--steps", default="50")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    pythons = {NEW: sys.executable, OLD: reference_python()}
    arguments = ["--size", *args.size, "--steps", args.steps]
    print("| ranks | mpi4jax, steps/s | 0.9.1, steps/s | ratio of the best | in the rounds |")
    print("| ---: | ---: | ---: | ---: | --- |")
    for ranks in args.ranks:
        speeds = {name: [] for name in pythons}
        for _ in range(args.rounds):
            for name, python in pythons.items():
                speeds[name].append(steps_per_second(python, ranks, arguments))
        new, old = speeds.values()
        ratios = sorted(a / b for a, b in zip(new, old, strict=True))
        print(
            f"| {ranks} | {max(new):.1f} | {max(old):.1f} | {max(new) / max(old):.2f} "
            f"| {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
