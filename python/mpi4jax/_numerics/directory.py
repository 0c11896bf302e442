"""A directory whose entries are opened by their names: all access to the files of a checkpoint.

No name leads out of the directory, because names with a slash or `..` are refused and symbolic
links are not followed. The path of the directory itself is the user's, and may have links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
# Without the flag, opening a named pipe would block. It has no effect on a regular file.
_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFE


class Directory:
    """An open directory. Use it in a `with` statement, which closes it.

    Attributes:
        path: path of the directory, used only in error messages.
    """

    def __init__(self, descriptor: int, path: Path):
        self._descriptor, self.path = descriptor, path

    @classmethod
    def at(cls, path: Path) -> Directory:
        """Open a directory that the user names."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        to: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _named(self, *names: str) -> Iterator[int]:
        """Yield the descriptor of the directory. Errors get the whole path of the first name."""
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise OSError(f"checkpoints: {name!r} is not the name of a file in {self.path}")
        try:
            yield self._descriptor
        except OSError as error:
            if error.errno is not None:
                error.filename = str(self.path / names[0])
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                self._refuse_links(names[0])
            raise

    def _refuse_links(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise OSError(
                    f"checkpoints: {self.path / name} is a symbolic link, which is not followed"
                )

    def child(self, name: str) -> Directory:
        """Open a directory in this one."""
        with self._named(name) as here:
            flags = os.O_RDONLY | os.O_DIRECTORY | _SAFE
            return Directory(os.open(name, flags, dir_fd=here), self.path / name)

    def open(self, name: str) -> int:
        """Return a descriptor to read a regular file."""
        with self._named(name) as here:
            return self._regular(name, os.open(name, _READ, dir_fd=here))

    def _regular(self, name: str, file: int) -> int:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"checkpoints: {self.path / name} is not a regular file")
        return file

    def read(self, name: str, limit: int) -> bytes:
        """Return the contents of a file.

        Raises:
            OSError: if the file has more than `limit` bytes.
        """
        file = self.open(name)
        with open(file, "rb") as inside:
            if os.fstat(file).st_size > limit:
                raise OSError(f"checkpoints: {self.path / name} has more than {limit} bytes")
            return inside.read(limit)

    def create(self, name: str) -> int:
        """Make a file, which must not exist, and return a descriptor to write it."""
        with self._named(name) as here:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=here)

    def create_or_open(self, name: str) -> tuple[int, bool]:
        """Return a descriptor to read and write a file, and whether this call has made it."""
        flags = os.O_RDWR | os.O_NONBLOCK | _SAFE
        with self._named(name) as here:
            try:
                file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=here)
                return file, True
            except FileExistsError:
                return self._regular(name, os.open(name, flags, dir_fd=here)), False

    def is_at(self, name: str, file: int) -> bool:
        """Return whether a name still refers to an open file."""
        try:
            with self._named(name) as here:
                found = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(file))

    def has(self, name: str) -> bool:
        try:
            with self._named(name) as here:
                os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)

    def make(self, name: str) -> None:
        """Make a directory, which must not exist."""
        with self._named(name) as here:
            os.mkdir(name, dir_fd=here)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError), self._named(name) as here:
            os.unlink(name, dir_fd=here)

    def remove_empty(self, name: str) -> bool:
        """Remove a directory if it is empty, and return whether this call has removed it."""
        try:
            with self._named(name) as here:
                os.rmdir(name, dir_fd=here)
        except OSError:
            return False
        return True

    def replace(self, name: str, other: str) -> None:
        """Rename a file over another one, in one step."""
        with self._named(name, other) as here:
            os.replace(name, other, src_dir_fd=here, dst_dir_fd=here)

    def sync(self) -> None:
        """Wait until the entries of the directory are on the disk."""
        os.fsync(self._descriptor)
