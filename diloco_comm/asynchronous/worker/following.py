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

from ...base.memory import empty_pages
from ...methods.outer import SGD
from ...ops.wire import Layout, WireFormat
from ..model.rule_states import FusedState
from ..model.shared import layout_of
from ..protocol.messages import Kind, Message
from ..protocol.window import Position
from .downloads import Download

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
        ahead: Runs (fragment, run) that are at a newer version already, and at which.
        own: Version that the worker's own last update made, its payloads and layouts.
    """

    def __init__(self, outer: list[Tensor], impl: str = "") -> None:
        self.outer, self.impl = outer, impl
        self.version: int | None = None
        self.ahead: dict[tuple[int, int], int] = {}
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
        self.lose()
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
        self.ahead.clear()
        for state in self.states:
            state.num_arrivals = version

    def lose(self) -> None:
        """The buffers are those of no version any more."""
        self.version = None
        self.ahead.clear()

    def version_of(self, fragment: int, run: int) -> int:
        assert self.version is not None
        return self.ahead.get((fragment, run), self.version)

    def apply(
        self, place: tuple[int, int], payload: Tensor, layout: Layout, weight: float, lr: float
    ) -> None:
        """Do with a run what the server did with it when the next update came."""
        (fragment, run), version = place, self.version_of(*place)
        state = self.states[fragment]
        state.optimizer.lr = lr
        state.add_runs(payload, layout, weight, *layout.run_range(run), version, self.impl)
        self.ahead[place] = version + 1

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
        self.lose()


class Pursuit(Download):
    """The way of a follower to the newest version: updates, or all buffers, or parameters.

    Updates are applied run by run as they come, all of them to a run while it is in the cache.
    """

    def __init__(self, send: Callable[[Message], bool], follower: Follower) -> None:
        super().__init__(send, follower.outer)
        self.follower = follower
        self._answer = Kind.READY
        self._token = follower.begin()
        self._asked_with = follower.question(self._token)
        self._lr = 0.0
        self._rows: list[list[Any]] = []
        self._base = 0
        self._payloads: dict[int, tuple[Sequence[Tensor], Sequence[Layout]]] = {}
        self._lent: list[Tensor] = []
        # Runs that have not come, by update.
        self._missing: dict[int, set[tuple[int, int]]] = {}

    def _first_question(self) -> Message:
        self._asked_with = self.follower.question(self._token)
        return self._asked_with

    def receive(self, message: Message) -> None:
        is_answer = message.kind in (Kind.READY, Kind.STATE, Kind.UPDATES)
        if is_answer and message.run != self._token:
            return
        if message.kind == Kind.READY and self.version != message.version:
            self._answer, self._question = Kind.READY, Kind.GET
            self._drop()
            self.follower.missed(self._asked_with)
        elif message.kind == Kind.STATE and self.version != message.version:
            self._answer, self._question, self._lr = Kind.STATE, Kind.GET, message.meta["lr"]
            self._drop()
            self.follower.make(message.meta["rule"])
            self._begin(message, self._all_runs([*range(1, 1 + len(self.follower.buffers(0)))]))
        elif message.kind == Kind.UPDATES and self.version != message.version:
            self._catch_up(message)
        super().receive(message)
        if self.is_complete and self._answer != Kind.READY:
            assert self.version is not None
            self._drop()
            self.follower.filled(self.version)
            self.follower.show(self._lr)

    def _catch_up(self, message: Message) -> None:
        """Ask for what the worker has not of the updates."""
        base, rows = self.follower.version, message.meta["updates"]
        if base is None or base + len(rows) != message.version:
            return  # An answer to an older question.
        self._answer, self._question, self._lr = Kind.UPDATES, Kind.GET_UPDATE, message.meta["lr"]
        self._drop()
        self._base, self._rows = base, rows
        positions: list[Position] = []
        own = self.follower.own
        for number, (wire, block_size, _, _) in enumerate(rows, base + 1):
            if own is not None and own[0] == number:
                self._payloads[number] = own[1:]
                continue
            layouts = [layout_of(flat.numel(), WireFormat(wire, block_size)) for flat in self.outer]
            buffers = [self.follower.take(layout.payload_bytes) for layout in layouts]
            self._payloads[number] = (buffers, layouts)
            self._lent += buffers
            runs = [at for at in self._places() if self.follower.version_of(*at) < number]
            self._missing[number] = set(runs)
            positions += [Position(number, *place) for place in runs]
        self._begin(message, positions)
        for place in self._places():
            self._apply(place)
        if self._window.is_empty:
            self._arrived()

    def _places(self) -> list[tuple[int, int]]:
        return [(fragment, run) for _, fragment, run in self._all_runs([0])]

    def _drop(self) -> None:
        """Forget what came of updates that were cut off, or are applied."""
        self.follower.give_back(self._lent)
        self._lent = []
        self._payloads.clear()
        self._missing.clear()

    def _arrived(self) -> None:
        super()._arrived()
        # Nobody changes an update, so what came is what it was.
        self.is_complete = self._answer == Kind.UPDATES

    def _size_of(self, position: Position) -> int:
        if self._answer == Kind.UPDATES:
            return self._payloads[position.number][1][position.fragment].run_bytes
        return super()._size_of(position)

    def _take(self, position: Position, body: memoryview | bytes) -> None:
        number, fragment, _ = position
        if self._answer == Kind.READY:
            super()._take(position, body)
        elif self._answer == Kind.STATE:
            self._put(self.follower.buffers(fragment)[number - 1], position, body)
        else:
            self._take_update(position, body)

    def _take_update(self, position: Position, body: memoryview | bytes) -> None:
        """Take in consecutive runs of an update."""
        number, fragment, first = position
        buffers, layouts = self._payloads[number]
        size = layouts[fragment].run_bytes
        runs = [Position(number, fragment, first + i) for i in range(len(body) // size)]
        if len(body) % size or any(run not in self._window.asked for run in runs):
            return
        buffers[fragment].numpy().data[first * size : first * size + len(body)] = body
        for run in runs:
            self._window.received(run)
            self._missing[number].discard((fragment, run.run))
            self._apply((fragment, run.run))

    def _apply(self, place: tuple[int, int]) -> None:
        """Apply the updates whose run is here, in their order."""
        while (number := self.follower.version_of(*place) + 1) in self._payloads:
            if place in self._missing.get(number, ()):
                return
            payloads, layouts = self._payloads[number]
            _, _, weight, lr = self._rows[number - self._base - 1]
            fragment = place[0]
            self.follower.apply(place, payloads[fragment], layouts[fragment], weight, lr)
