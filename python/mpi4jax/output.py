"""Output for analysis: a store of named arrays along a time axis, which xarray opens.

Ranks write their blocks as for :mod:`mpi4jax.checkpoints`, with TensorStore (``pip install
tensorstore``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ._numerics import files, records
from ._spmd.mesh import Mesh
from .layouts import layouts_and_comm

__all__ = ["append"]


def append(
    path: str | os.PathLike[str],
    tree: Mapping[str, Any],
    layouts: Any = None,
    *,
    time: float,
    dims: Mapping[str, Sequence[str]],
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    replace: bool = False,
    mesh: Mesh | None = None,
    comm: MPI.Intracomm | None = None,
) -> None:
    """Append a record to a store in zarr's format on a shared file system. Collective.

    ``xarray.open_zarr(path)`` opens the store, also while the job runs: it has all records whose
    ``append`` has returned. A job that restarts from a checkpoint passes ``replace=True``: the
    records that the job before has written at ``time`` or later are removed.

    Args:
        path: directory of the store, which is made if it does not exist.
        tree: this rank's arrays, by name. They become arrays with a first axis ``"time"``. A
            one-dimensional array with the same name as its axis is a coordinate, which is written
            once.
        layouts: which blocks of the global arrays the rank has, as for
            :func:`mpi4jax.checkpoints.save`.
        time: coordinate of the record; it must be larger than the coordinate of the last record.
        dims: for each array, the names of its global axes. Axes of one name have one length.
        attrs: attributes of arrays, such as ``{"h": {"units": "m"}}``; also of ``"time"``. The
            attributes given with the first record are stored.
        replace: whether to remove the records at ``time`` or later, if there are some.
        mesh, comm: as for :func:`mpi4jax.checkpoints.save`.

    Raises:
        TypeError: if a layout has another type, or an array does not hold numbers.
        ValueError: if ``dims`` does not name the axes of an array, or axes of one name have
            different lengths; if the arrays differ from the arrays of the store; if there are
            records at ``time`` or later, unless ``replace`` is true; if an array does not have the
            shape that its layout gives, or the blocks of all ranks do not cover the global array
            exactly once.
        FileExistsError: if ``path`` exists, is not empty, and is not such a store.
        OSError: if a rank cannot write.
        ModuleNotFoundError: if TensorStore is not installed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> path = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        >>> rows = mpi4jax.Layout((5, 2), {0: comm.size})
        >>> h = jnp.ones(rows.block_shape(comm.rank))
        >>> for step in range(3):
        ...     mpi4jax.output.append(path, {"h": h}, rows, time=0.5 * step, dims={"h": "yx"})

    See also: :func:`mpi4jax.checkpoints.save`.
    """
    layouts, comm = layouts_and_comm("append", layouts, mesh, comm)
    given_path, is_first = path, comm.Get_rank() == 0

    def check() -> None:
        files.path_of("append", given_path)
        for argument, value in (("tree", tree), ("dims", dims), ("attrs", attrs or {})):
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"append: argument '{argument}' must be a dict with the names of arrays as "
                    f"keys, got {type(value).__name__}"
                )
        if np.ndim(time) or np.asarray(time).dtype.kind not in "iuf":
            raise TypeError(f"append: argument 'time' must be a number, got {time!r}")
        records.check_library()

    as_dict = dict(tree) if isinstance(tree, Mapping) else {}
    arrays, _ = files.to_write("append", as_dict, layouts, comm, check)
    path = Path(path)
    written = [*zip(arrays, files.largest_blocks("append", arrays, comm), strict=True)]
    given = {records.TIME: records.variable(records.TIME, "float64", [0], [1024], [records.TIME])}

    def describe() -> None:
        lengths: dict[str, tuple[int, str]] = {}
        for name, (a, block) in zip(sorted(tree), written, strict=True):
            names = [*dims.get(name, ())]
            if not re.fullmatch(r"\w[\w.-]*", name) or records.TIME in (name, *names):
                raise ValueError(
                    f"append: argument 'tree' has array {name!r} with axes {names}; expected names "
                    f"of letters and digits, other than {records.TIME!r}"
                )
            if len({*names}) != len(a.whole) or len(names) != len(a.whole):
                raise ValueError(
                    f"append: argument 'dims' must name the {len(a.whole)} axes of array "
                    f"'{name}', got {names}"
                )
            for axis, length in zip(names, a.whole, strict=True):
                known, other = lengths.setdefault(axis, (length, name))
                if known != length:
                    raise ValueError(
                        f"append: axis {axis!r} has length {known} in array {other!r} and {length} "
                        f"in array {name!r}; expected one length for all arrays"
                    )
            given[name] = records.variable(name, a.dtype, [*a.whole], block, names)

    def begin() -> tuple[dict[str, Any], int]:
        """Return the metadata of the store with the new record, and the number of the record."""
        stored = records.read(path)
        if not stored:
            for name, meta in given.items():
                meta["attributes"] = dict((attrs or {}).get(name, {}))
            records.publish(path, given)
            return records.with_records(given, 1), 0
        records.check(path, given, stored)
        number = records.before(path, stored[records.TIME], time)
        later = stored[records.TIME]["shape"][0] - number
        if later and not replace:
            raise ValueError(
                f"append: {path} has {later} records at time {time} or later; expected a larger "
                "'time', or replace=True, which removes these records"
            )
        return records.with_records(stored, number + 1), number

    files.agree("append", comm, describe)
    metas, number = files.of_first("append", comm, begin)
    windows: dict[str, Any] = {records.TIME: ((), np.asarray(time), is_first)}
    for name, (a, _) in zip(sorted(tree), written, strict=True):
        windows[name] = a.window, files.data_of(a.leaf)[a.inner], a.writes

    def write() -> None:
        started = []
        for name, (window, values, writes) in windows.items():
            has_records = metas[name]["dimension_names"][0] == records.TIME
            if writes and values.size and (has_records or number == 0):
                stored = records.open_array(path / name, metas[name]).result()
                started.append(stored[(number, *window) if has_records else window].write(values))
        for each in started:
            each.result()

    files.agree("append", comm, write)
    files.of_first("append", comm, lambda: records.publish(path, metas))
