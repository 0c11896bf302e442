"""The gradients of a network with 40 parameter arrays in `mpi4jax.shard_map`: what combining saves.

    python tools/mpirun.py -n 2 benches/micro/gradients.py
    python tools/two_hosts.py 1 benches/micro/gradients.py

- *packed*: one `mpi4jax.allreduce` of the tree of gradients, written by hand.
- *gradient of pmean*: the gradient of the mean of the loss, inside of the function.
- *pmean of tree*: `jax.lax.pmean` of the tree of gradients.
- *apart*: the second, with no collectives combined.

They take turns. Each line: allreduces, and the median of the ratios to *packed* in the same round.
"""

import itertools
import re
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax
from mpi4jax._jax import combining

ROUNDS, CALLS, WIDTHS = 30, 5, [32] * 20 + [1]
comm = MPI.COMM_WORLD
mesh = mpi4jax.Mesh((comm.size,), ("i",))
params = [(jnp.ones((a, b)) / a, jnp.zeros(b)) for a, b in itertools.pairwise(WIDTHS)]
x, y = jnp.ones((16, 32)) + comm.rank, jnp.ones((16, 1))


def loss(params, x, y):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return jnp.mean((x @ w + b - y) ** 2)


def own(params):
    return jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params)


def of_mean(params, x, y):
    return jax.grad(lambda params: lax.pmean(loss(params, x, y), "i"))(params)


def compiled(f, limit=combining.LIMIT):
    combining.combined.__defaults__ = (limit,)
    how = {"mesh": mesh, "in_specs": (P(), P("i"), P("i")), "out_specs": P()}
    lowered = jax.jit(mpi4jax.shard_map(f, **how)).lower(params, x, y)
    return lowered.compile(), len(re.findall("@mpi4jax_allreduce", lowered.as_text()))


ways = {
    "packed": compiled(
        lambda p, x, y: mpi4jax.allreduce(jax.grad(loss)(own(p), x, y), mpi4jax.MEAN, comm=comm)
    ),
    "gradient of pmean": compiled(of_mean),
    "pmean of tree": compiled(lambda p, x, y: lax.pmean(jax.grad(loss)(own(p), x, y), "i")),
    "apart": compiled(of_mean, limit=0),
}
for f, _ in ways.values():
    jax.block_until_ready(f(params, x, y))
times = {name: [] for name in ways}
for k in range(ROUNDS):
    for name in ways if k % 2 else reversed(ways):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            jax.block_until_ready(ways[name][0](params, x, y))
        times[name].append((time.perf_counter() - start) / CALLS)
if comm.rank == 0:
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["packed"], strict=True))
        median = statistics.median(found) * 1e6
        print(
            f"{name:18s} {ways[name][1]:3d} allreduces {median:8.0f} us  {ratio:6.2f}", flush=True
        )
