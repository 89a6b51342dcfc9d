"""ZeroMQ sockets: heartbeats that end dead connections, and messages without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

# Plain integers: operations on zmq's enum flags cost more time than a small message.
NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
EVENTS = int(zmq.EVENTS)


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
