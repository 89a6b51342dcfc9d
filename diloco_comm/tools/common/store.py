"""Host the store at which replicas that are separate jobs find each other."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from typing import NoReturn

from ...base.interrupts import Stopped
from ...base.service.keys import LinkKeys
from ...base.store_host import open_store
from .hosting import raise_descriptors


def host_store(
    host: str, port: int, announce: Callable[[str], None], keys: LinkKeys | None = None
) -> NoReturn:
    """Host a store until SIGINT or SIGTERM.

    Args:
        announce: Called with the address when the store listens.

    Raises:
        Stopped: After the signal.
    """
    raise_descriptors()
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.put(number))
    # The store lives as long as this function.
    hosted = open_store(host, port, keys)
    announce(hosted.address)
    raise Stopped(received.get())
