"""Run ring attention, written for `jax.shard_map`, on ranks or on devices of one process.

    mpiexec -n 4 python examples/ring_attention.py
    python examples/ring_attention.py --devices 4

Each rank, or device, has a block of a sequence. Keys and values travel around in a ring, and each
rank accumulates the softmax as they pass, so no rank ever has all of them
(https://arxiv.org/abs/2310.01889). The function is the same in both cases; only the mesh differs.
The gradient is compared with the gradient of the whole sequence in one process.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

LENGTH, WIDTH = 240, 16  # 240: to be shared by 1 to 6 ranks, and more


def attention(q, k, v):
    """Of the whole sequence."""
    return jax.nn.softmax(q @ k.T / WIDTH**0.5) @ v


def ring_attention(q, k, v):
    """Of this part's queries to the keys of all."""
    n = lax.axis_size("parts")

    def step(state, _):
        k, v, top, total, out = state
        scores = q @ k.T / WIDTH**0.5
        new_top = jnp.maximum(top, scores.max(1))
        weights, scale = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
        total, out = total * scale + weights.sum(1), out * scale[:, None] + weights @ v
        k, v = lax.ppermute((k, v), "parts", [(i, (i + 1) % n) for i in range(n)])
        return (k, v, new_top, total, out), None

    nothing = jnp.zeros_like(q[:, 0])
    start = (k, v, nothing - jnp.inf, nothing, jnp.zeros_like(q))
    (_, _, _, total, out), _ = lax.scan(step, start, None, length=n)
    return out / total[:, None]


def loss(w, x, attend, mean=lambda y: y):
    q, k, v = (x @ w[i] for i in range(3))
    return mean(jnp.mean(attend(q, k, v) ** 2))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, help="of one process, instead of ranks")
    n = parser.parse_args().devices
    if n:
        jax.config.update("jax_num_cpu_devices", n)
    w = jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH)) / WIDTH**0.5
    x = jax.random.normal(jax.random.key(1), (LENGTH, WIDTH))
    if n:
        mesh = jax.sharding.Mesh(jax.devices(), "parts")
        shard_map = functools.partial(jax.shard_map, mesh=mesh)
        part, first = x, True
    else:
        import mpi4jax.notoken as mpi4jax

        mesh = mpi4jax.Mesh(axis_names="parts")
        shard_map = functools.partial(mpi4jax.shard_map, mesh=mesh)
        rank, n = mesh.coordinates["parts"], mesh.size
        part, first = x[rank * LENGTH // n : (rank + 1) * LENGTH // n], rank == 0

    @jax.jit
    @jax.grad
    @shard_map(in_specs=(P(), P("parts")), out_specs=P())
    def gradient(w, x):
        return loss(w, x, ring_attention, lambda y: lax.pmean(y, "parts"))

    found, expected = gradient(w, part), jax.grad(loss)(w, x, attention)
    error = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
    if first:
        print(f"{n} parts; gradients differ by {error:.0e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
