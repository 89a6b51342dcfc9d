"""The registry's journal: a log to which each group of swaps is appended, and fsynced.

The log's ``meta`` is the registry's id. The ``head`` of each entry of the log has the swaps that
were written together; a swap is the name of a run and its new record.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...base.checks import logger_of
from ...base.log import RESTORE, DamagedLog, Log, truncate
from ...base.service.folder_lock import FolderLock
from .protocol import MAX_NAME_BYTES, check_swap

logger = logger_of(__name__)

# The name of a run and its new record, b"" for none.
Change = tuple[str, bytes]

FILE, KIND = "journal", "registry"
_CHANGE = struct.Struct("<HI")  # bytes of the run's name, bytes of the record
# The most records in one entry of a compacted journal.
_BATCH = 64
# A journal is compacted when it has grown by 32 to 64 MiB: when it has so many bytes or, if its
# records alone have more than half of these, when half of these have been added.
_COMPACT_BYTES = 1 << 26


class Journal:
    """The journal in a folder, which belongs to this process until ``close``.

    The journal is compacted when it is opened, and when it has grown long: a new file with the
    present records is written, fsynced and renamed over the old file.

    Args:
        folder: The folder of the journal, made if missing. An empty one becomes a new registry.
        truncates: Cut a damaged journal off at the damage, and keep the rest in a file beside it.

    Attributes:
        registry_id: 16 random bytes, drawn when the journal was made.
        records: The newest record of each run that has one.
        cut: One sentence about a damaged or torn end that was cut off; "" if nothing was.

    Raises:
        FolderInUse: If another server has the folder.
        DamagedLog: If the file is damaged.
        OSError: If the folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, truncates: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._lock = FolderLock(folder, "journal folder")
        self._log: Log | None = None
        self.records: dict[str, bytes] = {}
        self.registry_id = secrets.token_bytes(16)
        self.cut = ""
        self._spared_bytes = 0  # beyond _COMPACT_BYTES, before the file is compacted
        try:
            self._open(truncates)
        except BaseException:
            self.close()
            raise

    def _open(self, truncates: bool) -> None:
        has_journal, torn_bytes = os.path.lexists(self.path), 0
        if has_journal:
            try:
                self.registry_id, self.records, torn_bytes = load(self.path)
            except DamagedLog as damage:
                if not truncates:
                    raise
                self.cut = truncate(damage)
                self.registry_id, self.records, torn_bytes = load(self.path)
        try:
            self._rewrite()
        except OSError as error:
            if not has_journal:
                raise
            reason = f"{error.filename} cannot be written: {error.strerror or error}"
            logger.warning("%s; the registry accepts no swap until it can", reason)
        else:
            if torn_bytes:
                self.cut = f"{self.path} had a torn end: its last {torn_bytes} bytes are cut off"

    def close(self) -> None:
        """Close the file and unlock the folder; idempotent."""
        if self._log is not None:
            self._log.close()
            self._log = None
        self._lock.release()

    def append(self, changes: Sequence[Change]) -> None:
        """Write changes as one entry of the log, fsync the file, and change ``records``.

        Args:
            changes: At most 64 changes.

        Raises:
            DoubtfulWrite: If the fsync failed. ``records`` has not changed, and the file is
                written anew before the next entry, so that both agree again.
            OSError: If the changes cannot be written, or another program has changed the file;
                these changes do not count, also after a crash.
        """
        if self._log is None or self._log.is_doubtful:
            self._rewrite()
        assert self._log is not None
        self._log.append(_packed(changes))
        _apply(self.records, changes)
        if self._log.end > _COMPACT_BYTES + self._spared_bytes:
            self._compact()

    def _compact(self) -> None:
        """Write a short file; if that fails, go on in the long one, and try again 64 MiB later."""
        self._spared_bytes += _COMPACT_BYTES
        try:
            self._rewrite()
        except OSError as error:
            logger.warning(
                "%s is long and cannot be written anew: %s; the registry goes on in the long file",
                self.path,
                error.strerror or error,
            )

    def _rewrite(self) -> None:
        """Write ``records`` to a new file, rename it over the journal, and go on in it."""
        changes = sorted(self.records.items())

        def fill(log: Log) -> None:
            for i in range(0, len(changes), _BATCH):
                log.append(_packed(changes[i : i + _BATCH]), is_durable=False)

        try:
            fresh = Log.create(self.path, KIND, self.registry_id, fill)
        except OSError:
            # The new file is there already if only the folder's fsync failed.
            if self._log is not None and not self._log.is_in_place:
                self._log.release()
                self._log = None
            raise
        if self._log is not None:
            self._log.release()
        # If the present records alone are long, let many swaps come before the next compaction.
        self._log, self._spared_bytes = fresh, max(0, fresh.end - _COMPACT_BYTES // 2)


def _packed(changes: Iterable[Change]) -> bytes:
    return b"".join(
        _CHANGE.pack(len(name := run.encode()), len(record)) + name + record
        for run, record in changes
    )


# ---------------------------------------------------------------------------------------- reading


def load(path: Path) -> tuple[bytes, dict[str, bytes], int]:
    """Return the registry's id, the whole records in a journal, and the bytes of its torn end.

    Raises:
        DamagedLog: If the file is damaged, or is no journal of a registry.
        OSError: If the file cannot be read.
    """
    records: dict[str, bytes] = {}
    log = Log(path, KIND, remedy=_remedy(path), is_writable=False)
    try:
        _apply(records, changes(log))
    finally:
        log.release()
    return log.meta, records, log.torn_bytes


def changes(log: Log) -> Iterator[Change]:
    """Yield the changes in a journal, from the oldest to the newest.

    Raises:
        DamagedLog, OSError: As ``load``.
    """
    for record in log.read():
        try:
            found = _parsed(record.head)
        except ValueError as error:
            raise log.damage(record.begin, str(error)) from None
        yield from found


def _parsed(content: bytes) -> list[Change]:
    """Return the changes in an entry of the log.

    Raises:
        ValueError: If a change is not whole, or its name or record is not of the allowed form.
    """
    found, offset = [], 0
    while offset < len(content):
        fixed = content[offset : offset + _CHANGE.size]
        name_bytes, record_bytes = _CHANGE.unpack(fixed.ljust(_CHANGE.size, b"\xff"))
        begin = offset + _CHANGE.size
        offset = begin + name_bytes + record_bytes
        if offset > len(content):
            raise ValueError("its last change is not whole")
        try:
            run = content[begin : begin + name_bytes].decode()
        except UnicodeDecodeError:
            raise ValueError("the name of a run is not UTF-8") from None
        record = content[begin + name_bytes : offset]
        check_swap(b"", record)
        # The host accepts names up to this length in bytes, though clients give shorter ones.
        if not 1 <= name_bytes <= MAX_NAME_BYTES or "/" in run:
            raise ValueError(f"the name of a run has {name_bytes} bytes, or a slash")
        found.append((run, record))
    return found


def _apply(records: dict[str, bytes], changes: Iterable[Change]) -> None:
    for run, record in changes:
        if record:
            records[run] = record
        else:
            records.pop(run, None)


def _remedy(path: Path) -> str:
    return (
        f"{RESTORE}, or cut it there with `diloco-comm registry --journal {path.parent} --truncate`"
    )
