"""Host a store at which replicas that are separate jobs meet."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from datetime import timedelta

import torch.distributed as dist

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
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
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
    """Return a store's address as ``tcp://host:port``, for ``DiLoCo(store=...)``."""
    host = f"[{store.host}]" if ":" in store.host else store.host
    return f"tcp://{host}:{store.port}"
