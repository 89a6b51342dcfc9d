"""Runs on their way: asked for some at a time, so many bytes ahead, and again if they get lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...ops.wire import Layout
from .messages import MAX_BATCH, MAX_BODY

# What is asked for at a time, and what may be on its way at most.
BATCH_BYTES, WINDOW_BYTES = MAX_BATCH, 2 * MAX_BATCH


class Position(NamedTuple):
    """A run: of the parameters (number 0), of a buffer (from 1), or of the update of a version."""

    number: int
    fragment: int
    run: int


class Window:
    """What one side wants from the other.

    Args:
        wanted: Runs in the order in which they are asked for.
        size_of: Bytes of a run.
        batch_bytes, window_bytes: Asked for at a time, and on their way at most; one run always is.

    Attributes:
        asked: Runs that were asked for and are not here yet.
    """

    def __init__(
        self,
        wanted: Iterable[Position],
        size_of: Callable[[Position], int],
        *,
        batch_bytes: int = BATCH_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._wanted = list(wanted)[::-1]
        self._size_of = size_of
        self._batch_bytes, self._window_bytes = batch_bytes, window_bytes
        self.asked: dict[Position, int] = {}
        self._asked_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Everything is here."""
        return not self._wanted and not self.asked

    def ask(self) -> list[tuple[Position, int]]:
        """Return what to ask for now: first runs, and how many follow one another."""
        requests = []
        while self._wanted and self._has_room():
            requests += list(_consecutive(self._next_batch()))
        return requests

    def _has_room(self) -> bool:
        # Whole batches: few questions.
        needed = max(self._batch_bytes, self._size_of(self._wanted[-1]))
        return not self.asked or self._asked_bytes + needed <= self._window_bytes

    def _next_batch(self) -> list[Position]:
        batch: list[Position] = []
        num_bytes = 0
        while self._wanted:
            size = self._size_of(self._wanted[-1])
            if batch and num_bytes + size > self._batch_bytes:
                break
            batch.append(self._wanted.pop())
            self.asked[batch[-1]] = size
            num_bytes += size
        self._asked_bytes += num_bytes
        return batch

    def ask_again(self) -> list[tuple[Position, int]]:
        """Return what was asked for and has not come."""
        return [(position, 1) for position in self.asked]

    def received(self, position: Position) -> None:
        """A run that was asked for is here."""
        self._asked_bytes -= self.asked.pop(position)


def _consecutive(positions: list[Position]) -> Iterator[tuple[Position, int]]:
    first, count = positions[0], 1
    for position in positions[1:]:
        if position == (first.number, first.fragment, first.run + count):
            count += 1
        else:
            yield first, count
            first, count = position, 1
    yield first, count


def bodies(layout: Layout, run: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut runs into what one message holds: first runs, and how many."""
    most = max(1, MAX_BODY // layout.run_bytes)
    for first in range(run, run + count, most):
        yield first, min(most, run + count - first)


def is_within(layout: Layout, run: int, count: int) -> bool:
    """Tell whether there are such runs, and no more of them than may be asked for at a time."""
    return count >= 1 and run + count <= layout.num_runs and count * layout.run_bytes <= MAX_BATCH
