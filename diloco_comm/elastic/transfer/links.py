"""A connection to one donor, and the requests that are open there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from ...base.service.sockets import NOBLOCK, receive
from .answers import Status
from .keys import KeyPair, Place
from .messages import MAX_ANSWER, Kind, Message, ProtocolError, pack, parse

# Requests for bytes that are open at one donor at a time.
MAX_OPEN = 2
# Seconds without an answer after which a donor is given up, and bytes that take a second more.
_STALL_S, _SLOWEST_BYTES_PER_S = 10.0, 400e3
# Seconds after which a connection that is not there is made anew: ZeroMQ does not connect again to
# a donor that refused this process's key, before the donor had heard of the key.
_CONNECT_S = 1.5


@dataclass(frozen=True)
class Asked:
    """An open request.

    Attributes:
        num_bytes: Of the answer's body.
        take: Called with the answer; with None if there is none.
    """

    kind: Kind
    at: float
    num_bytes: int
    take: Callable[[Link, Message | None], None]


class Link:
    """One donor, as a newcomer sees the donor.

    Attributes:
        status: Where the donor was last; None before the first answer.
        is_lost: The donor did not answer in time, or sent wrong bytes: nothing more is asked here.
        received_bytes: Of bodies.
    """

    def __init__(self, context: zmq.Context, name: str, place: Place, keys: KeyPair) -> None:
        self.name, self.place = name, place
        self.status: Status | None = None
        self.is_lost = False
        self.received_bytes = 0
        self._open: dict[int, Asked] = {}
        self._numbers = itertools.count(1)
        # Before the connection is there, the donor may not have heard of this process's key.
        self._since = time.monotonic()
        # When bytes were asked for last.
        self._last_asked = 0.0
        self._blocked_at = 0.0
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_ANSWER
        self.socket.immediate = True
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 50, 500
        self.socket.ipv6 = "[" in place.address
        keys.protect_client(self.socket, place.key)
        self.socket.connect(place.address)

    @property
    def num_open(self) -> int:
        """Requests for bytes that have no answer yet."""
        return sum(asked.num_bytes > 0 for asked in self._open.values())

    @property
    def may_ask(self) -> bool:
        """Whether one more request for bytes makes sense."""
        is_able = self.status is not None and not self.is_lost and not self._blocked_at
        return is_able and self.num_open < MAX_OPEN

    @property
    def load(self) -> tuple[int, int, float]:
        """How busy the donor is; the least is asked first.

        With a limited bandwidth one request is open at a time, so that all donors are equally busy.
        Then the donor is next that was not asked for the longest time.
        """
        num_newcomers = 0 if self.status is None else self.status.num_newcomers
        return self.num_open, num_newcomers, self._last_asked

    def has_open(self, kind: Kind) -> bool:
        return any(asked.kind == kind for asked in self._open.values())

    def ask(
        self,
        kind: Kind,
        numbers: Mapping[str, int],
        num_bytes: int,
        take: Callable[[Link, Message | None], None],
    ) -> bool:
        """Send a request; return False if there is no connection."""
        number = next(self._numbers)
        try:
            self.socket.send_multipart(pack(Message(kind, number, numbers)), NOBLOCK)
        except zmq.Again:
            self._blocked_at = self._blocked_at or time.monotonic()
            return False
        self._blocked_at = 0.0
        self._open[number] = Asked(kind, time.monotonic(), num_bytes, take)
        if num_bytes:
            self._last_asked = self._open[number].at
        return True

    def receive(self) -> None:
        """Handle all answers that have come."""
        while not self.is_lost and (frames := receive(self.socket)) is not None:
            try:
                answer = parse([frame.buffer for frame in frames])
            except ProtocolError:
                self.lose()
                return
            asked = self._open.pop(answer.number, None)
            if asked is not None:
                self.received_bytes += len(answer.body)
                asked.take(self, answer)

    @property
    def is_stalled(self) -> bool:
        """Whether the donor has not answered for too long."""
        now = time.monotonic()
        if self.status is None and not self._open:
            return now - self._since > _CONNECT_S
        if self._blocked_at and now - self._blocked_at > _STALL_S:
            return True
        waiting = sum(asked.num_bytes for asked in self._open.values())
        limit = _STALL_S + waiting / _SLOWEST_BYTES_PER_S
        return any(now - asked.at > limit for asked in self._open.values())

    def lose(self) -> None:
        """Ask nothing more here, and let others be asked for what is open; idempotent."""
        self.is_lost = True
        asked, self._open = list(self._open.values()), {}
        for one in asked:
            one.take(self, None)
        self.socket.close()
