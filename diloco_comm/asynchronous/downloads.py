"""Downloads: a worker fetches a version of the model, as parameters or as the updates up to it.

A worker that *follows* the server holds a copy of the server's buffers, and applies all workers'
updates to it. Encoded updates are smaller than parameters, and a worker has its own update already,
so with few workers there is less to fetch. The copy equals the server's buffers to the last bit:
both apply the same operators to the same bytes in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.checks import logger_of
from ..base.memory import empty_pages
from ..methods.outer import SGD
from ..ops.wire import Layout, WireFormat
from .messages import MAX_BODY, Kind, Message
from .model import layout_of
from .rules import FusedState
from .window import WINDOW_BYTES, Fetcher, Position, Window, view_of_runs

logger = logger_of(__name__)

_FP32 = WireFormat("fp32")
# A link is slow if a message takes more seconds than this.
SLOW_S = 1.0

# The server answers with parameters if updates that the worker needs were released, or are larger.
# Then the worker fetches parameters in this many more rounds before it fetches all buffers again.
REST_ROUNDS = 8


class Follower:
    """A copy of the server's buffers at one version.

    Args:
        outer: The parameters from which the worker's rounds start, fp32 [num_elements] for each
            fragment; downloads write them.
        impl: Force an implementation of the operators.
        follows: False: the worker always fetches parameters, and keeps no copy of the buffers.

    Attributes:
        version: Version of the buffers; None if they are incomplete.
        ahead: The versions of runs (fragment, run) that are newer than ``version`` already.
        states: The copy of the server's buffers, for each fragment.
        own: The version that the worker's last update made, and that update's payloads and layouts.
        is_refused: The worker fetches parameters, by its own choice or the server's.
    """

    def __init__(self, outer: list[Tensor], impl: str = "", *, follows: bool = True) -> None:
        self.outer, self.impl = outer, impl
        self.version: int | None = None
        self.ahead: dict[tuple[int, int], int] = {}
        self.states: list[FusedState] = []
        self.own: tuple[int, Sequence[Tensor], Sequence[Layout]] | None = None
        self.is_refused, self._follows = not follows, follows
        self._rest = self._pursuits = 0
        self._spare: dict[int, list[Tensor]] = {}

    def begin(self) -> int:
        """Return the token of a new download; it is always 0 where no updates are fetched.

        Each answer repeats the token of its request, so answers to an earlier download are told
        apart and dropped.
        """
        self._pursuits += self._follows
        return self._pursuits

    def question(self, token: int) -> Message:
        """Return the message by which the worker asks for the newest version."""
        if self.version is not None:
            return Message(Kind.FOLLOW, 1, self.version, 0, token)
        if self._rest or self.is_refused:
            return Message(Kind.PULL, run=token)
        return Message(Kind.FOLLOW, run=token)

    def make(self, rule: dict[str, Any]) -> None:
        """Allocate the buffers of the server's rule, uninitialised."""
        self.lose()
        if not self.states or self.states[0].config() != rule:
            numbers = dict(rule)
            period = numbers.pop("period")
            outers = self.outer
            if rule["follows"] and period > 1:
                # Workers train from other parameters than the rule's ``outer``: two buffers.
                outers = [empty_pages(flat.shape, torch.float32) for flat in outers]
            self.states = [FusedState(outer, period, SGD(), **numbers) for outer in outers]

    def take(self, size: int) -> Tensor:
        """Return a buffer for a payload, uint8 [size]."""
        spare = self._spare.get(size)
        return spare.pop() if spare else empty_pages((size,), torch.uint8)

    def give_back(self, payloads: Sequence[Tensor]) -> None:
        """Keep payload buffers for later use."""
        for payload in payloads:
            self._spare.setdefault(payload.nbytes, []).append(payload)

    def buffers(self, fragment: int) -> list[Tensor]:
        state = self.states[fragment]
        return [state.outer, *state.tensors().values()]

    def filled(self, version: int) -> None:
        """Note that all buffers have this version."""
        self.version = version
        self.ahead.clear()
        for state in self.states:
            state.num_arrivals = version

    def lose(self) -> None:
        """Note that the buffers are incomplete now."""
        self.version = None
        self.ahead.clear()

    def version_of(self, fragment: int, run: int) -> int:
        assert self.version is not None
        return self.ahead.get((fragment, run), self.version)

    def apply(
        self, place: tuple[int, int], payload: Tensor, layout: Layout, weight: float, lr: float
    ) -> None:
        """Apply the next update to one run, as the server did."""
        (fragment, run), version = place, self.version_of(*place)
        state = self.states[fragment]
        state.optimizer.lr = lr
        state.add_runs(payload, layout, weight, *layout.run_range(run), version, self.impl)
        self.ahead[place] = version + 1

    def show(self, lr: float) -> None:
        """Write the parameters from which workers train into ``outer``, if the rule hides them."""
        for state, outer in zip(self.states, self.outer, strict=True):
            state.optimizer.lr = lr
            if state.hides:
                layout = layout_of(outer.numel(), _FP32)
                for run in range(layout.num_runs):
                    begin, end = layout.run_range(run)
                    outer[begin:end] = state.visible(begin, end)

    def missed(self, question: Message) -> None:
        """Drop the buffers, as the server answers with parameters; decide what to ask for next."""
        if question.kind == Kind.FOLLOW and question.number == 0:
            self.is_refused = True
            logger.warning(
                "the server's rule does not allow fetch='updates': this worker fetches parameters"
            )
        elif question.kind == Kind.FOLLOW:
            self._rest = REST_ROUNDS
        else:
            self._rest = max(0, self._rest - 1)
        self.lose()


class Download(Fetcher):
    """Brings a follower to the newest version: by updates, by all buffers, or by parameters.

    Updates are applied run by run as they arrive, all updates of one run while it is in the cache.
    The server sends parameters and buffers from its live memory. So at the end the worker asks
    whether the server has kept their version until the last run was sent.

    Attributes:
        steps: Inner steps of the round that starts from this version.
        is_complete: All runs of the version have arrived; the server has confirmed that parameters
            or buffers were kept until then, while updates need no such answer.
    """

    def __init__(self, send: Callable[[Message], bool], follower: Follower) -> None:
        super().__init__(send, [layout_of(flat.numel(), _FP32) for flat in follower.outer])
        self.follower = follower
        self.steps = 0
        self.is_complete = False
        self._heard_at = 0.0
        self._answer = Kind.READY
        self._token = follower.begin()
        self._asked_with = follower.question(self._token)
        self._lr = 0.0
        self._rows: list[list[Any]] = []
        self._base = 0
        self._payloads: dict[int, tuple[Sequence[Tensor], Sequence[Layout]]] = {}
        self._lent: list[Tensor] = []
        # Runs (fragment, run) that have not arrived, by update.
        self._missing: dict[int, set[tuple[int, int]]] = {}

    def ask(self) -> None:
        """Ask for a version, again for the runs that have not arrived, or for the confirmation."""
        if self.version is None:
            self._asked_with = self.follower.question(self._token)
            self._send(self._asked_with)
        elif self._window.is_empty:
            self._send(Message(Kind.DONE, 0, self.version))
        else:
            self._get(self._window.ask_again())

    def receive(self, message: Message) -> None:
        """Handle a message of the server."""
        kind, is_present = message.kind, message.version == self.version
        if kind in (Kind.READY, Kind.STATE, Kind.UPDATES):
            if message.run == self._token and not is_present:
                self._answered(message)
        elif kind == Kind.GONE and is_present:
            self.version = None
            self.ask()
        elif kind == Kind.DATA and is_present:
            self._widen()
            self._take(self._store(message))
        elif kind == Kind.KEPT and is_present:
            self.is_complete = self._window.is_empty
        if self.is_complete and self._answer != Kind.READY:
            assert self.version is not None
            self._drop()
            self.follower.filled(self.version)
            self.follower.show(self._lr)

    def _answered(self, message: Message) -> None:
        """Ask for runs of the updates, the buffers or the parameters that the server has named."""
        if message.kind == Kind.UPDATES:
            self._catch_up(message)
            return
        self._answer, self._question = message.kind, Kind.GET
        self._drop()
        if message.kind == Kind.READY:
            self.follower.missed(self._asked_with)
            self._begin(message, self._all_runs([0]))
        else:
            self._lr = message.meta["lr"]
            self.follower.make(message.meta["rule"])
            self._begin(message, self._all_runs(range(1, 1 + len(self.follower.buffers(0)))))

    def _begin(self, message: Message, positions: list[Position]) -> None:
        self.version, self.steps = message.version, message.meta["steps"]
        self._heard_at = time.monotonic()
        self._window = Window(positions, self._size_of, batch_bytes=MAX_BODY, window_bytes=MAX_BODY)
        self._get(self._window.ask())

    def _widen(self) -> None:
        """Let several messages be under way, but on a slow link only one.

        The server ends a download in which the worker asks for nothing new for some time, so on a
        slow link a request must not cover too much.
        """
        now = time.monotonic()
        is_slow, self._heard_at = now - self._heard_at > SLOW_S, now
        self._window.window_bytes = MAX_BODY if is_slow else WINDOW_BYTES

    def _catch_up(self, message: Message) -> None:
        """Ask for the runs of the updates that the worker does not have."""
        base, rows = self.follower.version, message.meta["updates"]
        if base is None or base + len(rows) != message.version:
            return  # This answers an older question.
        self._answer, self._question, self._lr = Kind.UPDATES, Kind.GET_UPDATE, message.meta["lr"]
        self._drop()
        self._base, self._rows = base, rows
        positions: list[Position] = []
        own = self.follower.own
        for number, (wire, block_size, _, _) in enumerate(rows, base + 1):
            if own is not None and own[0] == number:
                self._payloads[number] = own[1:]
                continue
            form = WireFormat(wire, block_size)
            layouts = [layout_of(flat.numel(), form) for flat in self.follower.outer]
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
        """Forget the payloads of updates that are applied, or that the server stopped sending."""
        self.follower.give_back(self._lent)
        self._lent = []
        self._payloads.clear()
        self._missing.clear()

    def _arrived(self) -> None:
        """Ask the server to confirm the version, as every run has arrived."""
        assert self.version is not None
        self._send(Message(Kind.DONE, 0, self.version))
        # An update never changes, so the server need not confirm its runs.
        self.is_complete = self._answer == Kind.UPDATES

    def _size_of(self, position: Position) -> int:
        if self._answer == Kind.UPDATES:
            return self._payloads[position.number][1][position.fragment].run_bytes
        return super()._size_of(position)

    def _view(self, position: Position) -> memoryview:
        number, fragment, run = position
        if self._answer == Kind.UPDATES:
            payloads, layouts = self._payloads[number]
            return view_of_runs(payloads[fragment], layouts[fragment], run)
        flat = self.follower.outer[fragment]
        if self._answer == Kind.STATE:
            flat = self.follower.buffers(fragment)[number - 1]
        return view_of_runs(flat, self.layouts[fragment], run)

    def _take(self, stored: list[Position]) -> None:
        """Apply the runs of updates that have come, and ask for the next ones."""
        if not stored:
            return
        if self._answer == Kind.UPDATES:
            for number, *place in stored:
                self._missing[number].discard((place[0], place[1]))
                self._apply((place[0], place[1]))
        if self._window.is_empty:
            self._arrived()
        else:
            self._get(self._window.ask())

    def _apply(self, place: tuple[int, int]) -> None:
        """Apply the updates whose run has arrived, in order."""
        while (number := self.follower.version_of(*place) + 1) in self._payloads:
            if place in self._missing.get(number, ()):
                return
            payloads, layouts = self._payloads[number]
            _, _, weight, lr = self._rows[number - self._base - 1]
            fragment = place[0]
            self.follower.apply(place, payloads[fragment], layouts[fragment], weight, lr)
