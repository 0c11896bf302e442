"""What is made on one rank of 100,000, with communicators that report that size.

Functions are traced and lowered, and not run. Asserted are bytes, and not times.
"""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax
import mpi4jax.notoken as m
from mpi4jax import _native, report

MANY = 100_000
MB = 1e6


@pytest.fixture
def fake(monkeypatch):
    """``fake(size, rank)``: a communicator of one process that says that it has ``size`` ranks."""
    register, made = _native.register_comm, []
    monkeypatch.setattr(
        _native, "register_comm", lambda key, handle, rank, size: register(key, handle, 0, 1)
    )

    def make(size=MANY, rank=MANY // 2):
        class Fake(MPI.Intracomm):
            Get_size = lambda self: size
            Get_rank = lambda self: rank
            size = property(Get_size)
            rank = property(Get_rank)

        made.append(Fake(MPI.COMM_SELF.Dup()))
        return made[-1]

    yield make
    for comm in made:
        comm.Free()


def peak(f):
    """What ``f`` returns, and the maximum number of bytes that Python has allocated in it."""
    gc.collect()
    tracemalloc.start()
    try:
        result = f()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def lowered(f, *avals):
    return jax.jit(f).lower(*avals).as_text()


def to_neighbors(size, rank, count):
    counts = np.zeros(size, int)
    counts[[(rank + k) % size for k in (-30, -1, 1, 30)]] = count
    return counts


@pytest.mark.parametrize("kind", [np.asarray, list])
def test_programs_have_only_ranks_that_get_something(fake, kind):
    texts = []
    for size in (1_000, MANY):
        comm, counts = fake(size, size // 2), kind(to_neighbors(size, size // 2, 100))
        x = jax.ShapeDtypeStruct((400,), np.float32)
        text, most = peak(lambda: lowered(lambda x: m.alltoallv(x, counts, counts, comm=comm), x))  # noqa: B023
        texts.append(text)
        assert most < 20 * MB
    # Ranks have more digits.
    assert len(texts[1]) - len(texts[0]) < 100


@pytest.mark.parametrize("op", ["allgatherv", "gatherv", "reduce_scatterv"])
def test_operations_with_counts_of_all_ranks(fake, op):
    comm, counts = fake(), np.full(MANY, 2)
    rows = 2 * MANY if op == "reduce_scatterv" else 2
    x = jax.ShapeDtypeStruct((rows,), np.float32)
    _, most = peak(lambda: lowered(lambda x: getattr(m, op)(x, counts, comm=comm), x))
    assert most < 100 * MB


def test_an_fft_of_pencils(fake):
    grid = (256, 384)
    ranks = grid[0] * grid[1]
    comm, layout = fake(ranks, ranks // 2), mpi4jax.Layout((1024,) * 3, dict(enumerate(grid)))
    x = jax.ShapeDtypeStruct(layout.block_shape(ranks // 2), np.complex64)
    text, most = peak(lambda: lowered(lambda x: m.fft.fftn(x, layout, comm=comm), x))
    assert most < 20 * MB
    assert len(text) < 200_000


def test_layouts():
    layout, most = peak(lambda: mpi4jax.Layout((4 * MANY + 1,), {0: MANY}))
    assert most < 20 * MB
    at, most = peak(lambda: layout.owner(jnp.array([-1, 0, 4, 5, 4 * MANY, 4 * MANY + 1])))
    assert at.tolist() == [-1, 0, 0, 1, MANY - 1, -1]
    assert most < 20 * MB
    x = jax.ShapeDtypeStruct((8,), np.int32)
    assert len(lowered(layout.owner, x)) < 10_000


def test_plans_of_ghosts(fake):
    plan, most = peak(lambda: m.ghosts.Plan([7], [7, 7], comm=fake(MANY, 0)))
    assert most < 20 * MB
    x = jax.ShapeDtypeStruct((1, 3), np.float32)
    text, most = peak(lambda: lowered(plan.fill, x))
    assert most < 20 * MB
    assert len(text) < 10_000


def test_meshes(fake):
    """The program of a reduction over all ranks does not name them."""

    def make():
        mesh = m.Mesh((-1,), "i", comm=fake())
        f = m.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
        return lowered(f, jax.ShapeDtypeStruct((3,), np.float32))

    text, most = peak(make)
    # Several lists of the ranks of the mesh, of 36 bytes for each rank.
    assert most < 30 * MB
    assert len(text) < 10_000


def test_a_report_of_all_ranks():
    """Ranks in one state are one line."""
    record = {
        **dict.fromkeys(report._COMPARED, 0),
        "comm": ("mpi4jax.default", 1, ((0, MANY - 1, 1),)),
        **{"collective": True, "sequence": 1, "any_size": False, "count": 3},
        **{"started": 1.0, "state": "has begun", "text": "allreduce #1"},
    }
    dump = {
        **{"size": MANY, "state": "waits in allreduce #1", "time": 2.0, "host": "a", "pid": 1},
        **{"records": [record], "python": []},
    }
    dumps = dict.fromkeys(range(MANY), dump)
    dumps[7] = {**dump, "records": [], "state": "in Python"}
    (states, found), most = peak(lambda: (report._states(dumps), report.divergences(dumps)))
    assert states == [
        f"ranks 0-6, 8-{MANY - 1} are waits in allreduce #1",
        "rank 7 is in Python",
    ]
    ((_, words),) = found
    assert "rank 7 never called the collective" in words
    assert len(words) < 200
    assert most < 100 * MB
