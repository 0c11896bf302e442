"""The files of a checkpoint: arrays in zarr's format, and an index to verify them.

A checkpoint is a directory with an index and a directory of arrays, a group in zarr's format. The
index has the metadata of each array and the digest (CRC-32C) of each chunk. Before a save makes its
first array, a plan names all files that will be obsolete when the save is complete, or after it has
failed: only those are ever removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

INDEX, PLAN = "index.json", "unfinished.json"
_LARGEST_CHUNK = 2**22  # elements: whoever reads a part of a chunk reads all of it

Json = dict[str, Any]
Window = tuple[slice, ...]


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


def entries(arrays: Iterable[tuple[str, Json]]) -> list[Json]:
    """Entries of an index: for each array a name, a directory's name made of that, metadata."""
    found: dict[str, Json] = {}
    for number, (name, meta) in enumerate(arrays):
        directory = re.sub(r"[^\w-]+", ".", name, flags=re.ASCII).strip(".")[:100] or "x"
        if directory in found or directory == "zarr.json":
            directory = f"{directory}.{number}"
        found[directory] = {"name": name, "directory": directory, "metadata": meta}
    return [*found.values()]


def _chunks(meta: Json, window: Window | None = None) -> Iterator[tuple[int, str]]:
    """Number and file of each chunk of an array, or of those that overlap with a window."""
    sizes = meta["chunk_grid"]["configuration"]["chunk_shape"]
    counts = [-(-n // size) for n, size in zip(meta["shape"], sizes, strict=True)]
    within = [slice(0, n) for n in meta["shape"]] if window is None else window
    ranges = [
        range(s.start // n, -(-s.stop // n) if s.stop > s.start else 0)
        for s, n in zip(within, sizes, strict=True)
    ]
    for at in itertools.product(*ranges):
        number = 0
        for i, count in zip(at, counts, strict=True):
            number = number * count + i
        yield number, "/".join(["c", *map(str, at)])


def check_library() -> None:
    """Raise an error if TensorStore is missing: when a job starts, not at its first save."""
    if importlib.util.find_spec("tensorstore") is None:
        raise ModuleNotFoundError("mpi4jax.checkpoints needs TensorStore: pip install tensorstore")


def open_array(path: Path, meta: Json, *, create: bool = False) -> Any:
    """Open an array; its metadata are those of the index, whatever the file of zarr holds."""
    import tensorstore

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path.resolve())},
        "metadata": meta,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(spec, create=create, open=not create, assume_metadata=not create)


def _digest(file: Path) -> str:
    """Return the digest at the end of a chunk, which TensorStore verifies when it reads the
    chunk."""
    with file.open("rb") as chunk:
        chunk.seek(max(os.fstat(chunk.fileno()).st_size - 4, 0))
        return chunk.read().hex()


def digests(path: Path, entry: Json, window: Window) -> dict[int, str]:
    """Digests of the chunks of a window, by their numbers."""
    folder = path / entry["directory"]
    return {i: _digest(folder / file) for i, file in _chunks(entry["metadata"], window)}


def read(path: Path, entry: Json, window: Window) -> np.ndarray[Any, Any]:
    """Read a window of an array."""
    folder = path / entry["directory"]
    for number, file in _chunks(entry["metadata"], window):
        try:
            found = _digest(folder / file)
        except (FileNotFoundError, NotADirectoryError):
            raise OSError(f"load: {folder / file} is missing") from None
        if found != entry["digests"][number]:
            raise OSError(f"load: {folder / file} is damaged, or belongs to another checkpoint")
    try:
        return open_array(folder, entry["metadata"]).result()[window].read().result()
    except ValueError as error:
        raise OSError(f"load: {folder} is damaged: {error}") from None


def _check(kind: str, content: Json) -> int:
    return zlib.crc32(json.dumps([kind, content], sort_keys=True).encode())


def write_json(file: Path, content: Json) -> None:
    """Write a file, which is on the disk when this returns."""
    with file.open("w") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _write_json(file: Path, kind: str, content: Json) -> None:
    write_json(file, {**content, "crc32": _check(kind, content)})


def _read_json(file: Path) -> Json | None:
    """Return what an index or a plan holds; None if there is none."""
    try:
        content = json.loads(file.read_bytes())
        if content.pop("crc32") != _check(file.name, content):
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OSError(
            f"checkpoints: {file} is damaged, or was written by another version of mpi4jax"
        ) from None
    for named in content.get("folders", [content]):
        names = [(r"arrays-\d+", named["folder"])]
        names += [(r"[\w-][\w.-]*", a["directory"]) for a in named["arrays"]]
        for pattern, name in names:
            if not re.fullmatch(pattern, name, re.ASCII):
                raise ValueError(f"checkpoints: {file} names {name!r}, not its own")
    return content


def _planned(path: Path) -> list[Json]:
    """Directories that the plan of a save names: that of the checkpoint before it, and its own."""
    try:
        return (_read_json(path / PLAN) or {"folders": []})["folders"]
    except OSError:  # killed while the plan was written: before the first array was made
        return []


def read_index(path: Path) -> Json | None:
    """Return the index of a complete checkpoint, or None."""
    index = _read_json(path / INDEX)
    if index is None:
        plan = _planned(path)
        if len(plan) > 1 or (any(path.glob("arrays-*")) and not (path / PLAN).exists()):
            raise OSError(f"checkpoints: {path / INDEX} is missing; there are arrays beside it")
    return index


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def begin(path: Path, arrays: list[Json]) -> Path:
    """Make a new directory with empty arrays, which no index names yet."""
    index = read_index(path)
    is_other = index is None and not (path / PLAN).exists() and path.exists()
    if is_other and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"save: {path} exists, and is no checkpoint; expected another name")
    clean(path)
    number = 1 if index is None else int(index["folder"].partition("-")[2]) + 1
    while (path / f"arrays-{number}").exists():  # ranks of a killed job may still write
        number += 1
    new: Json = {"folder": f"arrays-{number}", "arrays": arrays}
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / PLAN, PLAN, {"folders": [new] if index is None else [index, new]})
    _sync(path)
    folder = path / new["folder"]
    folder.mkdir()
    (folder / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
    made = [open_array(folder / a["directory"], a["metadata"], create=True) for a in arrays]
    for array in made:
        array.result()
    return folder


def publish(folder: Path, arrays: list[Json]) -> None:
    """Let the index name a directory with complete arrays; then there is a new checkpoint."""
    path = folder.parent
    new = path / f"{INDEX}.new"
    _write_json(new, INDEX, {"folder": folder.name, "arrays": arrays})
    _sync(folder)
    os.replace(new, path / INDEX)
    _sync(path)
    clean(path)


def clean(path: Path) -> None:
    """Remove what the plan of a save names, except the arrays of the checkpoint."""
    if not (path / PLAN).exists():
        return
    index = read_index(path)
    for old in _planned(path):
        if index is None or old["folder"] != index["folder"]:
            _remove(path / old["folder"], old["arrays"])
    (path / f"{INDEX}.new").unlink(missing_ok=True)
    (path / PLAN).unlink()
    with contextlib.suppress(OSError):
        path.rmdir()  # empty if the first save has failed


def numbered(directory: Path) -> list[Path]:
    """Return the complete checkpoints whose names are numbers, the largest last."""
    inside = directory.iterdir() if directory.is_dir() else ()
    found = [p for p in inside if p.name.isdecimal() and (p / INDEX).exists()]
    return sorted(found, key=lambda p: int(p.name))


def discard(path: Path) -> None:
    """Remove a checkpoint; if the job is killed meanwhile, no index names what is left."""
    clean(path)
    if (index := read_index(path)) is not None:
        _write_json(path / PLAN, PLAN, {"folders": [index]})
        _sync(path)
        (path / INDEX).unlink()
        clean(path)


def keep_newest(directory: Path, number: int) -> None:
    """Remove all but the newest of the numbered checkpoints."""
    for old in numbered(directory)[:-number]:
        with contextlib.suppress(OSError, ValueError):  # a damaged one stays
            discard(old)


def _remove(folder: Path, arrays: list[Json]) -> None:
    files = [folder / "zarr.json"]
    for a in arrays:
        own = folder / a["directory"]
        files += [own / "zarr.json", *(own / file for _, file in _chunks(a["metadata"]))]
    for file in files:
        for name in (file, file.with_name(f"{file.name}.__lock")):  # TensorStore's, if killed
            name.unlink(missing_ok=True)
    directories = {parent for file in files for parent in file.parents if folder in parent.parents}
    for directory in [*sorted(directories, key=lambda d: -len(d.parts)), folder]:
        with contextlib.suppress(OSError):
            directory.rmdir()  # stays if others have put files there
