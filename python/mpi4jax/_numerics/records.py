"""The files of a store to which records are appended: a group in zarr's format (version 3).

The metadata of all arrays are in the group's file, too (consolidated metadata, which xarray reads).
Chunks of a new record are written first, and then that file is replaced: readers see whole records.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

_LARGEST_CHUNK = 2**22  # elements: whoever reads a part of a chunk reads all of it

Json = dict[str, Any]
TIME = "time"


def metadata(shape: Iterable[int], dtype: str, block: Iterable[int]) -> Json:
    """Return the metadata of an array, whose chunks are blocks or equal parts of blocks.

    Args:
        shape: of the array.
        dtype: its name.
        block: shape of the largest block that a rank writes.
    """
    chunk = [max(n, 1) for n in block]
    while math.prod(chunk) > _LARGEST_CHUNK:
        axis = int(np.argmax(chunk))
        chunk[axis] = -(-chunk[axis] // 2)
    return {
        "shape": [*shape],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def check_library() -> None:
    """Raise an error if TensorStore is missing: when a job starts, not at its first record."""
    if importlib.util.find_spec("tensorstore") is None:
        raise ModuleNotFoundError("mpi4jax.output needs TensorStore: pip install tensorstore")


def open_array(path: Path, meta: Json, *, create: bool = False) -> Any:
    """Open an array; its metadata are those given, whatever its own file holds."""
    import tensorstore

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path.resolve())},
        "metadata": meta,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(spec, create=create, open=not create, assume_metadata=not create)


def write_json(file: Path, content: Json) -> None:
    """Write a file, which is on the disk when this returns."""
    with file.open("w") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def variable(name: str, dtype: str, shape: list[int], chunk: list[int], dims: list[str]) -> Json:
    """Return the metadata of an array without records; a coordinate is named as its only axis."""
    if dims != [name]:
        shape, chunk, dims = [0, *shape], [1, *chunk], [TIME, *dims]
    kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
    fill = {"f": "NaN", "c": ["NaN", "NaN"], "b": False}.get(kind, 0)
    return {
        **metadata(shape, dtype, chunk),
        "zarr_format": 3,
        "node_type": "array",
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "attributes": {},
        "dimension_names": dims,
    }


def read(path: Path) -> dict[str, Json]:
    """Return the metadata of the arrays of a store, by name; none if there is no store."""
    file = path / "zarr.json"
    if not file.exists():
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"append: {path} exists, and is not a store; use another name")
        return {}
    found: Json = json.loads(file.read_bytes()).get("consolidated_metadata") or {}
    if TIME not in found.get("metadata", {}):
        raise FileExistsError(
            f"append: {path} exists, but output.append has not written it; choose another path"
        )
    return dict(found["metadata"])


def check(path: Path, given: dict[str, Json], stored: dict[str, Json]) -> None:
    """Raise an error if new arrays do not fit the arrays of a store."""
    told = {}
    for which, metas in (("given", given), ("stored", stored)):
        told[which] = {
            name: (meta["data_type"], meta["shape"][meta["dimension_names"][0] == TIME :])
            for name, meta in metas.items()
        }
    if told["given"] != told["stored"]:
        raise ValueError(
            f"append: argument 'tree' must have the arrays of {path}, {told['stored']}; got "
            f"{told['given']}"
        )


def before(path: Path, meta: Json, time: float) -> int:
    """Return the number of records of a store before a time."""
    times = open_array(path / TIME, meta).result().read().result()
    return int(np.count_nonzero(np.asarray(times) < time))


def with_records(metas: dict[str, Json], number: int) -> dict[str, Json]:
    """Return the metadata for a number of records."""
    return {
        name: {**meta, "shape": [number, *meta["shape"][1:]]}
        if meta["dimension_names"][0] == TIME
        else meta
        for name, meta in metas.items()
    }


def publish(path: Path, metas: dict[str, Json]) -> None:
    """Write the metadata; the group's metadata last."""
    path.mkdir(parents=True, exist_ok=True)
    inside = {"kind": "inline", "must_understand": False, "metadata": metas}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    for folder, content in (
        *((path / name, meta) for name, meta in metas.items()),
        (path, {**group, "consolidated_metadata": inside}),
    ):
        folder.mkdir(exist_ok=True)
        new = folder / "zarr.json.new"
        write_json(new, content)
        os.replace(new, folder / "zarr.json")
