"""Which silent processes have ended: further signs beside beats, which may be wrong.

A sign lets the others go on without a process after a second without its beats. Without a sign they
wait for the whole ``suspect_after``.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from . import core
from .beats import FINISHED, GONE, Beat

logger = logging.getLogger(__name__)

# Seconds for which a host may take to answer; one that is cut off never does.
_ANSWER_S = 2.0
# Seconds between the beginnings of two connections to a silent process, and to one that lives.
AGAIN_S, _ACQUAINT_S = 0.3, 5.0
# Refusals in a row that are a sign.
_ENOUGH = 2


class Detector(Protocol):
    """What the driver asks at each of its polls, on its thread: no method may wait for anything.

    An error of a method is logged once, and is no sign.
    """

    def begin(self, nonce: str) -> None:
        """Say to others, from now on, that the process of this name lives."""
        ...

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which of the silent processes have ended; a later look may take that back.

        Args:
            silent: The address of each one's store, ``tcp://host:port``, by nonce: of its own
                process, unless the members share a store.
        """
        ...

    def close(self) -> None:
        """End all that this detector does; idempotent."""
        ...


class Guarded:
    """A detector of the user: its errors are logged once, and say nothing about other processes."""

    def __init__(self, detector: Detector) -> None:
        self._detector, self._has_failed = detector, False

    def begin(self, nonce: str) -> None:
        """Begin, if the detector can."""
        try:
            self._detector.begin(nonce)
        except Exception as error:
            self._failed("begin", error)

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which of the silent processes have ended, as far as the detector can say."""
        try:
            return tuple(nonce for nonce in self._detector.look(silent) if nonce in silent)
        except Exception as error:
            self._failed("look", error)
            return ()

    def close(self) -> None:
        """Close the detector, if it can be closed."""
        try:
            self._detector.close()
        except Exception as error:
            self._failed("close", error)

    def _failed(self, method: str, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            name = type(self._detector).__name__
            logger.error(
                "%s of the detector %s failed, which is no sign", method, name, exc_info=error
            )


@dataclass
class _Asked:
    """What is known of the host of one process.

    Attributes:
        attempt: A connection that is under way.
        began: When the last one was begun; 0: there was none.
        has_accepted: The host has taken a connection.
        num_refused: Refusals since then, or since the process is silent.
    """

    address: str
    attempt: socket.socket | None = None
    began: float = 0.0
    has_accepted: bool = False
    num_refused: int = 0

    def end(self) -> None:
        """End the attempt that is under way."""
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None


class Refusals:
    """Connections to the stores that other processes host; nothing here waits.

    Every process listens from its start to its end, and its kernel takes connections also while the
    process is stopped or busy. So a host that has taken a connection, and refuses two in a row
    later, says that the process has ended. A host that has refused from the start may stand behind
    a proxy or a filter, and says nothing. Nor does a host that does not answer, or that accepts:
    another program may listen there by now.
    """

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    @property
    def is_in_doubt(self) -> bool:
        """Whether a process was refused, and the next attempt will show if that is a sign."""
        return any(0 < one.num_refused < _ENOUGH for one in self._asked.values())

    def look(self, living: Mapping[str, str], silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which silent processes are refused; begin or go on asking about each of them.

        Args:
            living: The address of each process that beats, by nonce: each is connected to once.
            silent: The same of those that do not.
        """
        for nonce in self._asked.keys() - living.keys() - silent.keys():
            self._asked.pop(nonce).end()
        for nonce, address in living.items():
            one = self._of(nonce, address)
            one.num_refused = 0
            if not one.has_accepted:
                self._ask(one, _ACQUAINT_S)
                one.num_refused = 0
        return tuple(nonce for nonce, address in silent.items() if self._is_refused(nonce, address))

    def close(self) -> None:
        """End all attempts; idempotent."""
        for one in self._asked.values():
            one.end()
        self._asked.clear()

    def _of(self, nonce: str, address: str) -> _Asked:
        known = self._asked.get(nonce)
        if known is None or known.address != address:
            if known is not None:
                known.end()
            known = self._asked[nonce] = _Asked(address)
        return known

    def _is_refused(self, nonce: str, address: str) -> bool:
        one = self._of(nonce, address)
        if one.has_accepted:
            self._ask(one, AGAIN_S)
        return one.num_refused >= _ENOUGH

    def _ask(self, one: _Asked, pause_s: float) -> None:
        """Look for the answer of a host, and begin another attempt after a pause."""
        now = time.monotonic()
        if one.attempt is None:
            if one.began and now - one.began < pause_s:
                return
            one.began = now
            one.attempt = _begin(one.address)
            if one.attempt is None:
                return
        poll = select.poll()
        poll.register(one.attempt, select.POLLOUT)
        if poll.poll(0):
            code = one.attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            one.has_accepted |= code == 0
            one.num_refused = one.num_refused + 1 if code == errno.ECONNREFUSED else 0
            one.end()
        elif now - one.began > _ANSWER_S:
            one.num_refused = 0
            one.end()


class Signs:
    """Signs that silent members have ended: refused connections, and the user's detector.

    A sign may be wrong.

    Args:
        detector: The user's; None if the user gave none.
        asks_hosts: The address of a member leads to the process of that member.
    """

    def __init__(self, detector: Detector | None, asks_hosts: bool = True) -> None:
        self._refusals, self._asks_hosts = Refusals(), asks_hosts
        self._detector = None if detector is None else Guarded(detector)

    @property
    def is_in_doubt(self) -> bool:
        """Whether to look again soon, see ``Refusals``."""
        return self._refusals.is_in_doubt

    def begin(self, nonce: str) -> None:
        """Let the detector of the user begin."""
        if self._detector is not None:
            self._detector.begin(nonce)

    def ended_among(self, state: core.State, beats: Sequence[Beat]) -> tuple[str, ...]:
        """Return the silent members, of the recorded view and its base, that seem to have ended."""
        view = state.recorded
        members = set() if view is None else {*view.keys, *view.base_members}
        members.discard(state.key)
        silent = {peer.key for peer in state.peers if peer.silent_polls}
        addresses: tuple[dict[str, str], dict[str, str]] = {}, {}
        for beat in beats:
            one = beat.member
            if one.key in members and beat.stage not in (GONE, FINISHED):
                addresses[one.key in silent][one.nonce] = one.address
        ended = self._refusals.look(*addresses) if self._asks_hosts else ()
        return ended if self._detector is None else (*ended, *self._detector.look(addresses[1]))

    def close(self) -> None:
        """End all that was begun; idempotent."""
        self._refusals.close()
        if self._detector is not None:
            self._detector.close()


def _begin(address: str) -> socket.socket | None:
    """Begin to connect; None where that cannot be tried."""
    try:
        url = urlsplit(address)
        # The name of a host is not looked up: that may take long.
        family, kind, _, _, place = socket.getaddrinfo(
            url.hostname, url.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        attempt = socket.socket(family, kind)
    except (OSError, ValueError):
        return None
    attempt.setblocking(False)
    if attempt.connect_ex(place) not in (0, errno.EINPROGRESS):
        attempt.close()
        return None
    return attempt
