"""The lock of a checkpoint's directory: a file that says which job saves there."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket

from .directory import Directory

NAME = "unfinished.json"
_FORMAT = "mpi4jax save"
_BEGIN = json.dumps({"format": _FORMAT})[:-1].encode()
_LENGTH = 1024
# The file system has no locks, such as Lustre without `-o flock`. Then nothing prevents two jobs
# from saving at once.
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Lock:
    """The right to change a checkpoint's directory, which one process at a time has.

    The operating system releases the lock when the process ends, however it ends. The file stays
    then: it says that a directory of files without an index is an unfinished save.

    Attributes:
        is_new: whether this process has created the file.
    """

    def __init__(self, directory: Directory):
        """Take the lock.

        Raises:
            BlockingIOError: if another save has it; the error says which one.
            FileExistsError: if the file is not one of this package.
        """
        while not self._open(directory):
            pass  # another process has removed the file before this one had the lock

    def _open(self, directory: Directory) -> bool:
        try:
            self._file, self.is_new = directory.create_or_open(NAME)
        except FileNotFoundError:
            return False
        try:
            self._take(directory)
            if not directory.is_at(NAME, self._file):
                os.close(self._file)
                return False
        except BaseException:
            os.close(self._file)
            raise
        return True

    def describe(self, ranks: int, replaces: str | None) -> None:
        """Write who has the lock, and the directory of the checkpoint that is there, if any."""
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        own = {"host": socket.gethostname(), "process": os.getpid(), "since": now, "ranks": ranks}
        text = json.dumps({"format": _FORMAT, **own, "replaces": replaces})
        # The text is written in one call and has a fixed length, so that a killed process cannot
        # leave half of it.
        os.pwrite(self._file, text.encode().ljust(_LENGTH), 0)
        os.fsync(self._file)

    def _take(self, directory: Directory) -> None:
        found = os.pread(self._file, _LENGTH, 0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"save: {directory.path} is being saved by {_holder(found)}; expected one job, and "
                "one save at a time, for each path"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        # After a power failure, the file may be empty or contain zeros.
        if found.strip(b"\0") and not found.startswith(_BEGIN):
            raise FileExistsError(
                f"save: {directory.path / NAME} was not written by mpi4jax, or is damaged; "
                "expected a path without such a file"
            )

    def release(self, directory: Directory) -> None:
        """Remove the file and release the lock, because no save is unfinished."""
        try:
            directory.remove(NAME)
        finally:
            self.leave()

    def leave(self) -> None:
        """Release the lock, unless it has been released, and keep the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_first_save(directory: Directory) -> bool:
    """Return whether the lock's file says that no checkpoint was complete when it was written."""
    try:
        found = json.loads(directory.read(NAME, _LENGTH))
        return bool(found["format"] == _FORMAT and found["replaces"] is None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _holder(text: bytes) -> str:
    """Describe who has the lock, from its file, which another process may be writing now."""
    try:
        found = json.loads(text)
        return (
            f"process {found['process']} on host {found['host']}, rank 0 of {found['ranks']}, "
            f"since {found['since']}"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
