"""The files of a checkpoint, which ranks write, read and remove.

A checkpoint is a directory with an index and a directory of files, in which each rank has one file
with its blocks of all arrays:

    index.json          what is complete; replaced in one step
    unfinished.json     the lock, while a job saves, or after it was killed
    arrays-3/0.blocks   a header, the tiles of the blocks, and the checksums of the tiles

A file begins with the identity of its save and with its own place. A file is removed only if its
header says that it was written to this path.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from . import lock as locks
from .directory import Directory
from .index import DTYPES, LARGEST, Damaged, Index, decode, encode, folder_number, tile_windows
from .lock import Lock

INDEX = "index.json"
_NEW = f"{INDEX}.new"

Window = tuple[slice, ...]
Values = np.ndarray[Any, Any]

_MAGIC = b"mpi4jax blocks 2"
#: The header of a file: its kind, the identity of its save, and the numbers of its directory and of
#: the file.
_HEADER = struct.Struct("<16s16sQQ16x")


def _name(file: int) -> str:
    return f"{file}.blocks"


def _header(identity: str, subdirectory: str, file: int) -> bytes:
    return _HEADER.pack(_MAGIC, bytes.fromhex(identity), folder_number(subdirectory), file)


class Removal(NamedTuple):
    """Files to remove.

    Attributes:
        path: path of the checkpoint.
        subdirectory: name of the directory of files in it.
        files: numbers of the files.
        is_all: whether to remove the whole checkpoint.
    """

    path: str
    subdirectory: str
    files: list[int]
    is_all: bool = False

    def share(self, rank: int, ranks: int) -> Removal:
        return self._replace(files=self.files[rank::ranks])


class Begun(NamedTuple):
    """A save that has begun: a new directory, in which there are no files yet.

    Attributes:
        path: path of the checkpoint.
        identity, subdirectory: as in an index.
        leftovers: files that a killed save has left.
        old: the files of the checkpoint before this one.
        made: the directories that were made for the path.
    """

    path: str
    identity: str
    subdirectory: str
    leftovers: list[Removal]
    old: list[Removal]
    made: list[str]


# ---- What rank 0 does alone


def read_index(directory: Directory) -> Index | None:
    """Return the index of a complete checkpoint, or None."""
    try:
        return decode(directory.read(INDEX, LARGEST))
    except FileNotFoundError:
        names = directory.names()
    except Damaged as error:
        raise OSError(
            f"checkpoints: {directory.path / INDEX} is damaged, or was written by another version "
            f"of mpi4jax: {error}"
        ) from None
    if any(map(folder_number, names)) and not locks.is_first_save(directory):
        raise OSError(
            f"checkpoints: {directory.path / INDEX} is missing; there are arrays beside it"
        )
    return None


def find_index(path: Path) -> Index | None:
    """Return the index of a complete checkpoint at a path, or None."""
    try:
        with Directory.at(path) as directory:
            return read_index(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _no_checkpoint(path: Path) -> str:
    return (
        f"save: argument 'path' is {path}, which exists and is not a checkpoint; expected a "
        "checkpoint, an empty directory or a new path"
    )


def begin(path: Path, ranks: int) -> tuple[Begun, Lock]:
    """Take the lock, and make a new directory, which no index names yet."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(_no_checkpoint(path))
    made = [str(p) for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    begun: Begun | None = None
    lock: Lock | None = None
    try:
        with Directory.at(path) as directory:
            begun, lock = _begin(directory, ranks)
        for parent in made:
            with Directory.at(Path(parent).parent) as above:
                above.sync()
    except BaseException:
        if begun is not None and lock is not None:
            abandon(begun, lock)
        remove_directories(made)
        raise
    return begun._replace(made=made), lock


def _begin(directory: Directory, ranks: int) -> tuple[Begun, Lock]:
    names = {*directory.names()}
    if names and not names & {INDEX, locks.NAME}:
        read_index(directory)  # an error if there are arrays
        raise FileExistsError(_no_checkpoint(directory.path))
    lock = Lock(directory)
    try:
        index = read_index(directory)
        lock.describe(ranks, None if index is None else index.subdirectory)
        folders = [name for name in directory.names() if folder_number(name)]
        current = None if index is None else index.subdirectory
        leftovers = [r for name in folders if name != current for r in _removal(directory, name)]
        # Ranks of a killed job may still write into existing directories.
        numbers = [folder_number(name) or 0 for name in (*folders, *([current] if current else []))]
        subdirectory = f"arrays-{max(numbers, default=0) + 1}"
        old = [r for name in folders if name == current for r in _removal(directory, name)]
        directory.make(subdirectory)
        try:
            directory.sync()
        except OSError:
            directory.remove_empty(subdirectory)
            raise
    except BaseException:
        lock.release(directory) if lock.is_new else lock.leave()
        raise
    path = str(directory.path)
    return Begun(path, secrets.token_hex(16), subdirectory, leftovers, old, []), lock


def _removal(directory: Directory, subdirectory: str) -> list[Removal]:
    """Return the removal of a directory of files, or none if it cannot be opened."""
    try:
        with directory.child(subdirectory) as inside:
            found = [re.fullmatch(r"(0|[1-9][0-9]{0,9})\.blocks", name) for name in inside.names()]
    except OSError:
        return []
    return [Removal(str(directory.path), subdirectory, sorted(int(f[1]) for f in found if f))]


def publish(index: Index, path: Path, lock: Lock) -> None:
    """Publish a checkpoint: replace the index by one that names a directory of complete files."""
    with Directory.at(path) as directory:
        with directory.child(index.subdirectory) as inside:
            inside.sync()
        directory.remove(_NEW)
        with open(directory.create(_NEW), "wb") as out:
            out.write(encode(index))
            out.flush()
            os.fsync(out.fileno())
        directory.replace(_NEW, INDEX)
        directory.sync()
        lock.release(directory)


def is_published(begun: Begun) -> bool:
    """Return whether the index names the directory of a save that has failed."""
    index = find_index(Path(begun.path))
    return index is not None and index.subdirectory == begun.subdirectory


def abandon(begun: Begun, lock: Lock) -> None:
    """Remove the directories and the lock of a failed save, whose files have been removed."""
    try:
        with Directory.at(Path(begun.path)) as directory:
            directory.remove(_NEW)
            directory.remove_empty(begun.subdirectory)
            lock.release(directory)
        remove_directories(begun.made)
    finally:
        lock.leave()


def remove_directories(paths: Iterable[str]) -> None:
    """Remove directories that are empty, the deepest first."""
    with contextlib.suppress(OSError):
        for path in paths:
            os.rmdir(path)


def numbered(directory: Path) -> list[Path]:
    """Return the complete checkpoints whose names are numbers, the largest last."""
    inside = directory.iterdir() if directory.is_dir() else ()
    found = [p for p in inside if p.name.isdecimal() and (p / INDEX).exists()]
    return sorted(found, key=lambda p: int(p.name))


def retire(parent: Path, keep: int) -> list[Removal]:
    """Remove the indices of all numbered checkpoints except for the newest ones.

    Returns:
        The files of these checkpoints, which remain to be removed.

    If a job was killed while removing a checkpoint, the checkpoint has no index any more. Its files
    are returned, too.
    """
    found: list[Removal] = []
    with contextlib.suppress(OSError), Directory.at(parent) as above:
        oldest = int(numbered(parent)[-keep:][0].name)
        for name in sorted(above.names()):
            if name.isdecimal() and int(name) < oldest:
                with contextlib.suppress(OSError):  # a damaged one stays
                    found += _retire(above, name)
    return found


def _retire(above: Directory, name: str) -> list[Removal]:
    with above.child(name) as directory:
        if not {*directory.names()} & {INDEX, locks.NAME}:
            return []
        lock = Lock(directory)
        try:
            if read_index(directory) is not None:
                lock.describe(1, None)
                directory.remove(INDEX)
                directory.sync()
        except BaseException:
            lock.release(directory) if lock.is_new else lock.leave()
            raise
        lock.leave()
        folders = [name for name in directory.names() if folder_number(name)]
        found = [r._replace(is_all=True) for f in folders for r in _removal(directory, f)]
    if not found:
        _remove_rest(above.path / name)
    return found


# ---- What each rank does


def write(begun: Begun, file: int, blocks: Sequence[Values]) -> None:
    """Write the blocks of one rank into its file, and wait until the file is on the disk."""
    with contextlib.ExitStack() as opened:
        top = opened.enter_context(Directory.at(Path(begun.path)))
        inside = opened.enter_context(top.child(begun.subdirectory))
        out = opened.enter_context(open(inside.create(_name(file)), "wb", buffering=2**20))
        header = _header(begun.identity, begun.subdirectory, file)
        out.write(header)
        digests = []
        for block in blocks:
            for window in tile_windows(block.shape):
                data = np.ascontiguousarray(block[window]).reshape(-1).view(np.uint8).data
                digests.append(zlib.crc32(data))
                out.write(data)
        end = np.array(digests, "<u4").tobytes()
        out.write(end + struct.pack("<I", zlib.crc32(header + end)))
        out.flush()
        os.fsync(out.fileno())


def remove(removal: Removal) -> None:
    """Remove the files that were written to this path, and their directory once it is empty.

    Ranks that each remove a share need not wait for each other: the last one removes the directory.
    """
    path, subdirectory = Path(removal.path), removal.subdirectory
    is_last = False
    with contextlib.suppress(OSError), Directory.at(path) as directory:
        with directory.child(subdirectory) as inside:
            for file in removal.files:
                with contextlib.suppress(OSError):
                    _remove_own(inside, subdirectory, file)
        is_last = directory.remove_empty(subdirectory)
    if is_last and removal.is_all:
        _remove_rest(path)


def _remove_own(inside: Directory, subdirectory: str, file: int) -> None:
    number = folder_number(subdirectory)
    descriptor = inside.open(_name(file))
    try:
        begin = os.pread(descriptor, _HEADER.size, 0)
    finally:
        os.close(descriptor)
    is_own = len(begin) == _HEADER.size and _HEADER.unpack(begin)[::2] == (_MAGIC, number)
    if not begin or (is_own and _HEADER.unpack(begin)[3] == file):
        inside.remove(_name(file))


def _remove_rest(path: Path) -> None:
    """Remove the lock of a checkpoint that has been removed, and its directory if it is empty."""
    with contextlib.suppress(OSError):
        with Directory.at(path) as directory:
            names = directory.names()
            if INDEX in names or any(map(folder_number, names)):
                return
            Lock(directory).release(directory)
        os.rmdir(path)


class _File:
    """A file of blocks. Use it in a `with` statement, which closes it."""

    def __init__(self, inside: Directory, index: Index, file: int):
        self._index, self._path = index, inside.path / _name(file)
        self._blocks, size, tiles = index.blocks(file)
        try:
            self._file = inside.open(_name(file))
        except FileNotFoundError:
            raise OSError(f"load: {self._path} is missing") from None
        try:
            expected = _HEADER.size + size + 4 * tiles + 4
            found = os.fstat(self._file).st_size
            if found != expected:
                raise OSError(f"load: {self._path} has {found} bytes; expected {expected}")
            header = self._bytes(0, _HEADER.size)
            if header != _header(index.identity, index.subdirectory, file):
                raise OSError(f"load: {self._path} is damaged, or belongs to another checkpoint")
            end = self._bytes(_HEADER.size + size, 4 * tiles + 4)
            if zlib.crc32(header + end[:-4]) != struct.unpack("<I", end[-4:])[0]:
                raise OSError(f"load: {self._path} is damaged")
        except BaseException:
            os.close(self._file)
            raise
        self._digests = np.frombuffer(end[:-4], "<u4").tolist()

    def __enter__(self) -> _File:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        to: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def _bytes(self, offset: int, size: int) -> bytes:
        parts = []
        while size and (part := os.pread(self._file, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def copy(self, number: int, window: Window, values: Values) -> None:
        """Copy the elements of an array that lie in this file and in a window into ``values``."""
        array, block = self._index.arrays[number], self._blocks[number]
        offset = _HEADER.size + block.offset
        shape = tuple(s.stop - s.start for s in block.window)
        for digest, tile in zip(self._digests[block.tile :], tile_windows(shape), strict=False):
            stored = np.empty([s.stop - s.start for s in tile], DTYPES[array.dtype])
            offset += stored.nbytes
            low = [b.start + t.start for b, t in zip(block.window, tile, strict=True)]
            pairs = [
                (max(start, w.start), min(start + n, w.stop))
                for start, n, w in zip(low, stored.shape, window, strict=True)
            ]
            if any(start >= stop for start, stop in pairs):
                continue
            data = self._bytes(offset - stored.nbytes, stored.nbytes)
            if len(data) != stored.nbytes or zlib.crc32(data) != digest:
                raise OSError(f"load: {self._path} is damaged in array {array.name or 'x'}")
            stored.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
            to = tuple(
                slice(a - w.start, b - w.start) for (a, b), w in zip(pairs, window, strict=True)
            )
            source = tuple(slice(a - n, b - n) for (a, b), n in zip(pairs, low, strict=True))
            values[to] = stored[source]


def read(path: Path, index: Index, windows: Sequence[Window], rank: int) -> list[Values]:
    """Read a window of each array."""
    found: list[Values] = []
    numbers: dict[int, list[int]] = {}
    for number, (array, window) in enumerate(zip(index.arrays, windows, strict=True)):
        found.append(np.empty([s.stop - s.start for s in window], DTYPES[array.dtype]))
        for file in index.tables[array.table].within(window):
            numbers.setdefault(file, []).append(number)
    if not numbers:
        return found
    with contextlib.ExitStack() as opened:
        top = opened.enter_context(Directory.at(path))
        try:
            inside = opened.enter_context(top.child(index.subdirectory))
        except FileNotFoundError:
            raise OSError(f"load: {path / index.subdirectory} is missing") from None
        # Ranks begin with different files, so that they do not all read the same one.
        for file in sorted(numbers, key=lambda file: (file - rank) % index.files):
            with _File(inside, index, file) as stored:
                for number in numbers[file]:
                    stored.copy(number, windows[number], found[number])
    return found
