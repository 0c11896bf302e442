"""`output.append`: what xarray opens, written on any number of ranks."""

import json
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import COMM, RANK, SIZE

from mpi4jax import notoken
from mpi4jax._numerics import records

pytest.importorskip("tensorstore")

SHAPE = (7, 3)
DIMS = {"h": ("x", "y"), "n": (), "x": ("x",)}


@pytest.fixture
def path():
    made = COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    yield Path(made) / "output.zarr"
    COMM.Barrier()
    if RANK == 0:
        shutil.rmtree(made)


def field(step):
    return np.arange(21, dtype=np.float32).reshape(SHAPE) + 100 * step


def append(path, step, comm=COMM, **more):
    cart = comm.Create_cart([comm.size], periods=[False])
    block = notoken.grids.Block(SHAPE, cart, axes=0, width=1)
    tree = {
        "h": block.with_ghosts(jnp.asarray(field(step)[block.slices])),
        "n": np.int32(step),
        "x": 0.5 * np.arange(7)[block.slices[:1]],
    }
    layouts = {"h": block, "n": None, "x": 0}
    options = {"time": 0.25 * step, "dims": DIMS, "comm": comm, **more}
    notoken.output.append(path, tree, layouts, **options)


def stored(path):
    """Arrays by name, as the group's metadata have them; TensorStore reads them."""
    import tensorstore

    group = json.loads((path / "zarr.json").read_text())
    found = {}
    for name, meta in group["consolidated_metadata"]["metadata"].items():
        assert json.loads((path / name / "zarr.json").read_text()) == meta
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
        found[name] = tensorstore.open(spec).result().read().result()
    return found


def is_right(found, steps):
    np.testing.assert_array_equal(found["time"], 0.25 * np.asarray(steps))
    np.testing.assert_array_equal(found["h"], [field(step) for step in steps])
    np.testing.assert_array_equal(found["n"], steps)
    np.testing.assert_array_equal(found["x"], 0.5 * np.arange(7))


def test_records_of_jobs_with_other_numbers_of_ranks(path):
    for step in range(3):
        append(path, step)
        is_right(stored(path), [*range(step + 1)])
    COMM.Barrier()
    if RANK == 0:  # a job of one rank, which begins at step 2 again
        append(path, 2, MPI.COMM_SELF, replace=True)
        append(path, 3, MPI.COMM_SELF)
    COMM.Barrier()
    is_right(stored(path), [0, 1, 2, 3])
    for step in (1, 3):
        with pytest.raises(ValueError, match=rf"has {4 - step} records at time .* replace=True"):
            append(path, step)
        is_right(stored(path), [0, 1, 2, 3])
    append(path, 1, replace=True)
    is_right(stored(path), [0, 1])


def test_xarray_opens_it(path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    for step in range(2):
        append(path, step, attrs={"h": {"units": "m"}})
    with xarray.open_zarr(path) as found:
        assert found["h"].dims == ("time", "x", "y")
        assert found["h"].attrs == {"units": "m"}
        np.testing.assert_array_equal(found["h"].sel(time=0.25, x=1.5), field(1)[3])
        is_right({name: found[name].to_numpy() for name in ("time", "h", "n", "x")}, [0, 1])


@pytest.mark.ranks(1)
def test_a_job_is_killed_before_a_record_is_complete(path, monkeypatch):
    publish = records.publish

    def killed(path, metas):
        if metas[records.TIME]["shape"] != [0]:
            raise KeyboardInterrupt
        publish(path, metas)

    for step in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(records, "publish", killed)
            with pytest.raises(KeyboardInterrupt):
                append(path, step)
        assert len(stored(path)["h"]) == step
        append(path, step)
        is_right(stored(path), [*range(step + 1)])


def test_axes_of_one_name_have_one_length(path):
    """Nothing is written, and all ranks know; one rank alone may see the wrong length."""
    x, y = jnp.ones((7, 3)), jnp.arange(16.0)
    write = lambda tree, dims: notoken.output.append(path, tree, time=0.0, dims=dims, comm=COMM)
    with pytest.raises(ValueError, match="axis 'x' has length 7 in array 'h' and 16 in array 'x'"):
        write({"h": x, "x": y}, {"h": ("x", "y"), "x": ("x",)})
    with pytest.raises(ValueError, match="'dims' must name the 2 axes of array 'h', got"):
        write({"h": x}, {"h": ("x", "x")})
    for name, axes in (("../h", "xy"), ("time", "xy"), ("h", ("x", "time"))):
        with pytest.raises(ValueError, match="other than 'time'"):
            write({name: x}, {name: axes})
    joined = jnp.ones(1 + (RANK == SIZE - 1))
    tree, dims = {"h": x, "z": joined}, {"h": ("x", "y"), "z": ("x",)}
    with pytest.raises(ValueError, match=rf"length 7 in array 'h' and {SIZE + 1} in array 'z'"):
        notoken.output.append(path, tree, {"h": None, "z": 0}, time=0.0, dims=dims, comm=COMM)
    assert not path.exists()


def test_errors(path):
    with pytest.raises((ValueError, OSError), match=r"'dims' must name the 2 axes of array 'h'"):
        append(path, 0, dims={**DIMS, "h": ("x",)})
    append(path, 0)
    cart = COMM.Create_cart([SIZE], periods=[False])
    other = notoken.grids.Block((7, 4), cart, axes=0)
    h = jnp.ones(other.shape)
    with pytest.raises((ValueError, OSError), match=r"append: argument 'tree' must have the arr"):
        notoken.output.append(path, {"h": h}, other, time=1.0, dims=DIMS)
    if RANK == 0:
        (path.parent / "full").mkdir()
        (path.parent / "full" / "file").touch()
    COMM.Barrier()
    with pytest.raises((FileExistsError, OSError), match="is not a store; use another name"):
        append(path.parent / "full", 0)
