"""Train with pipeline parallelism: one forward and one backward pass in each tick.

    mpiexec -n 2 python examples/pipeline.py

Each rank has one layer. Where the backward pass begins when all microbatches have gone forward, as
with `training.gpipe`, the activations of all are kept. Here, each tick does one forward pass, and
one backward pass of an earlier microbatch: a rank keeps the inputs of at most `2 * size - 1`
microbatches, however many there are, and computes the layer again for the backward pass.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpi4jax.notoken as mpi4jax

mesh = mpi4jax.Mesh(axis_names="stage")
rank, size = mesh.coordinates["stage"], mesh.size

MICROBATCHES, ROWS, WIDTH = 6, 3, 8
x = jax.random.normal(jax.random.key(0), (MICROBATCHES, ROWS, WIDTH))
layers = jax.random.normal(jax.random.key(1), (size, WIDTH, WIDTH)) / 3


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(y, target):
    return jnp.sum((y - target) ** 2)


@jax.jit
@mpi4jax.shard_map(mesh=mesh, in_specs=(P("stage"), P()), out_specs=(P(), P("stage")))
def loss_and_gradient(ws, x):
    value, gradient = mpi4jax.training.one_forward_one_backward(
        layer, loss, ws[0], x, 0 * x, "stage"
    )
    return value, gradient[None]


def mean_loss(layers, x):
    for w in layers:
        x = layer(w, x)
    return loss(x, 0) / MICROBATCHES


value, gradient = loss_and_gradient(layers[rank : rank + 1], x)
expected, of_layers = jax.value_and_grad(mean_loss)(layers, x)
same = jnp.allclose(gradient[0], of_layers[rank], atol=1e-5)
print(f"rank {rank}: the loss is right: {jnp.allclose(value, expected)}, the gradient: {same}")
