"""Train a transformer in five ways at once: data, fully sharded, tensor, sequence and pipeline
parallel.

    mpiexec -n 4 python examples/transformer.py --mesh 2,1,2 --mesh 1,2,2 --mesh 1,1,1

A mesh has the axes `data` (samples, and shards of all parameters), `stage` (layers) and `model`
(heads and hidden units, and positions of each sequence). Training goes on from a checkpoint on each
mesh in turn, and is compared with the training of one process: AdamW with clipping, in the same
order of samples. A mesh of one rank has the first rank alone. Functions of `jax.lax` communicate,
`mpi4jax.training` has the parts around them, and `pipeline.py` has the pipeline.
"""

import argparse
import contextlib
import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
from pipeline import gpipe

import mpi4jax.notoken as mpi4jax

Params = dict[str, Any]

WORDS, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 32, 8, 16, 4, 32, 2
SAMPLES, BATCH, MICROBATCHES, STEPS = 32, 8, 2, 2

# How parameters are sharded, without the axis `data`.
SPECS = {
    "words": P(),
    "places": P("model"),
    "layers": {
        "scale": P("stage"),
        "qkv": P("stage", None, None, "model"),
        "out": P("stage", "model"),
        "up": P("stage", None, "model"),
        "down": P("stage", "model"),
    },
}


def parameters() -> Params:
    shapes = {
        "words": (WORDS, WIDTH),
        "places": (LENGTH, WIDTH),
        "layers": {
            "scale": (LAYERS, 2, WIDTH),
            "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
            "up": (LAYERS, WIDTH, HIDDEN),
            "down": (LAYERS, HIDDEN, WIDTH),
        },
    }
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda s: random.normal(size=s, scale=s[-1] ** -0.5).astype(np.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def data() -> np.ndarray[Any, Any]:
    """Sequences in which each word follows from the last one, with some noise."""
    random = np.random.default_rng(0)
    x = random.integers(WORDS, size=(SAMPLES, LENGTH + 1))
    for k in range(LENGTH):
        x[:, k + 1] = np.where(random.random(SAMPLES) < 0.9, (3 * x[:, k] + 1) % WORDS, x[:, k + 1])
    return x


def whole_sequence(x: jax.Array) -> jax.Array:
    """Return all positions of (rows, positions of this rank, width)."""
    return lax.all_gather(x, "model", axis=1, tiled=True)


def own_positions(x: jax.Array) -> jax.Array:
    """Sum over the ranks' heads or hidden units, for the positions of this rank."""
    return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * scale * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(w: Params, x: jax.Array) -> jax.Array:
    h = whole_sequence(normalized(x, w["scale"][0]))
    q, k, v = jnp.einsum("btd,dnhe->nbthe", h, w["qkv"])
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    attended = jnp.einsum("bhqk,bkhe->bqhe", weights, v)
    x = x + own_positions(jnp.einsum("bqhe,hed->bqd", attended, w["out"]))
    h = whole_sequence(normalized(x, w["scale"][1]))
    return x + own_positions(jax.nn.gelu(h @ w["up"]) @ w["down"])


unshard = functools.partial(mpi4jax.training.unshard, axis="data")


def loss(params: Params, specs: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over this rank's samples and positions."""
    of_layer = jax.tree.map(lambda s: P(*s[1:]), specs["layers"])

    @jax.checkpoint  # gathers the layer again in the backward pass
    def gathered(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return layer(unshard(w, of_layer), x), None

    def stage(layers: Params, x: jax.Array) -> jax.Array:
        return lax.scan(gathered, x, layers)[0]

    words, places = (unshard(params[k], specs[k]) for k in ("words", "places"))
    h = (words[x] + places).reshape(MICROBATCHES, -1, *x.shape[1:], WIDTH)
    h = gpipe(stage, params["layers"], h, "stage").reshape(*x.shape, WIDTH)
    return optax.softmax_cross_entropy_with_integer_labels(h @ words.T, y).mean()


optimizer = optax.adamw(3e-2)


@functools.cache
def trainer(mesh: mpi4jax.Mesh) -> tuple[Any, Any]:
    """Return the specs of parameters and optimizer state, and a training step."""
    params = parameters()
    specs = mpi4jax.training.fsdp_specs(params, mesh, "data", specs=SPECS, smallest=64)
    specs = specs, mpi4jax.training.specs_for(jax.eval_shape(optimizer.init, params), specs)
    block = P("data", "model")

    @jax.jit
    @mpi4jax.shard_map(mesh=mesh, in_specs=(*specs, block, block), out_specs=(*specs, P()))
    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def mean(params: Params) -> jax.Array:
            return lax.pmean(loss(params, specs[0], x, y), ("data", "model"))

        value, gradient = jax.value_and_grad(mean)(params)
        gradient = mpi4jax.training.clip_by_global_norm(gradient, specs[0], 1.0)
        update, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, update), state, value

    return specs, step


def samples_of(step: int, comm: MPI.Intracomm) -> np.ndarray[Any, Any]:
    """Return this rank's samples of a batch: the same batches on any number of ranks."""
    epoch, k = divmod(step, SAMPLES // BATCH)
    order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
    return np.array_split(order[k * BATCH : (k + 1) * BATCH], comm.size)[comm.rank]


def train(
    mesh: mpi4jax.Mesh, path: str, sequences: np.ndarray[Any, Any], steps: int
) -> list[float]:
    """Train on from the checkpoint, if there is one, and save."""
    specs, run = trainer(mesh)
    params = parameters()
    state: list[Any] = [*mpi4jax.sharding.cut((params, optimizer.init(params)), specs, mesh=mesh)]
    begin, layouts = 0, (*specs, None)
    with contextlib.suppress(FileNotFoundError):  # the first time
        *state, begin = mpi4jax.checkpoints.load(path, (*state, begin), layouts, mesh=mesh)
    losses: list[float] = []
    for step in range(int(begin), int(begin) + steps):
        rows = sequences[samples_of(step, mesh.comm("data"))]
        x, y = mpi4jax.sharding.cut((rows[:, :-1], rows[:, 1:]), P(None, "model"), mesh=mesh)
        *state, value = run(*state, x, y)
        losses.append(float(value))
    mpi4jax.checkpoints.save(path, (*state, int(begin) + steps), layouts, mesh=mesh)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", action="append", help="data,stage,model", required=True)
    shapes = [tuple(map(int, mesh.split(","))) for mesh in parser.parse_args().mesh]
    world, alone = MPI.COMM_WORLD, MPI.COMM_SELF
    axes = ("data", "stage", "model")
    directory = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    sequences = data()

    losses: list[float] = []
    for shape in shapes:
        comm = alone if np.prod(shape) == 1 else world
        if comm is world or world.rank == 0:
            mesh = mpi4jax.Mesh(shape, axes, comm=comm)
            losses += train(mesh, f"{directory}/moved", sequences, STEPS)
        world.Barrier()
    if world.rank == 0:
        mesh = mpi4jax.Mesh((1, 1, 1), axes, comm=alone)
        expected = train(mesh, f"{directory}/alone", sequences, STEPS * len(shapes))
        print("losses", np.round(losses, 4))
        print("as in one process:", np.allclose(losses, expected, rtol=1e-4))


if __name__ == "__main__":
    main()
