"""What it takes to trace, lower and compile 400 operations in a row, and a tree of 200 leaves.

The tree is one operation here, and 200 in mpi4jax 0.9.1, to which both are compared.

    python benches/micro/compiling.py [ROUNDS]

Jobs of one rank of each package take turns. Each line: milliseconds of CPU in each package, the
median over all rounds, and the median ratio of a round with its range.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "suite"))

OPERATIONS, LEAVES = 400, 200
STEPS = ("trace", "lower", "compile")
REPEATS = 3  # in each job; the best of them counts


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

    def tree(x):
        leaves = [i * x for i in range(LEAVES)]
        if hasattr(mpi4jax, "default_comm"):
            leaves = allreduce(leaves, op=MPI.SUM)
        else:  # 0.9.1 has no trees
            leaves = [allreduce(leaf, op=MPI.SUM) for leaf in leaves]
        return sum(jnp.vdot(leaf, leaf) for leaf in leaves)

    found, functions = {}, {"chain": chained, "tree": tree}
    functions |= {f"gradient-{name}": jax.grad(f) for name, f in functions.items()}
    for name, f in functions.items():
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
            f"{' '.join(key):22} {statistics.median(ours):7.0f} {statistics.median(theirs):7.0f}"
            f"  {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        for (function, step), took in measured().items():
            print(function, step, f"{took:.3f}")
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
