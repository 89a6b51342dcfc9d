"""Host a store at which replicas that are separate jobs meet."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _C
from .service.addresses import Proxy, tcp_address
from .service.keys import AllowedWatch, LinkKeys

# Seconds in which a name that has no address yet may get one.
_NAME_S, _ASK_EVERY_S = 5.0, 0.5
# The descriptors at which the stores of this process listen.
_listeners: weakref.WeakKeyDictionary[dist.TCPStore, int] = weakref.WeakKeyDictionary()
_OWN_WAITS = timedelta(seconds=30)
_FIRST_TRY_S, _LEAST_S = 5.0, 0.5


class HostedStore(NamedTuple):
    """A store that this process hosts, until nobody holds ``store`` any more.

    Attributes:
        address: ``tcp://host:port``, for ``StorePeers``.
    """

    store: dist.Store
    address: str
    port: int


def open_store(host: str, port: int, keys: LinkKeys | None = None) -> HostedStore:
    """Host a store that listens on ``host`` only; TCPStore alone listens on all interfaces.

    Args:
        host: Name or address of a local interface.
        port: TCP port; 0 picks a free port.
        keys: With keys, connections are encrypted, and allowed keys alone are let in.

    Raises:
        OSError: If the address is not local or the port is taken.
        RuntimeError: If there is no OpenSSL for the keys.
    """
    family = resolve(host, port, "the store", seconds=0.0)[0]
    with socket.create_server((host, port), family=family) as listener:
        port = listener.getsockname()[1]
        address = tcp_address(host, port)
        if keys is not None:
            allowed = sorted(keys.allowed.present(at_once=True))
            # The store has a descriptor of its own.
            keyed = _C.StoreHost(listener.fileno(), keys.seed, allowed, _OWN_WAITS.total_seconds())
            AllowedWatch(keys, keyed, "diloco_comm keys of the store")
            return HostedStore(keyed, address, port)
        # The store owns the descriptor.
        descriptor = listener.detach()
    # Without libuv a stray connection can block the store.
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
        timeout=_OWN_WAITS,
    )
    _listeners[store] = descriptor
    return HostedStore(store, address, port)


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


def dial_store(
    host: str,
    port: int,
    seconds: float,
    keys: LinkKeys | None = None,
    proxy: Proxy | None = None,
) -> dist.Store:
    """Connect to a store that another process hosts.

    Args:
        seconds: Time to connect, and of the later waits.
        keys: The keys of this process, where the host has keys.
        proxy: Makes the connection, and looks the host up; only with keys.

    Raises:
        ValueError: If there is a proxy and there are no keys.
        torch.distributed.DistError: If the host has no address, or no store answers in time.
    """
    if proxy is not None and keys is None:
        raise ValueError(
            "a store without keys cannot be reached through a proxy: give keys= and let the store "
            f"at {tcp_address(host, port)} have keys, or give the result of connect_store() "
            "without proxy= as the store, if this process can dial the store itself"
        )
    try:
        if proxy is None:
            resolve(host, port, "the store", seconds=min(seconds, _NAME_S))
        else:
            resolve(proxy.host, proxy.port, "the proxy", seconds=min(seconds, _NAME_S))
    except OSError as error:
        raise dist.DistStoreError(str(error)) from None
    if keys is not None:
        allowed = sorted(keys.allowed.present(at_once=True))
        return _C.KeyedStore(host, port, keys.seed, allowed, seconds, proxy)
    # torch tries again until the end, also where a host with keys closes each connection, so that
    # such a host is looked for early. A store that has not started yet gets all the time at once.
    end = time.monotonic() + seconds
    is_there = _accepts(host, port, min(seconds, _FIRST_TRY_S))
    first = min(seconds, _FIRST_TRY_S) if is_there else max(end - time.monotonic(), _LEAST_S)
    try:
        store = _C.connect_store(host, port, first)
    except dist.DistError:
        if is_there and _speaks_tls(host, port, _LEAST_S):
            raise dist.DistStoreError(
                f"the store at {tcp_address(host, port)} has keys: give Link(keys=...), or --keys"
            ) from None
        left = end - time.monotonic()
        if left < _LEAST_S:
            raise
        store = _C.connect_store(host, port, left)
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _accepts(host: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True


def _speaks_tls(host: str, port: int, seconds: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), seconds) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except ssl.SSLEOFError:
        return False
    except ssl.SSLError as error:
        # Otherwise the host refuses this client, in TLS.
        return error.reason != "WRONG_VERSION_NUMBER"
    except OSError:
        return False


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
