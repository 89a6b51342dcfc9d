"""The registry's journal: a file to which each group of swaps is appended, and fsynced.

The file begins with a header (magic, the registry's id, a seed, the CRC-32 of these). Each entry is
a magic, the length of its content, the CRC-32 of the content, and the content: the swaps that were
written together, each as name of the run and new record. The seed is the start value of every
CRC-32. No client knows the seed, so no record can hold bytes that look like an entry.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ...base.service.folder_lock import FolderLock

logger = logging.getLogger(__name__)

# The name of a run and its new record, b"" for none.
Change = tuple[str, bytes]

FILE = "journal"
_MAGIC = b"DCREGv1\0"
_HEADER = struct.Struct("<8s16sI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ENTRY_MAGIC = b"DCRE"
_ENTRY = struct.Struct("<4sII")  # magic, bytes of the content, its CRC-32
_CHANGE = struct.Struct("<HI")  # bytes of the run's name, bytes of the record
MAX_CONTENT = 1 << 20
# Changes in one entry of a compacted journal; their content stays below MAX_CONTENT.
_BATCH = 64
_COMPACT_BYTES = 1 << 26


class CorruptJournal(RuntimeError):
    """The journal holds bytes that no server wrote; the text names file and offset."""


class DoubtfulWrite(OSError):
    """Changes were written, but may not survive a crash: the disk did not confirm the fsync."""


class Journal:
    """The journal in a folder, which belongs to this process until ``close``.

    The journal is compacted when it is opened, and when it has grown long: a new file with the
    present records is written, fsynced and renamed over the old file.

    Args:
        folder: Made if missing. An empty folder becomes a new registry.

    Attributes:
        registry_id: 16 random bytes, as old as the folder's journal.
        records: The record of each run that has one.

    Raises:
        FolderInUse: If another server has the folder.
        CorruptJournal: If the file is damaged before its end.
        OSError: If the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._lock = FolderLock(folder, "journal folder")
        self._file, self._end = -1, 0
        self.records: dict[str, bytes] = {}
        self.registry_id = secrets.token_bytes(16)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        has_journal = self.path.exists()
        if has_journal:
            self.registry_id, self.records = load(self.path)
        try:
            self._rewrite()
        except OSError as error:
            if not has_journal:
                raise
            logger.warning("%s; the registry accepts no swap until it can", _reason(error))

    def close(self) -> None:
        """Close the file and unlock the folder; idempotent."""
        self._close_file()
        self._lock.release()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ------------------------------------------------------------------------------------ writing

    def append(self, changes: Sequence[Change]) -> None:
        """Write changes as one entry, fsync the file, and change ``records``.

        Args:
            changes: At most 64 changes.

        Raises:
            DoubtfulWrite: If the fsync failed. ``records`` has not changed, and the file is
                written anew before the next entry, so that both agree again.
            OSError: If the changes cannot be written; nothing has changed, also after a crash.
        """
        records = dict(self.records)
        _apply(records, changes)
        if self._file < 0 or self._end > _COMPACT_BYTES:
            self._rewrite()
        entry = _entry(changes, self._seed)
        try:
            _write(self._file, entry, self._end)
        except OSError as error:
            self._cut_off()
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        try:
            os.fsync(self._file)
        except OSError as error:
            # After a failed fsync the file's pages may or may not be on the disk.
            self._close_file()
            raise DoubtfulWrite(error.errno, error.strerror, str(self.path)) from None
        self._end += len(entry)
        self.records = records

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self._file, self._end)
        except OSError:
            self._close_file()

    def _rewrite(self) -> None:
        """Write ``records`` to a new file, rename it over the journal, and go on in it."""
        self._close_file()
        fresh = self.path.with_name(f"{FILE}.new")
        seed = secrets.randbits(32)
        header = _HEADER.pack(_MAGIC, self.registry_id, seed)
        changes = sorted(self.records.items())
        batches = [changes[i : i + _BATCH] for i in range(0, len(changes), _BATCH)]
        content = header + _CHECKSUM.pack(zlib.crc32(header))
        content += b"".join(_entry(batch, seed) for batch in batches)
        file = -1
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            _write(file, content, 0)
            os.fsync(file)
            os.replace(fresh, self.path)
            _fsync_folder(self.path.parent)
        except OSError as error:
            if file >= 0:
                os.close(file)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._file, self._end, self._seed = file, len(content), seed


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _fsync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _reason(error: OSError) -> str:
    return f"{error.filename} cannot be written: {error.strerror or error}"


def _entry(changes: Iterable[Change], seed: int) -> bytes:
    content = b"".join(
        _CHANGE.pack(len(name := run.encode()), len(record)) + name + record
        for run, record in changes
    )
    return _ENTRY.pack(_ENTRY_MAGIC, len(content), zlib.crc32(content, seed)) + content


# ---------------------------------------------------------------------------------------- reading


def load(path: Path) -> tuple[bytes, dict[str, bytes]]:
    """Return the registry's id and the records in a journal, without a torn last entry.

    Raises:
        CorruptJournal: If the header or an entry before the last one is damaged.
        OSError: If the file cannot be read.
    """
    data = path.read_bytes()
    registry_id, seed = _read_header(path, data)
    records: dict[str, bytes] = {}
    offset = HEADER_BYTES
    while offset < len(data):
        content = _content(data, offset, seed)
        if content is None:
            _expect_torn(path, data, offset, seed)
            break
        _apply(records, _changes(content))
        offset += _ENTRY.size + len(content)
    return registry_id, records


def _read_header(path: Path, data: bytes) -> tuple[bytes, int]:
    if len(data) >= HEADER_BYTES:
        magic, registry_id, seed = _HEADER.unpack_from(data)
        (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        if magic == _MAGIC and checksum == zlib.crc32(data[: _HEADER.size]):
            return registry_id, seed
    raise CorruptJournal(
        f"{path} is damaged at byte 0, or is no journal of a registry: "
        "restore the file from a backup"
    )


def _content(data: bytes, offset: int, seed: int) -> memoryview | None:
    """Return the content of the entry at an offset, or None if there is no whole entry."""
    if len(data) - offset < _ENTRY.size:
        return None
    magic, length, checksum = _ENTRY.unpack_from(data, offset)
    begin = offset + _ENTRY.size
    if magic != _ENTRY_MAGIC or length > MAX_CONTENT or length > len(data) - begin:
        return None
    content = memoryview(data)[begin : begin + length]
    return content if zlib.crc32(content, seed) == checksum else None


def _expect_torn(path: Path, data: bytes, offset: int, seed: int) -> None:
    """Raise if a whole entry follows: every entry was fsynced before the next one was written."""
    later = data.find(_ENTRY_MAGIC, offset + 1)
    while later >= 0:
        if _content(data, later, seed) is not None:
            raise CorruptJournal(
                f"{path} is damaged at byte {offset}: the entry there is not valid, and a valid "
                f"entry follows at byte {later}; restore the file from a backup"
            )
        later = data.find(_ENTRY_MAGIC, later + 1)
    logger.warning(
        "%s ends with %d bytes that are no whole entry: they are cut off",
        path,
        len(data) - offset,
    )


def _changes(content: memoryview) -> Iterator[Change]:
    offset = 0
    while offset < len(content):
        name_bytes, record_bytes = _CHANGE.unpack_from(content, offset)
        begin = offset + _CHANGE.size
        offset = begin + name_bytes + record_bytes
        run = bytes(content[begin : begin + name_bytes]).decode()
        yield run, bytes(content[begin + name_bytes : offset])


def _apply(records: dict[str, bytes], changes: Iterable[Change]) -> None:
    for run, record in changes:
        if record:
            records[run] = record
        else:
            records.pop(run, None)
