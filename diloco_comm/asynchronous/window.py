"""A window of runs: the receiver asks for a limited number of bytes at a time, again after a loss.

A *run* is a range of a fragment's elements that travels as a whole, see ``layout_of``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.wire import Layout
from .messages import MAX_BATCH, MAX_BODY, Kind, Message

# Bytes of runs in one request, and the most bytes that are asked for and have not arrived.
BATCH_BYTES, WINDOW_BYTES = MAX_BATCH, 2 * MAX_BATCH
# Runs of at most so many fragments are asked for at a time. Each small fragment takes a message of
# its own, and a server's socket holds a limited number of messages for a peer.
WINDOW_FRAGMENTS = 32


class Position(NamedTuple):
    """A run of the parameters (number 0), of a buffer (from 1), or of the update of a version."""

    number: int
    fragment: int
    run: int


class Window:
    """The runs that one side still needs from the other.

    Args:
        wanted: Runs in the order in which they are asked for.
        size_of: Returns the bytes of a run.
        batch_bytes: The most bytes of one request; a single run may be larger.
        window_bytes: The most bytes that are asked for and have not arrived; a single run may be
            larger.

    Attributes:
        window_bytes: As above; it may be changed.
        asked: Runs that were asked for and have not arrived, with their bytes.
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
        self._batch_bytes, self.window_bytes = batch_bytes, window_bytes
        self.asked: dict[Position, int] = {}
        self._asked_bytes = 0
        # Runs in ``asked``, by number and fragment.
        self._num_asked: Counter[tuple[int, int]] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether every run has arrived."""
        return not self._wanted and not self.asked

    def ask(self) -> list[tuple[Position, int]]:
        """Return the requests to send now: first run, and number of consecutive runs."""
        requests = []
        while self._wanted and self._has_room():
            requests += list(_consecutive(self._next_batch()))
        return requests

    def _has_room(self) -> bool:
        # Wait until a whole batch has room, which makes fewer requests.
        needed = max(self._batch_bytes, self._size_of(self._wanted[-1]))
        fits = self._asked_bytes + needed <= self.window_bytes
        return not self.asked or (fits and len(self._num_asked) < WINDOW_FRAGMENTS)

    def _next_batch(self) -> list[Position]:
        batch: list[Position] = []
        num_bytes = 0
        while self._wanted:
            size = self._size_of(self._wanted[-1])
            is_full = len(self._num_asked) >= WINDOW_FRAGMENTS
            if batch and (num_bytes + size > self._batch_bytes or is_full):
                break
            position = self._wanted.pop()
            batch.append(position)
            self.asked[position] = size
            self._num_asked[position[:2]] += 1
            num_bytes += size
        self._asked_bytes += num_bytes
        return batch

    def ask_again(self) -> list[tuple[Position, int]]:
        """Return a request for each run that was asked for and has not arrived."""
        return [(position, 1) for position in self.asked]

    def received(self, position: Position) -> None:
        """Note that a run has arrived."""
        self._asked_bytes -= self.asked.pop(position)
        self._num_asked[position[:2]] -= 1
        if not self._num_asked[position[:2]]:
            del self._num_asked[position[:2]]


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
    """Divide runs among messages: yield first run and number of runs of each."""
    most = max(1, MAX_BODY // layout.run_bytes)
    for first in range(run, run + count, most):
        yield first, min(most, run + count - first)


def is_within(layout: Layout, run: int, count: int) -> bool:
    """Return whether these runs exist and fit into one request."""
    return count >= 1 and run + count <= layout.num_runs and count * layout.run_bytes <= MAX_BATCH


def view_of_runs(data: Tensor, layout: Layout, run: int, count: int = 1) -> memoryview:
    """Return the bytes of consecutive runs: of a payload, uint8, or of values in fp32."""
    begin, end = layout.run_range(run)[0], layout.run_range(run + count - 1)[1]
    if data.dtype == torch.uint8:
        begin, end = run * layout.run_bytes, (run + count) * layout.run_bytes
    return data[begin:end].numpy().data.cast("B")


class Fetcher(ABC):
    """Fetches runs from a server, and stores them in their places.

    Args:
        send: Sends a message to the server. A message may be lost, as missing runs are asked for
            again.
        layouts: The layout of each fragment.
        first: Number of the first fragment in messages.

    Attributes:
        version: The version that is on its way, or None.
    """

    _question = Kind.GET

    def __init__(
        self, send: Callable[[Message], bool], layouts: list[Layout], first: int = 0
    ) -> None:
        self._send, self.layouts, self._first = send, layouts, first
        self.version: int | None = None
        self._window = Window([], self._size_of)

    @abstractmethod
    def _view(self, position: Position) -> memoryview:
        """Return the memory into which a run's bytes are stored."""

    def _size_of(self, position: Position) -> int:
        return self.layouts[position.fragment].run_bytes

    def _all_runs(self, numbers: Iterable[int]) -> list[Position]:
        return [
            Position(number, fragment, run)
            for number in numbers
            for fragment, layout in enumerate(self.layouts)
            for run in range(layout.num_runs)
        ]

    def _get(self, requests: Iterable[tuple[Position, int]]) -> None:
        assert self.version is not None
        for (number, fragment, run), count in requests:
            place = (number, self.version, self._first + fragment, run)
            self._send(Message(self._question, *place, count=count))

    def _store(self, message: Message) -> list[Position]:
        """Put the runs of a message in their places; return those that were asked for."""
        position = Position(message.number, message.fragment - self._first, message.run)
        body, stored = memoryview(message.body), list[Position]()
        while len(body) and position in self._window.asked:
            view = self._view(position)
            if not 0 < len(view) <= len(body):
                break
            view[:] = body[: len(view)]
            self._window.received(position)
            stored.append(position)
            position, body = position._replace(run=position.run + 1), body[len(view) :]
        return stored
