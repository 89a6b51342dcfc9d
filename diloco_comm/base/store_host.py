"""Host a store at which replicas that are separate jobs meet, and connect to one."""

from __future__ import annotations

import socket
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _C
from .service.addresses import Proxy, tcp_address
from .service.keys import AllowedWatch, LinkKeys

# The seconds for which a host name without an address is looked up again, and between look-ups.
_NAME_S, _ASK_EVERY_S = 5.0, 0.5
_OWN_WAITS_S = 30.0


class HostedStore(NamedTuple):
    """A store that this process hosts, until nobody holds ``store`` any more.

    Attributes:
        store: The hosted store, through which this process reads and writes its keys.
        address: ``tcp://host:port``, for ``StorePeers``.
        port: The port, also where a free one was picked.
    """

    store: _C.StoreHost
    address: str
    port: int


def open_store(host: str, port: int, keys: LinkKeys | None = None) -> HostedStore:
    """Host a store that listens on ``host`` only.

    Args:
        host: Name or address of a local interface.
        port: TCP port; 0 picks a free port.
        keys: With keys, connections are encrypted, and allowed keys alone are let in.

    Raises:
        OSError: If the address is not local or the port is taken.
        RuntimeError: If there is no OpenSSL for the keys.
    """
    with listen_at(host, port) as listener:
        return serve_store(listener, host, keys)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` only; see ``open_store``."""
    family = resolve(host, port, "the store", seconds=0.0)[0]
    return socket.create_server((host, port), family=family, backlog=1024)


def serve_store(
    listener: socket.socket, host: str, keys: LinkKeys | None, **table: Any
) -> HostedStore:
    """Host a store at a socket that listens; the socket stays the caller's, who may close it.

    Args:
        host: The host in the address of the store that is returned.
        keys: See ``open_store``.
        table: Further arguments of ``_C.StoreHost``.

    Raises:
        RuntimeError: If there is no OpenSSL for the keys.
    """
    port = listener.getsockname()[1]
    seed, allowed = credentials(keys)
    store = _C.StoreHost(listener.fileno(), seed, allowed, _OWN_WAITS_S, **table)
    if keys is not None:
        AllowedWatch(keys, store, "diloco_comm keys of the store", of_host=True)
    return HostedStore(store, tcp_address(host, port), port)


def credentials(keys: LinkKeys | None) -> tuple[bytes, list[bytes]]:
    """Return the own seed and the public keys that are allowed now; b"" and no keys for None."""
    return (b"", []) if keys is None else (keys.seed, sorted(keys.allowed.present(at_once=True)))


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
        what: The thing at that host, for the error.
        seconds: Time for which a name without an address is looked up again.

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


def dial_store(
    host: str,
    port: int,
    seconds: float,
    keys: LinkKeys | None = None,
    proxy: Proxy | None = None,
) -> dist.Store:
    """Connect to a store that another process hosts.

    Args:
        seconds: The limit of the time to connect, and of each later wait for a key.
        keys: The keys of this process, needed if the store has keys.
        proxy: The proxy that makes the connection and looks the host up; None to connect directly.

    Raises:
        torch.distributed.DistError: If the host has no address, or no store answers in time.
    """
    try:
        if proxy is None:
            resolve(host, port, "the store", seconds=min(seconds, _NAME_S))
        else:
            resolve(proxy.host, proxy.port, "the proxy", seconds=min(seconds, _NAME_S))
    except OSError as error:
        raise dist.DistStoreError(str(error)) from None
    return _C.StoreClient(host, port, *credentials(keys), seconds, proxy)


def place_of_store(store: dist.Store) -> tuple[dist.Store, tuple[str, int] | None]:
    """Return the store below its prefixes, and the host and port where the store is hosted.

    Args:
        store: Any store of torch or of this package. For one in a file or in memory, None is
            returned instead of host and port.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, (dist.TCPStore, _C.StoreClient)):
        return store, (store.host, store.port)
    return store, None
