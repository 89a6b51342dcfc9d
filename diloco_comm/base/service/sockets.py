"""ZeroMQ sockets: heartbeats, messages without waiting, and descriptors while all are in use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import zmq

# Plain integers: operations on zmq's enum flags cost more than a small message.
NOBLOCK, POLLIN, POLLOUT = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLOUT)
EVENTS = int(zmq.EVENTS)
_SPARE = 8


def beat(socket: zmq.Socket, lost_after: float) -> None:
    """End each connection of a socket whose peer has been silent for ``lost_after`` seconds.

    Call this function before the socket is bound or connected.
    """
    milliseconds = round(1000 * lost_after)
    # The silence may begin right after a heartbeat was answered.
    socket.heartbeat_ivl = milliseconds // 4
    socket.heartbeat_timeout = milliseconds - milliseconds // 4


def receive(socket: zmq.Socket, wait_ms: int = 0) -> list[zmq.Frame] | None:
    """Return the frames of the next message, or None if none comes in time."""
    if wait_ms and not zmq.zmq_poll([(socket, POLLIN)], wait_ms):
        return None
    try:
        return socket.recv_multipart(NOBLOCK, copy=False)
    except zmq.Again:
        return None


def send_to_peer(
    socket: zmq.Socket, frames: Sequence[bytes | memoryview | zmq.Frame], *, copy: bool = True
) -> None:
    """Send a message to one peer of a ROUTER socket, without waiting.

    If ``sndhwm`` messages wait for the peer, ZeroMQ refuses the message, or drops the message in
    silence where the socket has no ``router_mandatory``. ZeroMQ's own thread notes by halves of the
    limit which messages have left, and ``send`` reads the notes about once in a millisecond. With a
    limit of 8, the ninth of nine prompt answers could count as the ninth that waits. A look at the
    socket's events reads the notes first.

    Args:
        frames: Name of the peer, then the frames of the message.

    Raises:
        zmq.Again: If too many messages wait for the peer; only with ``router_mandatory``.
        zmq.ZMQError: With ``EHOSTUNREACH``, if the peer is gone; only with ``router_mandatory``.
    """
    socket.getsockopt(EVENTS)
    socket.send_multipart(frames, NOBLOCK, copy=copy)


class SpareDescriptors:
    """Descriptors that a server keeps back: ZeroMQ accepts connections until none is left.

    Within a ``with`` block these descriptors are free. ZeroMQ's own thread may take some of them
    meanwhile, which are missing until a later block has got them back.
    """

    def __init__(self) -> None:
        self._held: list[int] = []
        self._fill()

    def _fill(self) -> None:
        with suppress(OSError):
            while len(self._held) < _SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Give all back; idempotent."""
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> None:
        self.close()

    def __exit__(self, *exception: object) -> None:
        self._fill()
