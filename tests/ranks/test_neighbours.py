"""`neighbor_allgather` and `neighbor_alltoall`, edge by edge, on grids and graphs; and started."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, Started, assert_equal, jits

import mpi4jax
from mpi4jax import notoken

# A grid, or for each rank its sources and destinations.
GRIDS = {
    "ring": ([SIZE], [True]),
    "line": ([SIZE], [False]),
    "torus": ([SIZE, 1], [True, True]),
    "plane": (MPI.Compute_dims(SIZE, 2), [False, True]),
}
GRAPHS = {
    # To the next rank twice, to oneself, and to rank 0.
    "graph": [(r, d) for r in range(SIZE) for d in ((r + 1) % SIZE, r, (r + 1) % SIZE, 0)],
    "star": [(0, d) for d in range(1, SIZE)],
    "nothing": [],
}
apis = pytest.mark.parametrize("api", [notoken, Started()], ids=["at once", "started"])


class Topology:
    """The edges of all ranks: ``(source, its edge, destination, its edge)``; and their numbers."""

    def __init__(self, name):
        self.name, self.edges = name, []
        if name in GRIDS:
            self.comm = MPI.COMM_WORLD.Create_cart(*GRIDS[name])
            dims, periods, _ = self.comm.Get_topo()
            self.ins = self.outs = [2 * len(dims)] * SIZE
            for rank in range(SIZE):
                for k in range(2 * len(dims)):
                    there = self.comm.Get_coords(rank)
                    there[k // 2] += 1 if k % 2 else -1
                    if periods[k // 2] or 0 <= there[k // 2] < dims[k // 2]:
                        self.edges.append((rank, k, self.comm.Get_cart_rank(there), k ^ 1))
        else:
            pairs = GRAPHS[name]
            outs = [[d for s, d in pairs if s == r] for r in range(SIZE)]
            ins = [[s for s, d in pairs if d == r] for r in range(SIZE)]
            for s in range(SIZE):
                for k, d in enumerate(outs[s]):
                    nth = outs[s][:k].count(d)
                    place = [i for i, source in enumerate(ins[d]) if source == s][nth]
                    self.edges.append((s, k, d, place))
            self.comm = MPI.COMM_WORLD.Create_dist_graph_adjacent(ins[RANK], outs[RANK])
            self.ins, self.outs = [len(i) for i in ins], [len(o) for o in outs]

    def alltoall(self, xs):
        out = [np.zeros((n, *xs[0].shape[1:]), xs[0].dtype) for n in self.ins]
        for s, k, d, place in self.edges:
            out[d][place] = xs[s][k]
        return out

    def transposed(self, cs):
        out = [np.zeros((n, *cs[0].shape[1:]), cs[0].dtype) for n in self.outs]
        for s, k, d, place in self.edges:
            out[s][k] = cs[d][place]
        return out


def numbers(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 9, (n, 3)).astype(np.float32) for n in lengths]


@pytest.fixture(scope="module")
def topologies():
    found = [Topology(name) for name in (*GRIDS, *GRAPHS)]
    yield found
    mpi4jax.flush()
    for topology in found:
        topology.comm.Free()


def check_all(topologies, actual, expected):
    """Of each topology, what this rank has got, and what all ranks should get."""
    for topology, y, ys in zip(topologies, actual, expected, strict=True):
        assert_equal(y, ys[RANK], what=topology.name)


def on_each(topologies, f):
    """``f(x, topology)`` of a list of arrays, one for each topology: as one program."""
    return lambda xs: [f(x, topology) for x, topology in zip(xs, topologies, strict=True)]


def mine(everyones):
    return [xs[RANK] for xs in everyones]


@apis
@jits
def test_alltoall(topologies, api, jit):
    everyones = [numbers(topology.outs) for topology in topologies]
    f = jit(on_each(topologies, lambda x, topology: api.neighbor_alltoall(x, topology.comm)))
    expected = [t.alltoall(xs) for t, xs in zip(topologies, everyones, strict=True)]
    check_all(topologies, f(mine(everyones)), expected)


@apis
@jits
def test_allgather(topologies, api, jit):
    xs = numbers([SIZE])[0]
    f = jit(on_each(topologies, lambda x, topology: api.neighbor_allgather(x, topology.comm)))
    expected = [
        t.alltoall([np.stack([xs[r]] * n) if n else xs[:0] for r, n in enumerate(t.outs)])
        for t in topologies
    ]
    check_all(topologies, f([xs[RANK]] * len(topologies)), expected)


@apis
def test_derivatives(topologies, api):
    everyones = [[numbers(t.outs), numbers(t.outs, 1), numbers(t.ins, 2)] for t in topologies]
    values, tangents, cotangents = map(mine, zip(*everyones, strict=True))
    f = on_each(topologies, lambda x, topology: api.neighbor_alltoall(x, topology.comm) ** 2)
    g = on_each(topologies, lambda x, topology: api.neighbor_allgather(x, topology.comm))

    @jax.jit
    def everything(x, t, c):
        forward, (backward,) = jax.jvp(f, (x,), (t,))[1], jax.vjp(f, x)[1](c)
        # What is gathered from a rank comes back from all that have it.
        (gathered,) = jax.vjp(g, [v.sum(axis=0) for v in x])[1](c)
        return forward, backward, gathered

    found = zip(topologies, everyones, *everything(values, tangents, cotangents), strict=True)
    for topology, (xs, ts, cs), forward, backward, gathered in found:
        there, name = topology.alltoall(xs), topology.name
        assert_equal(forward, 2 * there[RANK] * topology.alltoall(ts)[RANK], what=name)
        weighted = [2 * a * c for a, c in zip(there, cs, strict=True)]
        assert_equal(backward, topology.transposed(weighted)[RANK], what=name)
        assert_equal(gathered, topology.transposed(cs)[RANK].sum(axis=0), what=name)


@apis
def test_vmap_and_trees(topologies, api):
    xs = [numbers(topology.outs) for topology in topologies]
    ints = [
        [np.arange(n, dtype=np.int32) + 10 * r for r, n in enumerate(topology.outs)]
        for topology in topologies
    ]
    exchange = lambda x, topology: api.neighbor_alltoall(x, topology.comm)
    trees = [{"x": x, "i": i} for x, i in zip(mine(xs), mine(ints), strict=True)]
    ys = jax.jit(on_each(topologies, exchange))(trees)
    batch = lambda x, topology: jax.vmap(lambda x: exchange(x, topology), 1, 1)(x)
    batched = jax.jit(on_each(topologies, batch))(mine(xs))
    expected = [t.alltoall(x) for t, x in zip(topologies, xs, strict=True)]
    check_all(topologies, [y["x"] for y in ys], expected)
    check_all(topologies, batched, expected)
    expected = [t.alltoall(i) for t, i in zip(topologies, ints, strict=True)]
    check_all(topologies, [y["i"] for y in ys], expected)


def test_a_loop_carries_requests(topologies):
    """Each step waits for what the one before has started, on another line at first."""
    x0 = numbers([SIZE])[0][RANK]

    def steps(topology, start, end):
        def step(carry, k):
            request, x = carry
            x = x * k + end(request).sum(axis=0)
            return (start(x, topology.comm), x), None

        (last, x), _ = jax.lax.scan(step, (start(x0, topology.comm), x0), jnp.arange(3.0))
        return x + end(last).sum(axis=0)

    whole = lambda topology: steps(topology, notoken.neighbor_allgather, lambda y: y)
    started = lambda topology: steps(topology, mpi4jax.ineighbor_allgather, mpi4jax.wait)
    found = jax.jit(lambda: [(started(topology), whole(topology)) for topology in topologies])()
    for topology, (y, expected) in zip(topologies, found, strict=True):
        assert_equal(y, np.asarray(expected), what=topology.name)


def test_tokens_and_keys():
    line = MPI.COMM_WORLD.Create_cart([SIZE], [False])
    keys = jax.random.split(jax.random.key(0), SIZE)
    y, token = mpi4jax.neighbor_allgather(keys[RANK], line, token=mpi4jax.create_token())
    assert token.shape == ()
    data = np.asarray(jax.random.key_data(keys))
    expected = [
        data[RANK - 1] if RANK else 0 * data[0],
        data[RANK + 1] if RANK < SIZE - 1 else 0 * data[0],
    ]
    assert_equal(jax.random.key_data(y), np.stack(expected))
    mpi4jax.flush()
    line.Free()


@pytest.mark.parametrize(
    "op",
    [
        *(notoken.neighbor_alltoall, notoken.neighbor_allgather),
        *(mpi4jax.ineighbor_alltoall, mpi4jax.ineighbor_allgather),
    ],
)
@pytest.mark.parametrize("comm", [None, MPI.COMM_WORLD, MPI.COMM_NULL, 3])
def test_no_topology(op, comm):
    error, words = TypeError, "must be a communicator with"
    if comm == MPI.COMM_NULL:
        error, words = ValueError, "is the null communicator: .* left this rank out"
    with pytest.raises(error, match=rf"neighbor_.*: argument 'comm' {words}"):
        op(np.ones((2, 3)), comm)


def test_wrong_number_of_blocks():
    ring = MPI.COMM_WORLD.Create_cart([SIZE], [True])
    for x in (np.ones(3), np.float32(1)):
        with pytest.raises(
            ValueError, match=r"'x' must have a block for each .*; expected \(2, ...\)"
        ):
            notoken.neighbor_alltoall(x, ring)
    ring.Free()
