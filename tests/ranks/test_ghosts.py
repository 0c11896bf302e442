"""`mpi4jax.ghosts`: rows by global index, on random partitions, against NumPy."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, JITS, RANK, SIZE, assert_equal, each, enable_x64

import mpi4jax
from mpi4jax import ghosts, linalg, notoken
from mpi4jax._numerics.rendezvous import rendezvous


class Case:
    """Ids of all ranks, alike on every rank."""

    def __init__(self, name):
        rng = np.random.default_rng(len(name))
        ids = rng.choice(2**40, 23, replace=False) - 2**39
        owner = rng.integers(0, SIZE, len(ids))
        if name == "empty parts":
            owner[:] = SIZE - 1
        if name == "nothing":
            ids, owner = ids[:0], owner[:0]
        self.owned = [ids[owner == r] for r in range(SIZE)]
        needed = [rng.choice(ids, 11) if len(ids) else ids for _ in range(SIZE)]
        if name == "only others'":
            needed = [np.setdiff1d(n, o) for n, o in zip(needed, self.owned, strict=True)]
        if name == "own and others'":
            # Each id once, this rank's own first; nothing is received twice, and the order differs.
            others = [np.setdiff1d(n, o) for n, o in zip(needed, self.owned, strict=True)]
            needed = [np.r_[pair] for pair in zip(self.owned, others, strict=True)]
        if name == "empty parts":
            needed[0] = needed[0][:0]
        self.needed = needed
        self.plan = ghosts.Plan(self.owned[RANK], self.needed[RANK])

    def values(self, ids, shape=(), seed=0):
        rng = np.random.default_rng(seed)
        return [rng.integers(-9, 9, (len(i), *shape)).astype(np.float32) for i in ids]

    def fill(self, xs):
        pairs = zip(np.concatenate(self.owned), np.concatenate(xs), strict=True)
        of = dict(pairs)
        rows = [of[i] for i in self.needed[RANK]]
        return np.array(rows, xs[0].dtype).reshape(len(rows), *xs[0].shape[1:])

    def add(self, ys):
        out = np.zeros((len(self.owned[RANK]), *ys[0].shape[1:]), ys[0].dtype)
        place = {i: k for k, i in enumerate(self.owned[RANK])}
        for ids, y in zip(self.needed, ys, strict=True):
            for i, row in zip(ids, y, strict=True):
                if i in place:
                    out[place[i]] += row
        return out


@pytest.fixture(
    params=["any", "only others'", "own and others'", "empty parts", "nothing"], scope="module"
)
def ids(request):
    return Case(request.param)


class Started:
    def __init__(self, plan):
        self.fill = lambda x: self.end(plan.ifill(x))
        self.add = lambda y: self.end(plan.iadd(y))

    def end(self, request):
        between = mpi4jax.after(request, jnp.ones(2))
        return mpi4jax.wait(request, after=between * 2)


@pytest.mark.parametrize("shape, jit", [((), lambda f: f), ((2, 3), jax.jit)], ids=JITS)
@pytest.mark.parametrize("api", [lambda plan: plan, Started], ids=["at once", "started"])
def test_fill_and_add(ids, api, jit, shape):
    plan = api(ids.plan)
    xs, ys = ids.values(ids.owned, shape), ids.values(ids.needed, shape, 1)
    assert_equal(jit(plan.fill)(xs[RANK]), ids.fill(xs))
    assert_equal(jit(plan.add)(ys[RANK]), ids.add(ys))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("api", [lambda plan: plan, Started], ids=["at once", "started"])
def test_transformations(ids, api):
    """Each is the other's transpose; also of what is nonlinear, in batches, and again."""
    plan = api(ids.plan)
    xs, ts, cs = ids.values(ids.owned), ids.values(ids.owned, (), 1), ids.values(ids.needed, (), 2)
    f = jax.checkpoint(lambda x: plan.fill(x) ** 2)
    y, t = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(xs[RANK], ts[RANK])
    assert_equal(y, ids.fill(xs) ** 2)
    assert_equal(t, 2 * ids.fill(xs) * ids.fill(ts))
    (back,) = jax.jit(lambda x, c: jax.vjp(f, x)[1](c))(xs[RANK], cs[RANK])
    assert_equal(back, 2 * xs[RANK] * ids.add(cs))
    g = lambda y: jnp.sum(xs[RANK] * plan.add(y))
    assert_equal(jax.grad(g)(cs[RANK]), ids.fill(xs))
    tall = ids.values(ids.owned, (3,))
    assert_equal(jax.vmap(plan.fill, 1, 1)(tall[RANK]), ids.fill(tall))
    wide = ids.values(ids.needed, (3,))
    assert_equal(jax.vmap(plan.add, 1, 1)(wide[RANK]), ids.add(wide))


def test_trees_loops_and_keys(ids):
    plan, xs = ids.plan, ids.values(ids.owned, (2,))
    ints = [x[:, 0].astype(np.int32) for x in xs]
    y = plan.fill({"x": xs[RANK], "i": [ints[RANK]]})
    assert_equal(y["x"], ids.fill(xs))
    assert_equal(y["i"][0], ids.fill(ints))
    assert_equal(plan.add(y)["i"][0], ids.add([np.asarray(v) for v in _everyones(y["i"][0])]))

    def steps(fill, add):
        step = lambda x, _: (add(fill(x)) / 8, None)
        return jax.lax.scan(step, xs[RANK], None, length=3)[0]

    started = Started(plan)
    expected = np.asarray(jax.jit(steps, static_argnums=(0, 1))(plan.fill, plan.add))
    assert_equal(jax.jit(lambda: steps(started.fill, started.add))(), expected)


def _everyones(x):
    return COMM.allgather(np.asarray(x))


def test_only_neighbours_exchange_messages():
    """A ring: whoever else there is, each rank talks to two."""
    plan = ghosts.Plan([RANK], [(RANK - 1) % SIZE, RANK, (RANK + 1) % SIZE])
    others = sorted({(RANK - 1) % SIZE, (RANK + 1) % SIZE} - {RANK})
    assert sorted(plan.sources) == sorted(plan.destinations) == others
    assert repr(plan).startswith("<ghosts.Plan: 1 rows owned, 3 needed, ")


def test_ids_with_a_common_divisor_are_spread_over_the_directory():
    ids = np.arange(300) * SIZE
    with rendezvous(COMM) as by:
        directory = ghosts._Directory(COMM, by, np.array_split(ids, SIZE)[RANK])
    assert len(directory._ids) < 2 * len(ids) / SIZE


@pytest.mark.parametrize("spread", [1, ghosts.SPARSE])
def test_ids_that_fill_an_interval_are_stored_in_its_parts(spread):
    """Where ranks own consecutive ids, each stores its own."""
    ids = np.arange(spread * 5 * SIZE).reshape(SIZE, -1)[:, :5] - 7
    with rendezvous(COMM) as by:
        directory = ghosts._Directory(COMM, by, ids[RANK])
    assert directory._is_dense
    if spread == 1:
        assert directory._ids.tolist() == ids[RANK].tolist()
        assert set(directory._owners) == {RANK}
    assert len(directory._ids) <= 5 * ghosts.SPARSE


def test_ids_at_the_ends_of_int64():
    limits = np.iinfo(np.int64)
    ids = np.r_[limits.min + np.arange(SIZE), limits.max - np.arange(SIZE)].reshape(2, SIZE)
    x = jnp.array([1.0, 2.0]) * RANK
    plan = ghosts.Plan(ids[:, RANK], ids[:, (RANK + 1) % SIZE])
    assert plan.fill(x).tolist() == [(RANK + 1) % SIZE * 1.0, (RANK + 1) % SIZE * 2.0]
    with pytest.raises(ValueError, match=f"has id {limits.min}, which no rank owns"):
        ghosts.Plan([RANK], [limits.min])


def test_a_sparse_matrix_in_cg():
    """A graph's Laplacian whose rows are spread at random."""
    n, rng = 40, np.random.default_rng(3)
    edges = np.unique(np.sort(rng.integers(0, n, (90, 2)), axis=1), axis=0)
    A = np.eye(n)
    for a, b in edges:
        A[[a, b], [b, a]] -= 1.0 * (a != b)
    A += np.diag(np.abs(A).sum(axis=1))
    mine = np.nonzero(rng.integers(0, SIZE, n) == RANK)[0]
    rows, columns = np.nonzero(A[mine])
    needed = np.unique(columns)
    plan, at = ghosts.Plan(mine, needed), np.searchsorted(needed, columns)
    b = rng.normal(size=n)
    with enable_x64(True):
        values = jnp.asarray(A[mine][rows, columns])

        def product(x, scale=1.0):
            return jnp.zeros(len(mine)).at[rows].add(scale * values * plan.fill(x)[at])

        x, _ = linalg.cg(product, b[mine], tol=1e-12)
        np.testing.assert_allclose(x, np.linalg.solve(A, b)[mine], rtol=1e-8)

        def loss(scale):
            x, _ = linalg.cg(lambda v: product(v, scale), b[mine], tol=1e-12)
            return notoken.allreduce(jnp.sum(x**2))

        # x(s) = x(1) / s.
        slope = COMM.allreduce(float(jax.grad(loss)(1.0)))
        np.testing.assert_allclose(slope, -2 * np.sum(np.linalg.solve(A, b) ** 2), rtol=1e-8)


LAST = SIZE - 1
# What is given on this rank, and what all ranks are told.
ERRORS = {
    "nobody's": (
        lambda: ([RANK], [RANK] if RANK < LAST else [0, -5]),
        rf"ValueError: .*'needed_ids' of rank {LAST} has id -5, which no rank owns",
    ),
    "twice one's": (
        lambda: ([3, 3] if RANK == LAST else [], [3]),
        rf"ValueError: .*'owned_ids' has id 3, which rank {LAST} owns twice; expected one owner",
    ),
    "floats": (
        lambda: ([RANK], np.ones(2) if RANK == LAST else [RANK]),
        rf"TypeError: .*'needed_ids' must be .* got shape \(2,\) and dtype float64 on rank {LAST}",
    ),
    "two axes": (
        lambda: (np.ones((1, 1), int) if RANK == LAST else [RANK], []),
        rf"TypeError: .*'owned_ids' must be .* got shape \(1, 1\) .* on rank {LAST}",
    ),
    "too large": (
        lambda: (np.array([2**63 + 1], np.uint64) if RANK == LAST else [RANK], []),
        rf"ValueError: .*'owned_ids' has id {2**63 + 1} on rank {LAST}; expected ids",
    ),
}
if SIZE > 1:
    ERRORS["two owners'"] = (
        lambda: ([7] if RANK in (0, LAST) else [], []),
        rf"ValueError: .*'owned_ids' has id 7, which ranks 0 and {LAST} own; expected one owner",
    )


@each(list(ERRORS))
def test_errors_are_those_of_all_ranks(case):
    given, expected = ERRORS[case]
    kind, _, words = expected.partition(": ")
    with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[kind], match=words):
        ghosts.Plan(*given())


def test_copies_are_the_same_plan():
    plan = ghosts.Plan([RANK], [0])
    assert copy.copy(plan) is copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(TypeError, match=r"cannot be pickled: .* 'owned_ids' and 'needed_ids'"):
        pickle.dumps(plan)
    request = plan.ifill(np.ones(1))
    with pytest.raises(TypeError, match="cannot be pickled: a communicator belongs"):
        pickle.dumps(request)
    assert mpi4jax.wait(copy.deepcopy(request)).tolist() == [1]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"ghosts.Plan: argument 'comm' must be .*, got int: 3"):
        ghosts.Plan([], [], comm=3)
    plan = ghosts.Plan([RANK], [0, 0], comm=MPI.COMM_WORLD)
    for name, rows, wrong in (("fill", 1, 2), ("add", 2, 3), ("ifill", 1, 2), ("iadd", 2, 3)):
        message = rf"{name}: argument '.' must have a row for each id; expected \({rows}, ...\)"
        for x in (np.ones(wrong), 1.0):
            with pytest.raises(ValueError, match=message):
                getattr(plan, name)(x)
    for name in ("add", "iadd"):
        for wrong in (np.ones(2, bool), jax.random.split(jax.random.key(0))):
            with pytest.raises(TypeError, match=rf"^ghosts.Plan.{name}: argument 'y' .* added"):
                getattr(plan, name)({"a": np.ones(2), "b": wrong})
