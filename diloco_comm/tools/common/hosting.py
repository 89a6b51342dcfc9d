"""What the commands that host a server share: serve until a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol


class Server(Protocol):
    """A server that listens already."""

    address: str

    def serve(self) -> None: ...

    def stop_soon(self) -> None: ...


def serve_until_signal(server: Server, announce: Callable[[str], None]) -> str:
    """Serve until SIGINT or SIGTERM, and return the name of the signal.

    Args:
        announce: Called with the server's address.
    """
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        server.stop_soon()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    announce(server.address)
    server.serve()
    return signal.Signals(received[0]).name if received else "stop"
