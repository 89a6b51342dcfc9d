"""What the commands that host a server share: serve until a signal, and a relay beside."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from .exits import fail

if TYPE_CHECKING:
    from ...base.service.relay import Relay

RelayPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Run a relay for replicas too, at this port of --host."),
]


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


@contextlib.contextmanager
def relay_beside(host: str, port: int | None) -> Iterator[None]:
    """Run a relay in a thread while the block runs; none if ``port`` is None."""
    if port is None:
        yield
        return
    server = opened_relay(host, port)
    thread = threading.Thread(target=server.serve, name="relay", daemon=True)
    thread.start()
    print(f"diloco-comm: a relay listens at {server.address}", file=sys.stderr)
    try:
        yield
    finally:
        server.stop_soon()
        thread.join()


def opened_relay(host: str, port: int, connections: int = 1024) -> Relay:
    """Listen at once, or end the command with a sentence."""
    from ...base.service.relay import Relay

    try:
        return Relay(host, port, most=connections)
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error.strerror or error}")
