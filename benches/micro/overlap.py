"""How much of an operation is hidden behind computation, as OSU's benchmarks define it.

    mpiexec -n 2 python benches/micro/overlap.py [--sizes 65536 1048576] [--iterations 30]

As `osu_iallreduce` and `osu_ialltoall` do: first an operation is timed alone, from its start to the
end of the wait; then with a computation of that duration between. What the two take together,
beyond the computation alone, was not hidden:

    overlap = 100 * max(0, 1 - (total - computation) / alone)

Times are medians over the iterations, averaged over the ranks. The computation is on one core.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax

COMM = mpi4jax.default_comm()
# What starts an operation on an array of a block for each rank.
STARTS = {
    "iallreduce": mpi4jax.iallreduce,
    "ialltoall": mpi4jax.ialltoall,
    "iragged_alltoall": lambda x: mpi4jax.iragged_alltoall(
        x, jnp.ones(COMM.size, jnp.int32), COMM.size
    ),
}
SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


def computed(y: Any, rounds: Any) -> Any:
    """Something that takes a time in proportion to ``rounds``, in the caches of one core."""
    return jax.lax.fori_loop(0, rounds, lambda i, y: jnp.sin(y) + 0.5, y)


def median_time(f: Callable[..., Any], *args: Any, iterations: int) -> float:
    """Seconds of a call, averaged over the ranks."""
    times = []
    for i in range(iterations + 3):
        COMM.Barrier()
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        if i >= 3:
            times.append(time.perf_counter() - start)
    return float(COMM.allreduce(statistics.median(times))) / COMM.size


def overlap(start: Callable[..., Any], x: Any, iterations: int) -> tuple[float, float, float]:
    """Seconds alone, seconds with the computation, and how many per cent were hidden."""
    y = jnp.linspace(0, 1, 4096)

    @jax.jit
    def alone(x: Any) -> Any:
        return mpi4jax.wait(start(x))

    compute = jax.jit(computed)

    @jax.jit
    def both(x: Any, y: Any, rounds: Any) -> Any:
        request = start(x)
        z = computed(mpi4jax.after(request, y), rounds)
        return mpi4jax.wait(request, after=z), z

    pure = median_time(alone, x, iterations=iterations)
    # The computation is made as long as the operation.
    many = 2000
    rounds = max(1, round(many * pure / median_time(compute, y, many, iterations=3)))
    rounds = COMM.bcast(rounds)
    computation = median_time(compute, y, rounds, iterations=iterations)
    total = median_time(both, x, y, rounds, iterations=iterations)
    return pure, total, 100 * max(0.0, min(1.0, 1 - (total - computation) / pure))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of each rank")
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    if COMM.rank == 0:
        print(
            f"{COMM.size} ranks, {os.cpu_count()} cores, {MPI.Get_library_version().split(',')[0]}"
        )
        print(f"{'operation':16} {'bytes':>10} {'alone/ms':>10} {'total/ms':>10} {'overlap/%':>10}")
    for name, start in STARTS.items():
        for size in options.sizes:
            items = size // 4 // COMM.size
            shape = (COMM.size * items,) if name == "iallreduce" else (COMM.size, items)
            pure, total, hidden = overlap(start, jnp.ones(shape, jnp.float32), options.iterations)
            if COMM.rank == 0:
                print(
                    f"{name:16} {size:10} {1e3 * pure:10.3f} {1e3 * total:10.3f} {hidden:10.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
