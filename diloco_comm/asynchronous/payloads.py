"""Payloads that a server receives: in memory or in a file, within a budget, checked run by run.

An update larger than the whole memory budget goes to a file. The checks find payloads that no
encoder makes: infinities, NaN, codes out of range. They read the scales, and look for codes that an
encoder never writes; only sparse payloads are decoded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..base.log import Log
from ..base.memory import empty_pages
from ..ops.reference import decode_run
from ..ops.reference_rotation import largest_scale
from ..ops.wire import SCALE_BYTES, Layout, WireFormat
from .messages import MAX_BODY, Message
from .window import Position, Window

_COPY_BYTES = 1 << 20


class PayloadFile:
    """Bytes of a file, read like a 1-D uint8 tensor: ``file[begin:end]`` is a copy in memory."""

    def __init__(self, file: BinaryIO | Log, offset: int, nbytes: int) -> None:
        self._file, self._offset, self.nbytes = file, offset, nbytes

    @property
    def end(self) -> int:
        """Offset of the first byte behind these bytes in the file."""
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
    """Yield the pieces of a payload: in memory the whole payload, in a file each run.

    Yields:
        The bytes, their layout, and the range of elements, [begin, end).
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
    """Yield the bytes of a payload: as they are in memory, from a file in blocks of 1 MiB."""
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


# An encoder refuses larger magnitudes, as it refuses NaN.
HUGE = 2.0**126
_SMALLEST_BITS = 0x0080  # 2^-126, as bf16
_INFINITY_BITS = 0x7F80


def find_garbage(payload: Payload, layout: Layout) -> str:
    """Return what is invalid in a payload, uint8 [payload_bytes]; "" if nothing is."""
    run_bytes = layout.run_bytes
    for run in range(layout.num_runs):
        begin, end = layout.run_range(run)
        if begin == end:
            continue
        found = find_run_garbage(
            payload[run * run_bytes : (run + 1) * run_bytes], layout, end - begin
        )
        if found:
            return found
    return ""


def find_run_garbage(run: Tensor, layout: Layout, count: int) -> str:
    """Return what is invalid in the first ``count`` elements of a run, uint8 [run_bytes]; or ""."""
    wire = layout.wire
    offset = wire.code_offset(layout.run_elements)
    if wire.has_scales:
        num_blocks = -(-count // wire.block_size)
        # Read as integers, the bits of positive finite bf16 numbers sort like the numbers.
        begin = wire.scale_offset
        bits = run[begin : begin + SCALE_BYTES * num_blocks].numpy().view(np.int16)
        # On wires without a code for each element, a block of zeros has the scale zero.
        may_be_null = not wire.has_element_codes
        is_made = (bits >= _SMALLEST_BITS) | (bits == 0) if may_be_null else bits > 0
        if not is_made.all() or bits.max() >= _INFINITY_BITS:
            return "a scale is not a finite positive number"
        if bits.max() > _largest_scale_bits(wire):
            return "a scale is larger than any that an encoder makes"
    if wire.is_rotated:
        return ""  # every code is one that an encoder may make
    if wire.is_sparse:
        is_sound = not bool(decode_run(run, layout.run_elements, wire, count).isnan().any())
        return "" if is_sound else "the indices of a block are not those of its largest elements"
    codes = run[offset : offset + wire.code_bytes(count)]
    return _bad_codes(codes, wire.name)


def _largest_scale_bits(wire: WireFormat) -> int:
    """Return the bf16 bits of the largest scale that an encoder makes, or a little more."""
    if not wire.has_element_codes:
        return int(np.float32(largest_scale(wire)).view(np.uint32)) >> 16
    # Here the scale of a block is rounded up.
    return (int(np.float32(HUGE / wire.qmax).view(np.uint32)) + 0xFFFF) >> 16


def _bad_codes(codes: Tensor, wire: str) -> str:
    if wire == "int8":
        return "a code is -128" if codes.numpy().view(np.int8).min() == -128 else ""
    if wire == "int4":
        return "a code is -8" if bool(_nibble(codes, 8).any()) else ""
    if wire == "e3m0":
        return "a code is minus zero" if bool(_nibble(codes, 8).any()) else ""
    if wire == "fp8_e4m3":
        return "a code is NaN" if bool(((codes & 0x7F) == 0x7F).any()) else ""
    if wire == "fp8_e5m2":
        return "a code is not finite" if bool(((codes & 0x7F) >= 0x7C).any()) else ""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    low, high = torch.aminmax(codes.view(dtype))
    is_good = bool((low >= -HUGE) & (high <= HUGE)) if wire != "fp16" else _is_finite(low, high)
    return "" if is_good else "a value is not finite"


def _is_finite(low: Tensor, high: Tensor) -> bool:
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _nibble(codes: Tensor, value: int) -> Tensor:
    return ((codes & 0x0F) == value) | ((codes >> 4) == value)


@dataclass
class Upload:
    """The payloads of one update of a worker, as far as they have arrived at the server.

    Attributes:
        worker: Name of the worker.
        question: The message by which the worker has offered the update.
        layouts, payloads: For each fragment, the layout and the bytes.
        last_seen: When the last run arrived.
        first: Number of the first payload in messages.
        window: The runs that have not arrived.
        garbage: A sentence if a run that has arrived is invalid; else "".
    """

    worker: str
    question: Message
    layouts: list[Layout]
    payloads: list[Payload] = field(repr=False)
    last_seen: float
    first: int = 0
    window: Window = field(init=False, repr=False)
    garbage: str = ""

    def __post_init__(self) -> None:
        sizes = [layout.run_bytes for layout in self.layouts]
        runs = [
            Position(0, f, r) for f, lay in enumerate(self.layouts) for r in range(lay.num_runs)
        ]
        self.window = Window(
            runs,
            lambda position: sizes[position.fragment],
            batch_bytes=MAX_BODY,
            window_bytes=max(2 * MAX_BODY, 4 * max(sizes)),
        )

    @property
    def seq(self) -> int:
        """Number of the update or report; 0 for the parameters to start from."""
        return self.question.number

    def put(self, fragment: int, run: int, body: memoryview | bytes, now: float) -> str:
        """Store consecutive runs, and check their values.

        Returns:
            A sentence if their size or place is wrong, so that they were not stored; else "".
        """
        layout = self.layouts[fragment]
        size = layout.run_bytes
        count = len(body) // size
        if not count or len(body) % size:
            return f"a run of this update has {size} bytes, got {len(body)}"
        runs = [Position(0, fragment, run + index) for index in range(count)]
        if any(position not in self.window.asked for position in runs):
            return f"run {run} of fragment {fragment} and what follows were not all asked for"
        write_run(self.payloads[fragment], run * size, body)
        for position in runs:
            begin, end = layout.run_range(position.run)
            # Check now: the run is in the cache, and the wait for other runs hides the work.
            content = self.payloads[fragment][position.run * size : (position.run + 1) * size]
            self.garbage = self.garbage or find_run_garbage(content, layout, end - begin)
            self.window.received(position)
        self.last_seen = now
        return ""

    def read_through(self) -> None:
        """Read payload files once, so that disk errors come before the update is applied.

        Raises:
            OSError: If a file cannot be written or read.
        """
        read_back(self.payloads)


class PayloadMemory:
    """Buffers for payloads, within a memory budget.

    An update that is larger than the budget goes to a file, one such update at a time.

    Args:
        budget_bytes: Bytes of memory that payloads may use.
        make_files: Makes room in a file for payloads of these sizes; returns None while the disk is
            full.

    Attributes:
        used_bytes: Bytes of uploads, and of updates that are not folded into the model yet.
    """

    def __init__(
        self,
        budget_bytes: int,
        make_files: Callable[[list[int]], list[PayloadFile] | None] | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._make_files = make_files
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0
        self._lent: set[int] = set()

    def lend(self, payloads: Iterable[Payload]) -> None:
        """Never reuse these buffers: ZeroMQ may still send their bytes after ``give_back``."""
        self._lent.update(id(payload) for payload in payloads)

    def take(
        self, sizes: Iterable[int], *, may_use_file: bool = True, must: bool = False
    ) -> list[Payload] | None:
        """Return room for payloads of these sizes, or None while there is no room.

        Args:
            may_use_file: False for payloads that must be in memory, whatever the budget.
            must: Return room in memory in any case, even beyond the budget.

        Raises:
            OSError: If the payloads need a file and no file can be made.
        """
        sizes = list(sizes)
        needed = sum(sizes)
        if not must and self.used_bytes and self.used_bytes + needed > self.budget_bytes:
            return None
        payloads: list[Payload]
        may_use_file &= not must
        if needed > self.budget_bytes and may_use_file and self._make_files is not None:
            files = self._make_files(sizes)
            if files is None:
                return None
            payloads = list(files)
        else:
            payloads = [self._take(size) for size in sizes]
        self.used_bytes += needed
        return payloads

    def _take(self, size: int) -> Tensor:
        if self._free.get(size):
            self._free_bytes -= size
            return self._free[size].pop()
        # Free buffers of other sizes make room.
        if self._free_bytes and self.used_bytes + self._free_bytes + size > self.budget_bytes:
            self._free.clear()
            self._free_bytes = 0
        return empty_pages((size,), torch.uint8)

    def give_back(self, payloads: Iterable[Payload]) -> None:
        for payload in payloads:
            self.used_bytes -= payload.nbytes
            is_kept = self.used_bytes + self._free_bytes + payload.nbytes <= self.budget_bytes
            if id(payload) in self._lent:
                self._lent.discard(id(payload))
            elif is_kept and isinstance(payload, Tensor):
                self._free.setdefault(payload.nbytes, []).append(payload)
                self._free_bytes += payload.nbytes
