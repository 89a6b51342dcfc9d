"""The socket that a server listens on, with CURVE keys or without."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from ...base.service.keys import Guard, protect_server
from ...base.service.sockets import beat, send_to_peer
from ..protocol.connections import Connections
from ..protocol.messages import MAX_BODY, MAX_JSON
from ..protocol.window import WINDOW_BYTES, WINDOW_FRAGMENTS

# Bytes of bodies that wait for one peer at most, whether or not the peer reads. A worker asks for a
# window of them.
_MOST_WAITING_BYTES = 4 * WINDOW_BYTES


class Listener:
    """A ROUTER socket that listens.

    Args:
        address: ``tcp://host:port``; port 0 picks a free one.
        keys: Folder of CURVE keys, or None to accept any worker.
        lost_after: Seconds of a peer's silence after which its connection ends.

    Attributes:
        guard: Checks the keys; None without keys.

    Raises:
        OSError: If the socket cannot listen on the address.
        ValueError: If a key is missing or invalid.
    """

    def __init__(self, address: str, keys: str | Path | None, lost_after: float) -> None:
        # The bodies that may still wait for each peer: when ZeroMQ is done with one, and its bytes.
        self._waiting: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._context = zmq.Context()
        self.guard: Guard | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # A message for each fragment of a window, and as many again, because ZeroMQ notes the
        # messages that have left by halves of the limit.
        self.socket.sndhwm = 3 * WINDOW_FRAGMENTS
        self.socket.rcvhwm = 4 * WINDOW_BYTES // MAX_BODY
        beat(self.socket, lost_after)
        self.socket.handshake_ivl = 5_000
        self.socket.setsockopt(zmq.BACKLOG, 1024)
        self.connections = Connections(self.socket)
        try:
            if keys is not None:
                self.guard = protect_server(self._context, self.socket, Path(keys))
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error}") from None
        except ValueError:
            self.close()
            raise

    def send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message to a peer, without waiting and without copying a body.

        Raises:
            zmq.Again: If too many messages or bytes wait for the peer.
            zmq.ZMQError: With ``EHOSTUNREACH``, if the peer is gone.
        """
        if len(frames) == 1:
            send_to_peer(self.socket, [peer, *frames])
            return
        waiting = self._waiting_for(peer)
        if sum(num_bytes for _, num_bytes in waiting) >= _MOST_WAITING_BYTES:
            raise zmq.Again
        tracker = send_to_peer(self.socket, [peer, *frames], copy=False)
        assert tracker is not None
        if not tracker.done:
            waiting.append((tracker, sum(len(frame) for frame in frames)))

    def _waiting_for(self, peer: bytes) -> deque[tuple[zmq.MessageTracker, int]]:
        waiting = self._waiting.get(peer)
        if waiting is None:
            # Forget the peers for which nothing waits: some of them are gone.
            self._waiting = {
                other: bodies
                for other, bodies in self._waiting.items()
                if bodies and not bodies[-1][0].done
            }
            waiting = self._waiting[peer] = deque()
        while waiting and waiting[0][0].done:
            waiting.popleft()
        return waiting

    def close(self) -> None:
        """Close the socket and all connections."""
        self.connections.close()
        self.socket.close(0)
        if self.guard is not None:
            self.guard.stop()
        self._context.term()
