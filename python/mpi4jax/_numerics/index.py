"""The index of a checkpoint: its arrays, and which file has which block.

Arrays with the same shape and the same blocks on all ranks share a table of blocks, so that the
index has a few tables, and one entry per array. `decode` checks the whole index against one schema,
so that code that gets an `Index` may rely on the schema.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import cover

FORMAT = "mpi4jax checkpoint, version 2"
LARGEST = 2**27  # bytes of an index: 100,000 ranks with 20 tables have 10**8
_LARGEST_TILE = 2**22  # elements; a tile is read as a whole, even if only a part of it is needed
_MOST_AXES = 64  # of an array of NumPy

_NUMBERS = (
    x for x in vars(ml_dtypes).values() if isinstance(x, type) and issubclass(x, np.generic)
)
DTYPES = {
    dtype.name: dtype
    for dtype in (*(np.dtype(code) for code in "?bBhHiIqQefdFD"), *map(np.dtype, _NUMBERS))
}

Window = tuple[slice, ...]


class Damaged(Exception):
    """The index does not follow the schema; the message says where."""


def tiles(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the shape of the tiles of a block, and their number; tiles at its end are smaller."""
    tile = [max(n, 1) for n in shape]
    while math.prod(tile) > _LARGEST_TILE:
        axis = max(range(len(tile)), key=tile.__getitem__)
        tile[axis] = -(-tile[axis] // 2)
    return tuple(tile), math.prod(-(-n // size) for n, size in zip(shape, tile, strict=True))


def tile_windows(shape: tuple[int, ...]) -> Iterator[Window]:
    """Yield the windows of the tiles in a block, in the order in which a file has them."""
    tile, _ = tiles(shape)
    ranges = (range(0, n, size) for n, size in zip(shape, tile, strict=True))
    for starts in itertools.product(*ranges):
        yield tuple(
            slice(start, min(start + size, n))
            for start, size, n in zip(starts, tile, shape, strict=True)
        )


class Array(NamedTuple):
    """An array: its place in the pytree, the name of its dtype, and the number of its table."""

    name: str
    dtype: str
    table: int


class Block(NamedTuple):
    """A block in a file.

    Attributes:
        offset: of its first byte behind the file's header.
        tile: the number of its first tile in the file.
    """

    window: Window
    offset: int
    tile: int


@dataclass(frozen=True, eq=False)
class Table:
    """The blocks of arrays of one shape.

    Attributes:
        rows: for each block the number of its file, which increases, and then its start and stop
            along each axis.
    """

    shape: tuple[int, ...]
    rows: np.ndarray[Any, np.dtype[np.int64]]

    def within(self, window: Window) -> list[int]:
        """Return the numbers of the files whose blocks overlap with a window."""
        starts, stops = self.rows[:, 1::2], self.rows[:, 2::2]
        low = np.array([s.start for s in window], np.int64)
        high = np.array([s.stop for s in window], np.int64)
        found = (np.maximum(starts, low) < np.minimum(stops, high)).all(axis=1)
        return self.rows[found, 0].tolist()  # type: ignore[no-any-return]

    def block(self, file: int) -> Window | None:
        """Return the block of a file, or None."""
        at = int(np.searchsorted(self.rows[:, 0], file))
        if at == len(self.rows) or self.rows[at, 0] != file:
            return None
        ends = self.rows[at, 1:].tolist()
        return tuple(slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True))


@dataclass(frozen=True, eq=False)
class Index:
    """What a checkpoint holds.

    Attributes:
        identity: 32 hexadecimal digits, which each save draws by lot, and its files have too.
        subdirectory: the name of the directory of its files.
        files: how many numbers of files there are: the number of ranks that have saved. Ranks
            without a block have no file.
    """

    identity: str
    subdirectory: str
    files: int
    arrays: tuple[Array, ...]
    tables: tuple[Table, ...]

    def blocks(self, file: int) -> tuple[dict[int, Block], int, int]:
        """Return the blocks of a file by the numbers of their arrays, and its bytes and tiles."""
        found: dict[int, Block] = {}
        offset = tile = 0
        windows = [table.block(file) for table in self.tables]
        shapes = [tuple(s.stop - s.start for s in window or ()) for window in windows]
        counts = [tiles(shape)[1] for shape in shapes]
        for number, array in enumerate(self.arrays):
            window = windows[array.table]
            if window is not None:
                found[number] = Block(window, offset, tile)
                offset += math.prod(shapes[array.table]) * DTYPES[array.dtype].itemsize
                tile += counts[array.table]
        return found, offset, tile


def folder_number(name: str) -> int | None:
    """Return the number of a directory of files, or None for another name."""
    found = re.fullmatch(r"arrays-([1-9][0-9]{0,17})", name)
    return found and int(found[1])


def encode(index: Index) -> bytes:
    """Return the contents of the index's file: an object in JSON, which ends with a checksum."""
    content = {
        "format": FORMAT,
        "identity": index.identity,
        "subdirectory": index.subdirectory,
        "files": index.files,
        "arrays": [array._asdict() for array in index.arrays],
        "tables": [{"shape": [*t.shape], "rows": t.rows.tolist()} for t in index.tables],
    }
    body = json.dumps(content)[:-1].encode()
    return b'%b, "crc32": %d}\n' % (body, zlib.crc32(body))


def _object(content: Any, what: str, **kinds: type) -> list[Any]:
    """Return the values of an object, which must have these keys only."""
    if type(content) is not dict or content.keys() != kinds.keys():
        raise Damaged(f"{what} does not have the keys {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(content[key]) is not kind:
            raise Damaged(f"{key!r} of {what} is not of type {kind.__name__}")
    return [content[key] for key in kinds]


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise Damaged(words)


def _integers(values: list[Any], what: str) -> list[int]:
    is_right = all(type(v) is int and 0 <= v < 2**63 for v in values)
    _require(is_right, f"{what} has other entries than integers of 63 bits")
    return values


def _table(content: Any, number: int, files: int) -> Table:
    what = f"table {number}"
    shape, rows = _object(content, what, shape=list, rows=list)
    _integers(shape, f"the shape of {what}")
    _require(len(shape) <= _MOST_AXES, f"{what} has {len(shape)} axes")
    _require(math.prod(shape) < 2**59, f"the arrays of {what} are larger than any file")
    for row in rows:
        _require(type(row) is list and len(row) == 1 + 2 * len(shape), f"{what} has a wrong row")
        _integers(row, what)
    array = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * len(shape))
    numbers, starts, stops = array[:, 0], array[:, 1::2], array[:, 2::2]
    _require(bool((np.diff(numbers) > 0).all()), f"the files of {what} are not in their order")
    _require(not rows or rows[-1][0] < files, f"{what} names a file beyond the last")
    is_inside = (starts < stops).all() and (stops <= np.array(shape, np.int64)).all()
    _require(bool(is_inside), f"{what} has a block that is empty or outside of the array")
    low, high = cover.sums(starts, stops)
    _require(cover.is_exact(low, high, shape), f"{what} does not cover its arrays exactly once")
    return Table(tuple(shape), array)


def _array(content: Any, number: int, tables: int) -> Array:
    array = Array(*_object(content, f"array {number}", name=str, dtype=str, table=int))
    _require(array.dtype in DTYPES, f"array {number} has dtype {array.dtype[:40]!r}")
    _require(0 <= array.table < tables, f"array {number} has a table that is not there")
    return array


def decode(text: bytes) -> Index:
    """Return the index that a file holds.

    Raises:
        Damaged: if the file is not one that `encode` has made.
    """
    body, _, end = text.rpartition(b', "crc32": ')
    checksum = re.fullmatch(rb"([0-9]{1,10})}\n", end)
    _require(checksum is not None, "it does not end with a checksum")
    _require(zlib.crc32(body) == int(checksum[1]), "its checksum is wrong")  # type: ignore[index]
    try:
        content = json.loads(body + b"}")
    except (ValueError, RecursionError, MemoryError):
        raise Damaged("it is not in JSON") from None
    found = content.get("format") if type(content) is dict else None
    _require(found == FORMAT, f"its format is not {FORMAT!r}")
    keys = {"format": str, "identity": str, "subdirectory": str, "files": int, "arrays": list}
    _, identity, subdirectory, files, arrays, tables = _object(content, "it", **keys, tables=list)
    _require(re.fullmatch("[0-9a-f]{32}", identity) is not None, "its identity is wrong")
    _require(
        folder_number(subdirectory) is not None,
        f"it names {subdirectory[:200]!r}, not its own directory",
    )
    _require(0 < files < 2**31, f"it has {str(files)[:20]} files")
    known = tuple(_table(table, number, files) for number, table in enumerate(tables))
    make = functools.partial(_array, tables=len(known))
    return Index(
        identity, subdirectory, files, tuple(make(a, k) for k, a in enumerate(arrays)), known
    )
