"""The shallow-water example on this package and on mpi4jax 0.9.1, in turns: with messages between
pairs of ranks on both, and with halo_exchange on this one.

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

    arguments = ["--size", *args.size, "--steps", args.steps]
    contenders = {
        f"{OLD}": (reference_python(), arguments),
        f"{NEW}": (sys.executable, arguments),
        f"{NEW}, halo_exchange": (sys.executable, [*arguments, "--halo"]),
    }
    print("| ranks | version | steps/s | ratio of the best | in the rounds |")
    print("| ---: | --- | ---: | ---: | --- |")
    for ranks in args.ranks:
        speeds = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, (python, options) in contenders.items():
                speeds[name].append(steps_per_second(python, ranks, options))
        old = speeds[OLD]
        for name, new in speeds.items():
            ratios = sorted(a / b for a, b in zip(new, old, strict=True))
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
            print(
                f"| {ranks} | {name} | {max(new):.1f} | {max(new) / max(old):.2f} | {spread} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
