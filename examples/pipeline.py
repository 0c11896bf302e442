"""Train with pipeline parallelism: GPipe, and one forward and one backward pass in each step.

    mpiexec -n 2 python examples/pipeline.py

Each rank has one layer, or a function that runs several, and microbatches follow one another
through the ranks. In `gpipe` (Huang et al., 2019, https://arxiv.org/abs/1811.06965), JAX runs the
backward pass after all microbatches have gone forward, and the activations of all are kept. In
`one_forward_one_backward` (PipeDream-Flush in Narayanan et al., 2021,
https://arxiv.org/abs/2006.09503), each step has one forward pass, and one backward pass of an
earlier microbatch. A rank keeps the inputs of at most `2 * size - 1` microbatches, and computes its
layer again for the backward pass.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import mpi4jax.notoken as mpi4jax


def shifted(x, axis, by):
    """Return the value of the previous stage (`by=1`) or of the next one (`by=-1`)."""
    stages = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(k, k + by) for k in range(stages) if 0 <= k + by < stages])


def gpipe(layer, params, xs, axis):
    """Return the results of all layers for microbatches, on all ranks along the mesh axis.

    `layer(params, x)` returns an array of the shape and dtype of `x`. The microbatches are the
    first axis of `xs`; only the values on the first rank are used. JAX differentiates it. With
    `jax.checkpoint(layer)`, only the inputs of layers are kept.
    """
    stage, stages, number = lax.axis_index(axis), lax.axis_size(axis), len(xs)

    def step(received, t):
        y = layer(params, jnp.where(stage == 0, xs[jnp.minimum(t, number - 1)], received))
        return shifted(y, axis, 1), y

    # While the pipeline fills, layers get a real input: some have no derivative at zero. After the
    # first step, what is carried varies over the mesh axes that all later values vary over.
    received, first = step(xs[0], 0)
    _, later = lax.scan(step, received, jnp.arange(1, number + stages - 1))
    results = jnp.concatenate([first[None], later])[stages - 1 :]
    return lax.psum(jnp.where(stage == stages - 1, results, 0), axis)


def one_forward_one_backward(layer, loss, params, xs, targets, axis):
    """Return the mean of the loss over microbatches, and its gradient for this rank's parameters.

    `loss(y, target)` returns a scalar. Only the values of `targets` on the last rank are used.
    """
    stage, stages, number = lax.axis_index(axis), lax.axis_size(axis), len(xs)
    kept_inputs = 2 * stages - 1

    def step(carry, t):
        received, cotangent, kept, total, gradient = carry
        forward, back = t - stage, t - 2 * (stages - 1) + stage  # the microbatches of this step
        x = jnp.where(stage == 0, xs[forward % number], received)
        kept = kept.at[forward % kept_inputs].set(x)
        y, pull = jax.vjp(layer, params, kept[back % kept_inputs])
        value, of_loss = jax.value_and_grad(loss)(y, targets[back % number])
        of_params, of_x = pull(jnp.where(stage == stages - 1, of_loss, cotangent))
        counts = (back >= 0) & (back < number)  # the pipeline is not being filled or drained
        total = total + jnp.where(counts & (stage == stages - 1), value, 0)
        gradient = jax.tree.map(lambda g, new: g + jnp.where(counts, new, 0), gradient, of_params)
        y = layer(params, x)
        return (shifted(y, axis, 1), shifted(of_x, axis, -1), kept, total, gradient), None

    kept = jnp.broadcast_to(xs[0], (kept_inputs, *xs[0].shape))
    zeros = jax.tree.map(jnp.zeros_like, params)
    carry, _ = step((xs[0], jnp.zeros_like(xs[0]), kept, jnp.zeros(()), zeros), 0)
    steps = jnp.arange(1, number + 2 * stages - 2)
    (*_, total, gradient), _ = lax.scan(step, carry, steps)
    return lax.psum(total, axis) / number, jax.tree.map(lambda g: g / number, gradient)


# ---- Both are compared with one process


MICROBATCHES, ROWS, WIDTH = 6, 3, 8


def layer(params, x):
    y = jnp.tanh(x @ params["w"]) + params["b"]
    return y / jnp.linalg.norm(y)  # no derivative at zero


def loss(y, target):
    return jnp.mean((y - target) ** 2)


def main():
    mesh = mpi4jax.Mesh(axis_names="stage")
    rank = mesh.coordinates["stage"]

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape) / 3

    layers = {"w": normal(1, mesh.size, WIDTH, WIDTH), "b": normal(2, mesh.size, WIDTH)}
    xs, targets = normal(3, MICROBATCHES, ROWS, WIDTH), normal(4, MICROBATCHES, ROWS, WIDTH)

    def of_one_process(layers):
        total = 0.0
        for x, target in zip(xs, targets, strict=True):
            for k in range(mesh.size):
                x = layer(jax.tree.map(lambda leaf, k=k: leaf[k], layers), x)
            total += loss(x, target)
        return total / MICROBATCHES

    @jax.jit
    @mpi4jax.shard_map(mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=(P(), P("stage")))
    def by_gpipe(params, xs, targets):
        def mean(params):
            ys = gpipe(jax.checkpoint(layer), params, xs, "stage")
            return jnp.mean(jax.vmap(loss)(ys, targets))

        value, gradient = jax.value_and_grad(mean)(jax.tree.map(lambda leaf: leaf[0], params))
        return value, jax.tree.map(lambda leaf: leaf[None], gradient)

    @jax.jit
    @mpi4jax.shard_map(mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=(P(), P("stage")))
    def by_turns(params, xs, targets):
        own = jax.tree.map(lambda leaf: leaf[0], params)
        value, gradient = one_forward_one_backward(layer, loss, own, xs, targets, "stage")
        return value, jax.tree.map(lambda leaf: leaf[None], gradient)

    block = jax.tree.map(lambda leaf: leaf[rank, None], layers)
    value, gradients = jax.value_and_grad(of_one_process)(layers)
    expected = jax.tree.leaves((value, jax.tree.map(lambda leaf: leaf[rank, None], gradients)))
    for name, method in (("gpipe", by_gpipe), ("one forward, one backward", by_turns)):
        found = jax.tree.leaves(method(block, xs, targets))
        same = all(jnp.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
        print(f"rank {rank}: {name}: loss and gradient are right: {same}")


if __name__ == "__main__":
    main()
