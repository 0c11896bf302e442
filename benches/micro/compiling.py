"""What it takes to trace, lower and compile many operations, here and in mpi4jax 0.9.1.

    python benches/micro/compiling.py [ROUNDS]

Jobs of one rank of each package take turns. Each line: milliseconds of CPU in each package, the
median over all rounds, and the median ratio of a round with its range.
"""

import statistics
import subprocess
import sys
import time

OPERATIONS = 400
STEPS = ("trace", "lower", "compile")
REPEATS = 3  # in each job, of which the best counts


def measured():
    """{(function, step): milliseconds} in this process."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import mpi4jax

    allreduce = getattr(mpi4jax, "notoken", mpi4jax).allreduce

    def chained(x):
        for _ in range(OPERATIONS):
            x = allreduce(0.5 * x, op=MPI.SUM)
        return x.sum()

    found = {}
    for name, f in {"forward": chained, "gradient": jax.grad(chained)}.items():
        for _ in range(REPEATS):
            jax.clear_caches()
            stage, x = jax.jit(f), jnp.ones(16)
            for step in STEPS:
                start = time.process_time()
                stage = getattr(stage, step)(*[x] * (step == "trace"))
                took = 1e3 * (time.process_time() - start)
                found[name, step] = min(took, found.get((name, step), took))
    return found


def main(rounds):
    import contenders

    pythons = {"mpi4jax": sys.executable, "0.9.1": contenders.reference_python()}
    found = {name: [] for name in pythons}
    for _ in range(rounds):
        for name, python in pythons.items():
            done = subprocess.run(
                [python, __file__, "--measure"],
                env=contenders.environment(python),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows = [line.split() for line in done.stdout.splitlines()]
            found[name].append({(f, step): float(took) for f, step, took in rows})
    for key in found["mpi4jax"][0]:
        ours, theirs = ([each[key] for each in found[name]] for name in pythons)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{' '.join(key):18} {statistics.median(ours):7.0f} {statistics.median(theirs):7.0f}"
            f"  {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        for (function, step), took in measured().items():
            print(function, step, f"{took:.3f}")
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
