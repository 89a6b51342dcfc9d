"""A process that has no descriptor left, because strangers hold connections that say nothing."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def silent_strangers(address: str, *, free: int = 12, count: int = 100) -> Iterator[None]:
    """Let strangers hold connections to a server of this process, which so has no descriptor left.

    Args:
        address: ``tcp://host:port``.
        free: Descriptors that this process has when the strangers come.
        count: Connections; ZeroMQ ends those that it has accepted after five seconds of silence.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        # The numbers below are taken: an open file makes each gap a used number.
        highest, number = max(map(int, os.listdir("/proc/self/fd"))), -1
        while number < highest:
            number = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1 + free, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for each in sockets:
            each.settimeout(5.0)
            each.connect((host, int(port)))
        yield
