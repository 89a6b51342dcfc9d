"""Host a store at which replicas that are separate jobs meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


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
    # The store owns the descriptor. Without libuv a stray connection can block the store.
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
        timeout=timedelta(seconds=30),
    )


def address(store: dist.TCPStore) -> str:
    """Return a store's address as ``tcp://host:port``, for ``DiLoCo(store=...)``."""
    host = f"[{store.host}]" if ":" in store.host else store.host
    return f"tcp://{host}:{store.port}"
