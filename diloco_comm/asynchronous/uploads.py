"""Updates that are on their way to the server, run by run, within a budget of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..wire import Layout

# Runs of one update that are asked for and not here yet.
WINDOW = 4


@dataclass
class Upload:
    """One update, complete or not.

    Attributes:
        is_start: The worker's parameters, not an update.
        wanted: Runs not asked for yet, in reverse order; ``asked`` those on their way.
        last_seen: When its last run came.
    """

    worker: str
    seq: int
    version: int
    steps: int
    seconds: float
    is_start: bool
    layouts: list[Layout]
    payloads: list[Tensor] = field(repr=False)
    last_seen: float
    wanted: list[tuple[int, int]] = field(default_factory=list, repr=False)
    asked: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        runs = [(f, run) for f, lay in enumerate(self.layouts) for run in range(lay.num_runs)]
        self.wanted = runs[::-1]

    @property
    def is_complete(self) -> bool:
        return not self.wanted and not self.asked

    def ask(self) -> list[tuple[int, int]]:
        """Return the runs to ask for now."""
        new = []
        while self.wanted and len(self.asked) < WINDOW:
            new.append(self.wanted.pop())
            self.asked.add(new[-1])
        return new

    def put(self, fragment: int, run: int, body: memoryview | bytes, now: float) -> str:
        """Take in a run; returns what is wrong with it, or ""."""
        if (fragment, run) not in self.asked:
            return f"run {run} of fragment {fragment} was not asked for"
        size = self.layouts[fragment].run_bytes
        if len(body) != size:
            return f"a run of this update has {size} bytes, got {len(body)}"
        target = self.payloads[fragment][run * size : (run + 1) * size]
        target.numpy().data[:] = body
        self.asked.discard((fragment, run))
        self.last_seen = now
        return ""


class PayloadMemory:
    """Buffers for payloads, at most so many bytes in use; one update always fits.

    Attributes:
        used_bytes: Held by uploads and by updates that are not folded into the model yet.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0

    def take(self, sizes: Iterable[int]) -> list[Tensor] | None:
        """Return one uint8 buffer of each size, or None while the budget is used up."""
        sizes = list(sizes)
        needed = sum(sizes)
        if self.used_bytes and self.used_bytes + needed > self.budget_bytes:
            return None
        self.used_bytes += needed
        return [self._take(size) for size in sizes]

    def _take(self, size: int) -> Tensor:
        if self._free.get(size):
            self._free_bytes -= size
            return self._free[size].pop()
        # Buffers of another wire's sizes make room.
        if self._free_bytes and self.used_bytes + self._free_bytes > self.budget_bytes:
            self._free.clear()
            self._free_bytes = 0
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self.used_bytes -= buffer.nbytes
            if self.used_bytes + self._free_bytes + buffer.nbytes <= self.budget_bytes:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
                self._free_bytes += buffer.nbytes
