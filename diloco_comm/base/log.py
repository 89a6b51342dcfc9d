"""An append-only file of records, which are read back whole, in order, or not at all.

Layout, little endian::

    file    magic, version, kind, bytes of meta, seed | meta | checksum | records
    record  numbers | checksum | head | body | digest, end
    numbers magic, sequence, confirmed, bytes of head, bytes of body

A record's checksum covers its magic and numbers, so a changed length is noticed, and not taken for
a record that the file's end cut off. The digest covers the record and the digest before it, so the
reader notices a record that is missing, repeated or moved. The seed is random, and the key of all
checksums and digests: no head or body can hold bytes that look like a record. A record does not end
with a zero, so zeros at the end of a file belong to no whole record.

``confirmed`` is the offset up to which the file was on the disk (fsync) before the record was
written. Bytes before that offset cannot get lost; a loss of power may leave zeros in any sector
behind it.
A record is *torn* if the file ends within it, or if it begins at or behind the last confirmed
offset and holds a sector of 512 bytes that is all zeros. The log ends there: a warning says so, and
the next write cuts off the rest, with any whole records behind. All other bytes that do not fit are
*damage*, and the reader stops there with an error. ``close`` writes a last record, which confirms
all others, and without which the next reader says that the end may be missing.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .checks import logger_of

logger = logger_of(__name__)

MAX_HEAD = 1 << 24
_MAX_META = 1 << 16
_MAGIC, _VERSION = b"DCLOG\r\n\x1a", 1
_FILE = struct.Struct("<8sI16sI16s")  # magic, version, kind, bytes of meta, seed
_RECORD, _CLOSED = b"DCL\xa5", b"DCL\x5a"
_NUMBERS = struct.Struct("<4sQQIQ")  # magic, sequence, confirmed, bytes of head, bytes of body
# How journals of registries and snapshots of servers began in versions before 0.2.
_BEFORE_LOGS = (b"DCREGv1\0", b"DCASv1\0\0")
_KNOWN = 12  # bytes of the numbers that the reader can foretell: magic and sequence number
_MAGICS = re.compile(b"DCL[\xa5\x5a]")
_END = b"\xa5" * 4
_CHECKSUM, _DIGEST = 8, 16
_HEADER = _NUMBERS.size + _CHECKSUM
_TRAILER = _DIGEST + len(_END)
_SECTOR = 512
_BLOCK = 1 << 20


RESTORE = "restore the file from a backup"


class DamagedLog(RuntimeError):
    """A file holds bytes that its writer did not write there, or is no such log.

    Attributes:
        path, offset: The file, and the offset of the first record that is not valid; 0 where the
            head of the file is not. All records before are whole.
        lost: The number of records behind the damage whose headers are valid.
    """

    def __init__(self, sentence: str, path: Path, offset: int = 0, lost: int = 0) -> None:
        super().__init__(sentence)
        self.path, self.offset, self.lost = path, offset, lost


class ChangedLog(OSError):
    """A log was cut, replaced or continued by another program while this process appended to it."""


class DoubtfulWrite(OSError):
    """Records were written, but may not survive a crash: the disk did not confirm the fsync."""


@dataclass(frozen=True)
class Record:
    """A record of a log.

    Attributes:
        begin, end: The offsets of the record's begin and end in the file.
        head: The bytes of the record's head.
        body, body_bytes: The offset of the record's body in the file, and its length.
    """

    begin: int
    head: bytes
    body: int
    body_bytes: int

    @property
    def end(self) -> int:
        return self.body + self.body_bytes + _TRAILER


class _Found(NamedTuple):
    """A record whose header is valid, with its numbers."""

    numbers: bytes
    magic: bytes
    sequence: int
    confirmed: int
    record: Record


class Log:
    """A log that is read once, and then appended to.

    ``Log.create`` makes a new one. Bodies stay in the file; the caller reads them by ``fileno``.

    Args:
        path: A regular file; no symbolic link.
        kind: At most 16 characters of ASCII, which the file must have been created with.
        remedy: The end of the message about damage, which says what the user should do.
        is_writable: False for reading alone.

    Attributes:
        meta: The bytes that were given to ``create``.
        end: The offset at which the next record begins.
        torn_bytes: Bytes of a torn record and all behind it, which the next write cuts off.
        is_closed: The log ends with the record of ``close``.
        is_doubtful: An fsync has failed, so the log takes no further record.

    Raises:
        DamagedLog: If the file is no log, is damaged before its first record, or of another kind.
        OSError: If the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        *,
        remedy: str = RESTORE,
        is_writable: bool = True,
    ) -> None:
        self.path, self._remedy, self._is_writable = path, remedy, is_writable
        self._file = open_own(path, os.O_RDWR if is_writable else os.O_RDONLY)
        self._is_read = False  # to its end
        self._is_dirty = False  # has bytes behind ``end`` that the next write cuts off
        self._is_fresh = False  # is written by ``create``, and has no name yet
        self.is_closed = self.is_doubtful = False
        self._sequence = self._confirmed = self.torn_bytes = 0
        try:
            self._read_file_header(kind)
        except BaseException:
            self.release()
            raise

    @classmethod
    def create(
        cls,
        path: Path,
        kind: str,
        meta: bytes = b"",
        fill: Callable[[Log], None] = lambda log: None,
        *,
        remedy: str = RESTORE,
        mode: int = 0o600,
    ) -> Log:
        """Write a new log beside ``path``, fsync it, and rename it over what is at ``path``.

        Args:
            meta: At most 64 KiB for the reader.
            fill: Appends the first records, with ``is_durable=False``.
            mode: Permissions of the file, before the umask.

        Raises:
            OSError: If the file cannot be written. The new log is then at ``path`` only if the
                fsync of its folder is what failed.
        """
        fresh = path.with_name(f"{path.name}.new")
        file = open_new(fresh, mode)
        log: Log | None = None
        try:
            seed = secrets.token_bytes(16)
            header = _FILE.pack(_MAGIC, _VERSION, kind.encode(), len(meta), seed) + meta
            _write(file, header + _hash(seed, header), 0)
            log = cls(fresh, kind, remedy=remedy)
            log._is_read = log._is_fresh = True
            fill(log)
            log.sync()
            log._is_fresh = False
            os.replace(fresh, path)
            log.path = path
            sync_folder(path.parent)
        except BaseException as error:
            if log is not None:
                log.release()
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise
        finally:
            os.close(file)
        return log

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._file

    # ------------------------------------------------------------------------------------ reading

    def _read_file_header(self, kind: str) -> None:
        self._size = os.fstat(self._file).st_size
        fixed = self._pread(0, _FILE.size).ljust(_FILE.size, b"\0")
        magic, version, found, meta_bytes, self._seed = _FILE.unpack(fixed)
        if magic in _BEFORE_LOGS:
            raise DamagedLog(
                f"{self.path} has the format of a version before 0.2, and this version reads the "
                "format of 0.2: start the server of 0.2 in its folder once, which reads both and "
                "writes the newer one",
                self.path,
            )
        meta_end = _FILE.size + min(meta_bytes, _MAX_META)
        header = self._pread(0, meta_end)
        self._digest = self._pread(meta_end, _DIGEST)
        if magic != _MAGIC or self._digest != _hash(self._seed, header):
            raise DamagedLog(
                f"{self.path} is damaged at byte 0, or is no log of diloco_comm: {RESTORE}",
                self.path,
            )
        name = found.rstrip(b"\0").decode(errors="replace")
        if version != _VERSION or name != kind:
            raise DamagedLog(
                f"{self.path} is a log of kind {name!r} and version {version}, expected kind "
                f"{kind!r} and version {_VERSION}: give the folder that belongs to this command, "
                "or use the version of diloco_comm that wrote the file",
                self.path,
            )
        self.meta = header[_FILE.size :]
        self.end = meta_end + _DIGEST

    def read(self) -> Iterator[Record]:
        """Yield the whole records from the first one on, each after its digest was checked.

        The next ``append`` cuts a torn record off; a warning names its place.

        Raises:
            DamagedLog: If the file is damaged; all records before were yielded.
            OSError: If the file cannot be read.
        """
        while self.end < self._size:
            found = self._header_at(self.end)
            digest = b"" if found is None else self._digest_in(found)
            if found is None or not digest:
                self._expect_torn(found)
                break
            record = found.record
            self._confirmed = max(self._confirmed, found.confirmed)
            if found.magic == _CLOSED:
                if record.end < self._size:
                    raise self.damage(record.end, "bytes follow the record that closed the log")
                # The next append cuts this record off. Left inside the log, it would pass for the
                # end after a later cut of the file behind it.
                self.is_closed = self._is_dirty = True
                break
            self._sequence, self._digest, self.end = self._sequence + 1, digest, record.end
            yield record
        self._is_read = True
        if not self._is_dirty:
            logger.warning(
                "%s was not closed: its last server was killed after record %d, or the file was "
                "cut there, at byte %d",
                self.path,
                self._sequence,
                self.end,
            )

    def _pread(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes; fewer only at the end of the file."""
        wanted = max(0, min(num_bytes, self._size - offset))
        found = os.pread(self._file, wanted, offset)
        if len(found) < wanted:
            raise OSError(errno.EIO, "the file was cut while it was read", str(self.path))
        return found

    def _header_at(self, offset: int) -> _Found | None:
        """Return the record at an offset if its header is valid, else None."""
        header = self._pread(offset, _HEADER)
        numbers = header[: _NUMBERS.size]
        if header[_NUMBERS.size :] != _hash(self._seed, numbers, _CHECKSUM):
            return None
        magic, sequence, confirmed, head_bytes, body_bytes = _NUMBERS.unpack(numbers)
        if magic not in (_RECORD, _CLOSED) or head_bytes > MAX_HEAD:
            return None
        begin = offset + _HEADER
        record = Record(offset, self._pread(begin, head_bytes), begin + head_bytes, body_bytes)
        return _Found(numbers, magic, sequence, confirmed, record)

    def _digest_in(self, found: _Found) -> bytes:
        """Return the digest of a record if it is whole and next in sequence, else b""."""
        record = found.record
        if found.sequence != self._sequence or record.end > self._size:
            return b""
        body = _BodyDigest()
        room = torch.empty(min(record.body_bytes, _BLOCK), dtype=torch.uint8)
        for begin in range(0, record.body_bytes, _BLOCK):
            block = room[: min(_BLOCK, record.body_bytes - begin)]
            view, done = block.numpy().data, 0
            while done < len(view):
                count = os.preadv(self._file, [view[done:]], record.body + begin + done)
                if not count:
                    raise OSError(errno.EIO, "the file was cut while it was read", str(self.path))
                done += count
            body.add(block)
        digest = self._chained(found.numbers, record.head, body)
        return digest if self._pread(record.end - _TRAILER, _TRAILER) == digest + _END else b""

    def _chained(self, numbers: bytes, head: bytes, body: _BodyDigest) -> bytes:
        return _hash(self._seed, self._digest + numbers + head + body.finish())

    def _expect_torn(self, found: _Found | None) -> None:
        """Raise unless the record at ``end`` is torn; ``found`` is its header, if that is valid."""
        lost = 0
        if not self._ends_within(found):
            behind = list(self._behind(self.end))
            lost = sum(each.magic == _RECORD for each in behind)
            confirmed = max(self._confirmed, *(each.confirmed for each in behind), 0)
            if self.end < confirmed or not self._has_hole(found):
                raise self.damage(self.end)
        self._is_dirty, self.torn_bytes = True, self._size - self.end
        logger.warning(
            "%s ends at byte %d with %d bytes that are no whole record: they will be cut off at "
            "the next write, with %d whole records behind the torn one",
            *(self.path, self.end, self.torn_bytes, lost),
        )

    def _ends_within(self, found: _Found | None) -> bool:
        """Whether the file ends within the record at ``end``."""
        if found is not None:
            return found.sequence == self._sequence and found.record.end > self._size
        rest = self._pread(self.end, _HEADER)
        known = (_NUMBERS.pack(magic, self._sequence, 0, 0, 0) for magic in (_RECORD, _CLOSED))
        return len(rest) < _HEADER and any(each.startswith(rest[:_KNOWN]) for each in known)

    def _has_hole(self, found: _Found | None) -> bool:
        """Whether the record at ``end`` is the next one, and holds a sector of zeros."""
        if found is not None:
            return found.sequence == self._sequence and self._has_lost_sector(found.record)
        # Lost bytes read as zeros from within the header on: from the begin of a sector, or from
        # where the file ended at the last fsync.
        begin = self.end + len(self._pread(self.end, _HEADER).rstrip(b"\0"))
        sector = -(-begin // _SECTOR) * _SECTOR
        zeros = self._pread(begin, sector + _SECTOR - begin)
        is_long = sector < self._size or begin == self.end
        return begin < self.end + _HEADER and is_long and not zeros.strip(b"\0")

    def _has_lost_sector(self, record: Record) -> bool:
        for at in range(-(-record.begin // _SECTOR) * _SECTOR, record.end, _BLOCK):
            block = self._pread(at, _BLOCK)
            for place in range(0, min(record.end - at, len(block)), _SECTOR):
                if not block[place : place + _SECTOR].strip(b"\0"):
                    return True
        return False

    def _behind(self, offset: int) -> Iterator[_Found]:
        """Yield the records behind an offset whose headers are valid, and which fit the file."""
        at = offset + 1
        while at < self._size:
            # Blocks overlap, so that each magic is whole in one of them.
            block, end = self._pread(at, _BLOCK + len(_RECORD) - 1), at + _BLOCK
            for match in _MAGICS.finditer(block):
                found = self._header_at(at + match.start())
                if found is not None and found.record.end <= self._size:
                    yield found
                    end = found.record.end
                    break
            at = end

    def damage(self, offset: int, reason: str = "the record there is not valid") -> DamagedLog:
        """Return the error about the record at an offset, with what a cut there would lose.

        Args:
            offset: ``begin`` of a record whose content the caller cannot use, say.
            reason: Why the record is not valid.
        """
        lost = sum(found.magic == _RECORD for found in self._behind(offset))
        return DamagedLog(
            f"{self.path} is damaged at byte {offset}: {reason}; a cut there loses the last "
            f"{self._size - offset} bytes, with {lost} whole records behind the damage; "
            f"{self._remedy}",
            self.path,
            offset,
            lost,
        )

    # ------------------------------------------------------------------------------------ writing

    def append(
        self,
        head: bytes,
        body: Iterable[Tensor] = (),
        body_bytes: int = 0,
        *,
        is_durable: bool = True,
    ) -> None:
        """Write a record, wholly or not at all.

        Args:
            head: At most 16 MiB.
            body: CPU tensors; the body is their bytes, one after the other.
            body_bytes: The bytes of all of them.
            is_durable: Return when all records are on the disk (fsync).

        Raises:
            ChangedLog: If another program has cut, continued, replaced or removed the file since
                the last call. Nothing is written.
            DoubtfulWrite: If the fsync failed. The log takes no further record; the caller may
                write all that it knows to a new log with ``create``.
            OSError: If the record cannot be written. The log ends with the record before, and takes
                records again when the disk does.
            ValueError: If head or body are longer or shorter than they may be.
        """
        if len(head) > MAX_HEAD:
            raise ValueError(f"the head of a record has {len(head)} bytes, at most {MAX_HEAD}")
        self._append(_RECORD, head, body, body_bytes, is_durable)

    def _append(
        self, magic: bytes, head: bytes, body: Iterable[Tensor], body_bytes: int, is_durable: bool
    ) -> None:
        assert self._is_read, "a log is read to its end before the first append"
        if self.is_doubtful:
            raise OSError(errno.EIO, "the disk did not confirm an earlier fsync", str(self.path))
        self._expect_own_end()
        try:
            self._cut_dirt()
            self._is_dirty = True
            digest, end = self._write_record(magic, head, body, body_bytes)
        except BaseException as error:
            with suppress(OSError):
                self._cut_dirt()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise
        if is_durable:
            self.sync()
        self._sequence, self._digest, self.end = self._sequence + 1, digest, end
        if is_durable or self._is_fresh:
            self._confirmed = end
        self._is_dirty, self.is_closed = False, magic == _CLOSED

    def _write_record(
        self, magic: bytes, head: bytes, body: Iterable[Tensor], body_bytes: int
    ) -> tuple[bytes, int]:
        """Write a record behind ``end``, and return its digest and its end."""
        numbers = _NUMBERS.pack(magic, self._sequence, self._confirmed, len(head), body_bytes)
        text = numbers + _hash(self._seed, numbers, _CHECKSUM) + head
        sums, at, written = _BodyDigest(), self.end, 0
        if body_bytes:
            at, text = _write(self._file, text, at), b""
        for tensor in body:
            for block in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_BLOCK):
                sums.add(block)
                at = _write(self._file, block.numpy().data, at)
                written += block.nbytes
        if written != body_bytes:
            raise ValueError(f"a body of {body_bytes} bytes has {written}")
        digest = self._chained(numbers, head, sums)
        return digest, _write(self._file, text + digest + _END, at)

    @property
    def is_in_place(self) -> bool:
        """Whether the file at ``path`` is still the open one."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        return False

    def open_for_writing(self) -> None:
        """Let a log that was opened for reading alone take records; idempotent.

        Raises:
            OSError: If the file cannot be opened for writing, or is another one by now.
        """
        if self._is_writable:
            return
        file = open_own(self.path, os.O_RDWR)
        try:
            self._expect_own_end()
            os.dup2(file, self._file, inheritable=False)
        finally:
            os.close(file)
        self._is_writable = True

    def _expect_own_end(self) -> None:
        found = os.fstat(self._file)
        if not self.is_in_place:
            change = "was replaced or removed"
        elif found.st_size < self.end or (found.st_size > self.end and not self._is_dirty):
            change = f"has {found.st_size} instead of {self.end} bytes"
        else:
            return
        raise ChangedLog(
            errno.ESTALE,
            f"the file {change} by another program while this one had it open: end this program, "
            "and put the right file in place before the next start",
            str(self.path),
        )

    def _cut_dirt(self) -> None:
        """Cut off the bytes behind ``end``, on the disk too, so that no later record meets them."""
        if self._is_dirty:
            os.ftruncate(self._file, self.end)
            self.sync()
            self._is_dirty, self.torn_bytes = False, 0

    def sync(self) -> None:
        """Return when all records are on the disk (fsync).

        Raises:
            DoubtfulWrite: As ``append``.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            # The file's pages may or may not be on the disk, and a later fsync does not say so.
            self.is_doubtful = True
            raise DoubtfulWrite(error.errno, error.strerror, str(self.path)) from None
        self._confirmed = self.end

    def close(self) -> None:
        """Write the last record, which says that nothing is missing; idempotent."""
        is_whole = self._is_read and self._is_writable and not self.is_doubtful
        if self._file >= 0 and is_whole and not self.is_closed:
            with suppress(OSError):
                if self._confirmed < self.end:
                    self.sync()
                self._append(_CLOSED, b"", (), 0, True)
        self.release()

    def release(self) -> None:
        """Close the file as it is; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _BodyDigest:
    """The 64-bit digest of ``docs/developers/wire-formats.md`` of bytes that come in blocks."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._rest = b""
        self._num_words = 0

    def add(self, block: Tensor) -> None:
        """Add a block, 1-D uint8 of any length, to the digest."""
        if self._rest:
            missing = 8 - len(self._rest)
            self._rest += bytes(block[:missing].numpy())
            block = block[missing:]
            if len(self._rest) < 8:
                return
            self._add(torch.frombuffer(bytearray(self._rest), dtype=torch.uint8))
        num_bytes = block.numel() // 8 * 8
        self._rest = bytes(block[num_bytes:].numpy())
        if num_bytes:
            self._add(block[:num_bytes])

    def _add(self, words: Tensor) -> None:
        if self._sums is None:
            self._sums = torch.zeros(2, dtype=torch.int64)
        torch.ops.diloco_comm.digest(words, self._sums, self._num_words)
        self._num_words += -(-words.numel() // 8)

    def finish(self) -> bytes:
        """Return the digest, b"" for no bytes."""
        num_bytes = 8 * self._num_words + len(self._rest)
        if self._rest:
            self._add(torch.frombuffer(bytearray(self._rest), dtype=torch.uint8))
        if self._sums is None:
            return b""
        products, words = self._sums.tolist()
        return _C.finish_digest(products, words, num_bytes).to_bytes(8, "little")


def _hash(seed: bytes, data: bytes, num_bytes: int = _DIGEST) -> bytes:
    return hashlib.blake2b(data, key=seed, digest_size=num_bytes).digest()


def _write(file: int, data: bytes | memoryview, offset: int) -> int:
    """Write all data, in several calls where the disk is nearly full; return the end."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset


# ------------------------------------------------------------------------------------------ files


def expect_regular(path: Path) -> None:
    """Raise OSError if something is at a path that is no regular file."""
    mode = os.lstat(path).st_mode if os.path.lexists(path) else stat.S_IFREG
    if not stat.S_ISREG(mode):
        kind = "a symbolic link, which is not followed" if stat.S_ISLNK(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}: put a regular file there, or none", str(path))


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of a server's folder; never follow a symbolic link, or wait for a fifo.

    Raises:
        OSError: If the file cannot be opened, or is no regular file.
    """
    expect_regular(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def open_new(path: Path, mode: int) -> int:
    """Make a new file, in the place of a regular file that may be there.

    Raises:
        OSError: If the file cannot be made, or something else is there.
    """
    expect_regular(path)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


# Error numbers of file systems, such as CIFS and several of FUSE, that cannot fsync a folder.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
_unsynced: set[Path] = set()


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk.

    Some file systems cannot fsync a folder. That is logged once for each folder: the files are on
    the disk, and a crash of the host may lose their names.

    Raises:
        OSError: If the disk has not taken the names.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        if folder not in _unsynced:
            _unsynced.add(folder)
            logger.warning(
                "the file system of the folder %s cannot fsync a folder (%s): the files in it are "
                "on the disk, and a crash of its host may lose a new name",
                *(folder, error.strerror),
            )
    finally:
        os.close(file)


def truncate(damage: DamagedLog) -> str:
    """Cut a log off where it is damaged, and keep the rest in a new file beside it.

    Returns:
        One sentence that says what was cut off and where it is.

    Raises:
        DamagedLog: ``damage``, if nothing before it is whole.
        OSError: If a file cannot be written; nothing is cut off then.
    """
    path, offset = damage.path, damage.offset
    if not offset:
        raise damage
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.cut-{offset}-{number}")
        if not os.path.lexists(kept):
            break
    with open(open_own(path, os.O_RDWR), "r+b") as log:
        try:
            with open(open_new(kept, 0o600), "wb") as copy:
                log.seek(offset)
                shutil.copyfileobj(log, copy, _BLOCK)
                copy.flush()
                os.fsync(copy.fileno())
            sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                kept.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(kept)) from None
        num_bytes = log.tell() - offset
        log.truncate(offset)
        os.fsync(log.fileno())
    return (
        f"{path} is cut off at byte {offset}: {num_bytes} bytes, with {damage.lost} whole records "
        f"behind the damage, are kept in {kept}"
    )
