"""What watching costs a rank: wake-ups of its threads, files and bytes, by the number of ranks.

    python benches/micro/watch.py 2 8 64

One job each. Its ranks do nothing for QUIET seconds, and then the last one keeps the others waiting
for LATE seconds. Needs Linux.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import mpirun

QUIET, LATE = 10, 40

PROGRAM = f"""
import glob, json, os, sys, time
import numpy as np
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt

folder = sys.argv[1]
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

def wakes():
    total = 0
    for task in glob.glob("/proc/self/task/*"):
        if open(task + "/comm").read().startswith("mpi4jax-"):
            lines = open(task + "/status").read().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total

nt.barrier(); mpi4jax.flush()
before = wakes(); time.sleep({QUIET}); quiet = wakes() - before
nt.barrier(); mpi4jax.flush()
before, begin = wakes(), time.time()
if rank == size - 1:
    time.sleep({LATE - 2})
    names = glob.glob(f"{{folder}}/mpi4jax-*/*/*")
    bytes = sum(os.stat(name).st_size for name in names)
    print("files", json.dumps([len(names), bytes]), flush=True)
    time.sleep(2)
nt.barrier(); mpi4jax.flush()
waiting = wakes() - before
print("wakes", json.dumps([rank, quiet, waiting, begin]), flush=True)
"""


def measure(ranks: int, folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    begin = time.time()
    command = [sys.executable, str(program), str(folder)]
    job = mpirun.captured(ranks, command, cwd=folder, time_limit=900, env=env)
    end = time.time()
    assert job.returncode == 0, job.stderr
    lines = [line.split(" ", 1) for line in job.stdout.splitlines()]
    wakes = sorted(json.loads(text) for name, text in lines if name == "wakes")
    ((files, size),) = (json.loads(text) for name, text in lines if name == "files")
    started = min(at for *_, at in wakes) - begin - QUIET - 5
    ended = end - begin - started - QUIET - 5 - LATE
    print(f"{ranks} ranks: {started:.0f} s to start, {ended:.0f} s to end")
    for name, place, seconds in (("nothing waits", 1, QUIET), ("they wait", 2, LATE)):
        rates = [of[place] / seconds for of in wakes]
        others = rates[1:-1] or rates
        print(
            f"  wake-ups a second while {name}: rank 0 {rates[0]:.2f}, "
            f"others {min(others):.2f} to {max(others):.2f}"
        )
    print(
        f"  {files} files, {size} bytes; left at the end: {len(list(folder.glob('mpi4jax-*/*/*')))}"
    )
    print(
        *(f"  {line}" for line in job.stderr.splitlines() if "mpi4jax:" in line),
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
            measure(count, Path(name))
