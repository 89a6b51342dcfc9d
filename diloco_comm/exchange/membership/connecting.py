"""Groups of gloo between the members of an epoch."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ... import _C
from ...base.background import batch_threads
from ...base.errors import SyncError

Groups = list[dist.ProcessGroupGloo] | list[_C.LinkGroup]

# Seconds between two probes of an idle connection, and the most probes without an answer that Linux
# takes. The kernel then ends a connection after an hour; a dead member is noticed long before.
_PROBE_S, _PROBES = 30, 127


def connect(
    store: dist.Store, rank: int, size: int, timeout: float, name: str
) -> dist.ProcessGroupGloo:
    """Connect a gloo group.

    gloo binds to GLOO_SOCKET_IFNAME, else to the host's address, else to loopback.

    Args:
        store: Under a prefix of this group.
        timeout: Seconds, to connect and of each collective.
        name: For the error.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    started = time.monotonic()
    try:
        with batch_threads(), _kept_alive():
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise SyncError(
            f"{name} could not be connected: {error}",
            stage="connect",
            seconds=time.monotonic() - started,
        ) from error


@contextlib.contextmanager
def _kept_alive() -> Iterator[None]:
    """Let the kernel probe the TCP connections that gloo opens in this block (Linux).

    Between rounds nothing travels on a connection of gloo. A NAT or a firewall forgets an idle
    connection, and both of its ends would then wait for the whole timeout.

    gloo hands no socket out, so the sockets that are new in this process are probed. A connection
    that another thread opens meanwhile may be among them; probes do it no harm. Under
    TORCH_GLOO_LAZY_INIT gloo connects after this block, and its connections are not probed.
    """
    before = _socket_descriptors()
    yield
    for descriptor, _ in _socket_descriptors() - before:
        # Another thread may have closed the descriptor.
        with contextlib.suppress(OSError):
            _probe(descriptor)


def _socket_descriptors() -> set[tuple[int, str]]:
    """Return the sockets of this process, each with its inode; none on a system without /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # The descriptor of the listing itself is closed by now.
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found


def _probe(descriptor: int) -> None:
    """Set the keepalive options of a connected TCP socket, and leave other sockets alone.

    Raises:
        OSError: If the descriptor is closed, or its socket is not connected.
    """
    # fromfd duplicates the descriptor. SOCK_NONBLOCK keeps a default timeout of Python's sockets
    # from changing the flags that both descriptors share.
    stream = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.fromfd(descriptor, socket.AF_INET, stream) as connection:
        connection.getpeername()
        family = connection.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        kind = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        if family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
