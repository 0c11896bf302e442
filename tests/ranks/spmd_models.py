"""Functions for `jax.shard_map`: what people write, and libraries."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from spmd import AB, ROWS, A, program, ring, rows, size, vary

# ---- What people write


@program(
    (P(), ROWS, P(None, "i"), P("i", None)),
    P(),
    (4, 3),
    rows(1, 3),
    lambda n: (3, 2 * n),
    lambda n: (2 * n, 3),
)
def tensor_parallel_block(x, bias, up, down):
    h = jax.nn.gelu(x @ up + bias.sum())
    return x + lax.psum(h @ down, "i")


@program((ROWS, ROWS, ROWS), ROWS, rows(2, 4), rows(2, 4), rows(2, 4))
def ring_attention(q, k, v):
    """Keys and values go around, the softmax is summed up as they come; a row sees no later one."""
    n, r, m = size("i"), lax.axis_index("i"), q.shape[0]

    def step(state, turn):
        k, v, top, total, out = state
        first = (r - turn) % n * m  # of these keys
        seen = r * m + jnp.arange(m)[:, None] >= first + jnp.arange(m)
        scores = jnp.where(seen, q @ k.T, -1e30)
        new = jnp.maximum(top, scores.max(1))
        weight, old = jnp.where(seen, jnp.exp(scores - new[:, None]), 0), jnp.exp(top - new)
        out = out * old[:, None] + weight @ v
        total = total * old + weight.sum(1)
        k, v = (lax.ppermute(a, "i", ring(n)) for a in (k, v))
        return (k, v, new, total, out), None

    start = (k, v, q[:, 0] * 0 - jnp.inf, q[:, 0] * 0, q * 0)
    (*_, total, out), _ = lax.scan(step, start, jnp.arange(n))
    return out / total[:, None]


@program((ROWS, P()), (ROWS, P()), rows(4, 3), (2, 3))
def batch_norm(x, parameters):
    mean = lax.pmean(x.mean(0), "i")
    variance = lax.pmean((x * x).mean(0), "i") - mean**2
    return (x - mean) * lax.rsqrt(variance + 1e-5) * parameters[0] + parameters[1], variance


@program((P(), ROWS, ROWS), (P(), P()), {"w": (3, 2), "b": (2,)}, rows(4, 3), rows(4, 2))
def data_parallel_step(parameters, x, y):
    def loss(p):
        return lax.pmean(jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2), "i")

    value, gradient = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value


@program((ROWS, P()), P(), rows(1, 3, 3), (4, 2, 3))
def pipeline(w, batches):
    """Each rank has a layer; batches go from rank to rank."""
    n, r = size("i"), lax.axis_index("i")
    steps = batches.shape[0] + n - 1

    def step(state, k):
        fed = batches[jnp.minimum(k, batches.shape[0] - 1)]
        y = jnp.tanh(jnp.where(r == 0, fed, state) @ w[0])
        return lax.ppermute(y, "i", [(j, j + 1) for j in range(n - 1)]), y

    _, ys = lax.scan(step, vary(batches[0] * 0), jnp.arange(steps))
    return lax.psum(jnp.where(r == n - 1, ys[n - 1 :], 0), "i")


@program((ROWS, P(), ROWS), (ROWS, P()), lambda n: (2 * n * n, 3), lambda n: (3, n), rows(1, 3, 3))
def mixture_of_experts(x, gate, expert):
    """Rows go to the rank of their expert, as many to each, and come back."""
    n = size("i")
    scores = jax.nn.softmax(x @ gate)
    sent = lax.all_to_all(x.reshape(n, -1, 3), "i", 0, 0)
    done = jax.nn.relu(sent @ expert[0])
    back = lax.all_to_all(done, "i", 0, 0).reshape(x.shape)
    return back * scores.max(1, keepdims=True), lax.pmean(scores.mean(0), "i")


@program((ROWS, ROWS), ROWS, rows(2, 4), rows(1, 6))
def fully_sharded_layer(x, w):
    """A rank holds a part of the weights and gathers the rest when it needs them (ZeRO)."""
    n = size("i")

    @jax.checkpoint
    def layer(x, w):
        whole = lax.all_gather(w, "i", tiled=True).reshape(-1)
        whole = jnp.resize(whole, (4, 4)) if n < 3 else whole[:16].reshape(4, 4)
        return jnp.tanh(x @ whole)

    return layer(layer(x, w), w)


@program((P("i", None), P(None, "i")), P(None, "i"), lambda n: (2 * n, 3), lambda n: (3, n))
def collective_matmul(x, w):
    """The product of all rows with this rank's columns, while the rows go around both ways."""
    n, r = size("i"), lax.axis_index("i")
    m, half = x.shape[0], x.shape[0] // 2
    out = jnp.zeros((n * m, w.shape[1])) + 0 * w[:1]
    up, down = x[:half], x[half:]
    for k in range(n):
        out = lax.dynamic_update_slice_in_dim(out, up @ w, (r + k) % n * m, 0)
        out = lax.dynamic_update_slice_in_dim(out, down @ w, (r - k) % n * m + half, 0)
        up = lax.ppermute(up, "i", ring(n, -1))
        down = lax.ppermute(down, "i", ring(n))
    return out


@program((P(None, "i"), P("i", None)), P("i", None), lambda n: (2 * n, 3 * n), lambda n: (3 * n, 4))
def scattered_matmul(x, w):
    """The sum of all ranks' products for this rank's rows, while the sums go around."""
    n, r = size("i"), lax.axis_index("i")
    m = x.shape[0] // n

    def product(k):
        return lax.dynamic_slice_in_dim(x, k % n * m, m) @ w

    total = product(r + n - 1)
    for k in range(1, n):
        total = lax.ppermute(total, "i", ring(n)) + product(r + n - 1 - k)
    return total


CUT = {"up": P("a", "b"), "down": P("b", "a")}


@program(
    (CUT, A),
    (CUT, P()),
    {"up": lambda n: (2 * n, 2 * n), "down": lambda n: (2 * n, 2 * n)},
    lambda n: (n, 2 * n),
    grid=True,
)
def fully_sharded_and_tensor_parallel_step(parameters, x):
    """Weights are gathered along one axis, and used in parts along the other."""

    @jax.checkpoint
    def block(p):
        up = lax.all_gather(p["up"], "a", tiled=True)
        down = lax.all_gather(p["down"], "a", axis=1, tiled=True)
        return lax.psum(jax.nn.gelu(x @ up) @ down, "b")

    def loss(p):
        return lax.pmean(jnp.mean((block(p) - x) ** 2), "a")

    value, gradient = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value


@program((P("a", "b"),), P("a", "b"), lambda n: (3 * n, 2 * n), grid=True)
def heat_on_a_grid(u):
    """Ghost rows and columns by permutations of both axes."""

    def shifted(x, name, step):
        k = size(name)
        return lax.ppermute(x, name, [(j, j + step) for j in range(k) if 0 <= j + step < k])

    def step(u, _):
        up, down = shifted(u[-1:], "a", 1), shifted(u[:1], "a", -1)
        left, right = shifted(u[:, -1:], "b", 1), shifted(u[:, :1], "b", -1)
        tall = jnp.concatenate([up, u, down])
        wide = jnp.concatenate([left, u, right], 1)
        laplacian = tall[2:] + tall[:-2] + wide[:, 2:] + wide[:, :-2] - 4 * u
        return u + 0.1 * laplacian, None

    u, _ = lax.scan(step, u, None, length=3)
    return u / lax.psum(jnp.sum(u * u), ("a", "b"))


@program((AB, A), AB, rows(2, 3), lambda n: (2 * n,), grid=True)
def two_axes_of_parallelism(x, w):
    """Gradients of weights that are sharded along one axis and equal along the other."""

    def loss(w):
        whole = lax.all_gather(w, "a", tiled=True)
        return lax.psum(jnp.sum(jnp.sin(x * whole.sum())), ("a", "b"))

    return x * jax.grad(loss)(w).sum()


# ---- Libraries


def flax_batch_norm(x):
    from flax import linen as nn

    layer = nn.BatchNorm(use_running_average=False, axis_name="i")
    variables = jax.tree.map(
        jnp.asarray,
        {
            "params": {"scale": np.full(3, 2.0, np.float32), "bias": np.ones(3, np.float32)},
            "batch_stats": {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)},
        },
    )
    y, new = layer.apply(variables, x, mutable=["batch_stats"])
    return y, new["batch_stats"]


def nnx_step(x, y):
    import optax
    from flax import nnx

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(3, 4, rngs=rngs),
        nnx.BatchNorm(4, axis_name="i", rngs=rngs),
        nnx.Linear(4, 2, rngs=rngs),
    )
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.value_and_grad
    def loss(model):
        return lax.pmean(jnp.mean((model(x) - y) ** 2), "i")

    for _ in range(2):
        value, gradient = loss(model)
        optimizer.update(model, gradient)
    return value, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def optax_step(parameters, x, y):
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    state = optimizer.init(parameters)

    def loss(p):
        return lax.pmean(jnp.mean(optax.l2_loss(x @ p["w"] + p["b"], y)), "i")

    for _ in range(2):
        gradient = jax.grad(loss)(parameters)
        updates, state = optimizer.update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters


def equinox_layer(x, w):
    import equinox as eqx

    layer = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: m.layers[0].bias, layer, w)

    @eqx.filter_grad
    def gradient(layer):
        return lax.pmean(jnp.mean(jax.vmap(layer)(x) ** 2), "i")

    return gradient(layer).layers[0].weight


def add_libraries():
    from importlib.util import find_spec

    if find_spec("flax"):
        program((ROWS,), (ROWS, {"mean": P(), "var": P()}), rows(4, 3))(flax_batch_norm)
        if find_spec("optax"):
            program((ROWS, ROWS), (P(), P()), rows(4, 3), rows(4, 2), has_derivative=False)(
                nnx_step
            )
    if find_spec("optax"):
        program((P(), ROWS, ROWS), P(), {"w": (3, 2), "b": (2,)}, rows(4, 3), rows(4, 2))(
            optax_step
        )
    if find_spec("equinox"):
        program((ROWS, P()), P(), rows(4, 3), (4,), has_derivative=False)(equinox_layer)


add_libraries()
