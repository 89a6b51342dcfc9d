"""Which connections of a server are alive, by ZeroMQ's heartbeats.

ZeroMQ's own thread sends and answers heartbeats. So a worker whose training thread is busy for
hours counts as alive. A worker that was killed or stopped, or that lost power or network, does not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

from ...base.checks import number
from ...base.service.sockets import NOBLOCK

_MIN_S, _MAX_S = 0.1, 86400
_PLACE = "inproc://connections"
_EVENT = struct.Struct("=HI")
_ACCEPTED, _ENDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


def check_lost_after(value: float) -> float:
    """Return the seconds of silence after which a peer counts as gone.

    Raises:
        ValueError: If the value is too small for heartbeats, or too large.
        TypeError: If the value is not a number.
    """
    seconds = number("lost_after", value)
    if not _MIN_S <= seconds <= _MAX_S:
        raise ValueError(f"lost_after must be {_MIN_S} to {_MAX_S} seconds, got {value!r}")
    return seconds


class Connections:
    """Watch the connections of a socket that will listen.

    The number of a connection is its file descriptor, so a later connection may reuse the number.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        socket.monitor(_PLACE, _ACCEPTED | _ENDED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.linger = 0
        # No limit: at a full queue ZeroMQ's thread would wait, and serve no connection.
        self._events.rcvhwm = 0
        self._events.connect(_PLACE)
        self._alive: set[int] = set()

    def ended(self) -> Iterator[int]:
        """Yield each connection that ended since the last call.

        The end of a connection is reported before the first message of a later connection of the
        same number, so a number never stands for two connections at a time.
        """
        while (event := self._next()) is not None:
            kind, number = event
            if kind == _ACCEPTED:
                self._alive.add(number)
            else:
                self._alive.discard(number)
                yield number

    def _next(self) -> tuple[int, int] | None:
        try:
            event, _ = self._events.recv_multipart(NOBLOCK)
        except zmq.Again:
            return None
        kind, number = _EVENT.unpack(event)
        return kind, number

    def is_alive(self, number: int) -> bool:
        """Whether the connection had not ended when ``ended`` was last called."""
        return number in self._alive

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close()


def connection_of(frame: zmq.Frame) -> int:
    """Return the number of a frame's connection; -1 if the connection has already ended."""
    try:
        return int(frame.get(int(zmq.SRCFD)))
    except zmq.ZMQError:
        return -1
