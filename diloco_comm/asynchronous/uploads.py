"""Updates that are on their way to the server, run by run, within a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..memory import empty_pages
from ..wire import Layout
from .garbage import find_run_garbage
from .spool import Payload, Spooled, write_run

# Runs of one update that are asked for and not here yet.
WINDOW = 4


@dataclass
class Upload:
    """One update, complete or not.

    Attributes:
        is_start: The worker's parameters, not an update.
        wanted: Runs not asked for yet, in reverse order; ``asked`` those on their way.
        last_seen: When its last run came.
        garbage: What is wrong with the runs that came, "" if nothing is.
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
    wanted: list[tuple[int, int]] = field(default_factory=list, repr=False)
    asked: set[tuple[int, int]] = field(default_factory=set)
    garbage: str = ""

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
        layout = self.layouts[fragment]
        size = layout.run_bytes
        if len(body) != size:
            return f"a run of this update has {size} bytes, got {len(body)}"
        write_run(self.payloads[fragment], run * size, body)
        begin, end = layout.run_range(run)
        # Looked at while it is in the cache, and while others are on their way.
        here = self.payloads[fragment][run * size : (run + 1) * size]
        self.garbage = self.garbage or find_run_garbage(here, layout, end - begin)
        self.asked.discard((fragment, run))
        self.last_seen = now
        return ""


class PayloadMemory:
    """Buffers for payloads, at most so many bytes in use.

    An update that is larger than all of it goes to a file, one at a time.

    Args:
        budget_bytes: Of memory.
        spool: Makes room in a file for payloads of these sizes.

    Attributes:
        used_bytes: Held by uploads and by updates that are not folded into the model yet.
    """

    def __init__(
        self, budget_bytes: int, spool: Callable[[list[int]], list[Spooled]] | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._spool = spool
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0
        self._lent: set[int] = set()

    def lend(self, payloads: Iterable[Payload]) -> None:
        """Never use these buffers again: their bytes may be on their way when they come back."""
        self._lent.update(id(payload) for payload in payloads)

    def take(self, sizes: Iterable[int], *, may_spool: bool = True) -> list[Payload] | None:
        """Return room for payloads of these sizes, or None while the budget is used up.

        Args:
            may_spool: False for bytes that must be in memory, whatever the budget.

        Raises:
            OSError: If there is no room for a file either.
        """
        sizes = list(sizes)
        needed = sum(sizes)
        if self.used_bytes and self.used_bytes + needed > self.budget_bytes:
            return None
        payloads: list[Payload]
        if needed > self.budget_bytes and may_spool and self._spool is not None:
            payloads = list(self._spool(sizes))
        else:
            payloads = [self._take(size) for size in sizes]
        self.used_bytes += needed
        return payloads

    def _take(self, size: int) -> Tensor:
        if self._free.get(size):
            self._free_bytes -= size
            return self._free[size].pop()
        # Buffers of another wire's sizes make room.
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
