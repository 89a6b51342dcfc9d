"""Updates on their way to the server, run by run, within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.memory import empty_pages
from ...ops.wire import Layout
from ..protocol.garbage import find_run_garbage
from ..protocol.messages import MAX_BODY
from ..protocol.payloads import Payload, PayloadFile, read_back, write_run
from ..protocol.window import Position, Window


@dataclass
class Upload:
    """One update, complete or not.

    Attributes:
        is_start: The upload is a worker's parameters, not an update.
        window: The runs that have not arrived.
        last_seen: When the last run arrived.
        garbage: What is wrong with the runs that arrived, "" if nothing is.
    """

    worker: str
    seq: int
    version: int
    steps: int
    seconds: float
    is_start: bool
    layouts: list[Layout]
    payloads: list[Payload] = field(repr=False)
    last_seen: float
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
    def meta(self) -> dict[str, Any]:
        """The fields of an update that the journal keeps beside the payload."""
        wire = self.layouts[0].wire
        return {
            "wire": wire.name,
            "block_size": wire.block_size,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def put(self, fragment: int, run: int, body: memoryview | bytes, now: float) -> str:
        """Store runs; return what is wrong with their size or place, or ""."""
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
            # Checked now: the run is in the cache, and other runs are still on their way.
            content = self.payloads[fragment][position.run * size : (position.run + 1) * size]
            self.garbage = self.garbage or find_run_garbage(content, layout, end - begin)
            self.window.received(position)
        self.last_seen = now
        return ""

    def read_through(self) -> None:
        """Meet errors of the disk before the update is applied; see ``read_back``.

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
            must: Return room in memory, whatever the budget and the payloads that are there.

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
