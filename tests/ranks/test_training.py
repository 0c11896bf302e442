"""`mpi4jax.training` against the same steps of one process."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import RANK, SIZE, assert_equal

import mpi4jax
from mpi4jax import training
from mpi4jax.sharding import cut, join

optax = pytest.importorskip("optax")

MESH = mpi4jax.Mesh((-1, 2 if SIZE == 4 else 1), ("data", "model"))
LINE = mpi4jax.Mesh((-1,), ("stage",))


def close(found, expected, rtol=1e-4):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


def parameters():
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda k, *shape: jax.random.normal(keys[k], shape) / 4
    return {"in": normal(0, 8, 16), "out": [normal(1, 16, 8)], "b": normal(2, 8), "s": jnp.ones(())}


def test_fsdp_specs():
    mesh = SimpleNamespace(shape={"data": 4, "model": 2})
    shapes = {"w": (12, 8), "odd": (3, 5), "b": (4,), "s": (), "cut": (8, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    specs = training.fsdp_specs(params, mesh, "data", smallest=10)
    assert specs == {"w": P("data"), "odd": P(), "b": P(), "s": P(), "cut": P("data")}
    of_model = {**dict.fromkeys(params, P()), "w": P("model"), "cut": P("model")}
    both = training.fsdp_specs(params, mesh, "data", specs=of_model, smallest=10)
    assert both["w"] == P("model", "data")
    assert both["cut"] == P("model", "data")


@pytest.mark.skipif(SIZE == 1, reason="one rank has whole parameters")
@pytest.mark.parametrize(
    ("name", "least", "most"), [("loss", 1, 3), ("gradient", 1, 3), ("sum of all layers", 8, 10)]
)
def test_fsdp_has_few_gathered_layers_in_memory(name, least, most):
    """The compiled program has buffers for as many of eight layers as are needed together."""
    n = 264
    gather = lambda w: lax.all_gather(w, "stage", tiled=True)
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ gather(w)))

    def loss(ws, x):
        if name == "sum of all layers":
            x = x @ sum([gather(w) for w in ws])
        else:
            x = functools.reduce(lambda x, w: layer(w, x), ws, x)
        return lax.pmean(x.sum(), "stage")

    rows = P("stage")
    f = mpi4jax.shard_map(loss, mesh=LINE, in_specs=(rows, rows), out_specs=P())
    f = jax.jit(jax.grad(f) if name == "gradient" else f)
    ws = [jax.ShapeDtypeStruct((n // SIZE, n), np.float32)] * 8
    memory = f.lower(ws, jax.ShapeDtypeStruct((4, n), np.float32)).compile().memory_analysis()
    assert least <= memory.temp_size_in_bytes / (4 * n * n) < most


def test_fsdp_specs_that_shard_nothing_are_a_warning(recwarn):
    params = {"w": jnp.ones((4, 3)), "s": jnp.ones(())}
    mesh = lambda size: SimpleNamespace(shape={"data": size})
    for size, given in ((1, {}), (2, {"smallest": 12}), (2, {"specs": {"w": P("data"), "s": P()}})):
        training.fsdp_specs(params, mesh(size), "data", **given)
    training.fsdp_specs({}, mesh(2), "data")
    assert not recwarn.list
    for size, smallest in ((2, 1024), (5, 1)):
        words = f"no array .* along axis 'data' of size {size}, .* 12 elements; .* least {smallest}"
        with pytest.warns(UserWarning, match=words) as caught:
            specs = training.fsdp_specs(params, mesh(size), "data", smallest=smallest)
        assert caught[0].filename == __file__
        assert specs == {"w": P(), "s": P()}


def by_path(specs):
    return jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))


def test_specs_of_optimizer_states():
    specs = {"in": P("data"), "out": [P(None, "data")], "b": P(), "s": P()}
    for optimizer in (
        optax.adamw(1e-2),
        optax.chain(optax.clip(1.0), optax.trace(0.9)),
        optax.masked(optax.adam(1e-2), {"in": True, "out": [True], "b": False, "s": True}),
    ):
        state = jax.eval_shape(optimizer.init, parameters())
        found = training.specs_for(state, specs)
        assert len(by_path(found)) == len(jax.tree.leaves(state)) > 2
        for path, spec in by_path(found):
            name = jax.tree_util.keystr(path)
            wanted = [s for p, s in by_path(specs) if name.endswith(jax.tree_util.keystr(p))]
            assert spec == (wanted[0] if wanted else P()), name
    with pytest.raises(ValueError, match=r"array \['h'\] of argument 'state' has 2 axes and no"):
        training.specs_for({"h": jnp.ones((2, 2))}, specs)
    with pytest.raises(ValueError, match=r"array \['out'\]\[0\] .* 1 axes and the spec"):
        training.specs_for({"out": [jnp.ones(2)]}, specs)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_steps_with_clipping_are_those_of_one_process(sharded):
    """AdamW, clipped: parameters are sharded over `data`, the layer's units over `model`."""
    params = parameters()
    x, y = jax.random.normal(jax.random.key(5), (2, 4 * SIZE, 8))
    optimizer = optax.adamw(1e-2)
    of_model = {"in": P(None, "model"), "out": [P("model")], "b": P(), "s": P()}
    specs = of_model
    if sharded:
        specs = training.fsdp_specs(params, MESH, "data", specs=of_model, smallest=10)

    def loss(params, x, y, total=lambda h: h):
        h = jnp.tanh(x @ params["in"]) @ params["out"][0]
        return jnp.mean((total(h) * params["s"] + params["b"] - y) ** 2)

    state = jax.eval_shape(optimizer.init, params)
    of_state = training.specs_for(state, specs)

    @jax.jit
    @mpi4jax.shard_map(
        mesh=MESH,
        in_specs=(specs, of_state, P("data"), P("data")),
        out_specs=(specs, of_state, P()),
    )
    def step(params, state, x, y):
        def mean(params):
            whole = training.unshard(params, specs, "data")
            return lax.pmean(loss(whole, x, y, lambda h: lax.psum(h, "model")), "data")

        value, gradient = jax.value_and_grad(mean)(params)
        gradient = training.clip_by_global_norm(gradient, specs, 0.1)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    @jax.jit
    def step_of_one(params, state):
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        assert gradient["b"].shape == (8,)
        scale = jnp.minimum(1, 0.1 / optax.global_norm(gradient))
        gradient = jax.tree.map(lambda g: g * scale, gradient)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    mine = (
        *cut((params, optimizer.init(params)), (specs, of_state), mesh=MESH),
        *cut((x, y), P("data"), mesh=MESH),
    )
    expected = params, optimizer.init(params)
    for _ in range(3):
        *new, value = step(*mine)
        mine = (*new, *mine[2:])
        *expected, of_one = step_of_one(*expected)
        np.testing.assert_allclose(value, of_one, rtol=1e-5)
    close(join(mine[:2], (specs, of_state), mesh=MESH), tuple(expected))


def test_what_you_may_have_meant():
    """The table of that name in `docs/training.md`: the values of each mistake and its remedy."""
    local = jnp.full((2,), 1.0 + RANK)
    w, b = jnp.ones(()), jnp.ones(3)
    loss = lambda w, x: jnp.mean(w * x)
    clip = lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0]

    @jax.jit
    @mpi4jax.shard_map(
        mesh=LINE,
        in_specs=(P(), P(), P("stage")),
        out_specs=((P(), P()), (P("stage"), P("stage")), (P(), P())),
    )
    def both(w, b, x):
        gradients = (
            lax.pmean(jax.grad(loss)(w, x), "stage"),
            jax.grad(lambda w: lax.pmean(loss(w, x), "stage"))(w),
        )
        clipped = clip(x), training.clip_by_global_norm(x, P("stage"), 1.0)
        partial = x @ jnp.ones((2, 3))
        sums = lax.psum(partial + b, "stage"), lax.psum(partial, "stage") + b
        return gradients, clipped, sums

    of_all = np.repeat(1.0 + np.arange(SIZE), 2)
    mean, norm = of_all.mean(), np.linalg.norm(of_all)
    gradients, clipped, sums = both(w, b, local)
    close(gradients, (SIZE * mean, mean))
    close(clipped, (local / np.linalg.norm(local), local / norm))
    close(sums, (of_all.sum() + SIZE * b, of_all.sum() + b))


def test_batches_of_different_numbers():
    mine = [np.full((2 + (k == 2), 1), 10.0 * RANK + k) for k in range(1 + RANK)]
    seen = [0.0, 0]
    for x, weight in training.batches(iter(mine)):
        seen[0] += float(mpi4jax.notoken.allreduce(weight * x.mean(), op=mpi4jax.MEAN))
        seen[1] += 1
    assert seen[1] == SIZE
    means = []
    for k in range(SIZE):
        rows = {r: 2 + (k == 2) for r in range(SIZE) if k <= r}
        means.append(sum(n * (10.0 * r + k) for r, n in rows.items()) / sum(rows.values()))
    assert np.isclose(seen[0], sum(means))
    with pytest.raises(ValueError, match=f"rank {SIZE - 1} has no batch"):
        list(training.batches([np.ones(1)] if RANK < SIZE - 1 else []))


def test_padded_batches_are_blocks_of_a_shard_map():
    """The third batch has fewer rows on most ranks, and rank 0 alone has a fourth one."""
    rng = np.random.default_rng(0)
    last = np.array_split(rng.normal(size=(SIZE + 1, 2)), SIZE)
    steps = [list(rng.normal(size=(SIZE, 2, 2))), list(rng.normal(size=(SIZE, 2, 2))), last]
    steps.append([last[0][:1]] + [last[0][:0]] * (SIZE - 1))
    traced, traces = [], set()

    @jax.jit
    @mpi4jax.shard_map(mesh=LINE, in_specs=(P(), P("stage"), P("stage")), out_specs=P())
    def step(w, batch, weights):
        traced.append(batch["x"].shape)

        def loss(w):
            # Its derivative at a row of zeros is NaN.
            losses = jnp.linalg.norm(batch["x"] * w, axis=1) * batch["sign"]
            return lax.pmean(jnp.mean(weights * losses), "stage")

        return jax.value_and_grad(loss)(w)

    def mean(w, x):
        return jnp.mean(jnp.linalg.norm(x * w, axis=1) * jnp.sign(x[:, 0]))

    as_batch = lambda x: {"x": x, "sign": jnp.sign(x[:, 0])}
    mine = (as_batch(of_all[RANK]) for of_all in steps if len(of_all[RANK]))
    w = jnp.array([1.0, 2.0])
    for of_all, (batch, weights) in zip(steps, training.batches(mine, pad=True), strict=True):
        assert batch["x"].shape == (2, 2)
        assert np.count_nonzero(weights) == len(of_all[RANK])
        expected = jax.value_and_grad(mean)(w, np.concatenate(of_all))
        close(step(w, batch, weights), expected)
        traces.add(len(traced))
    assert len(traces) == 1  # the function is compiled for the first batch alone


def test_padded_batches_without_rows():
    """An empty batch is not an end; an empty first one, or uneven arrays, are errors everywhere."""
    empty, full = np.zeros((0, 1)), np.full((2, 1), 3.0)
    mine = [full, empty, full if RANK == 0 else empty]
    found = list(training.batches(mine, pad=True))
    assert len(found) == 2
    for (batch, weights), weight in zip(found, (1, SIZE * (RANK == 0)), strict=True):
        assert_equal(batch, full)
        assert_equal(weights, np.full(2, weight, np.float32))
    with pytest.raises(ValueError, match=f"rank {SIZE - 1} has no batch, or a first one without"):
        list(training.batches([full if RANK < SIZE - 1 else empty], pad=True))
    uneven = {"x": full, "y": full[: 1 + (RANK < SIZE - 1)]}
    with pytest.raises(ValueError, match=f"different numbers of rows in one .* rank {SIZE - 1}"):
        list(training.batches([uneven], pad=True))
