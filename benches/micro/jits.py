"""What a call costs under whoever's jit: `python tools/mpirun.py -n 2 benches/micro/jits.py`.

A function that sums 4 bytes over the ranks beside one that does nothing, both waited for.
Contenders take turns. A time is the median of the rounds. A ratio is the median of the ratios
within the rounds, with its quartiles: the call's time divided by (the same jit's call of nothing +
mpi4py's call). The last ratio is the time of the eager call divided by the time of the call under
`jax.jit`.
"""

import time

import equinox
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mpi4py import MPI

from mpi4jax import notoken

COMM, ROUNDS, CALLS = MPI.COMM_WORLD, 15, 500
X = jnp.ones(1, jnp.float32)


def communicates(x):
    return notoken.allreduce(x, MPI.SUM)


def nothing(x):
    return x + 1


JITS = {
    "jax.jit": jax.jit,
    "eqx.filter_jit": equinox.filter_jit,
    "nnx.jit": nnx.jit,
    "ahead of time": lambda f: jax.jit(f).lower(X).compile(),
    "eager": lambda f: f if f is communicates else jax.jit(f),
}


def seconds(f):
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        f()
    return (time.perf_counter() - start) / CALLS


def main():
    sendbuf, recvbuf = np.ones(1, np.float32), np.empty(1, np.float32)
    contenders = {"raw": lambda: COMM.Allreduce(sendbuf, recvbuf)}
    for name, jit in JITS.items():
        for f in (nothing, communicates):
            call = jit(f)
            contenders[name, f] = lambda call=call: call(X).block_until_ready()
    for f in contenders.values():
        seconds(f)
    rounds = [{name: seconds(f) for name, f in contenders.items()} for _ in range(ROUNDS)]
    if COMM.rank != 0:
        return
    print(f"{COMM.size} rank(s); us a call", flush=True)
    for name in JITS:
        idle, call = ([r[name, f] for r in rounds] for f in (nothing, communicates))
        ratios = [r[name, communicates] / (r[name, nothing] + r["raw"]) for r in rounds]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(
            f"{name:15} {1e6 * np.median(idle):8.2f} without, {1e6 * np.median(call):8.2f} with;"
            f" ratio {middle:.2f} ({low:.2f} to {high:.2f})"
        )
    ratios = [r["eager", communicates] / r["jax.jit", communicates] for r in rounds]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    print(f"eager to jitted {middle:.2f} ({low:.2f} to {high:.2f})")


main()
