"""What derivatives, batches and half-precision reductions cost, as ratios in one run.

    python benches/micro/transformations.py [--ranks 1 2] [--output FILE]

The two sides of a ratio take turns, A B A B ..., as in benches/suite/run.py: a ratio is the
median of those within the rounds, in brackets are their quartiles.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "suite"))

from contenders import environment
from measurements import machine, ratio, ratio_name, size_name

import mpirun

OPS, BATCH = 100, 64


def subjects():
    """{what: (compiled function, its argument, the one it is compared with, its argument)}."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    import mpi4jax
    from mpi4jax import notoken

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    above, below = (rank + 1) % size, (rank - 1) % size
    chained = {
        "allreduce": lambda x: notoken.allreduce(x, MPI.SUM),
        "alltoall": notoken.alltoall,
        "sendrecv": lambda x: notoken.sendrecv(x, x, below, above),
    }

    def chain(op):
        def f(x):
            for _ in range(OPS):
                x = op(x)
            return jnp.sum(x * x)

        return f

    def summed(x):
        return notoken.allreduce(x, MPI.SUM)

    out = {}
    for name, op in chained.items():
        for items in (1, 2**14):
            x = jnp.ones((size, items) if name == "alltoall" else items)
            what = f"gradient of {OPS} {name}s of {size_name(4 * items)} / forward"
            forward = mpi4jax.jit(chain(op))
            out[what] = mpi4jax.jit(jax.grad(chain(op))), x, forward, x
    x = jnp.asarray(np.random.default_rng(rank).normal(size=10**6), jnp.float32)
    repeated = mpi4jax.jit(mpi4jax.reproducible_sum)
    out["reproducible_sum of 10^6 / jnp.sum"] = repeated, x, mpi4jax.jit(jnp.sum), x
    plain = mpi4jax.jit(lambda x: summed(jnp.sum(x)))
    out["reproducible_sum of 10^6 / allreduce of jnp.sum"] = repeated, x, plain, x
    x = jnp.ones((BATCH, 2**10))
    out[f"vmap of {BATCH} allreduces of 4 KiB / one of 256 KiB"] = (
        mpi4jax.jit(jax.vmap(summed)),
        x,
        mpi4jax.jit(summed),
        x,
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.ones(2**19, dtype)
        out[f"allreduce of 1 MiB of {x.dtype} / through float32"] = (
            mpi4jax.jit(summed),
            x,
            mpi4jax.jit(lambda x: summed(x.astype(jnp.float32)).astype(x.dtype)),
            x,
        )
    return out


def worker(rounds, seconds, only):
    """Return one rank; rank 0 prints {what: (seconds of A in each round, seconds of B)}."""
    import jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def measure(f, x, calls):
        gc.disable()
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(f(x))
        passed = (time.perf_counter() - begin) / calls
        gc.enable()
        return comm.allreduce(passed, MPI.MAX)

    found = {}
    for what, (f, x, g, y) in subjects().items():
        if only not in what:
            continue
        measure(f, x, 1), measure(g, y, 1)
        calls = max(1, round(seconds / measure(g, y, 3)))
        turns = [(measure(f, x, calls), measure(g, y, calls)) for _ in range(rounds)]
        found[what] = list(zip(*turns, strict=True))
    if comm.rank == 0:
        library, *_ = MPI.Get_library_version().splitlines()[0].split(",")
        print(json.dumps({"versions": {"jax": jax.__version__, "mpi": library}, "found": found}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.003, help="of one measurement")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that have it")
    parser.add_argument("--output", type=Path, help="the table goes there as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.rounds, args.seconds, args.only)

    results = {}
    for ranks in args.ranks:
        command = [mpirun.find_mpiexec(sys.executable), "-n", str(ranks), sys.executable, __file__]
        command += ["--worker", f"--rounds={args.rounds}", f"--seconds={args.seconds}"]
        command += [f"--only={args.only}"]
        job = subprocess.run(
            command, env=environment(sys.executable), check=True, stdout=subprocess.PIPE, text=True
        )
        results[ranks] = json.loads(job.stdout.splitlines()[-1])
    lines = [
        ["", *(f"{n} rank{'s' * (n > 1)}" for n in results)],
        ["---", *("---:" for _ in results)],
    ]
    names = [list(result["found"].items()) for result in results.values()]
    for row in zip(*names, strict=True):
        ratios = [ratio_name(*ratio([above], [below])) for _, (above, below) in row]
        lines.append([row[-1][0], *ratios])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = f"{machine(results[args.ranks[0]]['versions'])}\n\n{table}\n"
    print(text)
    if args.output:
        args.output.write_text(text)
    return None


if __name__ == "__main__":
    sys.exit(main())
