"""What the commands that host a server share: serve until a signal, and a relay beside."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ...base.interrupts import Stopped
from ...base.service.addresses import name_of_place, parse_address
from .exits import fail, in_options, misuse, note, sentence_of
from .printing import announcer

if TYPE_CHECKING:
    from ...base.service.relay import Relay

# The options that these commands share.
Listen = Annotated[str, typer.Option(help="HOST:PORT to listen at; port 0 picks a free one.")]
AddressAsJson = Annotated[bool, typer.Option("--json", help="Print the address in JSON.")]
StoreKeys = Annotated[
    Path | None,
    typer.Option(help="Folder of keys, or a file NAME.key_secret: encrypt, and ask for a key."),
]
RelayPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Run a relay for replicas too, at this port of --listen's host."
    ),
]


class Server(Protocol):
    """A server that listens already."""

    address: str

    def serve(self) -> None: ...

    def stop_soon(self) -> None: ...


@contextlib.contextmanager
def closed_by_signal() -> Iterator[None]:
    """Let SIGINT or SIGTERM end the command with status 0, which is how a server ends."""
    try:
        yield
    except Stopped as stopped:
        print(f"closed by {stopped.name}", file=sys.stderr)


def serve_until_signal(server: Server, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        announce: Called with the server's address.

    Raises:
        Stopped: After the signal, when the server has ended.
    """
    from ... import _C

    _C.raise_descriptors()
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        server.stop_soon()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    announce(server.address)
    server.serve()
    if received:
        raise Stopped(received[0])


@closed_by_signal()
def host_store(
    context: typer.Context, listen: str, relay_port: int | None, *, as_json: bool, **options: Any
) -> None:
    """Host a registry or a store until a signal, and end with a sentence if that fails.

    Args:
        options: Arguments of ``RegistryServer``.
    """
    from ...base.log import DamagedLog
    from ...elastic.registry.server import RegistryServer

    try:
        server = RegistryServer(listen, **options)
        if options.get("journal", "") is None:
            note("without --journal a restart forgets all runs")
        with relay_beside(listen, relay_port):
            serve_until_signal(server, announcer(as_json))
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    except (OSError, DamagedLog, RuntimeError) as error:
        fail(sentence_of(error))


@contextlib.contextmanager
def relay_beside(listen: str, port: int | None) -> Iterator[None]:
    """Run a relay in a thread while the block runs; none if ``port`` is None.

    Args:
        listen: The ``host:port`` of the other server, whose host the relay shares.
    """
    if port is None:
        yield
        return
    from ... import _C

    # The other server keeps most of the descriptors.
    host, _ = place_of(listen)
    server = opened_relay(name_of_place(host, port), _C.raise_descriptors() // 16)
    thread = threading.Thread(target=server.serve, name="relay", daemon=True)
    thread.start()
    print(f"diloco-comm: a relay listens at {server.address}", file=sys.stderr)
    try:
        yield
    finally:
        server.stop_soon()
        thread.join()


def place_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``--listen``, or end the command with a sentence."""
    try:
        return parse_address("--listen", listen, listens=True)
    except ValueError as error:
        misuse(str(error))


def opened_relay(listen: str, connections: int) -> Relay:
    """Listen at once, or end the command with a sentence."""
    from ... import _C
    from ...base.service.relay import Relay

    place, descriptors = place_of(listen), _C.raise_descriptors()
    # A pair has two connections, and strangers and the process itself need descriptors, too.
    most = min(connections, descriptors // 4)
    if most < connections:
        print(
            f"diloco-comm: the relay takes {most} connections, because this process may have "
            f"{descriptors} open files",
            file=sys.stderr,
        )
    try:
        return Relay(*place, most=most)
    except OSError as error:
        fail(f"cannot listen on {listen}: {error.strerror or error}")
