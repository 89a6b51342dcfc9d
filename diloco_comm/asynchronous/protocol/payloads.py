"""Payloads in files, for updates that do not fit into the memory budget for payloads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ...base.log import Log
from ...ops.wire import Layout

_COPY_BYTES = 1 << 20


class PayloadFile:
    """Bytes of a file, read like a 1-D uint8 tensor: ``file[begin:end]`` is a copy in memory."""

    def __init__(self, file: BinaryIO | Log, offset: int, nbytes: int) -> None:
        self._file, self._offset, self.nbytes = file, offset, nbytes

    @property
    def end(self) -> int:
        """Place in the file of the first byte behind this one."""
        return self._offset + self.nbytes

    def __getitem__(self, wanted: slice) -> Tensor:
        begin, end, _ = wanted.indices(self.nbytes)
        part = torch.empty(max(0, end - begin), dtype=torch.uint8)
        self.read_into(part, begin)
        return part

    def read_into(self, part: Tensor, begin: int) -> None:
        """Fill 1-D uint8 with the bytes from ``begin`` on."""
        view, done = part.numpy().data, 0
        while done < part.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], self._offset + begin + done)
            if count == 0:
                raise OSError("a file with an update on its way was cut short")
            done += count

    def split(self, sizes: Sequence[int]) -> list[PayloadFile]:
        """Divide the file into payloads of these sizes."""
        offsets = accumulate(sizes, initial=self._offset)
        return [PayloadFile(self._file, *at) for at in zip(offsets, sizes, strict=False)]

    def write(self, begin: int, body: memoryview | bytes) -> None:
        """Set the bytes from ``begin`` on."""
        view, done = memoryview(body), 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], self._offset + begin + done)

    def fileno(self) -> int:
        """Return the descriptor of the file, which payloads of one update share."""
        return self._file.fileno()


Payload = Tensor | PayloadFile


def payload_files(folder: Path | None, sizes: Sequence[int]) -> list[PayloadFile]:
    """Return room for payloads of these sizes in one file without a name.

    The file is removed with the last payload.

    Args:
        folder: Folder of the file; None for the folder of temporary files.

    Raises:
        OSError: If there is no room.
    """
    file = tempfile.TemporaryFile(dir=folder, buffering=0)
    total = sum(sizes)
    if total:
        os.posix_fallocate(file.fileno(), 0, total)
    return PayloadFile(file, 0, total).split(sizes)


def write_run(payload: Payload, begin: int, body: memoryview | bytes) -> None:
    """Set the bytes of a payload from ``begin`` on."""
    if isinstance(payload, PayloadFile):
        payload.write(begin, body)
    else:
        payload[begin : begin + len(body)].numpy().data[:] = body


def pieces(payload: Payload, layout: Layout) -> Iterator[tuple[Tensor, Layout, int, int]]:
    """Yield a payload in memory whole, and a payload in a file run by run.

    Yields:
        The bytes, their layout, the first element, and the last element plus one.
    """
    if isinstance(payload, Tensor):
        yield payload, layout, 0, layout.num_elements
        return
    size = layout.run_bytes
    for run in range(layout.num_runs):
        begin, end = layout.run_range(run)
        if begin < end:
            part = payload[run * size : (run + 1) * size]
            yield part, Layout(end - begin, 1, layout.run_elements, layout.wire), begin, end


def blocks(payload: Payload) -> Iterator[Tensor]:
    """Yield the bytes of a payload in blocks that fit into memory."""
    if isinstance(payload, Tensor):
        yield payload
        return
    for begin in range(0, payload.nbytes, _COPY_BYTES):
        yield payload[begin : begin + _COPY_BYTES]


def read_back(payloads: Sequence[Payload]) -> None:
    """Write payload files to the disk and read them back, so that disk errors are raised here.

    A file of many payloads is written out once, and dropped from the page cache where possible.

    Bytes that the system keeps in memory are not read from the disk (tmpfs has no disk). A disk may
    still fail after this call.

    Raises:
        OSError: If a file cannot be written or read.
    """
    files = [payload for payload in payloads if isinstance(payload, PayloadFile)]
    for number in dict.fromkeys(payload.fileno() for payload in files):
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    for payload in files:
        for _ in blocks(payload):
            pass
