"""The socket that a server listens on, with CURVE keys or without."""

from __future__ import annotations

from pathlib import Path

import zmq

from ... import _C
from ...base.service.keys import Guard, protect_server
from ...base.service.sockets import beat
from ..protocol.connections import Connections
from ..protocol.messages import MAX_BODY, MAX_JSON
from ..protocol.window import WINDOW_BYTES, WINDOW_FRAGMENTS


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
        _C.raise_descriptors()
        self._context = zmq.Context()
        self.guard: Guard | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # A window has a message for each of its fragments, and a few more for large ones. The rest
        # is room: ZeroMQ notes the messages that have left by halves of the limit. More room would
        # let a peer that does not read hold more memory.
        self.socket.sndhwm = 4 * WINDOW_FRAGMENTS
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

    def close(self) -> None:
        """Close the socket and all connections."""
        self.connections.close()
        self.socket.close(0)
        if self.guard is not None:
            self.guard.stop()
        self._context.term()
