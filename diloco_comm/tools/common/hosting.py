"""What the commands that host a server share: serve until a signal, make keys."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .exits import fail, misuse
from .outputs import check_folder


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


def write_keys(folder: Path, workers: list[str] | None, *, as_json: bool) -> None:
    """Make CURVE keys for a server and its clients, and print the files; end with a sentence."""
    from ...base.service.curve import make_keys

    try:
        check_folder("FOLDER", folder)
        paths = [str(path) for path in make_keys(folder, workers or None)]
    except ValueError as error:
        misuse(str(error))
    except OSError as error:
        fail(f"cannot write the keys into {folder}: {error.strerror or error}")
    print(json.dumps({"schema": 1, "keys": paths}) if as_json else "\n".join(paths))
