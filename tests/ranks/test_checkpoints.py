"""`mpi4jax.checkpoints`: what some ranks write, others read; wherever the former die."""

import contextlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from killing import KILL, add_moments
from mpi4py import MPI
from reference import COMM, RANK, SIZE

import mpi4jax
from mpi4jax import Layout, checkpoints, grids
from mpi4jax._numerics import index, store
from mpi4jax.sharding import NamedSharding, cut

WHOLE = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)


@contextlib.contextmanager
def first(ranks):
    """A communicator of the first ranks, None elsewhere; all leave together."""
    comm = COMM.Split(0 if ranks > RANK else MPI.UNDEFINED)
    here = comm != MPI.COMM_NULL
    try:
        yield comm if here else None
    finally:
        COMM.Barrier()
    if here:
        comm.Free()


def whole(comm, number):
    return None if number == 0 else 1


def slabs(comm, number):
    return Layout(WHOLE.shape, {number: comm.size})


def pencils(comm, number):
    return Layout(WHOLE.shape, dict(enumerate(MPI.Compute_dims(comm.size, 2))))


def behind(comm, number):
    """Behind an axis that the layout does not have."""
    return Layout(WHOLE.shape[1:], {1: comm.size})


def blocks(comm, number):
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2), periods=[True, False])
    return grids.Block(WHOLE.shape, cart, axes=(number, 2), width=(2, (0, 1)))


def joined(comm, number):
    return number


def specs(comm, k):
    """Cut, and then the same on all ranks; without the shape where blocks are equal."""
    spec = [P(None, "i"), P()][k]
    return NamedSharding(mpi4jax.Mesh(axis_names="i", comm=comm), spec, [WHOLE.shape, None][k])


LAYOUTS = [whole, slabs, pencils, behind, blocks, joined, specs]


def local(layout, comm, fill):
    """This rank's part of WHOLE, in what has another value where the part is not."""
    if layout is None:
        return WHOLE
    if isinstance(layout, int):
        return np.array_split(WHOLE, comm.size, layout)[comm.rank]
    if isinstance(layout, NamedSharding):
        return WHOLE[layout.layout(WHOLE.shape).block(comm.rank)]
    if isinstance(layout, Layout):
        return WHOLE[:, :, :][(..., *layout.block(comm.rank))]
    x = np.full(layout.padded_shape, fill, WHOLE.dtype)
    x[layout.inner] = WHOLE[layout.slices]
    return x


@pytest.mark.parametrize("writers, readers", [(SIZE, SIZE), (1, SIZE), (SIZE, 1), (2, 3)])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_others_read_what_some_have_written(folder, writers, readers, number):
    if max(writers, readers) > SIZE:
        writers = readers = SIZE
    with first(writers) as comm:
        if comm is not None:
            layouts = {name: LAYOUTS[number](comm, k) for k, name in enumerate("ab")}
            tree = {name: jnp.asarray(local(x, comm, -1)) for name, x in layouts.items()}
            checkpoints.save(folder / "all", tree, layouts, comm=comm)
    for other in LAYOUTS:
        with first(readers) as comm:
            if comm is None:
                continue
            layouts = {name: other(comm, k) for k, name in enumerate("ab")}
            expected = {name: local(x, comm, 5) for name, x in layouts.items()}
            like = {
                name: np.where(x == 5, x, 0) if isinstance(layouts[name], grids.Block) else 0 * x
                for name, x in expected.items()
            }
            found = checkpoints.load(folder / "all", like, layouts, comm=comm)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_specs_on_a_mesh(folder):
    """The state of a training loop, read by one rank, which takes all for its own block."""
    mesh = mpi4jax.Mesh((-1, 1), ("data", "model"))
    whole = {"w": np.arange(8 * SIZE, dtype=np.float32).reshape(2 * SIZE, 4), "step": np.int32(7)}
    specs = {"w": P(("model", "data")), "step": P()}
    mine = cut(whole, specs, mesh=mesh)
    checkpoints.save(folder / "s", mine, specs, mesh=mesh)
    with mesh:
        found = checkpoints.load(folder / "s", jax.tree.map(jnp.zeros_like, mine), specs)
    jax.tree.map(np.testing.assert_array_equal, found, mine)
    with first(1) as comm:
        if comm is not None:
            of_one = mpi4jax.Mesh((1, 1), ("data", "model"), comm=comm)
            found = checkpoints.load(folder / "s", whole, specs, mesh=of_one)
            jax.tree.map(np.testing.assert_array_equal, found, whole)
    with pytest.raises(TypeError, match="save: expected a NamedSharding, or a PartitionSpec and"):
        checkpoints.save(folder / "s", mine, specs)


def test_lengths_of_joined_arrays_differ(folder):
    mine = jnp.arange(2 * RANK, dtype=jnp.int32).reshape(RANK, 2) + 100 * RANK
    checkpoints.save(folder / "p", mine, 0, comm=COMM)
    expected = np.concatenate([*map(np.asarray, COMM.allgather(np.asarray(mine)))])
    found = checkpoints.load(folder / "p", mine[:0], 0, comm=COMM)
    np.testing.assert_array_equal(np.concatenate(COMM.allgather(np.asarray(found))), expected)
    with first(1) as comm:
        if comm is not None:
            shape = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
            found = checkpoints.load(folder / "p", shape, comm=comm)
            np.testing.assert_array_equal(found, expected)
            assert isinstance(found, jax.Array)


DTYPES = [bool, *"bBhHiIlLefdFD", ml_dtypes.bfloat16]


def test_every_dtype_and_kind_of_leaf(folder):
    tree = {
        "arrays": [np.array([0, 1, 3]).astype(dtype) for dtype in DTYPES],
        "special": np.array([-0.0, np.nan, np.inf, 1e-45], np.float32),
        "scalars": (3, 2.5, True, 1j, np.float32(0.1), np.int8(-3)),
        "jax": (jnp.zeros(()), jnp.ones((0, 2)), jnp.full((2, 2), 3, jnp.bfloat16)),
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 2)),
        "none": None,
    }
    checkpoints.save(folder / "x", tree, comm=COMM)
    like = jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, tree)
    like["keys"] = (jax.random.key(0), jax.random.split(jax.random.key(0, impl="rbg"), 2))
    found = checkpoints.load(folder / "x", like, comm=COMM)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        if hasattr(old, "dtype") and jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            assert new.dtype == old.dtype
            old, new = jax.random.key_data(old), jax.random.key_data(new)
        assert isinstance(new, type(old))
        old, new = np.asarray(old), np.asarray(new)
        assert (old.shape, old.dtype, old.tobytes()) == (new.shape, new.dtype, new.tobytes())


def test_large_blocks_have_several_tiles(folder, monkeypatch):
    monkeypatch.setattr(index, "_LARGEST_TILE", 4)
    x = np.arange(24.0).reshape(4, 6) + 1
    layout = Layout(x.shape, {0: SIZE})
    checkpoints.save(folder / "x", x[layout.block(RANK)], layout, comm=COMM)
    np.testing.assert_array_equal(checkpoints.load(folder / "x", x * 0, comm=COMM), x)
    other = Layout(x.shape, {1: SIZE})
    mine = checkpoints.load(folder / "x", x[other.block(RANK)] * 0, other, comm=COMM)
    np.testing.assert_array_equal(mine, x[other.block(RANK)])
    assert index.tiles((4, 6)) == ((2, 2), 6)


@pytest.mark.parametrize("is_there", [False, True])
def test_killed_at_each_moment(folder, monkeypatch, is_there):
    """The old checkpoint or the new one is there, and the next call writes over what is left."""
    add_moments(monkeypatch)
    path, tree = folder / f"of{RANK}", lambda step: {"step": step, "x": jnp.full(3, step)}
    found, at, step = set(), 0, 0
    while True:
        if is_there:
            checkpoints.save(path, tree(step), comm=MPI.COMM_SELF)
        else:
            shutil.rmtree(path, ignore_errors=True)
        with KILL.after(at) as killed:
            checkpoints.save(path, tree(step + 1), comm=MPI.COMM_SELF)
        try:
            state = checkpoints.load(path, tree(-1), comm=MPI.COMM_SELF)
            new = state["step"] - step
            np.testing.assert_array_equal(state["x"], tree(state["step"])["x"])
        except FileNotFoundError:
            assert not is_there
            assert not (path / store.INDEX).exists()
            new = 0
        assert new in (0, 1)
        found.add((bool(killed), new))
        checkpoints.save(path, tree(step + 2), comm=MPI.COMM_SELF)
        assert checkpoints.load(path, tree(-1), comm=MPI.COMM_SELF)["step"] == step + 2
        assert len([*path.iterdir()]) == 2, "nothing old is left"
        at, step = at + 1, step + 3
        if not killed:
            break
    assert found == {(True, 0), (True, 1), (False, 1)}
    assert at > 20


def test_the_newest_are_kept(folder):
    """Other directories stay, and what is left of a removal that was killed is not the newest."""
    latest = lambda: checkpoints.latest(folder)
    assert latest() is None
    for step in (8, 9, 10, 11):
        checkpoints.save(f"{folder}/{step}", {"step": step}, keep=3)
        assert latest() == Path(folder) / str(step)
    checkpoints.save(f"{folder}/last", {"step": 1})
    COMM.Barrier()
    assert {p.name for p in Path(folder).iterdir()} == {"9", "10", "11", "last"}
    COMM.Barrier()
    if RANK == 0:
        (Path(folder) / "11" / "index.json").unlink()  # as when a save is not complete
    COMM.Barrier()
    assert latest() == Path(folder) / "10"
    assert checkpoints.load(latest(), {"step": 0}) == {"step": 10}
    for path, keep in ((f"{folder}/last", 1), (f"{folder}/12", 0)):
        with pytest.raises(ValueError, match=r"^save: argument 'keep' must be at least 1, and"):
            checkpoints.save(path, {"step": 1}, keep=keep)


def test_a_removal_is_killed_at_each_moment(folder, monkeypatch):
    """The checkpoint is complete or not there, and the next removal removes what is left."""
    add_moments(monkeypatch)
    path, at, found = folder / f"of{RANK}", 0, set()
    checkpoints.save(path / "2", {"step": 2}, comm=MPI.COMM_SELF)

    def remove():
        for removal in store.retire(path, 1):
            store.remove(removal)

    while True:
        checkpoints.save(path / "1", {"step": at}, comm=MPI.COMM_SELF)
        with KILL.after(at) as killed:
            remove()
        try:
            state = checkpoints.load(path / "1", {"step": -1}, comm=MPI.COMM_SELF)
            found.add(state["step"] == at)
        except FileNotFoundError:
            found.add(None)
        remove()
        assert not (path / "1").exists() or not any((path / "1").iterdir())
        at += 1
        if not killed:
            break
    assert found == {True, None}
    assert at > 8
    assert checkpoints.load(path / "2", {"step": 0}, comm=MPI.COMM_SELF) == {"step": 2}


def test_restart_of_a_job_that_had_ended(folder):
    for step in (1, 1, 2):
        checkpoints.save(folder / "last", {"step": step}, comm=COMM)
        assert checkpoints.load(folder / "last", {"step": 0}, comm=COMM) == {"step": step}
    assert sorted(p.name for p in folder.iterdir()) == ["last"]


def test_an_empty_folder_may_be_there(folder):
    checkpoints.save(folder, 1.5, comm=COMM)
    assert checkpoints.load(folder, 0.0, comm=COMM) == 1.5


def raises(error, words):
    """On all ranks."""
    return pytest.raises(error, match=words)


def test_operations_complete_before_ranks_communicate_through_mpi4py(folder):
    """A program saves while its last step still computes, on the communicator of that step."""
    comm = mpi4jax.default_comm()

    @jax.jit
    def step(x):
        for _ in range(30 * (RANK == 0)):  # the first rank is late with its reduction
            x = jnp.tanh(x @ x)
        return mpi4jax.notoken.allreduce(x[0], op=MPI.SUM)

    x = jnp.full((500, 500), 1e-3)
    step(x).block_until_ready()
    for number in range(4):
        y = step(x)
        checkpoints.save(folder / str(number), {"step": number}, None, comm=comm)
        assert checkpoints.latest(folder) == folder / str(number)
        y.block_until_ready()


def test_errors(folder):
    x = jnp.ones((2, 3))
    save = lambda *args, path="x": checkpoints.save(folder / path, *args, comm=COMM)
    load = lambda *args, path="x": checkpoints.load(folder / path, *args, comm=COMM)
    with raises(FileNotFoundError, "load: there is no complete checkpoint at '.*x'"):
        load(x)
    with raises(ValueError, r"save: array \['a'\] has shape \(2, 3\) .* expects \(9, 3\)"):
        save({"a": x}, Layout((9 * SIZE, 3), {0: SIZE}))
    with raises(ValueError, "argument 'layouts' has axis 2 for array x; expected one of its 2"):
        save(x, 2)
    with raises(TypeError, "argument 'layouts' must have a Layout, .*; got str: 'rows'"):
        save(x, "rows")
    with raises(ValueError, "argument 'layouts' must be a layout, or a pytree of layouts that"):
        save({"a": x}, {"b": None})
    with raises(TypeError, r"save: array \['name'\] has dtype <U3; expected numbers"):
        save({"name": "run"})
    assert not [*folder.iterdir()]
    save({"a": x, "n": 1})
    with raises(ValueError, r"'like' has the arrays \[.*\]; expected the arrays of .*\['a'\]"):
        load({"a": x})
    with raises(ValueError, r"array \['a'\] is float32\[3, 2\]; expected float32\[2, 3\], as in"):
        load({"a": x.T, "n": 1})
    with raises(ValueError, r"array \['n'\] is float64\[\]; expected int64\[\], as in"):
        load({"a": x, "n": 1.0})
    COMM.Barrier()
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / f"file{RANK}").write_text("")
    COMM.Barrier()
    with raises(FileExistsError, "other, which exists and is not a checkpoint"):
        save(x, path="other")


@pytest.mark.min_ranks(2)
def test_an_error_of_one_rank_is_one_of_all(folder, monkeypatch):
    x = jnp.ones(SIZE)
    save = lambda *args: checkpoints.save(folder / "x", *args, comm=COMM)
    save(x)
    with raises(
        ValueError, "must have the same arrays on all ranks; rank 0 has 1 and rank 1 has 1"
    ):
        save(x if RANK == 0 else x.astype(int))
    with raises(TypeError, "^save: arr.* <U1" if RANK == 1 else "^save: rank 1 has failed: .* <U1"):
        save("a" if RANK == 1 else x)

    def full(*args):
        raise OSError("No space left on device")

    written = store.write
    if RANK == 1:
        monkeypatch.setattr(store, "write", full)
    with raises(OSError, "No space" if RANK == 1 else "rank 1 has failed: OSError: No space"):
        save(x[:1] + 1, 0)
    monkeypatch.setattr(store, "write", written)
    np.testing.assert_array_equal(checkpoints.load(folder / "x", x * 0, comm=COMM), x)
    assert json.loads((folder / "x/index.json").read_text())["subdirectory"] == "arrays-1"
    assert not (folder / "x/arrays-2").exists()
