"""`neighbor_allgather` and `neighbor_alltoall`, edge by edge, on grids and graphs; and started."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import JITS, RANK, SIZE, Started, assert_equal, jits

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
each = pytest.mark.parametrize("name", [*GRIDS, *GRAPHS])
apis = pytest.mark.parametrize("api", [notoken, Started()], ids=["at once", "started"])


class Topology:
    """The edges of all ranks: ``(source, its edge, destination, its edge)``; and their numbers."""

    def __init__(self, name):
        self.edges = []
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


@pytest.fixture
def topology(name):
    found = Topology(name)
    yield found
    mpi4jax.flush()
    found.comm.Free()


@each
@apis
@jits
def test_alltoall(topology, api, jit):
    xs = numbers(topology.outs)
    y = jit(lambda x: api.neighbor_alltoall(x, topology.comm))(xs[RANK])
    assert_equal(y, topology.alltoall(xs)[RANK])


@each
@apis
def test_allgather(topology, api):
    xs = numbers([SIZE])[0]
    expected = topology.alltoall(
        [np.stack([xs[r]] * n) if n else xs[:0] for r, n in enumerate(topology.outs)]
    )
    for jit in JITS.values():
        y = jit(lambda x: api.neighbor_allgather(x, topology.comm))(xs[RANK])
        assert_equal(y, expected[RANK])


@pytest.mark.one_in(2)
@each
@apis
def test_derivatives(topology, api):
    xs, ts, cs = numbers(topology.outs), numbers(topology.outs, 1), numbers(topology.ins, 2)
    f = lambda x: api.neighbor_alltoall(x, topology.comm) ** 2
    forward = jax.jvp(f, (xs[RANK],), (ts[RANK],))[1]
    there = topology.alltoall(xs)
    assert_equal(forward, (2 * there[RANK] * topology.alltoall(ts)[RANK]))
    (backward,) = jax.jit(lambda x, c: jax.vjp(f, x)[1](c))(xs[RANK], cs[RANK])
    weighted = [2 * a * c for a, c in zip(there, cs, strict=True)]
    assert_equal(backward, topology.transposed(weighted)[RANK])

    # What is gathered from a rank comes back from all that have it.
    g = lambda x: jnp.sum(cs[RANK] * api.neighbor_allgather(x, topology.comm))
    assert_equal(jax.grad(g)(xs[RANK].sum(axis=0)), topology.transposed(cs)[RANK].sum(axis=0))


@each
@apis
def test_vmap_and_trees(topology, api):
    xs = numbers(topology.outs)
    tree = {"x": xs[RANK], "i": np.arange(topology.outs[RANK], dtype=np.int32) + 10 * RANK}
    y = api.neighbor_alltoall(tree, topology.comm)
    assert_equal(y["x"], topology.alltoall(xs)[RANK])
    ints = [np.arange(n, dtype=np.int32) + 10 * r for r, n in enumerate(topology.outs)]
    assert_equal(y["i"], topology.alltoall(ints)[RANK])
    batched = jax.vmap(lambda x: api.neighbor_alltoall(x, topology.comm), 1, 1)
    assert_equal(batched(xs[RANK]), topology.alltoall(xs)[RANK])


@each
def test_a_loop_carries_requests(topology):
    """Each step waits for what the one before has started, on another line at first."""
    comm, x0 = topology.comm, numbers([SIZE])[0][RANK]

    def steps(start, end):
        def step(carry, k):
            request, x = carry
            x = x * k + end(request).sum(axis=0)
            return (start(x, comm), x), None

        (last, x), _ = jax.lax.scan(step, (start(x0, comm), x0), jnp.arange(3.0))
        return x + end(last).sum(axis=0)

    expected = jax.jit(lambda: steps(notoken.neighbor_allgather, lambda y: y))()
    assert_equal(
        jax.jit(lambda: steps(mpi4jax.ineighbor_allgather, mpi4jax.wait))(), np.asarray(expected)
    )


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
    with pytest.raises(
        TypeError, match=r"neighbor_.*: argument 'comm' must be a communicator with"
    ):
        op(np.ones((2, 3)), comm)


def test_wrong_number_of_blocks():
    ring = MPI.COMM_WORLD.Create_cart([SIZE], [True])
    for x in (np.ones(3), np.float32(1)):
        with pytest.raises(
            ValueError, match=r"'x' must have a block for each .*; expected \(2, ...\)"
        ):
            notoken.neighbor_alltoall(x, ring)
    ring.Free()
