"""A version on its way to a worker, run by run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..wire import WireFormat
from .messages import Kind, Message
from .model import layout_of

# Runs of a version that are asked for and not here yet.
WINDOW = 8


class Position(NamedTuple):
    """A run: of the parameters (number 0), of a buffer (from 1), or of the update of a version."""

    number: int
    fragment: int
    run: int


class Download:
    """The newest parameters on their way.

    Args:
        send: Sends a message to the server, or does not: what is missing is asked for again.
        outer: fp32 [num_elements] for each fragment, written.

    Attributes:
        version: That is on its way, or None.
        steps: Inner steps of the round that starts from it.
    """

    _question = Kind.GET

    def __init__(self, send: Callable[[Message], bool], outer: list[Tensor]) -> None:
        self._send, self.outer = send, outer
        self.layouts = [layout_of(flat.numel(), WireFormat("fp32")) for flat in outer]
        self.version: int | None = None
        self.steps = 0
        self._wanted: list[Position] = []
        self._asked: set[Position] = set()

    @property
    def is_complete(self) -> bool:
        return self.version is not None and not self._wanted and not self._asked

    def ask(self) -> None:
        """Ask for a version, or again for the runs of one that have not come."""
        if self.version is None:
            self._send(self._first_question())
            return
        for position in self._asked:
            self._get(position)

    def _first_question(self) -> Message:
        return Message(Kind.PULL)

    def receive(self, message: Message) -> None:
        """Act upon what the server says."""
        if message.kind == Kind.READY and self.version != message.version:
            self._begin(message, self._all_runs([0]))
        elif message.kind == Kind.GONE and message.version == self.version:
            self.version = None
            self.ask()
        elif message.kind == Kind.DATA and message.version == self.version:
            position = Position(message.number, message.fragment, message.run)
            if position in self._asked and self._take(position, message.body):
                self._asked.discard(position)
        while self._wanted and len(self._asked) < WINDOW:
            position = self._wanted.pop()
            self._asked.add(position)
            self._get(position)

    def _begin(self, message: Message, positions: list[Position]) -> None:
        self.version, self.steps = message.version, message.meta["steps"]
        self._wanted, self._asked = positions[::-1], set()

    def _all_runs(self, numbers: list[int]) -> list[Position]:
        return [
            Position(number, fragment, run)
            for number in numbers
            for fragment, layout in enumerate(self.layouts)
            for run in range(layout.num_runs)
        ]

    def _get(self, position: Position) -> None:
        assert self.version is not None
        number, fragment, run = position
        self._send(Message(self._question, number, self.version, fragment, run))

    def _take(self, position: Position, body: memoryview | bytes) -> bool:
        """Put a run where it belongs; False if it has the wrong size."""
        begin, end = self.layouts[position.fragment].run_range(position.run)
        return put(self.outer[position.fragment][begin:end], body)


def put(target: Tensor, body: memoryview | bytes) -> bool:
    """Set the bytes of a tensor; False if there are not as many."""
    if len(body) != target.nbytes:
        return False
    target.view(torch.uint8).numpy().data[:] = body
    return True
