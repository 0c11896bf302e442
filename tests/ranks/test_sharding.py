"""`mpi4jax.sharding`: blocks of global arrays against slices in NumPy, and JAX's programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import RANK, SIZE, assert_equal

import mpi4jax
from mpi4jax import fft, notoken
from mpi4jax.sharding import (
    NamedSharding,
    cut,
    device_put,
    join,
    make_array_from_callback,
    make_mesh,
    shard_map,
)

ROWS = 2 if SIZE == 4 else 1
MESH = make_mesh((ROWS, -1), ("a", "b"))
SPECS = [
    P("a"),
    P(None, "b"),
    P("a", "b"),
    P("b", None, "a"),
    P(("a", "b")),
    P(("b", "a")),
    P(None, ("b", "a"), None),
    P(),
]
SHAPE = (5, 8, 6)
WHOLE = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)


def expected(spec, whole=WHOLE):
    """This rank's block, cut axis by axis."""
    for axis, names in enumerate(spec):
        names = (names,) if isinstance(names, str) else names or ()
        n = int(np.prod([MESH.shape[name] for name in names], dtype=int))
        whole = np.array_split(whole, n, axis)[MESH.index_along(names)]
    return whole


@pytest.mark.parametrize("root", [None, SIZE - 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_cut_and_join(spec, root):
    sharding = NamedSharding(MESH, spec, SHAPE)
    given = WHOLE if root in (None, RANK) else jax.ShapeDtypeStruct(SHAPE, np.float32)
    block = cut({"x": given}, spec, mesh=MESH, root=root)["x"]
    assert_equal(block, expected(spec))
    again = jax.jit(lambda x: join({"x": x}, {"x": sharding}, root=root)["x"])(block)
    assert_equal(again, WHOLE if root in (None, RANK) or spec == P() else block)
    assert_equal(make_array_from_callback(SHAPE, sharding, lambda i: WHOLE[i]), block)
    if root is not None:
        with_ops = notoken.scatter_blocks(given, sharding, root)
        assert_equal(with_ops, block)
        assert_equal(notoken.gather_blocks(with_ops, sharding, root), again)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_derivatives_of_cut_and_join(spec):
    """Of a global function, computed in blocks."""
    sharding = NamedSharding(MESH, spec, SHAPE)

    def loss(x):
        return jnp.sum(jnp.sin(sharding.join(sharding.cut(x) ** 2)))

    value, gradient = jax.jit(jax.value_and_grad(loss))(WHOLE)
    np.testing.assert_allclose(value, np.sin(WHOLE**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.cos(WHOLE**2) * 2 * WHOLE, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", SPECS, ids=str)
def test_redistribute_between_shardings(source):
    """Also where several ranks have a block, before or after."""
    before = NamedSharding(MESH, source, SHAPE)
    lengths = mpi4jax.Layout(SHAPE, {1: [1] * (SIZE - 1) + [9 - SIZE]})
    for spec in SPECS:
        after = NamedSharding(MESH, spec, SHAPE)
        y = mpi4jax.redistribute(expected(source), before, after)
        assert_equal(y, expected(spec))
    moved = mpi4jax.redistribute(expected(source), before, lengths)
    assert_equal(moved, WHOLE[lengths.block(RANK)])
    assert_equal(mpi4jax.redistribute(moved, lengths, before), expected(source))


def test_the_transpose_of_redistribute_adds_copies():
    slabs, whole = (NamedSharding(MESH, spec, SHAPE) for spec in (P(("a", "b")), P()))
    x = expected(P(("a", "b")))
    _, back = jax.vjp(lambda x: mpi4jax.redistribute(x, slabs, whole), x)
    (c,) = back(jnp.full(SHAPE, RANK + 1.0))
    assert_equal(c, np.full(x.shape, SIZE * (SIZE + 1) / 2, np.float32))


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P(("b", "a"))], ids=str)
def test_transforms_take_shardings(spec):
    sharding = NamedSharding(MESH, spec, SHAPE)
    y = fft.rfftn(expected(spec), sharding)
    there = fft.spectral_layout(sharding, real=True).block(RANK)
    np.testing.assert_allclose(y, np.fft.rfftn(WHOLE)[there], atol=2e-4)
    np.testing.assert_allclose(fft.irfftn(y, sharding), expected(spec), atol=1e-5)


# ---- Programs of JAX's documentation, with these imports


def test_a_matrix_product_of_jaxs_documentation():
    mesh = make_mesh((ROWS, SIZE // ROWS), ("x", "y"))
    a = jnp.arange(8 * 16.0).reshape(8, 16)
    b = jnp.arange(16 * 4.0).reshape(16, 4)

    @functools.partial(
        shard_map, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P("x", None)
    )
    def matmul_basic(a_block, b_block):
        return lax.psum(a_block @ b_block, "y")

    np.testing.assert_allclose(matmul_basic(a, b), a @ b, rtol=1e-6)
    loss = lambda a, b: jnp.sum(jnp.tanh(matmul_basic(a, b) / 1e4))
    found = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    close = jax.grad(lambda a, b: jnp.sum(jnp.tanh(a @ b / 1e4)), (0, 1))(a, b)
    for one, other in zip(found, close, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_network_of_jaxs_documentation():
    """Parameters cut as in fully sharded data parallelism, gathered layer by layer."""
    mesh = make_mesh((-1,), ("batch",))
    keys = jax.random.split(jax.random.key(0), 4)
    params = [(jax.random.normal(k, (8, 8)) / 3, jnp.zeros(8)) for k in keys]
    batch = jax.random.normal(jax.random.key(1), (2, 8, 8))

    def predict(params, inputs, gather=lambda w: w):
        for w, b in params:
            inputs = jnp.tanh(inputs @ gather(w) + gather(b))
        return inputs

    def loss(params, batch):
        return jnp.mean((predict(params, batch[0]) - batch[1]) ** 2)

    params = device_put(params, NamedSharding(mesh, P("batch")))

    @jax.jit
    def loss_fsdp(params, batch):
        @shard_map(mesh=mesh, in_specs=(P("batch"), P(None, "batch")), out_specs=P())
        def sharded(params, batch):
            gather = lambda w: lax.all_gather(w, "batch", tiled=True)
            local = jnp.mean((predict(params, batch[0], gather) - batch[1]) ** 2)
            return lax.pmean(local, "batch")

        return sharded(params, batch)

    np.testing.assert_allclose(loss_fsdp(params, batch), loss(params, batch), rtol=1e-5)
    found, close = jax.grad(loss_fsdp)(params, batch), jax.grad(loss)(params, batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(close), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_inside_another_function_it_takes_what_is_there():
    with MESH:
        inner = shard_map(lambda x: lax.psum(x, "b"), in_specs=P("b"), out_specs=P())
        assert_equal(inner(jnp.arange(SIZE)), join(inner(jnp.arange(SIZE)), P()))
        both = shard_map(
            lambda x: shard_map(
                lambda y: lax.psum(y, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"}
            )(x),
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
        )
        x = jnp.arange(8)
        halves = np.split(np.asarray(x), ROWS)
        sums = [sum(np.split(half, SIZE // ROWS)) for half in halves]
        assert_equal(jax.jit(both)(x), np.concatenate(sums))


MESH_OF_ONE = make_mesh((-1,), ("i",))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (lambda: NamedSharding(jax.make_mesh((1,), ("i",)), P("i")), TypeError, "mpi4jax.Mesh, go"),
        (lambda: NamedSharding(MESH, ("a",)), TypeError, "PartitionSpec, got tuple"),
        (lambda: NamedSharding(MESH, P("k")), ValueError, r"different axes of Mesh\('a': .*'k'"),
        (lambda: NamedSharding(MESH, P("a", "a")), ValueError, "different axes of Mesh"),
        (lambda: NamedSharding(MESH, P(None, "a"), (3,)), ValueError, r"at least 2 axes.*got \(3,"),
        (lambda: cut(WHOLE, P("a")), TypeError, "argument 'mesh' or a 'with mesh:'"),
        (lambda: cut(WHOLE, 0, mesh=MESH), TypeError, "cut: expected a NamedSharding.*int: 0"),
        (lambda: join(WHOLE, NamedSharding(MESH, P(), (3,))), ValueError, r"expected \(3,\), the"),
        (lambda: fft.fftn(WHOLE, NamedSharding(MESH, P())), ValueError, r"\(mesh, spec, shape\)"),
        (lambda: device_put(WHOLE, NamedSharding(MESH, P(*"ab"), WHOLE[0, 0].shape)), ValueError,
         "at least 2 axes"),
    ],
)  # fmt: skip
def test_wrong_shardings(wrong, kind, words):
    with pytest.raises(kind, match=words):
        wrong()


@pytest.mark.skipif(SIZE == 1, reason="an axis of one rank cuts nothing")
def test_axes_that_cannot_be_cut_into_equal_blocks():
    f = shard_map(lambda x: x, mesh=MESH, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    with pytest.raises(ValueError, match=r"shape \(5,\); expected axes that .* equal blocks"):
        f(jnp.ones(5))


def test_equal_shardings_have_one_hash():
    assert NamedSharding(MESH, P("a"), SHAPE) == NamedSharding(MESH, P("a"), SHAPE)
    assert len({NamedSharding(MESH, P(*"ab")), NamedSharding(MESH, P(*"ab"))}) == 1
    assert NamedSharding(MESH, P("a")) != NamedSharding(MESH, P("a"), SHAPE)
    assert NamedSharding(MESH, P()).comm is MESH.comm(("a", "b"))
