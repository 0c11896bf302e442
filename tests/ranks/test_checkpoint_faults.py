"""Damaged checkpoints: `load` returns what was saved, or names the file. Random checkpoints, too.

`CHECKPOINTS=200 python tools/run_tests.py -n 4 tests/ranks/test_checkpoint_faults.py` tests more.
"""

import itertools
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from killing import KILL, add_moments
from mpi4py import MPI
from reference import COMM, RANK, SIZE
from test_checkpoints import first

from mpi4jax import Layout, checkpoints, grids, output
from mpi4jax._numerics import cover, index

SELF = MPI.COMM_SELF
GHOST = 7
MANY = int(os.environ.get("CHECKPOINTS", "0"))


def tree(step):
    """Several chunks, equal chunks, chunks of zeros; 1000 is no step."""
    return {
        "step": step,
        "x": np.arange(12.0).reshape(6, 2) * step,
        "zeros": np.zeros(7, np.int8),
        "more/../x": [np.full(9, step, np.float32), np.full(9, step + 1, np.float32)],
    }


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def remove(file, rng, root):
    file.unlink()


def empty(file, rng, root):
    file.write_bytes(b"")


def cut(file, rng, root):
    file.write_bytes(file.read_bytes()[: rng.integers(file.stat().st_size)])


def longer(file, rng, root):
    file.write_bytes(file.read_bytes() + rng.bytes(rng.integers(1, 9)))


def flip(file, rng, root):
    old = bytearray(file.read_bytes())
    old[rng.integers(len(old))] ^= 1 << rng.integers(8)
    file.write_bytes(old)


def swap(file, rng, root):
    other = rng.choice(files(root))  # never outside of the test's directory
    old = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(old)


FAULTS = [remove, empty, cut, longer, flip, swap]


def loaded(path, steps):
    """The step that was loaded; None after an error that names a file; False if there is none."""
    try:
        found = checkpoints.load(path, tree(0), comm=SELF)
    except FileNotFoundError:
        return False
    except OSError as error:
        if str(path) not in str(error):
            raise
        return None
    assert found["step"] in steps
    expected = tree(found["step"])
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, strict=name != "step")
    return found["step"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_file_is_damaged(folder, monkeypatch, fault):
    monkeypatch.setattr(index, "_LARGEST_TILE", 4)
    saved, path = folder / f"of{RANK}", folder / f"damaged{RANK}"
    rng = np.random.default_rng(RANK)
    checkpoints.save(saved, tree(2), comm=SELF)
    checkpoints.save(saved, tree(3), comm=SELF)
    names = [file.relative_to(saved) for file in files(saved)]
    assert sorted(map(str, names)) == ["arrays-2/0.blocks", "index.json"]
    for name, _ in itertools.product(names, range(200 if MANY else 20)):
        shutil.copytree(saved, path)
        fault(path / name, rng, path)
        found = loaded(path, [3])
        assert found is None or (found == 3 and fault is swap), name
        shutil.rmtree(path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_there", [False, True])
def test_damaged_at_each_moment_of_a_save(folder, monkeypatch, is_there):
    """The old checkpoint, the new one, or an error; saving goes on or says why it cannot."""
    add_moments(monkeypatch)
    path, old = folder / f"of{RANK}", folder / f"old{RANK}"
    rng = np.random.default_rng(RANK)
    checkpoints.save(old, tree(2), comm=SELF)
    for at in itertools.count(RANK, 1 if MANY else 4):
        if is_there:
            shutil.copytree(old, path)
        with KILL.after(at) as killed:
            checkpoints.save(path, tree(3), comm=SELF)
        shutil.copytree(path, folder / f"copy{RANK}") if path.exists() else None
        full = [file for file in files(path) if file.stat().st_size]
        for file in rng.permutation(full)[:2] if path.exists() else []:
            shutil.rmtree(path)
            shutil.copytree(folder / f"copy{RANK}", path)
            rng.choice(FAULTS)(file, rng, path)
            assert loaded(path, [2, 3]) is not False or not is_there
            try:
                checkpoints.save(path, tree(4), comm=SELF)
            except OSError as error:
                if str(path) not in str(error):
                    raise
            else:
                assert loaded(path, [4]) == 4
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(folder / f"copy{RANK}", ignore_errors=True)
        if not killed:
            break
    assert at > 20


@pytest.mark.ranks(2)
def test_only_what_a_save_has_made_is_removed(folder):
    path = folder / f"of{RANK}"
    checkpoints.save(path, tree(1), comm=SELF)
    shutil.copytree(path / "arrays-1", path / "arrays-50")
    others = ("arrays-1/note", "arrays-1/1.blocks", "arrays-8/0.blocks", "7/note", "arrays-x", "x")
    for other in (path / name for name in others):
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine" * 100)
    inner = [path / name for name in ("1", "arrays-7", "arrays-1/2")]
    for step, other in enumerate(inner):
        checkpoints.save(other, tree(step), comm=SELF)
    for step in range(10, 20):
        checkpoints.save(path, tree(step), comm=SELF)
        assert loaded(path, [step]) == step
    assert {(path / name).read_text() for name in others} == {"mine" * 100}
    assert [loaded(other, range(9)) for other in inner] == [0, 1, 2]
    found = sorted(p.relative_to(path).as_posix() for p in path.glob("arrays-*/0.blocks"))
    assert found == ["arrays-50/0.blocks", "arrays-60/0.blocks", "arrays-8/0.blocks"]


ROWS, COLUMNS = (Layout((4 * SIZE, 4 * SIZE), {axis: SIZE}) for axis in (0, 1))
# Which layout rank 0 has, and which one the others have; what all ranks are told.
LAYOUTS = {
    "rows and columns": (ROWS, COLUMNS, r"rank 0 writes \[0:4, 0:.*cuts=\(\(1, .* which overlap"),
    "all and rows": (
        None,
        ROWS,
        r"rank 0 writes \[0:.* by layout None and rank 1 .* which overlap",
    ),
    "rows and none": (
        ROWS,
        None,
        rf"have {16 * SIZE} of its {16 * SIZE**2} elements: rank 0 writes",
    ),
    "two axes": (
        0,
        1,
        r"rank 0 has array \['x'\] .* \[\*, .* along axis 0, and rank 1 has .* axis 1",
    ),
    "two dtypes": (
        ROWS,
        ROWS,
        r"rank 0 has array \['x'\] of dtype float64 .*, and rank 1 has array .* of dtype int32 ",
    ),
}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("function", [checkpoints.save, output.append])
def test_layouts_of_ranks_that_do_not_fit(folder, name, function):
    """Their blocks may have as many elements as the array, and cover it twice or not at all."""
    layout = LAYOUTS[name][RANK > 0]
    dtype = "int32" if name == "two dtypes" and RANK else "float64"
    x = np.ones(layout.block_shape(RANK) if isinstance(layout, Layout) else ROWS.shape, dtype)
    more = {} if function is checkpoints.save else {"time": 0.0, "dims": {"x": "ij"}}
    with pytest.raises(ValueError, match=LAYOUTS[name][2]) as caught:
        function(folder / "x", {"x": x}, layout, comm=COMM, **more)
    assert "array ['x'] of" in str(caught.value)
    assert len(set(COMM.allgather(str(caught.value)))) == 1
    assert not (folder / "x").exists()


def test_fewer_blocks_than_the_layout_has(folder):
    layout = Layout((4 * SIZE, 2), {0: 2 * SIZE})
    with pytest.raises(ValueError, match=rf"exactly once; they have {4 * SIZE} of its {8 * SIZE} "):
        checkpoints.save(folder / "x", np.ones(layout.block_shape(RANK)), layout, comm=COMM)
    assert not (folder / "x").exists()


@pytest.mark.ranks(1)
def test_a_cover_is_exact_or_not():
    """Random boxes, against counts of each element."""
    rng, kinds = np.random.default_rng(0), set()
    for _ in range(600):
        shape = tuple(rng.integers(0, 4, rng.integers(3)))
        boxes = []
        for _ in range(rng.integers(4)):
            ends = [np.sort(rng.integers(0, n + 1, 2)) for n in shape]
            boxes.append(tuple(slice(int(a), int(b)) for a, b in ends))
        counts = np.zeros(shape, int)
        for box in boxes:
            counts[box] += 1
        sums = np.array([cover.halves(box) for box in boxes] or [(0, 0)], np.uint64).sum(axis=0)
        exact = cover.is_exact(*map(int, sums), shape)
        assert exact == bool((counts == 1).all()), (shape, boxes)
        pair = cover.overlapping(boxes)
        assert (pair is not None) == bool((counts > 1).any())
        kinds.add((exact, pair is None, counts.size > 0))
    assert len(kinds) >= 4


DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float32", "float64", "complex64", "bfloat16"]


def random_array(rng):
    shape = tuple(rng.integers(0, 9, rng.integers(4)))
    values = rng.integers(0, 3, shape) * rng.integers(0, 2)
    dtype = rng.choice(DTYPES)
    return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def random_layout(rng, shape, comm):
    kinds = ["whole", "joined", "layout", "block"] if shape else ["whole"]
    kind, axis = rng.choice(kinds), int(rng.integers(max(len(shape), 1)))
    width, periodic = int(rng.integers(3)), bool(rng.integers(2))
    if kind == "whole":
        return None
    if kind == "joined":
        return axis - len(shape) if rng.integers(2) else axis
    if kind == "layout" or shape[axis] < comm.size * max(width, 1):
        return Layout(shape, {axis: comm.size})
    cart = comm.Create_cart([comm.size], periods=[periodic])
    return grids.Block(shape, cart, axes=axis, width=width)


def local(x, layout, comm, rng):
    """This rank's part of `x`; its ends are random along an axis that is joined."""
    if layout is None:
        return x
    if isinstance(layout, int):
        axis = layout % x.ndim
        if rng is None:
            return np.array_split(x, comm.size, axis)[comm.rank]
        ends = np.sort(rng.integers(0, x.shape[axis] + 1, comm.size - 1))
        return np.split(x, ends, axis)[comm.rank]
    if isinstance(layout, Layout):
        return x[layout.block(comm.rank)]
    padded = np.full(layout.padded_shape, GHOST).astype(x.dtype)
    padded[layout.inner] = x[layout.slices]
    return padded


@pytest.mark.parametrize("seed", range(MANY or 10))
def test_random_checkpoints(folder, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(index, "_LARGEST_TILE", int(rng.integers(2, 40)))
    arrays = [random_array(rng) for _ in range(rng.integers(1, 5))]
    writers, readers = rng.integers(1, SIZE + 1, 2)
    with first(writers) as comm:
        if comm is not None:
            rng = np.random.default_rng([seed, 1])
            layouts = [random_layout(rng, x.shape, comm) for x in arrays]
            parts = [local(x, y, comm, rng) for x, y in zip(arrays, layouts, strict=True)]
            checkpoints.save(folder / "x", parts, layouts, comm=comm)
    with first(readers) as comm:
        if comm is not None:
            rng = np.random.default_rng([seed, 2])
            layouts = [random_layout(rng, x.shape, comm) for x in arrays]
            expected = [local(x, y, comm, None) for x, y in zip(arrays, layouts, strict=True)]
            like = [np.full_like(x, GHOST) for x in expected]
            found = checkpoints.load(folder / "x", like, layouts, comm=comm)
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x, y, strict=True)
