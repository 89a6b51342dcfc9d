"""ZeroMQ sockets: heartbeats that end dead connections, and messages received without waiting."""

from __future__ import annotations

import zmq

# Plain integers: operations on zmq's enum flags cost more than a small message.
NOBLOCK, POLLIN, POLLOUT = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLOUT)


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
