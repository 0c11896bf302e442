"""Particles that go to the ranks of their cells, and blocks that are balanced by them."""

import contextlib
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE, assert_equal, enable_x64

import mpi4jax.notoken as mpi4jax

CELLS, NUMBER, STEPS = (12, 8), 60, 3
DIMS = MPI.Compute_dims(SIZE, 2)


def all_particles():
    """Most of them in a corner."""
    place = np.random.default_rng(5).random((NUMBER, 2)).astype(np.float32) ** 3
    return {"place": place, "number": np.arange(NUMBER, dtype=np.int32)}


def cells_of(place):
    return [(place[:, k] * n).astype(int) for k, n in enumerate(CELLS)]


def moved(place):
    return (place + 0.1 * jnp.sin(5 * place[:, ::-1])) % 1.0


def sent(layout, particles, count=None):
    owners = layout.owner(*cells_of(particles["place"]))
    return mpi4jax.migrate(particles, owners, NUMBER, count=count)


def balanced(particles, count):
    """The layout in which ranks have as many particles as each other, as nearly as can be."""
    here = jnp.arange(NUMBER) < count
    cuts = {}
    for axis, (at, n) in enumerate(zip(cells_of(particles["place"]), CELLS, strict=True)):
        weights = mpi4jax.allreduce(jnp.bincount(jnp.where(here, at, n), length=n))
        cuts[axis] = mpi4jax.grids.balanced(weights, DIMS[axis])
    return mpi4jax.Layout(CELLS, cuts)


def of_all_ranks(particles, count):
    """All particles, in the order of their numbers, as ranks have them now."""
    rows = COMM.allgather({name: np.asarray(x)[: int(count)] for name, x in particles.items()})
    found = {name: np.concatenate([each[name] for each in rows]) for name in particles}
    return {name: x[np.argsort(found["number"])] for name, x in found.items()}


def test_particles_that_are_balanced_are_those_of_one_process():
    expected = all_particles()
    layout = mpi4jax.Layout(CELLS, dict(enumerate(DIMS)))
    mine = {name: x[RANK::SIZE] for name, x in expected.items()}
    send = jax.jit(sent, static_argnums=0)
    particles, count = send(layout, mine)
    for _ in range(STEPS):
        before = max(COMM.allgather(int(count)))
        layout = balanced(particles, count)
        particles, count = send(layout, particles, count)
        assert max(COMM.allgather(int(count))) <= before
        owned = layout.owner(*cells_of(particles["place"][: int(count)]))
        assert owned.tolist() == [RANK] * int(count)
        assert not particles["place"][int(count) :].any()
        particles = {**particles, "place": moved(particles["place"])}
        particles, count = send(layout, particles, count)
        expected["place"] = np.asarray(moved(expected["place"]))
    found = of_all_ranks(particles, count)
    assert found["number"].tolist() == [*range(NUMBER)]
    np.testing.assert_allclose(found["place"], expected["place"], rtol=1e-6)


def test_the_gradient_of_particles_that_move():
    """With respect to where they were, on the ranks where they were; and by finite differences."""
    layout = mpi4jax.Layout(CELLS, dict(enumerate(DIMS)))
    everything = all_particles()

    def loss(place):
        particles = {"place": place, "number": jnp.asarray(everything["number"][RANK::SIZE])}
        particles, count = sent(layout, particles)
        for _ in range(STEPS):
            particles = {**particles, "place": moved(particles["place"])}
            particles, count = sent(layout, particles, count)
        here = (jnp.arange(NUMBER) < count)[:, None]
        return jnp.sum(
            jnp.where(here, jnp.cos(particles["place"]) * particles["number"][:, None], 0)
        )

    place = jnp.asarray(everything["place"][RANK::SIZE])
    gradient = jax.jit(jax.grad(loss))(place)

    def alone(place):
        whole = place
        for _ in range(STEPS):
            whole = moved(whole)
        return jnp.sum(jnp.cos(whole) * everything["number"][:, None])

    expected = jax.grad(alone)(jnp.asarray(everything["place"]))[RANK::SIZE]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
    # A direction in which no particle comes to another cell.
    tangent = np.random.default_rng([1, RANK]).standard_normal(place.shape).astype(np.float32)
    both = [COMM.allreduce(float(loss(place + h * tangent))) for h in (1e-4, -1e-4)]
    total = COMM.allreduce(float(jnp.vdot(gradient, tangent)))
    np.testing.assert_allclose((both[0] - both[1]) / 2e-4, total, rtol=0.05)
    _, forward = jax.jvp(loss, (place,), (jnp.asarray(tangent),))
    np.testing.assert_allclose(COMM.allreduce(float(forward)), total, rtol=1e-4)


def test_owners_of_elements():
    layout = mpi4jax.Layout((5, 4), {0: [0, 3, 2], 1: [4]})
    assert layout.owner(jnp.array([0, 2, 3, 4, 5, -1]), 0).tolist() == [1, 1, 2, 2, -1, -1]
    for given in (layout, mpi4jax.Layout((7, 5), {1: 3, 0: 2}), mpi4jax.Layout((3, 2))):
        i, j = np.indices(given.shape)
        owners = np.asarray(jax.jit(given.owner)(i, j))
        for rank in range(given.ranks):
            assert (owners[given.block(rank)] == rank).all()
    with pytest.raises(TypeError, match=r"'index' must be 2 integers, .* got 1 of \['int32'\]"):
        layout.owner(1)
    with pytest.raises(TypeError, match=r"got 2 of \['float32', 'int32'\]"):
        layout.owner(1.5, 1)


def test_rows_arrive_in_the_order_of_their_ranks():
    rows = np.arange(6, dtype=np.int32) + 10 * RANK
    expected = [i + 10 * r for r in range(SIZE) for i in range(5) if i % SIZE == RANK]
    for dtype in (np.int8, np.uint8, np.int32, np.int64):
        owners = (np.arange(6) % SIZE).astype(dtype)
        found, count = mpi4jax.migrate(rows, owners, 6 * SIZE, count=5)
        assert count.dtype == np.int32
        assert_equal(found[: int(count)], np.array(expected, np.int32))


@pytest.mark.parametrize(
    ("owners", "error", "words"),
    [
        (np.zeros(2), TypeError, "migrate: argument 'owners' must be an array of integers, got"),
        (np.zeros(3, int), ValueError, r"one entry per row of 'x', got shapes \(3,\) and \(2, 2\)"),
        (np.zeros((2, 1), int), ValueError, "one entry per row"),
    ],
)
def test_wrong_owners(owners, error, words):
    with pytest.raises(error, match=words):
        mpi4jax.migrate(jnp.ones((2, 2)), owners, 4)


def test_wrong_counts():
    rows, owners = jnp.arange(3), jnp.full(3, RANK)
    for count, error in (
        (4, ValueError),
        (-1, ValueError),
        (1.5, TypeError),
        (np.ones(1, int), TypeError),
    ):
        with pytest.raises(error, match=r"^migrate: argument 'count' must be"):
            mpi4jax.migrate(rows, owners, 3, count=count)
    for count in (4, -1):
        own = COMM.Dup()  # it cannot be used after the error
        send = jax.jit(lambda n: mpi4jax.migrate(rows, owners, 3, count=n, comm=own))  # noqa: B023
        words = rf"migrate: argument 'count' must be .* rows of 'x', got {count} on rank {SIZE - 1}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words) as e:
            jax.block_until_ready(send(count if RANK == SIZE - 1 else 3))
        assert "test_migrate.py:" in str(e.value)
        own.Free()


def test_an_owner_that_is_no_rank():
    """All ranks raise, and the row is not dropped."""
    comm = COMM.Dup()
    for wrong, is_x64 in ((SIZE, True), (-1, True), (-1, False), (2**31 - 1, False)):
        own = comm.Dup()
        shown = "268435455 or more" if wrong > SIZE else wrong
        words = rf"migrate: argument 'owners' must be ranks from 0 to {SIZE - 1}, got {shown} on"
        send = jax.jit(lambda owners: mpi4jax.migrate(owners, owners, 9, count=2, comm=own))  # noqa: B023
        with enable_x64(is_x64):
            owners = jnp.array([0, wrong if RANK == SIZE - 1 else 0, wrong])
            with pytest.raises(jax.errors.JaxRuntimeError, match=words) as e:
                jax.block_until_ready(send(owners))
        assert f"on rank {SIZE - 1} when it ran" in str(e.value)


def test_refined_blocks_of_the_page():
    """The mean is kept, ghost cells are those beside a block, and the gradient is the area."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    section = page.partition("\n## Refined blocks\n")[2].partition("\n## ")[0]
    program = section.partition("```python\n")[2].partition("```")[0]
    printed = io.StringIO()
    names = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    expected = "mean 0.4287 in 16 blocks, 0.4287 in 52, jump 1.55\n"
    assert printed.getvalue().startswith(expected) if RANK == SIZE - 1 else not printed.getvalue()
    assert sum(names["new_lengths"]) == len(names["refined"])
    assert len(names["fine"]) == len(names["own_refined"]) == names["new_lengths"][RANK]

    n, centers, ghosts = names["n"], [], []
    for level, *place in names["own_refined"]:
        at = [(k + (np.arange(-1, n + 1) + 0.5) / n) / 2**level for k in place]
        ghosts.append(np.stack(np.meshgrid(*at, indexing="ij"), -1))
        centers.append(ghosts[-1][1:-1, 1:-1].reshape(-1, 2))
    found = np.asarray(names["plan"].fill(jnp.asarray(np.concatenate(centers)))).reshape(
        -1, n + 2, n + 2, 2
    )
    away = np.abs((found - np.stack(ghosts) + 0.5) % 1 - 0.5).max(-1)  # in a periodic square
    width = np.array([1 / (n * 2**level) for level, *_ in names["own_refined"]])
    assert (away <= 0.5 * width[:, None, None] + 1e-6).all()
    assert (away[:, 1:-1, 1:-1] < 1e-6).all()

    area, own = names["area"], [names["blocks"][k] for k in names["own"]]

    def total(u):
        return (names["move"](u).sum((1, 2)) * area(names["own_refined"])).sum()

    gradient = jax.jit(jax.grad(total))(names["u"])
    expected = np.broadcast_to(np.asarray(area(own))[:, None, None], gradient.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
