"""The stores at which the members of a view meet: one on a member, or one that they share."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

import torch.distributed as dist

from ..base.service.addresses import parse_address
from ..base.service.keys import LinkKeys
from ..base.store_host import dial_store, open_store, resolve
from .views import Member, View

_SETTINGS, _VIEW = "settings", "view"


class Place:
    """The store at which others find this process: its own, or one that all members share.

    Args:
        store: The process hosts it, or is a client of it.
        address: Of the store, ``tcp://host:port``.
        run: Name of the training run; a shared store may serve several.
    """

    def __init__(self, store: dist.Store, address: str, run: str) -> None:
        self._store, self.address, self._run = store, address, run
        self._published = ""

    @classmethod
    def hosted(cls, interface: str, run: str, keys: LinkKeys | None = None) -> Place:
        """Host a store, for the views whose lowest member this process is.

        Args:
            interface: Address or name at which the other members reach this process.
            keys: With keys, the store lets in the members with an allowed key.
        """
        hosted = open_store(interface, 0, keys)
        return cls(hosted.store, hosted.address, run)

    @classmethod
    def shared(cls, address: str, run: str, timeout_s: float, keys: LinkKeys | None) -> Place:
        """Connect to a store that ``diloco-comm store`` hosts for all members.

        Raises:
            torch.distributed.DistError: If the store does not answer.
        """
        return cls(_dial(address, timeout_s, keys), address, run)

    def publish(self, nonce: str, settings: str) -> None:
        """Show what must be equal on all replicas, for a process that is refused.

        Args:
            nonce: Of this process.
        """
        self._published = _settings_key(self._run, nonce)
        self._store.set(self._published, settings)

    def withdraw(self) -> None:
        """Undo ``publish``."""
        with contextlib.suppress(dist.DistError):
            self._store.delete_key(self._published)

    @property
    def num_keys(self) -> int:
        """Keys that the store holds now."""
        return len(self._store.list_keys())

    def forget_before(self, number: int) -> None:
        """Delete the keys of the views before this number."""
        begin = f"{self._run}/{_VIEW}"
        with contextlib.suppress(dist.DistError):
            for key in self._store.list_keys():
                of_view, _, _ = key.removeprefix(begin).partition("/")
                if key.startswith(begin) and of_view.isdecimal() and int(of_view) < number:
                    self._store.delete_key(key)


def settings_of(run: str, member: Member, timeout_s: float, keys: LinkKeys | None = None) -> str:
    """Return what a member of a run has published.

    Raises:
        torch.distributed.DistError: If the member's store does not answer.
    """
    store = _dial(member.address, timeout_s, keys)
    return str(store.get(_settings_key(run, member.nonce)).decode())


def meeting_place(view: View, timeout_s: float, keys: LinkKeys | None) -> dist.Store:
    """Connect to the store at which the members of a view meet, under a prefix of this attempt.

    Raises:
        torch.distributed.DistError: If the store of the view's lowest member does not answer.
    """
    return dist.PrefixStore(_prefix_of(view), _dial(view.lowest.address, timeout_s, keys))


def place_of_workers(
    view: View, member: Member, timeout_s: float, keys: LinkKeys | None
) -> dist.Store:
    """Connect to the store at which the workers of one member hear what became of an attempt.

    Raises:
        torch.distributed.DistError: If the member's store does not answer.
    """
    prefix = f"{_prefix_of(view)}/workers{member.id}"
    return dist.PrefixStore(prefix, _dial(member.address, timeout_s, keys))


def _dial(address: str, timeout_s: float, keys: LinkKeys | None) -> dist.Store:
    return dial_store(*parse_address(address), timeout_s, keys)


def _prefix_of(view: View) -> str:
    return f"{view.run}/{_VIEW}{view.number}/{view.proposer}"


def _settings_key(run: str, nonce: str) -> str:
    return f"{run}/{_SETTINGS}/{nonce}"


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
