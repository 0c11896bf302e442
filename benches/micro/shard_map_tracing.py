"""What it takes to trace 200 collectives in `mpi4jax.shard_map`, and in `jax.shard_map`.

    python tools/mpirun.py -n 2 benches/micro/shard_map_tracing.py [ROUNDS]

Both take turns, in one process each, on as many virtual devices as there are ranks. Each line:
milliseconds of CPU of each, medians of the rounds, and the median ratio with its quartiles. Rank 0
prints; the ranks do not communicate.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax

COLLECTIVES = 200


def sums(x):
    for _ in range(COLLECTIVES):
        x = lax.psum(x, "i")
    return x


def varied(x):
    return lax.pcast(x, "i", to="varying") if hasattr(lax, "pcast") else lax.pvary(x, "i")


def mixture(x):
    """Four kinds of collectives, with arithmetic between."""
    n = lax.axis_size("i")
    for _ in range(COLLECTIVES // 4):
        x = jnp.sin(x) + lax.pmean(x * 2.0, "i")
        x = lax.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]) * x
        x = x - lax.all_gather(x, "i").sum(0)
        x = x + lax.psum_scatter(jnp.stack([x] * n), "i")
    return x


def network(x):
    """Layers, in jitted functions."""
    for _ in range(COLLECTIVES):
        x = jax.nn.relu(x) + lax.psum(jnp.sum(x, keepdims=True), "i")
    return x


def shapes(x):
    """Of arrays of 20 shapes."""
    for k in range(COLLECTIVES):
        x = x + lax.psum(jnp.ones(1 + k % 20) * x[0], "i")[0]
    return x


FUNCTIONS = {
    "psum": (sums, P()),
    "mixture": (mixture, P("i")),
    "network": (network, P("i")),
    "20 shapes": (shapes, P("i")),
}


def milliseconds(f, x):
    jax.clear_caches()
    start = time.process_time()
    jax.jit(f).trace(x)
    return 1e3 * (time.process_time() - start)


def main(rounds):
    n = MPI.COMM_WORLD.size
    mesh = mpi4jax.Mesh()
    devices = jax.sharding.AbstractMesh((n,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    block, array = jnp.ones(4), jnp.ones(4 * n)
    for name, (f, out) in FUNCTIONS.items():
        for gradient in (False, True):

            def traced(shard_map, mesh, f=f, out=out, gradient=gradient):
                g = shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=out)
                return jax.grad(lambda x: g(x).sum()) if gradient else g

            found = []
            for _ in range(rounds + 1):
                ours = milliseconds(traced(mpi4jax.shard_map, mesh), block)
                found.append((ours, milliseconds(traced(jax.shard_map, devices), array)))
            ours, theirs = zip(*found[1:], strict=True)
            ratios = [a / b for a, b in found[1:]]
            low, middle, high = statistics.quantiles(ratios, n=4)
            if MPI.COMM_WORLD.rank == 0:
                print(
                    f"{name + ', gradient' * gradient:20} {statistics.median(ours):7.1f} "
                    f"{statistics.median(theirs):7.1f}  {middle:.2f} ({low:.2f} to {high:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
