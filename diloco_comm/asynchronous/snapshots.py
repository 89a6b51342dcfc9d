"""The files of a server: a snapshot, and a journal of the updates since the snapshot.

A snapshot is written beside the old one and renamed over it. The journal is named after the version
of its snapshot. It gets every update before the update's worker gets the outcome. So, unless the
disk failed, a server that was killed restores all updates that its workers know to be applied, and
those whose outcome was not sent yet. Both files are logs
(``base.log``): the head of a record is JSON, its body is raw bytes. After any failure the folder
still holds a snapshot and the journal that belongs to the snapshot.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base import log as logs
from ..base.checks import logger_of
from ..base.log import DamagedLog, DoubtfulWrite, Log
from ..base.service.folder_lock import FolderLock
from .payloads import Payload, PayloadFile, blocks

logger = logger_of(__name__)

SNAPSHOT, JOURNAL = "server-snapshot", "server-journal"
_REMEDY = (
    "restore the file from a backup, or cut the newest journal there with `diloco-comm serve "
    "truncate --snapshot ...`"
)
_OUR_JOURNAL = re.compile(r"journal-\d+(\.new)?")

# A record: its JSON, and its bytes in the file.
Row = tuple[dict[str, Any], PayloadFile]


def _fresh(header: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.empty(int(count), dtype=torch.float32)
        for name, count in header["tensors"].items()
    }


def read_snapshot(
    path: Path, make: Callable[[dict[str, Any]], dict[str, Tensor]] = _fresh
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a snapshot and return its header and tensors; see ``Storage.load``.

    Raises:
        DamagedLog: If the file is damaged.
        ValueError: If the file holds something else than the snapshot of a server.
        OSError: If the file cannot be read.
    """
    rows = _rows(_open(path, SNAPSHOT))
    with restoring(path):
        header, body = next(rows)
        counts = header["tensors"]
        is_counted = all(type(count) is int and count > 0 for count in counts.values())
        if not is_counted or 4 * sum(counts.values()) != body.nbytes:
            raise ValueError(f"{path} has {body.nbytes} bytes of tensors, its header says others")
        tensors = make(header)
        if {name: tensor.numel() for name, tensor in tensors.items()} != counts:
            raise ValueError(f"{path} holds other tensors than its rule keeps")
        begin = 0
        for name in counts:
            body.read_into(tensors[name].view(torch.uint8), begin)
            begin += tensors[name].nbytes
        if next(rows, None) is not None:
            raise ValueError(f"{path} holds more than one snapshot")
    return header, tensors


def read_journal(path: Path, *, may_be_torn: bool = True) -> Iterator[Row]:
    """Yield the records of a journal, which is not changed.

    Payloads stay in the file, and are valid until the next record is yielded.

    Args:
        may_be_torn: Accept a torn end. False for a journal that was closed before a later one.

    Raises:
        DamagedLog, ValueError, OSError: As ``read_snapshot``; all records before were yielded.
    """
    if os.path.lexists(path):
        yield from _rows(_open(path, JOURNAL), may_be_torn=may_be_torn)


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn errors in a block that reads JSON of ``path`` into a ValueError with one sentence.

    The JSON may lack a field, or have one of another type: checksums prove that a file is as it was
    written, but not that a server has written it.
    """
    try:
        yield
    except DamagedLog:
        raise
    except StopIteration:
        raise ValueError(f"{path} is empty") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"{path} holds JSON that no server of this version writes: {error!r}"
        ) from None


def _open(path: Path, kind: str) -> Log:
    return Log(path, kind, remedy=_REMEDY, is_writable=False)


def _rows(log: Log, *, keeps_open: bool = False, may_be_torn: bool = True) -> Iterator[Row]:
    try:
        for record in log.read():
            head = _parsed(record.head)
            if head is None:
                raise log.damage(record.begin, "the record there holds no JSON object")
            yield head, PayloadFile(log, record.body, record.body_bytes)
        if log.torn_bytes and not may_be_torn:
            raise log.damage(log.end, "the end was cut off, and a later journal follows")
    finally:
        if not keeps_open:
            log.release()


def _parsed(text: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def newest_journal(folder: Path) -> int:
    """Return the version in the name of the newest journal; -1 for none."""
    names = [path.name.removeprefix("journal-") for path in folder.glob("journal-*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def truncate_journal(folder: Path) -> str:
    """Cut the newest journal of a folder off where it is damaged; keep the rest in another file.

    Returns:
        One sentence that says what was cut off, or that nothing is damaged.

    Raises:
        ValueError: If the folder has no journal.
        DamagedLog: If nothing of the journal is whole.
        OSError: If a server has the folder, or a file cannot be read or written.
    """
    newest = newest_journal(folder)
    if newest < 0:
        raise ValueError(f"{folder} has no journal of a server")
    path = folder / f"journal-{newest}"
    lock = FolderLock(folder, "snapshot folder")
    try:
        log = _open(path, JOURNAL)
        for _ in _rows(log):
            pass
    except DamagedLog as damage:
        return logs.truncate(damage)
    finally:
        lock.release()
    if log.torn_bytes:
        return (
            f"{path} is not damaged, but torn: nothing was cut off, and the next server cuts off "
            f"its last {log.torn_bytes} bytes"
        )
    return f"{path} is not damaged, and nothing was cut off"


# ------------------------------------------------------------------------------------ the folder


class Storage:
    """A folder with one snapshot and one journal, for one server at a time.

    Args:
        keeps_journals: Keep the first snapshot, as ``first``, and the journals of all snapshots.

    Raises:
        FolderInUse: If another server has the folder.
        ValueError: If the folder has updates in a journal, and no snapshot.
    """

    def __init__(self, folder: Path, *, keeps_journals: bool = False) -> None:
        self.folder, self._keeps_journals = folder, keeps_journals
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(folder, "snapshot folder")
        self._journal: Log | None = None
        # If the last fsync of the journal failed: where its valid records end. The journal is
        # written anew before it goes on.
        self._doubtful_end: int | None = None
        # A server that was killed may have left half a snapshot.
        with suppress(OSError):
            self._scratch.unlink(missing_ok=True)
        try:
            self._refuse_without_snapshot()
        except BaseException:
            self.release()
            raise

    def _refuse_without_snapshot(self) -> None:
        """Raise if the folder has updates of a model, but not its snapshot."""
        newest = newest_journal(self.folder)
        path = self._journal_path(newest)
        if not self.exists and newest >= 0 and any(read_journal(path)):
            raise ValueError(
                f"{path} has updates of a model whose snapshot, {self._path}, is missing: put the "
                "snapshot back, or move the journals away to begin a new model"
            )

    @property
    def _path(self) -> Path:
        return self.folder / "snapshot"

    @property
    def _first(self) -> Path:
        """The first snapshot of a run whose journals are kept."""
        return self.folder / "first"

    @property
    def _scratch(self) -> Path:
        return self.folder / "snapshot.new"

    @property
    def exists(self) -> bool:
        return os.path.lexists(self._path)

    @property
    def has_first(self) -> bool:
        """Whether the folder has the snapshot ``first``, with which the kept journals begin."""
        return os.path.lexists(self._first)

    def begin_tape(self) -> None:
        """Make the present snapshot the first one of the kept journals, unless there is one.

        Raises:
            OSError: If the folder cannot be written.
        """
        if self.exists and not self.has_first:
            with _naming(self._first):
                os.link(self._path, self._first)

    def _journal_path(self, version: int) -> Path:
        return self.folder / f"journal-{version}"

    def probe(self) -> None:
        """Raise OSError if the folder cannot be written."""
        with _naming(self._scratch):
            try:
                with open(logs.open_new(self._scratch, 0o600), "wb") as file:
                    file.write(bytes(4096))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                with suppress(OSError):
                    self._scratch.unlink(missing_ok=True)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the file system has room for this many bytes; True if that is unknown."""
        with suppress(OSError):
            found = os.statvfs(self.folder)
            free = found.f_bavail if os.geteuid() else found.f_bfree
            return not found.f_blocks or num_bytes <= free * found.f_frsize
        return True

    # --------------------------------------------------------------------------- the snapshot

    def load(
        self, make: Callable[[dict[str, Any]], dict[str, Tensor]] = _fresh
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the snapshot and return its header and tensors.

        Args:
            make: Called with the header; returns the fp32 tensors to fill, by name.
        """
        return read_snapshot(self._path, make)

    def save(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the old snapshot by a new one, or change nothing; call ``begin_journal`` next.

        Raises:
            OSError: If the snapshot cannot be written; the error names the file.
        """
        shapes = {name: tensor.numel() for name, tensor in tensors.items()}
        text = _text({**header, "tensors": shapes}, self._path)

        def fill(log: Log) -> None:
            log.append(text, tensors.values(), 4 * sum(shapes.values()), is_durable=False)
            if self._keeps_journals and not self.exists:
                self._first.unlink(missing_ok=True)  # from a process that ended before its rename
                os.link(log.path, self._first)

        before = _inode(self._path)
        try:
            Log.create(self._path, SNAPSHOT, fill=fill).close()
        except OSError:
            # The rename is done if only the folder's fsync failed, which ``begin_journal`` repeats.
            if _inode(self._path) == before:
                raise

    # ---------------------------------------------------------------------------- the journal

    def begin_journal(self, version: int) -> None:
        """Begin the journal of the snapshot of this version; remove older journals, unless kept.

        Raises:
            OSError: If the journal or the folder cannot be written; no journal is removed then.
        """
        self.close()
        path = self._journal_path(version)
        # ``Log.create`` also syncs the folder. So the new snapshot's name is on the disk before the
        # old journal is removed: a loss of power leaves no old snapshot without its journal.
        self._journal = Log.create(path, JOURNAL, remedy=_REMEDY)
        # The other journals belong to snapshots that have been replaced.
        old = [] if self._keeps_journals else [self._first, *self.folder.glob("journal-*")]
        for other in old:
            if other == self._first or (_OUR_JOURNAL.fullmatch(other.name) and other != path):
                with suppress(OSError):
                    other.unlink()

    def append(
        self, header: dict[str, Any], payloads: Sequence[Payload], *, is_durable: bool = False
    ) -> None:
        """Write an update to the journal, and hand the bytes to the operating system.

        Args:
            is_durable: Return when the bytes are on the disk (fsync).

        Raises:
            OSError: If the record cannot be written. The journal then ends with the update before;
                call ``continue_journal`` before the next update.
        """
        assert self._journal is not None
        body = (block for payload in payloads for block in blocks(payload))
        size = sum(payload.nbytes for payload in payloads)
        with self._doubting():
            text = _text(header, self._journal.path)
            self._journal.append(text, body, size, is_durable=is_durable)

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """Close the journal if a fsync in this block fails, and note where it ends."""
        try:
            yield
        except DoubtfulWrite:
            assert self._journal is not None
            self._doubtful_end = self._journal.end
            self._journal.release()
            self._journal = None
            raise

    def replay(self, version: int) -> Iterator[Row]:
        """Yield the updates in the journal of this version; ``continue_journal`` comes next.

        Payloads stay in the file, and are valid until the next update is yielded.

        Raises:
            ValueError: If the folder has the journal of a newer snapshot.
        """
        path = self._journal_path(version)
        newest = newest_journal(self.folder)
        if newest > version and any(read_journal(self._journal_path(newest))):
            raise ValueError(
                f"{self._journal_path(newest)} belongs to a newer snapshot than {self._path} of "
                f"version {version}: put back the snapshot of the journal, or move the journal away"
            )
        if os.path.lexists(path):
            self._journal = _open(path, JOURNAL)
            yield from _rows(self._journal, keeps_open=True)

    def continue_journal(self, version: int) -> None:
        """Open the journal for updates, after ``replay`` or after a failed ``append``.

        All records are on the disk (fsync) when this method returns: a server that was killed
        between writing a record and its fsync may have left it in the memory of the operating
        system alone.

        Raises:
            OSError: If the journal cannot be written; the server then writes no journal.
        """
        path = self._journal_path(version)
        if self._journal is None:
            self._journal = self._opened(path)
        with self._doubting(), _naming(path):
            self._journal.open_for_writing()
            self._journal.sync()
            logs.sync_folder(self.folder)

    def _opened(self, path: Path) -> Log:
        """Open a journal to append to it; write it anew if it is doubtful."""
        if self._doubtful_end is not None:
            log = self._rewritten(path, self._doubtful_end)
            self._doubtful_end = None
            return log
        if not os.path.lexists(path):
            return Log.create(path, JOURNAL, remedy=_REMEDY)
        log = _open(path, JOURNAL)
        for _ in log.read():
            pass
        return log

    def _rewritten(self, path: Path, end: int) -> Log:
        """Write a journal anew, with its records up to a place in the file."""

        def fill(log: Log) -> None:
            for head, body in _rows(_open(path, JOURNAL)):
                if body.end > end:
                    break
                log.append(_text(head, path), blocks(body), body.nbytes, is_durable=False)

        return Log.create(path, JOURNAL, fill=fill, remedy=_REMEDY)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._doubtful_end = None

    def release(self) -> None:
        """Close the journal and unlock the folder; nothing is written after this call."""
        self.close()
        self._lock.release()


def _text(header: dict[str, Any], path: Path) -> bytes:
    text = json.dumps(header).encode()
    if len(text) > logs.MAX_HEAD:
        reason = f"the header has {len(text)} bytes of JSON, at most {logs.MAX_HEAD} are read"
        raise OSError(errno.EFBIG, reason, str(path))
    return text


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise each OSError of a block with the name of this file."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None


def _inode(path: Path) -> int | None:
    return path.lstat().st_ino if os.path.lexists(path) else None
