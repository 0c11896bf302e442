"""`ragged_alltoall`: counts that are data, others at each call and on each rank."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reference import COMM, RANK, SIZE, Started, assert_equal, enable_x64, jits

import mpi4jax
from mpi4jax import notoken

ROWS = max(7, 2 * SIZE)  # of each rank's array
ROOM = ROWS * SIZE
WIDTH = 3


def random_counts(seed, steps=()):
    """Of all ranks: ``[..., source, dest]``. No rank sends more rows than it has."""
    rng = np.random.default_rng(seed)
    shares = rng.multinomial(ROWS, np.full(SIZE + 1, 1 / (SIZE + 1)), (*steps, SIZE))
    return shares[..., :SIZE].astype(np.int32)


def all_rows(seed, dtype=np.float32):
    rng = np.random.default_rng([seed, 1])
    return rng.integers(-9, 9, (SIZE, ROWS, WIDTH)).astype(dtype)


def model(xs, counts, room=ROOM):
    """All ranks' results."""
    starts = np.cumsum(counts, axis=1) - counts
    out = np.zeros((SIZE, room, *xs.shape[2:]), xs.dtype)
    for dest in range(SIZE):
        parts = [xs[s, starts[s, dest] :][: counts[s, dest]] for s in range(SIZE)]
        rows = np.concatenate(parts)
        out[dest, : len(rows)] = rows
    return out


def transposed(cs, counts):
    """The cotangents of all ranks' operands, given the cotangents of the results."""
    out = np.zeros((SIZE, ROWS, *cs.shape[2:]), cs.dtype)
    starts, places = np.cumsum(counts, axis=1) - counts, np.cumsum(counts, axis=0) - counts
    for s in range(SIZE):
        for d in range(SIZE):
            n = counts[s, d]
            out[s, starts[s, d] :][:n] = cs[d, places[s, d] :][:n]
    return out


@pytest.fixture(params=[notoken, Started()], ids=["at once", "started"])
def exchange(request):
    def call(x, counts, room=ROOM, **comm):
        return request.param.ragged_alltoall(x, counts, room, **comm)

    return call


@jits
def test_counts_that_change(exchange, jit):
    f = jit(exchange)
    for seed in range(4):
        xs, counts = all_rows(seed), random_counts(seed)
        y, received = f(xs[RANK], counts[RANK])
        assert_equal(y, model(xs, counts)[RANK])
        assert_equal(received, counts[:, RANK])


def test_loop_in_which_counts_are_computed(exchange):
    """Each step sends the rows that the step before has received, by counts of its own."""
    steps = 5
    shares = random_counts(3, (steps,))
    start = all_rows(3)

    @jax.jit
    def run(x, shares):
        def step(x, share):
            y, received = exchange(x, share)
            return y[:ROWS] + received.sum(), received

        return lax.scan(step, x, shares)

    x, received = run(start[RANK], shares[:, RANK])
    xs = start
    for step in range(steps):
        sums = shares[step].sum(axis=0, dtype=np.float32)
        xs = model(xs, shares[step])[:, :ROWS] + sums[:, None, None]
    assert_equal(x, xs[RANK])
    assert_equal(received, shares[:, :, RANK])


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_derivative(exchange, jit, wrap):
    rng = np.random.default_rng(5)
    xs, counts = all_rows(5), random_counts(5)
    ts = rng.integers(-9, 9, xs.shape).astype(np.float32)
    cs = rng.integers(-9, 9, (SIZE, ROOM, WIDTH)).astype(np.float32)

    def everything(x, counts, t, c):
        f = wrap(lambda x: exchange(x, counts)[0] ** 2)
        backward = lambda x: jax.vjp(f, x)[1](c)[0]
        y, forward = jax.jvp(f, (x,), (t,))
        return y, forward, *jax.jvp(backward, (x,), (t,))

    y, forward, backward, second = jit(everything)(xs[RANK], counts[RANK], ts[RANK], cs[RANK])
    there = model(xs, counts)
    assert_equal(y, there[RANK] ** 2)
    assert_equal(forward, (2 * there * model(ts, counts))[RANK])
    assert_equal(backward, transposed(2 * there * cs, counts)[RANK])
    assert_equal(second, transposed(2 * model(ts, counts) * cs, counts)[RANK])


def test_derivative_of_the_loop(exchange):
    """Backwards, the rows of each step go where they came from; counts depend on the rows."""

    def run(x, s):
        def step(x, share):
            share = jnp.where(jnp.sum(x) > -1e9, share, 0)
            y, _ = exchange(x, share)
            return x + y[:ROWS] * y[:ROWS], None

        return lax.scan(step, x, s)[0]

    shares, xs = random_counts(6, (3,)), 0.01 * all_rows(6)
    weights = np.arange(1.0, 1 + xs.size, dtype=np.float32).reshape(xs.shape)
    loss = lambda x: jnp.sum(weights[RANK] * run(x, shares[:, RANK]))
    gradient = jax.jit(jax.grad(loss))(xs[RANK])

    def whole(xs):
        for share in shares:
            matrix = np.zeros((SIZE * ROWS, SIZE * ROWS), np.float32)
            for i, column in enumerate(np.eye(SIZE * ROWS, dtype=np.float32)):
                matrix[:, i] = model(column.reshape(SIZE, ROWS), share)[:, :ROWS].ravel()
            y = (matrix @ xs.reshape(SIZE * ROWS, WIDTH)).reshape(xs.shape)
            xs = xs + y * y
        return jnp.sum(weights * xs)

    expected = jax.grad(whole)(jnp.asarray(xs))
    np.testing.assert_allclose(gradient, expected[RANK], rtol=1e-5)


def test_vmap(exchange):
    batch = np.stack([all_rows(seed) for seed in range(4)])
    counts = random_counts(8)
    f = jax.jit(lambda x, c: jax.vmap(exchange, (0, None), (0, None))(x, c))
    y, received = f(batch[:, RANK], counts[RANK])
    assert_equal(y, np.stack([model(xs, counts)[RANK] for xs in batch]))
    assert_equal(received, counts[:, RANK])
    gradient = jax.vmap(jax.grad(lambda x: jnp.sum(exchange(x, counts[RANK])[0] ** 2)))
    moved = np.arange(ROWS)[:, None] < counts[RANK].sum()
    assert_equal(gradient(batch[:, RANK]), np.where(moved, 2 * batch[:, RANK], 0))


def test_counts_that_are_batched(exchange):
    """They may be the same, as where a `cond` is batched; of no elements there are none."""
    xs, counts = all_rows(8), random_counts(8)
    f = jax.vmap(lambda x, c: exchange(x, c)[0])
    y = f(np.stack([xs[RANK]] * 2), np.stack([counts[RANK]] * 2))
    assert_equal(y, np.stack([model(xs, counts)[RANK]] * 2))
    assert f(np.ones((0, ROWS)), np.ones((0, SIZE), np.int32)).shape == (0, ROOM)
    differ = np.zeros((2, SIZE), np.int32)
    differ[1, 0] = 1
    fails(
        exchange,
        differ,
        ROOM,
        "under vmap the same for all elements, got ",
        batch=(2,),
        wrap=jax.vmap,
    )


def test_pytrees_of_several_dtypes(exchange):
    counts, xs = random_counts(9), all_rows(9)
    tree = {"x": xs[RANK], "id": np.arange(ROWS, dtype=np.int32) + 100 * RANK, "v": -xs[RANK, :, 0]}
    ids = np.arange(ROWS, dtype=np.int32) + 100 * np.arange(SIZE, dtype=np.int32)[:, None]
    for f in (exchange, jax.jit(exchange)):
        y, received = f(tree, counts[RANK])
        assert_equal(y["x"], model(xs, counts)[RANK])
        assert_equal(y["v"], model(-xs[..., 0], counts)[RANK])
        assert_equal(y["id"], model(ids, counts)[RANK])
        assert_equal(received, counts[:, RANK])
    nothing, received = exchange({}, counts[RANK])
    assert nothing == {}
    assert_equal(received, counts[:, RANK])


def test_ranks_of_different_sizes(exchange):
    """The ranks' operands and capacities differ; one rank has no rows, and others no capacity."""
    rows = np.arange(RANK, dtype=np.float32)
    counts = np.zeros(SIZE, int)
    counts[-1] = RANK
    total = SIZE * (SIZE - 1) // 2
    last = RANK == SIZE - 1
    y, received = exchange(rows, counts, total if last else 0)
    expected = np.concatenate([np.arange(r) for r in range(SIZE)]).astype(np.float32)
    assert_equal(y, expected if last else np.zeros(0, np.float32))
    assert_equal(received, np.arange(SIZE, dtype=np.int32) * last)


@pytest.mark.parametrize("kind", [list, np.uint8, np.uint32, np.int64, jnp.int16])
def test_kinds_of_counts(exchange, kind):
    xs, counts = all_rows(1), random_counts(1)
    given = counts[RANK].tolist() if kind is list else counts[RANK].astype(kind)
    with enable_x64(kind is np.int64):
        for f in (exchange, jax.jit(exchange)):
            assert_equal(f(xs[RANK], given)[0], model(xs, counts)[RANK])


def test_a_loop_carries_requests():
    """A step starts the exchange that the next one waits for: two are under way at a time."""

    def steps(start, end, x, shares):
        def body(carry, share):
            request, x = carry
            new = start(x, share, ROOM)
            y, received = end(request)
            return (new, x + y[:ROWS] * y[:ROWS]), received

        (last, x), received = lax.scan(body, (start(x, shares[0], ROOM), x), shares[1:])
        return jnp.sum((x + end(last)[0][:ROWS]) * (RANK + 1)), received

    x, shares = 0.01 * all_rows(6)[RANK], random_counts(6, (4,))
    f = jax.jit(jax.value_and_grad(steps, 2, has_aux=True), static_argnums=(0, 1))
    found = f(mpi4jax.iragged_alltoall, mpi4jax.wait, x, shares[:, RANK])
    expected = f(notoken.ragged_alltoall, lambda y: y, x, shares[:, RANK])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    assert_equal(found[0][1], shares[:-1, :, RANK])


# ---- Errors


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"send_counts": np.ones(SIZE)}, TypeError, "'send_counts' must be .* integers, .* float"),
        ({"send_counts": "many"}, TypeError, "'send_counts' must be .* got str: 'many'"),
        ({"send_counts": None}, TypeError, "'send_counts' must be "),
        ({"send_counts": 1}, ValueError, r"'send_counts' must be .* got shape \(\)"),
        (
            {"send_counts": [1] * (SIZE + 1)},
            ValueError,
            rf"'send_counts'.* shape \({SIZE + 1},\)",
        ),
        ({"capacity": -1}, ValueError, "'capacity' must be a number of rows, .* got -1"),
        ({"capacity": 2.5}, TypeError, "'capacity' must be a number of rows, .* float: 2.5"),
        ({"x": 1.0}, ValueError, r"'x' must have a first axis, of rows; .* got \(\)"),
        ({"x": [np.ones(2), np.ones(3)]}, ValueError, r"'x' must have as many rows .* \(2, ...\)"),
    ],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_wrong_arguments(changed, error, message, jit):
    good = {"x": np.ones((ROWS, 2), np.float32), "send_counts": [1] * SIZE, "capacity": ROOM}
    call = functools.partial(notoken.ragged_alltoall, **{**good, **changed})
    with pytest.raises(error, match=f"ragged_alltoall: argument {message}"):
        jax.jit(call).trace() if jit else call()


def test_traced_capacity(exchange):
    with pytest.raises(TypeError, match="argument 'capacity' must be a static integer"):
        jax.jit(lambda n: exchange(np.ones(SIZE), np.ones(SIZE, int), n))(3)


def fails(exchange, counts, room, pattern, batch=(), wrap=lambda f: f):
    x = np.ones((*batch, ROWS, 2), np.float32)
    comm = COMM.Dup()  # it cannot be used after that
    f = jax.jit(wrap(lambda x, c: exchange(x, c, room, comm=comm)))
    with pytest.raises(Exception, match=pattern):
        jax.block_until_ready(f(x, np.int32(counts)))
    with pytest.raises(Exception, match=r"an earlier operation on communicator .* failed"):
        notoken.bcast(1.0, 0, comm=comm).block_until_ready()
    comm.Free()


def test_too_much_names_rank_and_rows(exchange):
    each = ", ".join(f"2 from rank {rank}" for rank in range(SIZE))
    fails(
        exchange,
        [2] * SIZE,
        2 * SIZE - 1,
        rf"i?ragged_alltoall: argument 'capacity' must be at least the {2 * SIZE} rows "
        rf"that rank {RANK} receives \({each}\), got {2 * SIZE - 1} when it ran, "
        "(test_ragged|reference).py",
    )


@pytest.mark.parametrize("bad", [[ROWS + 1], [-1, 2]], ids=["more than there are", "negative"])
def test_wrong_counts_of_one_rank_are_an_error_on_all(exchange, bad):
    counts = (bad + [0] * SIZE)[:SIZE] if RANK == 0 else [0] * SIZE
    got = rf"{sum(counts)} \({', '.join(map(str, counts))}\)" if RANK == 0 else "others on rank 0"
    fails(exchange, counts, ROOM, f"argument 'send_counts' must be .*, got {got} when it ran")
