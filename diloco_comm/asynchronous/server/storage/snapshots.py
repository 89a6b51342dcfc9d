"""The files of a server: a snapshot, and a journal of the updates since the snapshot.

A snapshot is written beside the old one and renamed over it. The journal is named after the version
of its snapshot. It gets every update before the update's worker gets the outcome, so a server that
was killed restores exactly the updates that its workers know to be applied. Snapshot and records of
the journal are a JSON header of known length, followed by raw bytes. After any failure the folder
still holds a snapshot and the journal that belongs to the snapshot.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ....base.service.folder_lock import FolderLock
from ...protocol.payloads import Payload, PayloadFile, blocks

_MAGIC = b"DCASv1\0\0"
_LENGTH = struct.Struct("<QII")  # bytes after the header, bytes of the header, its CRC-32
_MAX_HEADER = 1 << 24


def _view(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def _write_record(file: BinaryIO, header: dict[str, Any], payloads: Sequence[Payload]) -> None:
    text = json.dumps(header).encode()
    if len(text) > _MAX_HEADER:
        raise OSError(
            errno.EFBIG, f"the header has {len(text)} bytes of JSON, at most {_MAX_HEADER} are read"
        )
    size = sum(payload.nbytes for payload in payloads)
    _write(file, _LENGTH.pack(size, len(text), zlib.crc32(text)) + text)
    for payload in payloads:
        for block in blocks(payload):
            _write(file, _view(block))


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all data: one call of ``write`` takes at most 2 GiB, and less on a full disk."""
    view = memoryview(data)
    while view.nbytes:
        view = view[file.write(view) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in each OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int] | None:
    """Return the next header and the bytes that follow it; None at the end or a torn record."""
    fixed = file.read(_LENGTH.size)
    if len(fixed) < _LENGTH.size:
        return None
    size, length, checksum = _LENGTH.unpack(fixed)
    text = file.read(length) if length <= _MAX_HEADER else b""
    # After a loss of power a file may end in zeros, whose checksum is that of no bytes.
    if not length or len(text) < length or zlib.crc32(text) != checksum:
        return None
    return json.loads(text), size


def _fresh(header: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.empty(int(count)) for name, count in header["tensors"].items()}


def read_snapshot(
    path: Path, make: Callable[[dict[str, Any]], dict[str, Tensor]] = _fresh
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a snapshot and return its header and tensors; see ``Storage.load``."""
    with path.open("rb") as file:
        found = _read_header(file) if file.read(len(_MAGIC)) == _MAGIC else None
        if found is None:
            raise ValueError(f"{path} is not a snapshot of this version of diloco_comm")
        header, _ = found
        tensors = make(header)
        if {name: tensor.numel() for name, tensor in tensors.items()} != header["tensors"]:
            raise ValueError(f"{path} holds other tensors than its rule keeps")
        for name in header["tensors"]:
            if file.readinto(_view(tensors[name])) < tensors[name].nbytes:
                raise ValueError(f"{path} is cut short")
    return header, tensors


def read_journal(path: Path) -> Iterator[tuple[dict[str, Any], PayloadFile]]:
    """Yield the whole records of a journal.

    Payloads stay in the file, and are valid until the next record is yielded.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        while (found := _read_header(file)) is not None:
            header, size = found
            begin = file.tell()
            if begin + size > length:
                break
            yield header, PayloadFile(file, begin, size)
            file.seek(begin + size)


class Storage:
    """A folder with one snapshot and one journal, for one server at a time.

    Args:
        keeps_journals: Keep the first snapshot, as ``first``, and the journals of all snapshots.

    Raises:
        FolderInUse: If another server has the folder.
        ValueError: If the folder holds something that is not a snapshot.
    """

    def __init__(self, folder: Path, *, keeps_journals: bool = False) -> None:
        self.folder, self._keeps_journals = folder, keeps_journals
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(folder, "snapshot folder")
        self._journal: BinaryIO | None = None
        self._whole = 0
        # A server that was killed may have left half a snapshot.
        with suppress(OSError):
            self._scratch.unlink(missing_ok=True)

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
        return self._path.exists()

    @property
    def has_first(self) -> bool:
        """Whether the folder has the snapshot ``first``, with which the kept journals begin."""
        return self._first.exists()

    def begin_tape(self) -> None:
        """Keep the journals from the present snapshot on; nothing changes where they are kept.

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
        with self._writing_scratch() as file:
            _write(file, bytes(4096))
        self._scratch.unlink()

    @contextmanager
    def _writing_scratch(self) -> Iterator[BinaryIO]:
        """Open the file that a snapshot is written to, and remove the file after a failure."""
        try:
            with _naming(self._scratch), self._scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                self._scratch.unlink(missing_ok=True)
            raise

    def has_room(self, num_bytes: int) -> bool:
        """Whether the file system has room for this many bytes; True if that is unknown."""
        with suppress(OSError):
            found = os.statvfs(self.folder)
            free = found.f_bavail if os.geteuid() else found.f_bfree
            return not found.f_blocks or num_bytes <= free * found.f_frsize
        return True

    def save(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the old snapshot by a new one, wholly or not at all.

        Raises:
            OSError: If the snapshot cannot be written; the error names the file.
        """
        shapes = {name: tensor.numel() for name, tensor in tensors.items()}
        with self._writing_scratch() as file:
            file.write(_MAGIC)
            _write_record(file, {**header, "tensors": shapes}, list(tensors.values()))
        with _naming(self._path):
            if self._keeps_journals and not self._path.exists():
                self._first.unlink(missing_ok=True)  # of a process that ended before the next line
                os.link(self._scratch, self._first)
            os.replace(self._scratch, self._path)

    def begin_journal(self, version: int) -> None:
        """Begin the journal of the snapshot of this version, and remove all others.

        Raises:
            OSError: If the journal or the folder cannot be written; no journal is removed then.
        """
        self._whole = 0
        self._open_journal(version, "wb")
        # After a loss of power the folder must not have lost the old journals and kept the old
        # snapshot.
        with _naming(self.folder):
            self._sync_folder()
        # The other journals belong to snapshots that have been replaced.
        old = [] if self._keeps_journals else [self._first, *self.folder.glob("journal-*")]
        for path in old:
            if path != self._journal_path(version):
                with suppress(OSError):
                    path.unlink()

    def _open_journal(self, version: int, mode: str) -> None:
        self.close()
        self._journal = self._journal_path(version).open(mode, buffering=0)  # type: ignore[assignment]

    def load(
        self, make: Callable[[dict[str, Any]], dict[str, Tensor]] = _fresh
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the snapshot and return its header and tensors.

        Args:
            make: Called with the header; returns the fp32 tensors to fill, by name.
        """
        return read_snapshot(self._path, make)

    def append(
        self, header: dict[str, Any], payloads: Sequence[Payload], *, is_durable: bool = False
    ) -> None:
        """Write an update to the journal, and hand the bytes to the operating system.

        Args:
            is_durable: Return when the bytes are on the disk (fsync).

        Raises:
            OSError: If the record cannot be written. The journal then ends with the update before
                and takes no further update, since the journal would have a gap.
        """
        journal = self._journal
        assert journal is not None
        whole = journal.tell()
        try:
            with _naming(Path(journal.name)):
                _write_record(journal, header, payloads)
                if is_durable:
                    self._sync(journal)
            self._whole = journal.tell()
        except OSError:
            # If this fails too, ``continue_journal`` cuts the torn record off.
            with suppress(OSError):
                os.ftruncate(journal.fileno(), whole)
            self.close()
            raise

    def _sync(self, journal: BinaryIO) -> None:
        """Write the journal to the disk, and its name in the folder with the first record."""
        os.fsync(journal.fileno())
        if not self._whole:
            self._sync_folder()

    def _sync_folder(self) -> None:
        """Write the names in the folder to the disk."""
        number = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def replay(self, version: int) -> Iterator[tuple[dict[str, Any], PayloadFile]]:
        """Yield the updates in the journal of this version; ``continue_journal`` comes next.

        Payloads stay in the file, and are valid until the next update is yielded.
        """
        path = self._journal_path(version)
        self._whole = 0
        if path.exists():
            for header, body in read_journal(path):
                yield header, body
                self._whole = body.end

    def continue_journal(self, version: int) -> None:
        """Append to the journal that was replayed.

        A record that was not written whole is cut off: its worker never got the outcome. The other
        records are on the disk (fsync) when this method returns: a server that was killed between
        writing a record and its fsync may have left it in the memory of the operating system alone.

        Raises:
            OSError: If the journal cannot be written; the server then writes no journal.
        """
        path = self._journal_path(version)
        if path.exists() and path.stat().st_size > self._whole:
            with _naming(path):
                os.truncate(path, self._whole)
        self._open_journal(version, "ab")
        assert self._journal is not None
        try:
            with _naming(path):
                os.fsync(self._journal.fileno())
                self._sync_folder()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def release(self) -> None:
        """Close the journal and unlock the folder; nothing is written after this call."""
        self.close()
        self._lock.release()
