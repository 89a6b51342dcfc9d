"""The lock of a server's folder: two servers would remove each other's files."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path

from ..checks import logger_of
from ..log import expect_regular

logger = logger_of(__name__)

# Error numbers of file systems without locks.
_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class FolderInUse(OSError):
    """Another server keeps its state in the folder."""


class FolderLock:
    """Hold a folder until ``release``, or until the process ends.

    The kernel locks the file ``lock``, which stays in the folder and names the process that holds
    the folder. If the file cannot be made there is no lock; no other file can be made there either.
    Nor is there a lock on a file system without locks: the log says so.

    Args:
        folder: A folder that exists.
        name: What the folder is called in errors, such as "snapshot folder".

    Raises:
        FolderInUse: If another server holds the folder.
        OSError: If ``lock`` is there and is no regular file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._file = _open(folder / "lock")
        if self._file is None:
            return
        self._end = weakref.finalize(self, os.close, self._file)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            self._end()
            raise FolderInUse(
                f"the {name} {folder} belongs to another server, "
                f"{holder or 'whose process is not known'}: each server needs a folder of its own"
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise
            logger.warning("the %s %s cannot be locked: %s", name, folder, error.strerror)
            self._end()
            return
        self._sign()

    def _sign(self) -> None:
        """Write the name of this process into the lock, for the error of another server."""
        assert self._file is not None
        name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, name, 0)
        except OSError as error:
            logger.debug("the lock has no name: %s", error)

    def release(self) -> None:
        """Let another server have the folder; idempotent."""
        if self._file is not None and self._end.alive:
            # Closing is not enough: a forked child would keep the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._end()


def _open(path: Path) -> int | None:
    """Open a file, and make it if it is missing; None if that fails."""
    expect_regular(path)
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        try:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            logger.debug("%s cannot be opened: %s", path, error)
    return None
