"""`mpi4jax.sharding`: blocks of global arrays against slices in NumPy, and JAX's programs."""

import functools
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
from reference import RANK, SIZE, assert_equal

import mpi4jax
from mpi4jax import fft, notoken
from mpi4jax.sharding import (
    NamedSharding,
    cut,
    device_put,
    global_shard_map,
    join,
    make_array_from_callback,
    make_mesh,
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
WIDTH = 4 * SIZE  # `global_shard_map` needs equal blocks
WHOLE = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)


def expected(spec, whole=WHOLE):
    """This rank's block, taken axis by axis."""
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
    assert sharding.shard_shape(SHAPE) == block.shape
    assert sharding.num_devices == SIZE
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
    a = jnp.arange(8.0 * WIDTH).reshape(8, WIDTH)
    b = jnp.arange(WIDTH * 4.0).reshape(WIDTH, 4)

    @functools.partial(
        global_shard_map, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P("x", None)
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
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / 3, jnp.zeros(WIDTH)) for k in keys]
    batch = jax.random.normal(jax.random.key(1), (2, WIDTH, WIDTH))

    def predict(params, inputs, gather=lambda w: w):
        for w, b in params:
            inputs = jnp.tanh(inputs @ gather(w) + gather(b))
        return inputs

    def loss(params, batch):
        return jnp.mean((predict(params, batch[0]) - batch[1]) ** 2)

    params = device_put(params, NamedSharding(mesh, P("batch")))

    @jax.jit
    def loss_fsdp(params, batch):
        @global_shard_map(mesh=mesh, in_specs=(P("batch"), P(None, "batch")), out_specs=P())
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
        inner = global_shard_map(lambda x: lax.psum(x, "b"), in_specs=P("b"), out_specs=P())
        assert_equal(inner(jnp.arange(SIZE)), join(inner(jnp.arange(SIZE)), P()))
        both = global_shard_map(
            lambda x: global_shard_map(
                lambda y: lax.psum(y, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"}
            )(x),
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
        )
        x = jnp.arange(WIDTH)
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
        (lambda: device_put(WHOLE, P("a")), TypeError, "device_put: expected .*'with mesh:'"),
        (lambda: global_shard_map(jnp.sin, MESH, P("a"), P("a")), TypeError,
         "by name: mesh=.*, in_specs"),
        (lambda: mpi4jax.shard_map(jnp.add, mesh=MESH, in_specs=(P("a"), None), out_specs=P("a"))(
            WHOLE, WHOLE), TypeError, "'in_specs' must .* got None for an array"),
    ],
)  # fmt: skip
def test_wrong_shardings(wrong, kind, words):
    with pytest.raises(kind, match=words):
        wrong()


@pytest.mark.skipif(SIZE == 1, reason="an axis of one rank cuts nothing")
def test_axes_that_cannot_be_cut_into_equal_blocks():
    f = global_shard_map(lambda x: x, mesh=MESH, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    with pytest.raises(ValueError, match=r"shape \(5,\); expected axes that .* equal blocks"):
        f(jnp.ones(5))


def test_equal_shardings_have_one_hash():
    assert NamedSharding(MESH, P("a"), SHAPE) == NamedSharding(MESH, P("a"), SHAPE)
    assert len({NamedSharding(MESH, P(*"ab")), NamedSharding(MESH, P(*"ab"))}) == 1
    assert NamedSharding(MESH, P("a")) != NamedSharding(MESH, P("a"), SHAPE)
    assert NamedSharding(MESH, P()).comm is MESH.comm(("a", "b"))


# ---- What else programs for devices call


@pytest.mark.parametrize("spec", [P("a", "b"), P()], ids=str)
def test_shardings_in_the_functions_of_a_program_for_devices(spec):
    """Each rank has a global array whole: nothing is distributed outside of a `shard_map`."""
    sharding = NamedSharding(MESH, spec)

    @functools.partial(mpi4jax.sharding.jit, in_shardings=(sharding,), out_shardings=sharding)
    def double(x):
        return mpi4jax.sharding.with_sharding_constraint(2 * x, sharding)

    assert_equal(double(device_put(WHOLE, sharding)), 2 * WHOLE)
    decorator = mpi4jax.sharding.jit(out_shardings=sharding, static_argnums=1)
    assert_equal(decorator(lambda x, n: n * x)(WHOLE, 3), 3 * WHOLE)
    with MESH:
        assert_equal(device_put({"x": WHOLE}, spec)["x"], WHOLE)
    assert_equal(device_put({"x": WHOLE}, {"x": jax.devices()[0]})["x"], WHOLE)
    for name, use in {
        "_is_concrete": lambda: jnp.ones(4, device=sharding),
        "addressable_devices": lambda: sharding.addressable_devices,
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'.*sharding.device_put"):
            use()


@pytest.mark.skipif(SIZE == 1, reason="one rank has whole arrays")
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("check", ["", "1"])
def test_blocks_for_whole_arrays_are_noticed(jit, check, monkeypatch):
    """Each block would be cut again."""
    monkeypatch.setenv("MPI4JAX_CHECK", check)

    def total(x):
        return lax.psum(x.sum(), ("a", "b"))

    total.__name__ = f"total_{jit.__name__}"  # a warning comes once
    spec = P(("a", "b"))
    mapped = global_shard_map(total, mesh=MESH, in_specs=spec, out_specs=P())
    whole = np.arange(SIZE**2 * 6.0, dtype=np.float32)
    block = make_array_from_callback(whole.shape, NamedSharding(MESH, spec), lambda i: whole[i])
    f = jit(mapped)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert f(whole) == whole.sum()
        assert not seen
        if check:
            with pytest.raises(Exception, match="ranks have different values"):
                jax.block_until_ready(f(block))
            return
        for _ in range(2):
            f(block)
            notoken.barrier()
        f(block)
    words = [str(w.message) for w in seen if "not the same array" in str(w.message)]
    assert len(words) == (RANK == 0)
    assert all("argument [0] of 'total_" in text and "takes blocks" in text for text in words)


@pytest.mark.skipif(SIZE == 1, reason="one rank has whole arrays")
@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("has_mesh", [True, False])
def test_blocks_for_whole_arrays_of_a_compiled_function_are_noticed(has_mesh, check, monkeypatch):
    """Each rank would keep the gradient of its own rows."""
    monkeypatch.setenv("MPI4JAX_CHECK", check)
    spec = P(("a", "b"))

    def loss(w, x, power):
        return jnp.mean((x * w) ** power)

    def gradient(kind):
        def of_loss(w, x, power):
            return jax.grad(loss)(w, x, power)

        of_loss.__name__ = f"gradient_{kind}_{has_mesh}"  # a warning comes once
        shardings = (None, NamedSharding(MESH, spec) if has_mesh else spec)
        return mpi4jax.sharding.jit(of_loss, in_shardings=shardings, static_argnums=2)

    x = jnp.arange(4.0 * SIZE)
    rows = x[4 * RANK : 4 * RANK + 4]
    with warnings.catch_warnings(record=True) as seen, MESH:
        warnings.simplefilter("always")
        f = gradient("whole")
        assert_equal(f(3.0, x, 2), jax.grad(loss)(3.0, x, 2))
        f.lower(3.0, x, 2)  # as a function of jax.jit
        f = gradient("blocks")
        if check:
            with pytest.raises(Exception, match="ranks have different values"):
                f(3.0, rows, 2)
            return
        f(3.0, rows, 2)
        notoken.barrier()
        gradient("last")(3.0, x, 2)
    words = [str(w.message) for w in seen if "not the same array" in str(w.message)]
    assert len(words) == (RANK == 0)
    assert all("sharding.jit: argument [1] of 'gradient_blocks" in text for text in words), words


@pytest.mark.parametrize("none", [{}, {"in_shardings": None, "out_shardings": (None,)}], ids=str)
def test_a_function_without_shardings_compares_nothing(none, monkeypatch):
    """It is a function of `jax.jit`, also in a `with mesh:`."""
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    with MESH:
        x = np.full(3, RANK, np.float32)
        assert_equal(mpi4jax.sharding.jit(lambda x: 2 * x, **none)(x), 2 * x)


# ---- Blocks that are padded to one length


@pytest.mark.parametrize("root", [None, SIZE - 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_padded_blocks(spec, root):
    """All ranks have blocks of one shape; where the mask is True, they are the blocks of `cut`."""
    sharding = NamedSharding(MESH, spec, SHAPE)
    given = WHOLE if root in (None, RANK) else jax.ShapeDtypeStruct(SHAPE, np.float32)
    (block, same), mask = cut([given, given], spec, mesh=MESH, root=root, pad=True)
    assert len(set(MPI.COMM_WORLD.allgather(block.shape))) == 1
    assert mask.shape == block.shape[: len(spec)]
    assert_equal(same, block)
    assert_equal(np.asarray(block)[mask].reshape(expected(spec).shape), expected(spec))
    again = jax.jit(lambda x: join(x, sharding, root=root, pad=True))(block)
    if root in (None, RANK):
        assert_equal(again, WHOLE)


@pytest.mark.parametrize("rows", [10, 3, 1, 0])
def test_padded_rows(rows):
    """Repeated rows have no weight in values and gradients; a block without rows is zero."""
    spec = P(("a", "b"))
    sharding = NamedSharding(MESH, spec, (rows, 2))
    x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2) + 1
    block, mask = cut(x, sharding, pad=True)
    own = np.array_split(x, SIZE)[RANK]
    assert mask.sum() == len(own)
    assert_equal(
        block[len(own) :], np.zeros_like(x, shape=(len(mask) - len(own), 2)) + own[-1:].sum(0)
    )

    def loss(x, w):
        def of_blocks(x, w, mask):
            each = jnp.where(mask, ((x * w) ** 2).sum(1), 0)
            return lax.psum(each.sum(), ("a", "b")), x * w

        f = mpi4jax.shard_map(
            of_blocks, mesh=MESH, in_specs=(spec, P(), spec), out_specs=(P(), spec)
        )
        block, mask = cut(x, sharding, pad=True)
        total, y = f(block, w, mask)
        return total + (join(y, sharding, pad=True) ** 3).sum()

    def alone(x, w):
        return ((x * w) ** 2).sum() + ((x * w) ** 3).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, np.float32(0.5))
    for ours, right in zip(found, jax.grad(alone, argnums=(0, 1))(x, np.float32(0.5)), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5)


def test_padded_blocks_that_do_not_fit():
    with pytest.raises(ValueError, match=r"needs arrays of equal lengths.*a sharding for each"):
        cut([np.ones(4), np.ones(5)], P("a"), mesh=MESH, pad=True)
    with pytest.raises(ValueError, match="expected one with the global shape"):
        join(np.ones(4), NamedSharding(MESH, P("a")), pad=True)
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"of shape \(9,\); expected blocks"):
            join(np.ones(9), NamedSharding(MESH, P("b"), (9,)), pad=True)


def test_the_program_of_the_page(capsys):
    """On any number of ranks, it has the values of ten rows."""
    page = (Path(__file__).parents[2] / "docs" / "from-shard-map.md").read_text()
    section = page.partition("## Rows that do not divide evenly")[2]
    exec(section.partition("```python\n")[2].partition("```")[0], {})
    printed = capsys.readouterr().out
    right = "105.0 [ 0.  2.  4.  6.  8. 10. 12. 14. 16. 18.] of "
    assert printed.startswith(right) if RANK == SIZE - 1 else not printed
