"""What `MPI4JAX_WAIT=sleep` costs in latency: `python benches/micro/waiting.py`

In each round a job of two ranks with `poll` and one with `sleep`, in turns. A job prints the median
time of an operation, and the median time from when a rank that is late by 10 ms begins an
operation until the other one, which waits for it, has the result. Prints, for each, the medians of
all rounds and the ratio of the two jobs of a round: median, quartiles.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import mpirun

ROUNDS, CALLS, LATE_CALLS, LATE = 7, 2000, 40, 0.01


def measure() -> None:
    import time

    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import mpi4jax.notoken as mpi4jax

    comm = MPI.COMM_WORLD
    x = jnp.ones(2)
    operations = {
        "allreduce": jax.jit(mpi4jax.allreduce),
        "sendrecv": jax.jit(lambda x: mpi4jax.sendrecv(x, x, 1 - comm.rank, 1 - comm.rank)),
    }
    found = {}
    for name, run in operations.items():
        times = np.zeros(CALLS)
        for i in range(-100, CALLS):
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            times[i] = time.perf_counter() - start
        found[name] = np.median(times)
        begins, ends = np.zeros((2, LATE_CALLS))
        for i in range(LATE_CALLS):
            comm.Barrier()
            if comm.rank == 1:
                time.sleep(LATE)
            begins[i] = time.monotonic()  # one clock for both ranks
            jax.block_until_ready(run(x))
            ends[i] = time.monotonic()
        late = comm.bcast(begins, root=1)
        found[f"{name}, the other rank late"] = np.median(ends - late)
    if comm.rank == 0:
        print(json.dumps(found))


def main() -> None:
    jobs = {"poll": [], "sleep": []}
    for _ in range(ROUNDS):
        for how, of_jobs in jobs.items():
            env = {**os.environ, "MPI4JAX_WAIT": how, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "measure"]
            job = mpirun.captured(2, command, cwd=Path.cwd(), env=env, time_limit=300)
            if job.returncode != 0:
                sys.exit(job.stdout + job.stderr)
            of_jobs.append(json.loads(job.stdout.splitlines()[-1]))
    for name in jobs["poll"][0]:
        poll, sleep = (1e6 * np.array([job[name] for job in of_jobs]) for of_jobs in jobs.values())
        low, middle, high = np.percentile(sleep / poll, [25, 50, 75])
        medians = f"poll {np.median(poll):8.1f} us, sleep {np.median(sleep):8.1f} us"
        print(f"{name:30} {medians}, ratio {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
