"""Host a store at which replicas that are separate jobs meet."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import _C

# Seconds in which a name that has no address yet may get one.
_NAME_S, _ASK_EVERY_S = 5.0, 0.5
# The descriptors at which the stores of this process listen.
_listeners: weakref.WeakKeyDictionary[dist.TCPStore, int] = weakref.WeakKeyDictionary()


def open_store(host: str, port: int) -> dist.TCPStore:
    """Return a store that listens on ``host`` only; TCPStore alone listens on all interfaces.

    Args:
        host: Name or address of a local interface.
        port: TCP port; 0 picks a free port, the ``port`` of the result.

    Raises:
        OSError: If the address is not local or the port is taken.
    """
    family = resolve(host, port, "the store", seconds=0.0)[0]
    listener = socket.create_server((host, port), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()
    # The store owns the descriptor. Without libuv a stray connection can block the store.
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
        timeout=timedelta(seconds=30),
    )
    _listeners[store] = descriptor
    return store


def resolve(
    host: str,
    port: int,
    what: str,
    *,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    seconds: float = _NAME_S,
) -> Any:
    """Return the first entry of ``socket.getaddrinfo`` for a host.

    Args:
        what: Is at that host, for the error.
        seconds: Time for a name that has no address yet; the name is asked for again until then.

    Raises:
        OSError: If the host has no address.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.getaddrinfo(host, port, type=kind)[0]
        except socket.gaierror as error:
            if time.monotonic() + _ASK_EVERY_S > deadline:
                raise OSError(
                    f"{what} is to be at {host}, and this host knows no address of that name "
                    f"({error.strerror}): check the name, or give an IP address"
                ) from None
        time.sleep(_ASK_EVERY_S)


def connect_store(host: str, port: int, seconds: float) -> dist.Store:
    """Connect to a store that another process hosts.

    Raises:
        torch.distributed.DistError: If the host has no address, or no store answers in time.
    """
    try:
        resolve(host, port, "the store", seconds=min(seconds, _NAME_S))
    except OSError as error:
        raise dist.DistStoreError(str(error)) from None
    return _C.connect_store(host, port, seconds)


def _stop_listening() -> None:
    """Let go the listeners of the parent in a forked child, such as a worker of a DataLoader.

    Else the kernel would take connections to a store for as long as the child lives. The number of
    a descriptor stays taken, because the child's copy of the store may close it.
    """
    for descriptor in list(_listeners.values()):
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nowhere, descriptor, inheritable=False)
            os.close(nowhere)


os.register_at_fork(after_in_child=_stop_listening)


def address(store: dist.TCPStore) -> str:
    """Return a store's address as ``tcp://host:port``, for ``StorePeers``."""
    host = f"[{store.host}]" if ":" in store.host else store.host
    return f"tcp://{host}:{store.port}"
