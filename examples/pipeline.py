"""Train with pipeline parallelism: one forward and one backward pass in each tick.

    mpiexec -n 2 python examples/pipeline.py

Each rank has one layer. If the backward pass begins after all microbatches have gone forward
(docs/training.md), the activations of all microbatches are kept. Here, each tick does one forward
pass, and one backward pass of an earlier microbatch. A rank keeps the inputs of at most `2 * size -
1` microbatches, and computes the layer again for the backward pass. JAX differentiates only the
layer, so a line of the program sends the cotangents.
"""

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
before = rank - 1 if rank > 0 else MPI.PROC_NULL
after = rank + 1 if rank < size - 1 else MPI.PROC_NULL

MICROBATCHES, ROWS, WIDTH = 6, 3, 8
KEPT = 2 * size - 1  # microbatches between their two passes, on rank 0
x = jax.random.normal(jax.random.key(0), (MICROBATCHES, ROWS, WIDTH))
layers = jax.random.normal(jax.random.key(1), (size, WIDTH, WIDTH)) / 3


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(y):
    return jnp.sum(y**2)


@jax.jit
def loss_and_gradient(w, x):
    def tick(carry, t):
        y, c, kept, total, gradient = carry
        there, back = t - rank, t - 2 * (size - 1) + rank  # the microbatches of this tick
        given = x[there % MICROBATCHES] if rank == 0 else y
        kept = kept.at[there % KEPT].set(given)
        y = layer(w, given)
        old, pull = jax.vjp(layer, w, kept[back % KEPT])
        value, of_loss = jax.value_and_grad(loss)(old)
        of_w, c = pull(of_loss if rank == size - 1 else c)
        counts = (back >= 0) & (back < MICROBATCHES)  # the pipeline fills and drains
        total = total + jnp.where(counts, value, 0)
        gradient = gradient + jnp.where(counts, of_w, 0)
        y = mpi4jax.sendrecv(y, y, source=before, dest=after)
        c = mpi4jax.sendrecv(c, c, source=after, dest=before)
        return (y, c, kept, total, gradient), None

    zeros = jnp.zeros((ROWS, WIDTH))
    start = zeros, zeros, jnp.zeros((KEPT, ROWS, WIDTH)), 0.0, jnp.zeros_like(w)
    ticks = jnp.arange(MICROBATCHES + 2 * size - 2)
    (_, _, _, total, gradient), _ = jax.lax.scan(tick, start, ticks)
    return mpi4jax.bcast(total, root=size - 1), gradient


def whole(layers, x):
    for w in layers:
        x = layer(w, x)
    return loss(x)


value, gradient = loss_and_gradient(layers[rank], x)
expected, of_layers = jax.value_and_grad(whole)(layers, x)
same = jnp.allclose(gradient, of_layers[rank], atol=1e-5)
print(f"rank {rank}: the loss is right: {jnp.allclose(value, expected)}, the gradient: {same}")
