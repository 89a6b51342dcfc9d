"""The stores at which the members of a view meet: each member can host one for the others."""

from __future__ import annotations

import contextlib
import re
import socket
from urllib.parse import urlsplit

import torch.distributed as dist

from ..base.service.keys import LinkKeys
from ..base.store_host import connect_store, open_store, resolve
from .views import View

_SETTINGS = "settings"
_KEY = re.compile(r"view(\d+)/")


class Host:
    """A store in this process, for the views whose lowest member this process is.

    Args:
        name: Address or name of the interface at which the other members reach this process.
        keys: With keys, the store lets in the members with an allowed key.

    Attributes:
        address: ``tcp://host:port``.
    """

    def __init__(self, name: str, keys: LinkKeys | None = None) -> None:
        hosted = open_store(name, 0, keys)
        self._store, self.address = hosted.store, hosted.address

    def publish(self, settings: str) -> None:
        """Show what must be equal on all replicas, for a process that is refused."""
        self._store.set(_SETTINGS, settings)

    @property
    def num_keys(self) -> int:
        """Keys that the store holds now."""
        return len(self._store.list_keys())

    def forget_before(self, number: int) -> None:
        """Delete the keys of the views before this number."""
        for key in self._store.list_keys():
            found = _KEY.match(key)
            if found and int(found[1]) < number:
                with contextlib.suppress(dist.DistError):
                    self._store.delete_key(key)


def settings_at(address: str, timeout_s: float, keys: LinkKeys | None = None) -> str:
    """Return what the member at this address has published.

    Raises:
        torch.distributed.DistError: If the member does not answer.
    """
    url = urlsplit(address)
    assert url.hostname is not None and url.port is not None
    store = connect_store(url.hostname, url.port, timeout_s, keys)
    return str(store.get(_SETTINGS).decode())


def meeting_place(
    view: View, timeout_s: float, keys: LinkKeys | None, address: str = ""
) -> dist.Store:
    """Connect to the store at which the members of a view meet, under a prefix of this attempt.

    Args:
        address: Of another member's store; default: that of the lowest.

    Raises:
        torch.distributed.DistError: If the view's lowest member does not host it any more.
    """
    url = urlsplit(address or view.lowest.address)
    assert url.hostname is not None and url.port is not None
    store = connect_store(url.hostname, url.port, timeout_s, keys)
    return dist.PrefixStore(f"view{view.number}/{view.proposer}", store)


def own_interface(registry: object) -> str:
    """Return the address of the interface that leads from this host to the registry's.

    Without an address of the registry's (a store of another kind), that is loopback.

    Raises:
        OSError: If the registry's host has no address.
    """
    if isinstance(registry, dist.Store):
        while isinstance(registry, dist.PrefixStore):
            registry = registry.underlying_store
        place = (registry.host, registry.port) if isinstance(registry, dist.TCPStore) else None
    else:
        url = urlsplit(str(registry).split(",")[0])
        place = None if url.hostname is None else (url.hostname, url.port or 0)
    if place is None:
        return "127.0.0.1"
    family, _, _, _, target = resolve(*place, "the registry", kind=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # A datagram socket sends nothing when it connects; it only chooses its interface.
        probe.connect(target)
        return str(probe.getsockname()[0])
