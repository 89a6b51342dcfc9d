"""Which silent processes have ended: further signs beside beats, which may be wrong.

A sign lets the others go on without a process after a second without its beats. Without a sign they
wait for the whole ``suspect_after``.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

# Seconds for which a host may take to answer; one that is cut off never does.
_ANSWER_S = 2.0


class Detector(Protocol):
    """What the driver asks at each of its polls, on its thread: no method may wait for anything."""

    def begin(self, nonce: str) -> None:
        """Say to others, from now on, that the process of this name lives."""
        ...

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which of the silent processes have ended.

        Args:
            silent: The address of the store that each of them hosts, ``tcp://host:port``, by nonce.
        """
        ...

    def close(self) -> None:
        """End all that this detector does; idempotent."""
        ...


class Refusals:
    """Connection attempts to the stores that silent processes host; nothing here waits.

    Every process listens from its start to its end, and its kernel takes connections also while the
    process is stopped or busy. So a host that refuses a connection says that the process has ended.
    A host that does not answer says nothing, and a host that accepts says nothing either: another
    program may listen there by now.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, tuple[socket.socket, float]] = {}

    def begin(self, nonce: str) -> None:
        """Do nothing: this process listens already."""

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which processes are refused; begin or go on asking about each of the others."""
        for nonce in self._attempts.keys() - silent.keys():
            self._end(nonce)
        return tuple(nonce for nonce, address in silent.items() if self._ask(nonce, address))

    def close(self) -> None:
        """End all attempts; idempotent."""
        for nonce in list(self._attempts):
            self._end(nonce)

    def _ask(self, nonce: str, address: str) -> bool:
        if nonce not in self._attempts:
            attempt = _begin(address)
            if attempt is None:
                return False
            self._attempts[nonce] = attempt, time.monotonic()
        attempt, began = self._attempts[nonce]
        poll = select.poll()
        poll.register(attempt, select.POLLOUT)
        if not poll.poll(0):
            if time.monotonic() - began > _ANSWER_S:
                self._end(nonce)
            return False
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._end(nonce)
        return code == errno.ECONNREFUSED

    def _end(self, nonce: str) -> None:
        attempt, _ = self._attempts.pop(nonce)
        attempt.close()


def _begin(address: str) -> socket.socket | None:
    """Begin to connect; None where that cannot be tried."""
    url = urlsplit(address)
    try:
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
