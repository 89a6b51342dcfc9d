"""A donor, from which a newcomer copies the outer state, and the open requests to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ... import _C
from ...group.beats import Way
from ...ops.wire import WireFormat
from ...rounds.round_log import LoggedRound, Standing
from .messages import MOST_TEXT, Answer, Kind, Wanted, has_body


@dataclass(frozen=True)
class Status:
    """How far a donor's training is, and which rounds its log has.

    Attributes:
        standings: The standing of each fragment.
        log: The logged rounds, by fragment and number of the round.
        last: The donor's number for the newest entry of its log. The next request for the status
            names it, so that the answer has only newer entries.
        num_newcomers: How many newcomers copy from this donor now.
    """

    standings: tuple[Standing, ...]
    log: Mapping[tuple[int, int], LoggedRound]
    last: int
    num_newcomers: int

    @classmethod
    def read(
        cls, numbers: Mapping[str, Any], num_fragments: int, before: Status | None = None
    ) -> Status:
        """Return the status that a donor has sent.

        Args:
            numbers: The JSON of the answer.
            num_fragments: How many fragments the donor must have.
            before: The donor's last status, whose logged rounds the answer leaves out.

        Raises:
            ValueError: If the JSON is no status, or the number of fragments is another one.
        """
        try:
            fragments = [tuple(map(_count, one)) for one in numbers["fragments"]]
            standings = tuple([Standing(*one) for *one, _ in fragments])
            lowest = [one[-1] for one in fragments]
            entries = [_logged(*one) for one in numbers["log"]]
            counts = _count(numbers["last"]), _count(numbers["num_newcomers"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a donor's status cannot be read: {error}") from None
        if len(standings) != num_fragments:
            raise ValueError(f"a donor has {len(standings)} fragments, expected {num_fragments}")
        log = {} if before is None else dict(before.log)
        log |= {(entry.fragment, entry.number): entry for entry in entries}
        kept = {
            key: entry
            for key, entry in log.items()
            if key[0] < num_fragments and key[1] >= lowest[key[0]]
        }
        return cls(standings, kept, *counts)


def _logged(
    fragment: Any,
    number: Any,
    before: Any,
    after: Any,
    num_steps: Any,
    outer_lr: Any,
    coefficients: Any,
    num_runs: Any,
    run_elements: Any,
    wire: Any,
    block_size: Any,
    num_bytes: Any,
) -> LoggedRound:
    form = WireFormat(wire, _count(block_size))
    return LoggedRound(
        _count(fragment),
        _count(number),
        _count(before),
        _count(after),
        _count(num_steps),
        float(outer_lr),
        tuple([float(one) for one in coefficients]),
        _count(num_runs),
        _count(run_elements),
        form.name,
        form.block_size,
        _count(num_bytes),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"a whole number is expected, got {value!r}")
    return value


# ------------------------------------------------------------------------------------------- donors


# At most so many requests for state or payloads are open at one donor.
MAX_OPEN = 2
# Seconds without a byte of an answer after which a donor is given up.
_STALL_S = 10.0
# After an answer without a body, a donor is asked nothing for so many seconds.
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Asked:
    """An open request.

    Attributes:
        num_bytes: Bytes of the expected body; 0 for a status.
        take: Called with the donor and the answer; with None if the donor gives none.
    """

    kind: Kind
    num_bytes: int
    take: Callable[[Donor, Answer | None], None]


class Donor:
    """A donor, and the requests to it that are open.

    Args:
        link: The link of this process.
        service: The name under which the donor's link serves the state.
        name: The donor's name among the members.
        way: The address of the donor's link.

    Attributes:
        status: The donor's last status; None before the first answer.
        is_lost: The donor did not answer in time, or has sent wrong bytes: it is asked no more.
        is_wrong: The donor has sent wrong bytes.
        trouble: Why the donor cannot be reached; "" if it can.
        received_bytes: Bytes of state and payloads that the donor has sent.
    """

    def __init__(self, link: _C.Link, service: str, name: str, way: Way) -> None:
        self._link, self._service = link, service
        self.name, self.way = name, way
        self.status: Status | None = None
        self.is_lost = self.is_wrong = False
        self.trouble = ""
        self.received_bytes = 0
        self._open: dict[int, Asked] = {}
        # When bytes were asked for last; until when nothing is asked; and since when the link has
        # no connection for a request (0: it has one).
        self._last_asked = self._pause_until = 0.0
        self._blocked_at = 0.0
        # When the last byte of an open request came, and how many bytes had come by then.
        self._heard_at, self._num_arrived = 0.0, 0

    @property
    def num_open(self) -> int:
        """The number of requests for state or payloads that have no answer yet."""
        return sum(asked.num_bytes > 0 for asked in self._open.values())

    @property
    def may_ask(self) -> bool:
        """Whether the donor can take one more request for state or payloads now."""
        is_able = self.status is not None and not self.is_lost and not self._blocked_at
        is_able = is_able and time.monotonic() >= self._pause_until
        return is_able and self.num_open < MAX_OPEN

    @property
    def load(self) -> tuple[int, int, float]:
        """A key to sort donors by: the least busy one first, then the one asked longest ago.

        With a limited bandwidth mostly one request is open at a time, so the time decides.
        """
        num_newcomers = 0 if self.status is None else self.status.num_newcomers
        return self.num_open, num_newcomers, self._last_asked

    def has_open(self, kind: Kind) -> bool:
        return any(asked.kind == kind for asked in self._open.values())

    def ask(
        self, wanted: Wanted, num_bytes: int, take: Callable[[Donor, Answer | None], None]
    ) -> bool:
        """Send a request; return whether it was sent.

        No request is sent while the link has no connection, or shortly after an answer without a
        body.

        Args:
            wanted: The request.
            num_bytes: Bytes of the expected body; 0 for a status.
            take: See ``Asked``.
        """
        now = time.monotonic()
        if now < self._pause_until:
            return False
        content, most = wanted.to_bytes(), max(num_bytes, MOST_TEXT)
        number = self._link.request(self.way.words, self._service, content, most)
        if number == 0:
            self._blocked_at = self._blocked_at or now
            return False
        self._blocked_at = 0.0
        if not self._open:
            self._heard_at = now
        self._open[number] = Asked(wanted.kind, num_bytes, take)
        if num_bytes:
            self._last_asked = now
        return True

    def take(self, number: int, head: bytes, body: Tensor) -> bool:
        """Handle the answer to request ``number``; return False if this donor has no such request.

        The head is empty if the connection ended before the whole answer had arrived, nobody serves
        there, the body is longer than accepted, or the donor had no memory for the answer.
        """
        asked = self._open.pop(number, None)
        if asked is None:
            return False
        self.received_bytes += body.numel() if asked.num_bytes else 0
        self._heard_at = time.monotonic()
        answer = None
        if head:
            try:
                answer = Answer.read(head, body)
            except ValueError:
                self.lose(is_wrong=True)
        if not has_body(answer):
            self._pause_until = self._heard_at + _PAUSE_S
        asked.take(self, answer)
        return True

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has come from the donor for too long."""
        now = time.monotonic()
        if self._blocked_at and self.status is not None and now - self._blocked_at > _STALL_S:
            return True
        if not self._open or now - self._heard_at <= _STALL_S:
            return False
        # On a slow link a long answer takes its time: the donor is alive while bytes arrive.
        arrived = self._link.arrived(list(self._open))
        if arrived != self._num_arrived:
            self._num_arrived, self._heard_at = arrived, now
        return now - self._heard_at > _STALL_S

    def lose(self, *, is_wrong: bool = False) -> None:
        """Ask this donor nothing more, and end its open requests without answer; idempotent."""
        self.is_lost, self.is_wrong = True, self.is_wrong or is_wrong
        asked, self._open = self._open, {}
        self._link.forget(list(asked))
        for one in asked.values():
            one.take(self, None)
