"""Training steps of six kinds for `jax.shard_map`, whose collectives are counted.

Run as a program, on ``n`` virtual devices of one process, this writes how many collectives XLA
compiles for each step: `python spmd_steps.py n file`.
"""

import collections
import functools
import pickle
import re
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from spmd import ring, size

# A weight of 64 KiB is a large gather: `mpi4jax._jax.combining`.
WIDTH, LAYERS, ROWS, TICKS = 128, 3, 8, 4
STEPS = {}


def step(params, *data):
    """Add a step: its loss, the specs of the parameters, and the specs of the data."""

    def add(loss):
        STEPS[loss.__name__.replace("_", " ")] = (loss, params, data)
        return loss

    return add


def rows(*spec):
    return (ROWS, WIDTH), P(*spec)


def mean(y):
    return lax.pmean(jnp.mean(y**2), "i")


WEIGHTS = [((WIDTH, WIDTH), P()), ((WIDTH,), P())] * LAYERS
SHARDS = [((WIDTH, WIDTH), P("i"))] * LAYERS


@step(WEIGHTS, rows("i"))
def data_parallel(weights, x):
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        x = jnp.tanh(x @ w + b)
    return mean(x)


def gathered_layer(x, w):
    return jnp.tanh(x @ lax.all_gather(w, "i", tiled=True))


@step(SHARDS, rows("i"))
def FSDP(shards, x):
    return mean(functools.reduce(gathered_layer, shards, x))


@step(SHARDS, rows("i"))
def FSDP_with_remat(shards, x):
    return mean(functools.reduce(jax.checkpoint(gathered_layer), shards, x))


@step([((WIDTH, WIDTH), P(None, "i")), ((WIDTH, WIDTH), P("i"))] * LAYERS, rows())
def tensor_parallel(weights, x):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + lax.psum(jax.nn.gelu(x @ up) @ down, "i")
    return jnp.mean(x**2)


@step([((3, WIDTH, WIDTH), P())], rows("i"))
def ring_attention(weights, x):
    q, k, v = jnp.einsum("rc,ncd->nrd", x, weights[0])

    def one(state, _):
        k, v, top, total, out = state
        scores = q @ k.T
        new = jnp.maximum(top, scores.max(1))
        p, scale = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        k, v = lax.ppermute((k, v), "i", ring(size("i")))
        return (k, v, new, total * scale + p.sum(1), out * scale[:, None] + p @ v), None

    nothing = 0 * q[:, 0]
    start = (k, v, nothing - 1e30, nothing, 0 * q)
    (_, _, _, total, out), _ = lax.scan(one, start, None, length=size("i"))
    return mean(out / total[:, None])


@step([(("n", WIDTH, WIDTH), P("i"))], rows())
def pipeline(weights, x):
    """A stage on each device; microbatches move on to the next one."""
    n, here = size("i"), lax.axis_index("i")

    def tick(carry, k):
        y = jnp.tanh(jnp.where(here == 0, x * k, carry) @ weights[0][0])
        return lax.ppermute(y, "i", ring(n)), y

    start = 0 * x + 0 * here
    _, outs = lax.scan(tick, start, jnp.arange(1.0, TICKS + n))
    return lax.psum(jnp.where(here == n - 1, jnp.mean(outs[n - 1 :] ** 2), 0.0), "i")


@step([(("n", WIDTH, WIDTH), P("i")), ((WIDTH, "n"), P())], rows("i"))
def experts(weights, x):
    """An expert on each device; rows travel there and back."""
    expert, router = weights
    gates = jax.nn.softmax(x @ router)
    sent = gates.T[:, :, None] * x
    at_expert = lax.all_to_all(sent, "i", 0, 0)
    back = lax.all_to_all(jnp.tanh(at_expert @ expert[0]), "i", 0, 0)
    return mean(back.sum(0))


@step([(("n", WIDTH, WIDTH), P("i")), ((WIDTH, "n"), P())], rows("i"))
def ragged_experts(weights, x):
    """An expert on each device; each row travels to one expert and back."""
    expert, router = weights
    here, scores = lax.axis_index("i"), x @ router
    order = scores.argmax(1).argsort()
    chosen = jnp.bincount(scores.argmax(1), length=size("i"))
    counts = lax.all_gather(chosen, "i")  # of each device, for each expert
    at_source, at_expert = counts.cumsum(1) - counts, counts.cumsum(0) - counts
    there = (at_source[here], counts[here], at_expert[here], counts[:, here])
    back = (at_expert[:, here], counts[:, here], at_source[:, here], counts[here])
    room = jnp.zeros((size("i") * len(x), WIDTH)) * x[0]
    received = lax.ragged_all_to_all(x[order], room, *there, axis_name="i")
    computed = jnp.tanh(received @ expert[0])
    returned = lax.ragged_all_to_all(computed, 0 * x, *back, axis_name="i")
    return mean(jax.nn.softmax(scores).max(1)[order, None] * returned)


def gradient_step(name, shard_map):
    """The loss and the new parameters."""
    loss, params, data = STEPS[name]
    specs = ([spec for _, spec in params], *(spec for _, spec in data))
    mapped = shard_map(loss, in_specs=specs, out_specs=P())

    def one(params, *data):
        value, grads = jax.value_and_grad(mapped)(params, *data)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return one


def arguments(name, n, parts):
    """The shapes of the arguments on ``n`` devices, each divided into ``parts`` along "i"."""

    def block(shape, spec):
        spec = (*spec, *[None] * len(shape))
        whole = [n if k == "n" else k for k in shape]
        lengths = [k // parts if axis else k for k, axis in zip(whole, spec, strict=False)]
        return jax.ShapeDtypeStruct(tuple(lengths), jnp.float32)

    _, params, data = STEPS[name]
    return [block(*p) for p in params], *(block(*d) for d in data)


XLA = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all"


def of_xla(n):
    """How many collectives of each kind XLA has for each step; a loop's body counts once.

    Of ragged experts, those that JAX gives to XLA.
    """
    mesh = jax.sharding.Mesh(jax.devices()[:n], "i")
    found = {}
    for name in STEPS:
        f = gradient_step(name, functools.partial(jax.shard_map, mesh=mesh))
        lowered = jax.jit(f).lower(*arguments(name, n, 1))
        if name == "ragged experts":  # XLA cannot compile `ragged-all-to-all` for CPUs
            text = lowered.as_text(dialect="hlo")
        else:
            text = lowered.compile().as_text()
        found[name] = dict(collections.Counter(re.findall(rf" ({XLA})(?:-start)?\(", text)))
    return found


if __name__ == "__main__":
    n = int(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", n)
    with open(sys.argv[2], "wb") as out:
        pickle.dump(of_xla(n), out)
