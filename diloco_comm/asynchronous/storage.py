"""What a server keeps on disk: a snapshot, and a journal of the updates since.

A snapshot is written beside the old one and renamed over it. The journal, named after the version
of its snapshot, gets every update before its worker is told of it: a server that was killed comes
back with exactly the updates that its workers know to be applied. Both are a JSON header of known
length and raw bytes.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .spool import Payload, Spooled, blocks

_MAGIC = b"DCASv1\0\0"
_LENGTH = struct.Struct("<QII")  # bytes that follow the header, of the header, its CRC-32
_MAX_HEADER = 1 << 24


def _view(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def _write_record(file: BinaryIO, header: dict[str, Any], payloads: Sequence[Payload]) -> None:
    text = json.dumps(header).encode()
    size = sum(payload.nbytes for payload in payloads)
    file.write(_LENGTH.pack(size, len(text), zlib.crc32(text)))
    file.write(text)
    for payload in payloads:
        for block in blocks(payload):
            file.write(_view(block))


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int] | None:
    """Return the next header and the bytes that follow it; None at the end or a torn record."""
    fixed = file.read(_LENGTH.size)
    if len(fixed) < _LENGTH.size:
        return None
    size, length, checksum = _LENGTH.unpack(fixed)
    text = file.read(length) if length <= _MAX_HEADER else b""
    if len(text) < length or zlib.crc32(text) != checksum:
        return None
    return json.loads(text), size


def _fresh(header: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.empty(int(count)) for name, count in header["tensors"].items()}


class Storage:
    """A folder with one snapshot and one journal.

    Raises:
        ValueError: If the folder holds something that is not a snapshot.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._journal: BinaryIO | None = None

    @property
    def _path(self) -> Path:
        return self.folder / "snapshot"

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def _journal_path(self, version: int) -> Path:
        return self.folder / f"journal-{version}"

    def save(self, version: int, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write a snapshot of this version and begin a new journal."""
        shapes = {name: tensor.numel() for name, tensor in tensors.items()}
        scratch = self.folder / "snapshot.new"
        with scratch.open("wb") as file:
            file.write(_MAGIC)
            _write_record(file, {**header, "tensors": shapes}, list(tensors.values()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self._path)
        self._open_journal(version, "wb")
        for path in self.folder.glob("journal-*"):
            if path != self._journal_path(version):
                path.unlink()

    def _open_journal(self, version: int, mode: str) -> None:
        self.close()
        self._journal = self._journal_path(version).open(mode, buffering=0)  # type: ignore[assignment]

    def load(
        self, make: Callable[[dict[str, Any]], dict[str, Tensor]] = _fresh
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the snapshot and return its header and tensors.

        Args:
            make: Called with the header; returns the fp32 tensors to be filled, by name.
        """
        with self._path.open("rb") as file:
            found = _read_header(file) if file.read(len(_MAGIC)) == _MAGIC else None
            if found is None:
                raise ValueError(f"{self._path} is not a snapshot of this version of diloco_comm")
            header, _ = found
            tensors = make(header)
            if {name: tensor.numel() for name, tensor in tensors.items()} != header["tensors"]:
                raise ValueError(f"{self._path} holds other tensors than its rule keeps")
            for name in header["tensors"]:
                if file.readinto(_view(tensors[name])) < tensors[name].nbytes:
                    raise ValueError(f"{self._path} is cut short")
        return header, tensors

    def append(self, header: dict[str, Any], payloads: Sequence[Payload]) -> None:
        """Write an update to the journal; the operating system has it when this returns."""
        assert self._journal is not None
        _write_record(self._journal, header, payloads)

    def replay(self, version: int) -> Iterator[tuple[dict[str, Any], Spooled]]:
        """Yield what the journal of this version holds, and go on appending after it.

        Payloads stay in the file until they are asked for, and are valid until the next.

        A record that was not written whole is cut off: its worker was told nothing yet.
        """
        path = self._journal_path(version)
        whole = 0
        if path.exists():
            length = path.stat().st_size
            with path.open("rb") as file:
                while (found := _read_header(file)) is not None:
                    header, size = found
                    begin = file.tell()
                    if begin + size > length:
                        break
                    yield header, Spooled(file, begin, size)
                    whole = file.seek(begin + size)
            os.truncate(path, whole)
        self._open_journal(version, "ab")

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
