"""A version on its way to a worker, run by run."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ...ops.wire import WireFormat
from ..model.shared import layout_of
from ..protocol.messages import MAX_BODY, Kind, Message
from ..protocol.window import WINDOW_BYTES, Position, Window

# A link is slow if a message takes longer.
SLOW_S = 1.0


class Download:
    """Fetch the newest parameters of the server, run by run.

    The server sends the parameters from its own buffers. So the worker asks in the end whether the
    server kept the version unchanged until the last run was sent.

    Args:
        send: Sends a message to the server. A lost message does no harm: missing runs are asked for
            again.
        outer: fp32 [num_elements] for each fragment, written.

    Attributes:
        version: The version that is on its way, or None.
        steps: Inner steps of the round that starts from this version.
        is_complete: All runs of the version have arrived.
    """

    _question = Kind.GET

    def __init__(self, send: Callable[[Message], bool], outer: list[Tensor]) -> None:
        self._send, self.outer = send, outer
        self.layouts = [layout_of(flat.numel(), WireFormat("fp32")) for flat in outer]
        self.version: int | None = None
        self.steps = 0
        self.is_complete = False
        self._window = Window([], self._size_of)
        self._heard_at = 0.0

    def ask(self) -> None:
        """Ask for a version, or ask again for the runs that have not arrived."""
        if self.version is None:
            self._send(self._first_question())
        elif self._window.is_empty:
            self._send(Message(Kind.DONE, 0, self.version))
        else:
            self._get(self._window.ask_again())

    def _first_question(self) -> Message:
        return Message(Kind.PULL)

    def receive(self, message: Message) -> None:
        """Handle a message of the server."""
        if message.kind == Kind.READY and self.version != message.version:
            self._begin(message, self._all_runs([0]))
        elif message.kind == Kind.GONE and message.version == self.version:
            self.version = None
            self.ask()
        elif message.kind == Kind.DATA and message.version == self.version:
            position = Position(message.number, message.fragment, message.run)
            self._widen()
            if position in self._window.asked:
                self._take(position, message.body)
                if self._window.is_empty:
                    self._arrived()
                else:
                    self._get(self._window.ask())
        elif message.kind == Kind.KEPT and message.version == self.version:
            self.is_complete = self._window.is_empty

    def _begin(self, message: Message, positions: list[Position]) -> None:
        self.version, self.steps = message.version, message.meta["steps"]
        self._heard_at = time.monotonic()
        self._window = Window(positions, self._size_of, batch_bytes=MAX_BODY, window_bytes=MAX_BODY)
        self._get(self._window.ask())

    def _widen(self) -> None:
        """Ask for several messages at a time, but on a slow link for one at a time.

        The server ends the download of a worker that asks for nothing new for some time.
        """
        now = time.monotonic()
        is_slow, self._heard_at = now - self._heard_at > SLOW_S, now
        self._window.window_bytes = MAX_BODY if is_slow else WINDOW_BYTES

    def _arrived(self) -> None:
        """Ask the server to confirm the version: every run has arrived."""
        assert self.version is not None
        self._send(Message(Kind.DONE, 0, self.version))

    def _all_runs(self, numbers: list[int]) -> list[Position]:
        return [
            Position(number, fragment, run)
            for number in numbers
            for fragment, layout in enumerate(self.layouts)
            for run in range(layout.num_runs)
        ]

    def _size_of(self, position: Position) -> int:
        return self.layouts[position.fragment].run_bytes

    def _get(self, requests: list[tuple[Position, int]]) -> None:
        assert self.version is not None
        for (number, fragment, run), count in requests:
            self._send(Message(self._question, number, self.version, fragment, run, count=count))

    def _take(self, position: Position, body: memoryview | bytes) -> None:
        """Write a run to its place in ``outer``, if the run has the right size."""
        self._put(self.outer[position.fragment], position, body)

    def _put(self, flat: Tensor, position: Position, body: memoryview | bytes) -> None:
        begin, end = self.layouts[position.fragment].run_range(position.run)
        if len(body) == 4 * (end - begin):
            flat.numpy().data.cast("B")[4 * begin : 4 * end] = body
            self._window.received(position)
