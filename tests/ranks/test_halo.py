"""Ghost cells: against a model in NumPy that looks each cell up in the block that owns it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import (
    ON_GPU,
    RANK,
    SIZE,
    Started,
    assert_equal,
    enable_x64,
    exact_values,
    random_bits,
)

import mpi4jax
from mpi4jax import _native, notoken


@functools.cache
def cart_of(dims, periods):
    return MPI.COMM_WORLD.Create_cart(dims, periods)


def grid(d, periods, reverse=False):
    """All ranks as a grid of d dimensions; ``reverse`` puts most of them along the last one."""
    dims = MPI.Compute_dims(SIZE, d)
    return cart_of(tuple(reversed(dims) if reverse else dims), tuple(periods))


def pairs(width, d):
    width = [width] * d if isinstance(width, int) else width
    return [(w, w) if isinstance(w, int) else w for w in width]


class Model:
    """For each cell of a block, the rank and the cell that it is a copy of.

    ``inner[k]`` has the inner cells of the blocks along dimension k of the grid.
    """

    def __init__(self, cart, inner, width, corners):
        self.cart, self.inner, self.corners = cart, inner, corners
        self.dims, self.periods, _ = cart.Get_topo()
        self.width = pairs(width, len(self.dims))

    def shape(self, rank):
        coords = self.cart.Get_coords(rank)
        return tuple(
            inner[c] + low + high
            for inner, c, (low, high) in zip(self.inner, coords, self.width, strict=True)
        )

    def _along(self, k, at):
        """For each cell along a dimension: the block it is of, the index there, the step."""
        inner, (low, high) = self.inner[k], self.width[k]
        for i in range(low + inner[at] + high):
            block, index, step = at, i, 0
            if i < low and (at > 0 or self.periods[k]):
                block, step = (at - 1) % self.dims[k], -1
                index = inner[block] + i  # the last `low` inner cells
            elif i >= low + inner[at] and (at < self.dims[k] - 1 or self.periods[k]):
                block, step = (at + 1) % self.dims[k], 1
                index = i - inner[at]
            yield block, index, step

    def sources(self, rank):
        """(cell, rank, cell there)"""
        coords = self.cart.Get_coords(rank)
        for cells in itertools.product(
            *(enumerate(self._along(k, c)) for k, c in enumerate(coords))
        ):
            here = tuple(i for i, _ in cells)
            if not self.corners and sum(step != 0 for _, (_, _, step) in cells) > 1:
                yield here, rank, here
                continue
            owner = self.cart.Get_cart_rank([block for _, (block, _, _) in cells])
            yield here, owner, tuple(index for _, (_, index, _) in cells)

    def forward(self, xs):
        y = xs[RANK].copy()
        for here, owner, there in self.sources(RANK):
            y[here] = xs[owner][there]
        return y

    def adjoint(self, cs):
        """The cotangent of this rank's block, given the cotangents of all results."""
        out = np.zeros_like(cs[RANK])
        for rank in range(SIZE):
            for here, owner, there in self.sources(rank):
                if owner == RANK:
                    out[there] += cs[rank][here]
        return out

    def blocks(self, make, seed=0):
        return [make(self.shape(rank), [seed, rank]) for rank in range(SIZE)]


def floats(shape, seed):
    return exact_values("float32", shape, seed)


def uneven(cart, least):
    """Inner cells of the blocks along each dimension: not all alike."""
    return [[least + (k + c) % 2 for c in range(n)] for k, n in enumerate(cart.dims)]


SETTINGS = [
    pytest.param(periods, width, corners, id=f"{len(periods)}d-{periods}-{width}-{corners}")
    for periods, width, corners in [
        ([True], 1, True),
        ([False], 2, True),
        ([True], [(0, 2)], True),
        ([True, True], 1, True),
        ([True, False], 1, False),
        ([False, True], [2, (1, 2)], True),
        ([True, True], [(2, 0), (0, 1)], True),
        ([False, False], [(1, 0), 2], False),
        ([True, True, True], 1, True),
        ([False, True, False], [1, (0, 1), 2], True),
        ([True, False, True], [1, 1, 1], False),
    ]
]


# At once; and started, then waited for. With what stands in a jaxpr once.
NAMES = {notoken: "mpi4jax_halo_exchange[", Started(): "mpi4jax_start["}
APIS = pytest.mark.parametrize("api", NAMES, ids=["whole", "started"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("periods", "width", "corners"), SETTINGS)
@pytest.mark.parametrize("reverse", [False, True])
@APIS
def test_against_the_model(periods, width, corners, reverse, api):
    if reverse and (len(periods) == 1 or SIZE == 1):
        pytest.skip("the same grid as without")
    cart = grid(len(periods), periods, reverse)
    model = Model(cart, uneven(cart, 2), width, corners)
    xs, cs = model.blocks(floats), model.blocks(floats, seed=1)

    def f(x):
        return api.halo_exchange(x, cart, width=width, corners=corners)

    @mpi4jax.jit
    def derivatives(x, c):
        y, pull = jax.vjp(f, x)
        (g,) = pull(c)
        # The transpose of the transpose, and the tangent, are the exchange.
        (back,) = jax.linear_transpose(lambda c: pull(c)[0], c)(x)
        return y, g, back, jax.jvp(f, (x,), (c,))[1]

    assert_equal(f(xs[RANK]), model.forward(xs))
    y, g, back, tangent = derivatives(xs[RANK], cs[RANK])
    assert_equal(y, model.forward(xs))
    assert_equal(g, model.adjoint(cs))
    assert_equal(back, model.forward(xs))
    assert_equal(tangent, model.forward(cs))
    # <A x, c> = <x, A^T c>, over all ranks; the values are small integers
    both = MPI.COMM_WORLD.allreduce(np.array([np.sum(y * cs[RANK]), np.sum(xs[RANK] * g)]))
    assert both[0] == both[1]


DTYPES = ("bool", "int8", "bfloat16", "complex64", "float64", "float8_e5m2", "int4")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DTYPES)
@APIS
def test_data_types(name, api):
    if not hasattr(jnp, name + "_" * (name == "bool")):
        pytest.skip(f"this JAX has no {name}")
    cart = grid(2, [True, False])
    model = Model(cart, uneven(cart, 3), [1, (2, 1)], corners=True)
    with enable_x64(True):
        xs = model.blocks(lambda shape, seed: random_bits(name, shape, seed))
        y = api.halo_exchange(jnp.asarray(xs[RANK]), cart, width=[1, (2, 1)])
        if isinstance(api, Started) and name.startswith("float8"):
            # XLA packs the faces. It computes with these floats in wider ones, and there a NaN
            # becomes another one.
            y, xs = np.asarray(y, np.float32), [x.astype(np.float32) for x in xs]
            np.testing.assert_array_equal(y, model.forward(xs))
        else:
            assert_equal(y, model.forward(xs), bits=True)


SUMMED = (
    *("int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e5m2"),
)


@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_the_transpose(name):
    cart = grid(2, [True, True])
    model = Model(cart, uneven(cart, 2), 1, corners=True)
    with enable_x64(True):
        cs = model.blocks(lambda shape, seed: exact_values(name, shape, seed))
        assert_equal(notoken.halo_add(cs[RANK], cart), model.adjoint(cs))
        if jnp.issubdtype(cs[RANK].dtype, np.inexact):
            f = functools.partial(notoken.halo_exchange, cart=cart)
            (g,) = jax.linear_transpose(f, cs[RANK])(jnp.asarray(cs[RANK]))
            assert_equal(g, model.adjoint(cs))


@pytest.mark.skipif(_native.takes_packed(ON_GPU), reason="XLA packs ghost cells for the transport")
def test_the_transpose_is_one_call():
    cart = grid(2, [True, False])
    text = jax.jit(lambda x: notoken.halo_add(x, cart)).lower(jnp.ones((5, 6))).as_text()
    assert text.count("stablehlo.custom_call") == 1


@APIS
def test_trees_travel_together(api):
    """Blocks of equal dtype in one call; keys, and arrays with more axes in front, as well."""
    cart = grid(1, [True])
    n = 5
    blocks = {
        "a": np.arange(n, dtype=np.float32) + 10 * RANK,
        "b": np.arange(2 * n, dtype=np.float32).reshape(2, n) - 10 * RANK,
        "c": np.arange(n, dtype=np.int32) + 100 * RANK,
        "keys": jax.random.split(jax.random.key(RANK), n),
    }
    f = functools.partial(api.halo_exchange, cart=cart, axes=-1)
    out = f(blocks)
    compiled = mpi4jax.jit(f)(blocks)
    left, right = cart.Shift(0, 1)
    assert_equal(out["a"], np.float32([3 + 10 * left, *blocks["a"][1:4], 1 + 10 * right]))
    assert_equal(out["b"][1], np.float32([8 - 10 * left, *blocks["b"][1, 1:4], 6 - 10 * right]))
    assert_equal(out["c"], np.int32([3 + 100 * left, *blocks["c"][1:4], 1 + 100 * right]))
    expected = jax.random.split(jax.random.key(left), n)[3]
    assert (jax.random.key_data(out["keys"][0]) == jax.random.key_data(expected)).all()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*map(_bits, (a, b))), out, compiled)
    text = str(jax.make_jaxpr(f)({"a": blocks["a"], "b": blocks["b"]}))
    assert text.count(NAMES[api]) == 1


def _bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@APIS
def test_axes_and_dimensions(api):
    """Any axis for each dimension, and dimensions that are not exchanged."""
    cart = grid(2, [True, True])
    model = Model(cart, [[3] * cart.dims[0], [2] * cart.dims[1]], [1, 1], corners=True)
    xs = model.blocks(floats)
    y = api.halo_exchange(xs[RANK].T[:, None], cart, axes=(2, 0))
    assert_equal(y[:, 0].T, model.forward(xs))
    edges = Model(cart, model.inner, 1, corners=False)  # on the communicator that had corners
    assert_equal(api.halo_exchange(xs[RANK], cart, corners=False), edges.forward(xs))

    rows = Model(cart, [[3] * cart.dims[0], [4] * cart.dims[1]], [1, (0, 0)], corners=True)
    xs = rows.blocks(floats)
    assert_equal(api.halo_exchange(xs[RANK], cart, axes=(0, None)), rows.forward(xs))
    assert_equal(api.halo_exchange(xs[RANK], cart, axes=(None, None)), xs[RANK])


@APIS
def test_vmap_carries_the_batch_in_one_exchange(api):
    cart = grid(2, [True, False])
    model = Model(cart, uneven(cart, 2), 1, corners=True)
    batches = [model.blocks(floats, seed) for seed in range(3)]
    x = jnp.stack([xs[RANK] for xs in batches], axis=2)
    f = functools.partial(api.halo_exchange, cart=cart, axes=(0, 1))
    y = mpi4jax.jit(jax.vmap(f, in_axes=2, out_axes=1))(x)
    for i, xs in enumerate(batches):
        assert_equal(y[:, i], model.forward(xs))
    jaxpr = jax.make_jaxpr(jax.vmap(f, in_axes=2))(x)
    assert str(jaxpr).count(NAMES[api]) == 1


@APIS
def test_in_a_loop_under_grad_and_checkpoint(api):
    """A diffusion in a ring: ranks agree with one process that has the whole ring."""
    cart, n, steps = grid(1, [True]), 4, 3
    start = np.random.default_rng(5).standard_normal(n * SIZE).astype(np.float32)

    def smooth(x):
        return 0.5 * x[1:-1] + 0.25 * (x[:-2] + x[2:])

    def distributed(x):
        @jax.checkpoint
        def step(x, _):
            return smooth(api.halo_exchange(jnp.pad(x, 1), cart)), None

        x, _ = jax.lax.scan(step, x, None, length=steps)
        return jnp.sum(x**3)

    def whole(x):
        for _ in range(steps):
            x = smooth(jnp.concatenate([x[-1:], x, x[:1]]))
        return jnp.sum(x**3)

    part = slice(n * RANK, n * (RANK + 1))
    value, g = mpi4jax.jit(jax.value_and_grad(distributed))(start[part])
    expected, everything = jax.value_and_grad(whole)(start)
    np.testing.assert_allclose(MPI.COMM_WORLD.allreduce(float(value)), expected, rtol=1e-5)
    np.testing.assert_allclose(g, everything[part], rtol=1e-5, atol=1e-6)


@APIS
def test_ranks_that_are_not_perturbed_take_part_in_the_derivative(api):
    cart = grid(1, [True])
    x = np.arange(4, dtype=np.float32)

    def f(a):
        y = api.halo_exchange(a * x if RANK == 0 else jnp.asarray(x), cart)
        return y.sum() if RANK == SIZE - 1 else a * 0

    # Rank 0's cells 1 and 2 are the ghost cells of the last rank, or of rank 0 itself.
    expected = {0: 3.0 if SIZE > 1 else 6.0}.get(RANK, 0.0)
    if SIZE == 1:
        assert float(jax.grad(f)(1.0)) == expected
    else:
        ghosts = 1.0 + (2.0 if SIZE == 2 else 0.0)
        assert float(jax.grad(f)(1.0)) == (ghosts if RANK == 0 else 0.0)


def test_a_ghost_cell_that_nothing_fills_keeps_its_value_and_its_cotangent():
    cart = grid(1, [False])
    x = np.arange(5, dtype=np.float32) + 10 * RANK
    y, token = mpi4jax.halo_exchange(x, cart)
    assert token.shape == ()
    assert float(y[0]) == (x[0] if RANK == 0 else x[3] - 10)
    assert float(y[4]) == (x[4] if RANK == SIZE - 1 else x[1] + 10)
    (c,) = jax.linear_transpose(lambda x: notoken.halo_exchange(x, cart), x)(jnp.asarray(x))
    assert float(c[0]) == (x[0] if RANK == 0 else 0)


MODES = {"edge": "edge", "symmetric": "symmetric", "reflect": "reflect", 7.0: "constant"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("border", [*MODES, None, ((7.0, "edge"), "reflect")], ids=str)
@pytest.mark.parametrize("corners", [True, False])
@APIS
def test_borders_of_the_grid(border, corners, api):
    """As `numpy.pad` of the whole array, one axis after the other."""
    cart = grid(2, [False, True] if SIZE % 2 else [False, False])
    width, inner = [2, (1, 2)], uneven(cart, 3)
    model = Model(cart, inner, width, corners)
    whole = floats(tuple(map(sum, inner)), [3])
    each = border if isinstance(border, tuple) else (border, border)
    padded = whole
    for k, (side, pair) in enumerate(zip(each, pairs(width, 2), strict=True)):
        for low, part in (
            ((True, side[0]), (False, side[1]))
            if isinstance(side, tuple)
            else (
                (True, side),
                (False, side),
            )
        ):
            around = [(0, 0), (0, 0)]
            around[k] = (pair[0], 0) if low else (0, pair[1])
            mode = "wrap" if cart.periods[k] else MODES.get(part, "constant")
            # What is beyond one side is no copy of what is beyond the other one.
            source = padded if mode == "constant" else _without(padded, k, 0 if low else pair[0])
            value = {"constant_values": part or 0.0} if mode == "constant" else {}
            strip = np.pad(source, around, mode, **value)
            ghosts = [slice(None)] * 2
            ghosts[k] = slice(0, pair[0]) if low else slice(strip.shape[k] - pair[1], None)
            parts = [strip[tuple(ghosts)], padded]
            padded = np.concatenate(parts if low else parts[::-1], k)
    at = cart.Get_coords(RANK)
    starts = [sum(cells[:c]) for cells, c in zip(inner, at, strict=True)]
    shape = model.shape(RANK)
    expected = padded[tuple(slice(s, s + n) for s, n in zip(starts, shape, strict=True))]
    own = [slice(a, n - b) for (a, b), n in zip(model.width, shape, strict=True)]
    x = np.full(shape, 0.0, np.float32)
    x[tuple(own)] = expected[tuple(own)]
    y = jax.jit(lambda x: api.halo_exchange(x, cart, width=width, corners=corners, border=border))
    result = np.asarray(y(x))
    if corners:
        assert_equal(result, expected)
    for k in range(2):
        window = [*own]
        window[k] = slice(None)
        assert_equal(result[tuple(window)], expected[tuple(window)])
    c = floats(shape, [4, RANK])
    tangent = jax.jvp(y, (x,), (c,))[1]
    (g,) = jax.vjp(y, x)[1](jnp.asarray(x))
    total = np.array([np.sum(tangent * x), np.sum(c * g)], float)
    both = MPI.COMM_WORLD.allreduce(total)
    np.testing.assert_allclose(both[0], both[1], rtol=1e-6)


def whole_numbers(shape, seed):
    return np.random.default_rng([seed, RANK]).integers(-9, 9, shape).astype(np.float32)


@pytest.mark.parametrize("border", [*MODES, None, ((0.0, "edge"), "reflect")], ids=str)
@pytest.mark.parametrize("corners", [True, False])
def test_halo_add_is_the_transpose(border, corners):
    cart = grid(2, [False, True] if SIZE % 2 else [False, False])
    model = Model(cart, uneven(cart, 3), [2, (1, 2)], corners)
    c = whole_numbers(model.shape(RANK), 1)
    how = {"cart": cart, "width": model.width, "corners": corners, "border": border}
    exchange = functools.partial(notoken.halo_exchange, **how)
    add = functools.partial(notoken.halo_add, **how)
    (expected,) = jax.jit(lambda c: jax.vjp(exchange, jnp.zeros(c.shape))[1](c))(c)
    for f in (add, jax.jit(add)):
        assert_equal(f(c), expected)
        assert_equal(f(c.astype(np.int32)), np.asarray(expected).astype(np.int32))
    batch = jax.vmap(add)(jnp.stack([c, 2 * c]))
    assert_equal(batch, np.stack([expected, 2 * expected]))
    # Its derivative is the derivative of the exchange, with a border of zeros for a number.
    x, t = whole_numbers(c.shape, 2), whole_numbers(c.shape, 3)
    assert_equal(jax.jvp(add, (c,), (t,))[1], add(t))
    (g,) = jax.vjp(add, jnp.asarray(c))[1](jnp.asarray(x))
    assert_equal(g, jax.jvp(exchange, (0 * x,), (x,))[1])


def test_halo_add_against_the_model():
    cart = grid(2, [True, True])
    model = Model(cart, uneven(cart, 2), 1, corners=True)
    cs = model.blocks(lambda shape, seed: np.random.default_rng(seed).integers(-9, 9, shape))
    cs = [c.astype(np.float32) for c in cs]
    y = notoken.halo_add({"a": cs[RANK], "b": 2 * cs[RANK]}, cart)
    assert_equal(y["a"], model.adjoint(cs))
    assert_equal(y["b"], 2 * model.adjoint(cs))
    total = MPI.COMM_WORLD.allreduce(float(y["a"].sum()))
    assert total == sum(c.sum() for c in cs)


def test_what_halo_add_drops():
    """At a border that is a number, what leaves the domain; nothing else."""
    cart = grid(1, [False])
    y = notoken.halo_add(jnp.ones(6), cart, width=2, border=5.0)
    kept = MPI.COMM_WORLD.allreduce(float(y.sum()))
    assert kept == 6 * SIZE - 4


@pytest.mark.parametrize("x", [np.ones(5, bool), jax.random.key(0)], ids=["bool", "key"])
def test_halo_add_of_what_is_no_number(x):
    with pytest.raises(TypeError, match="halo_add: argument 'x' has an array of dtype"):
        notoken.halo_add(x, grid(1, [True]))


def _without(x, axis, count):
    window = [slice(None)] * x.ndim
    window[axis] = slice(count, None)
    return x[tuple(window)]


def test_users_messages_are_not_mistaken_for_ghost_cells():
    """Also those with wildcards, on the same communicator, that wait while cells are exchanged."""
    cart = grid(1, [True])
    left, right = cart.Shift(0, 1)
    flags = np.full(3, -1.0)
    request = cart.Irecv(flags, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    x = np.arange(4, dtype=np.float32) + 10 * RANK
    y = jax.block_until_ready(notoken.halo_exchange(x, cart))
    assert_equal(y, np.float32([2 + 10 * left, *x[1:3], 1 + 10 * right]))
    cart.Send(np.full(3, float(RANK)), dest=right, tag=4)
    request.Wait()
    assert (flags == left).all()


def test_the_operand_is_not_changed_and_may_be_donated():
    cart = grid(1, [True])
    x = jnp.arange(4.0)
    f = mpi4jax.jit(lambda x: (notoken.halo_exchange(x, cart), x))
    _, same = f(x)
    assert same.tolist() == [0, 1, 2, 3]
    donating = mpi4jax.jit(lambda x: notoken.halo_exchange(x, cart), donate_argnums=0)
    assert donating(x).tolist() == [2, 1, 2, 1]
    text = donating.lower(jnp.arange(4.0)).as_text()
    assert ON_GPU or "output_operand_alias" in text  # there XLA writes to the operand


# ---- Errors


# Arguments that are wrong, and what is said of them.
WRONG = [
    *(({"cart": cart}, TypeError, "'cart' must be") for cart in (None, MPI.COMM_WORLD, 3)),
    ({"axes": (0, 2)}, ValueError, "axis 2, which an array of shape"),
    ({"axes": (0, -2)}, ValueError, "one axis twice, as 0 and -2"),
    ({"axes": (0,)}, ValueError, "2 axes, one"),
    ({"axes": ("a", 1)}, TypeError, "argument 'axes'"),
    ({"axes": 1.5}, TypeError, "argument 'axes'"),
    ({"width": 2}, ValueError, r"\(4, 5\) has 0 inner cells along axis -2, .* 2 below and 2 above"),
    ({"width": [1, (3, 1)]}, ValueError, r"has 1 inner cells along axis -1, .* 3 below and 1 abov"),
    ({"width": -1}, ValueError, "argument 'width' must be an integer from 0"),
    ({"width": [1]}, ValueError, "argument 'width' must be"),
    ({"width": [1, (1, 2, 3)]}, ValueError, "argument 'width' must be"),
    ({"width": True}, TypeError, "argument 'width'"),
    ({"width": "12"}, TypeError, "argument 'width'"),
    (
        {"border": "mirror"},
        ValueError,
        "must be None, one of .*'edge', 'symmetric', 'reflect'.*or a list",
    ),
    ({"border": ["edge"]}, ValueError, "or a list of 2 of these or of pairs"),
    ({"border": [{}, None]}, TypeError, "argument 'border' must be None"),
    ({"border": np.ones(2)}, ValueError, r"an array of shape \(2,\); expected the shape of .x."),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=lambda v: str(v)[:30])
def test_wrong_arguments(given, error, message):
    call = functools.partial(notoken.halo_exchange, **{"cart": grid(2, [True, True]), **given})
    x = np.zeros((4, 5), np.float32)
    for f in (call, jax.jit(call)):
        with pytest.raises(error, match=f"^halo_exchange: .*{message}"):
            f(x)


def test_a_border_of_too_few_cells():
    """The ranks at it say so before a message is sent."""
    if RANK in (0, SIZE - 1):
        with pytest.raises(ValueError, match="3 inner cells along axis -1, too few for border="):
            notoken.halo_exchange(
                np.zeros(9), cart_of((SIZE,), (False,)), width=3, border="reflect"
            )
