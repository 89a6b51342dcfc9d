"""A worker that holds all that the server holds, and follows it by the updates of all workers.

Encoded updates are smaller than parameters, and the worker has its own: with few workers there is
less to fetch, and what comes out is the same to the last bit, since both apply the same operators
to the same bytes in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..exchange import empty_pages
from ..outer import SGD
from ..wire import Layout, WireFormat
from .downloads import Download, Position, put
from .messages import Kind, Message
from .model import layout_of
from .rule_states import FusedState

logger = logging.getLogger(__name__)

# After updates that the server had given up, parameters are fetched so many times before all
# buffers are fetched again.
REST_ROUNDS = 8


class Follower:
    """The server's buffers as of some version.

    Args:
        outer: What the worker's rounds start from, fp32 [num_elements] for each fragment, written.
        impl: Force an implementation of the operators.

    Attributes:
        version: Of the buffers; None if they are not whole.
        own: Version that the worker's own last update made, its payloads and layouts.
    """

    def __init__(self, outer: list[Tensor], impl: str = "") -> None:
        self.outer, self.impl = outer, impl
        self.version: int | None = None
        self.states: list[FusedState] = []
        self.own: tuple[int, Sequence[Tensor], Sequence[Layout]] | None = None
        self.is_refused = False
        self._rest = self._pursuits = 0
        self._spare: dict[int, list[Tensor]] = {}

    def begin(self) -> int:
        """Return a number by which the answers to one pursuit are known from older ones."""
        self._pursuits += 1
        return self._pursuits

    def question(self, token: int) -> Message:
        """Return how the worker asks for what to go on from."""
        if self.version is not None:
            return Message(Kind.FOLLOW, 1, self.version, 0, token)
        if self._rest or self.is_refused:
            return Message(Kind.PULL, run=token)
        return Message(Kind.FOLLOW, run=token)

    def make(self, rule: dict[str, Any]) -> None:
        """Make buffers to be filled."""
        self.version = None
        if not self.states or self.states[0].config() != rule:
            numbers = dict(rule)
            period = numbers.pop("period")
            outers = self.outer
            if rule["follows"] and period > 1:
                # What workers see is computed from it, and kept beside it.
                outers = [empty_pages(flat.shape, torch.float32) for flat in outers]
            self.states = [FusedState(outer, period, SGD(), **numbers) for outer in outers]

    def take(self, size: int) -> Tensor:
        """Return a buffer for a payload, uint8 [size]."""
        spare = self._spare.get(size)
        return spare.pop() if spare else empty_pages((size,), torch.uint8)

    def give_back(self, payloads: Sequence[Tensor]) -> None:
        """Use buffers again."""
        for payload in payloads:
            self._spare.setdefault(payload.nbytes, []).append(payload)

    def buffers(self, fragment: int) -> list[Tensor]:
        state = self.states[fragment]
        return [state.outer, *state.tensors().values()]

    def filled(self, version: int) -> None:
        """All buffers are those of this version."""
        self.version = version
        for state in self.states:
            state.num_arrivals = version

    def apply(
        self, payloads: Sequence[Tensor], layouts: Sequence[Layout], weight: float, lr: float
    ) -> None:
        """Do what the server did with an update."""
        assert self.version is not None
        for state, payload, layout in zip(self.states, payloads, layouts, strict=True):
            state.optimizer.lr = lr
            state.arrive(payload, layout, weight, self.impl)
        self.version += 1

    def show(self, lr: float) -> None:
        """Write what workers see of the version into ``outer``."""
        for state, outer in zip(self.states, self.outer, strict=True):
            state.optimizer.lr = lr
            if state.hides:
                layout = layout_of(outer.numel(), WireFormat("fp32"))
                for run in range(layout.num_runs):
                    begin, end = layout.run_range(run)
                    outer[begin:end] = state.visible(begin, end)

    def missed(self, question: Message) -> None:
        """The server answered with parameters: what is held is not what it says any more."""
        if question.kind == Kind.FOLLOW and question.number == 0:
            self.is_refused = True
            logger.warning("the server's rule cannot be followed: parameters are fetched whole")
        elif question.kind == Kind.FOLLOW:
            self._rest = REST_ROUNDS
        else:
            self._rest = max(0, self._rest - 1)
        self.version = None


class Pursuit(Download):
    """The way of a follower to the newest version: updates, or all buffers, or parameters."""

    def __init__(self, send: Callable[[Message], bool], follower: Follower) -> None:
        super().__init__(send, follower.outer)
        self.follower = follower
        self._answer = Kind.READY
        self._token = follower.begin()
        self._asked_with = follower.question(self._token)
        self._lr = 0.0
        self._rows: list[list[Any]] = []
        self._base = 0
        self._payloads: dict[int, tuple[list[Tensor], list[Layout]]] = {}
        self._missing: dict[int, int] = {}
        self._own: set[int] = set()

    def _first_question(self) -> Message:
        self._asked_with = self.follower.question(self._token)
        return self._asked_with

    @property
    def is_complete(self) -> bool:
        return super().is_complete and (
            self._answer != Kind.UPDATES or self.follower.version == self.version
        )

    def receive(self, message: Message) -> None:
        is_answer = message.kind in (Kind.READY, Kind.STATE, Kind.UPDATES)
        if is_answer and message.run != self._token:
            return
        if message.kind == Kind.READY and self.version != message.version:
            self._answer, self._question = Kind.READY, Kind.GET
            self.follower.missed(self._asked_with)
        elif message.kind == Kind.STATE and self.version != message.version:
            self._answer, self._question, self._lr = Kind.STATE, Kind.GET, message.meta["lr"]
            self.follower.make(message.meta["rule"])
            self._begin(message, self._all_runs([*range(1, 1 + len(self.follower.buffers(0)))]))
        elif message.kind == Kind.UPDATES and self.version != message.version:
            self._catch_up(message)
        super().receive(message)
        if self.is_complete and self._answer != Kind.READY:
            assert self.version is not None
            self.follower.filled(self.version)
            self.follower.show(self._lr)

    def _catch_up(self, message: Message) -> None:
        """Ask for the updates that the worker has not."""
        base, rows = self.follower.version, message.meta["updates"]
        if base is None or base + len(rows) != message.version:
            return  # An answer to an older question.
        self._answer, self._question, self._lr = Kind.UPDATES, Kind.GET_UPDATE, message.meta["lr"]
        self._base, self._rows = base, rows
        self._drop()
        positions: list[Position] = []
        for index, (wire, block_size, _, _) in enumerate(rows):
            number = base + 1 + index
            own = self.follower.own
            if own is not None and own[0] == number:
                self._payloads[number] = (list(own[1]), list(own[2]))
                self._own.add(number)
                self._missing[number] = 0
                continue
            layouts = [layout_of(flat.numel(), WireFormat(wire, block_size)) for flat in self.outer]
            buffers = [self.follower.take(layout.payload_bytes) for layout in layouts]
            self._payloads[number] = (buffers, layouts)
            runs = self._all_runs([number])
            self._missing[number] = len(runs)
            positions += runs
        self._begin(message, positions)
        self._apply()

    def _drop(self) -> None:
        """Forget what came of updates that were cut off."""
        for number, (payloads, _) in self._payloads.items():
            if number not in self._own:
                self.follower.give_back(payloads)
        self._payloads.clear()
        self._own.clear()

    def _take(self, position: Position, body: memoryview | bytes) -> bool:
        number, fragment, run = position
        if self._answer == Kind.READY:
            return super()._take(position, body)
        if self._answer == Kind.STATE:
            begin, end = self.layouts[fragment].run_range(run)
            return put(self.follower.buffers(fragment)[number - 1][begin:end], body)
        buffers, layouts = self._payloads[number]
        size = layouts[fragment].run_bytes
        if not put(buffers[fragment][run * size : (run + 1) * size], body):
            return False
        self._missing[number] -= 1
        self._apply()
        return True

    def _apply(self) -> None:
        """Apply the updates that are whole, in their order."""
        assert self.follower.version is not None
        while (number := self.follower.version + 1) in self._payloads and not self._missing[number]:
            _, _, weight, lr = self._rows[number - self._base - 1]
            payloads, layouts = self._payloads.pop(number)
            self.follower.apply(payloads, layouts, weight, lr)
            if number not in self._own:
                self.follower.give_back(payloads)
