"""Helpers of the commands that host a server: serving until a signal, with a relay and a page."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from diloco_comm.base.interrupts import Stopped
from diloco_comm.base.service.addresses import name_of_place, parse_address

from .commands import fail, in_sentences, note
from .console import announcer

if TYPE_CHECKING:
    from diloco_comm.base.service.relay import Relay
    from diloco_comm.monitor.http_server import Place
    from diloco_comm.monitor.status import Snapshot, Source

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
Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="[HOST:]PORT",
        help="Serve a page, its JSON and metrics there too; the host is 127.0.0.1 unless given.",
    ),
]
HttpToken = Annotated[
    Path | None,
    typer.Option(help="File with the page's password, which another host than loopback needs."),
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
    from diloco_comm import _C

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
    from diloco_comm.base.log import DamagedLog
    from diloco_comm.elastic.registry.server import RegistryServer

    with in_sentences(context.params, (OSError, DamagedLog, RuntimeError)):
        place = place_of_page(context)
        server = RegistryServer(listen, **options)
        if options.get("journal", "") is None:
            note("without --journal a restart forgets all runs")
        with relay_beside(listen, relay_port) as relay:
            source = cast("Source", server.host)
            with page_beside(place, lambda: source_snapshot(source, relay)) as page:
                serve_until_signal(server, announcer(as_json, page))


def place_of_page(context: typer.Context) -> Place | None:
    """Return where ``--http`` lets the page be served; None without the option.

    Raises:
        ValueError: If ``--http`` or ``--http-token`` is wrong.
    """
    from diloco_comm.monitor.http_server import Place

    http, token = context.params["http"], context.params["http_token"]
    if http is None and token is not None:
        raise ValueError("http_token= is the password of the page, which needs http=")
    return None if http is None else Place.of(http, token)


@contextlib.contextmanager
def page_beside(place: Place | None, read: Callable[[], Snapshot]) -> Iterator[str | None]:
    """Serve the page in a thread while the block runs, and yield its address; none without a place.

    Args:
        read: Called by the thread of the page.

    Raises:
        OSError: If the page cannot be served there.
    """
    if place is None:
        yield None
        return
    from diloco_comm.monitor.http_server import HttpServer, Monitor

    try:
        server = HttpServer(place, Monitor(read))
    except OSError as error:
        where = f"{place.host} port {place.port}"
        raise OSError(f"cannot serve --http at {where}: {error.strerror or error}") from None
    note(f"the page is at {server.address}")
    with server.running():
        yield server.address


def source_snapshot(source: Source, relay: Relay | None) -> Snapshot:
    """Return the last messages that a store or registry holds, and the numbers of both hosts."""
    from diloco_comm.monitor.status import Snapshot

    facts = {f"host_{name}": value for name, value in source.facts().items()}
    facts |= {} if relay is None else relay_facts(relay)
    return Snapshot(source.posted(), source.beats(), source.records(), facts)


def relay_facts(relay: Relay) -> Mapping[str, int]:
    """Return the numbers of a relay by the names of their metrics."""
    return {
        "relay_waiting": relay.num_waiting,
        "relay_pairs": relay.num_pairs,
        "relay_copied_bytes": relay.num_copied_bytes,
    }


@contextlib.contextmanager
def relay_beside(listen: str, port: int | None) -> Iterator[Relay | None]:
    """Run a relay in a thread while the block runs; none if ``port`` is None.

    Args:
        listen: The ``host:port`` of the other server, whose host the relay shares.
    """
    if port is None:
        yield None
        return
    from diloco_comm import _C

    # The relay takes a sixteenth of the file descriptors; the other server keeps the rest.
    host, _ = place_of(listen)
    server = opened_relay(name_of_place(host, port), _C.raise_descriptors() // 16)
    thread = threading.Thread(target=server.serve, name="relay", daemon=True)
    thread.start()
    print(f"diloco-comm: a relay listens at {server.address}", file=sys.stderr)
    try:
        yield server
    finally:
        server.stop_soon()
        thread.join()


def place_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``--listen``, or end the command with a sentence."""
    with in_sentences():
        return parse_address("--listen", listen, listens=True)


def opened_relay(listen: str, connections: int) -> Relay:
    """Listen at once, or end the command with a sentence."""
    from diloco_comm import _C
    from diloco_comm.base.service.relay import Relay

    place, descriptors = place_of(listen), _C.raise_descriptors()
    # A relayed pair takes two descriptors; strangers and the process itself need some, too.
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
