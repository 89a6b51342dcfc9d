"""The stores at which the members of a view meet: one on a member, or one that they share."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import torch.distributed as dist

from .. import _C
from ..base.service.addresses import parse_address
from ..base.service.keys import LinkKeys
from ..base.store_host import dial_store, open_store, place_of_store, resolve
from .views import View

_SETTINGS, _VIEW, _WORKERS = "settings", "view", "workers"
# Seconds in which a store that all members share answers, when nobody needs the answer to go on.
_ANSWER_S = 5.0


class Place:
    """The store at which others find this process: its own, or one that all members share.

    Attributes:
        address: ``tcp://host:port`` of the store.
    """

    def __init__(self, store: dist.Store, address: str, run: str) -> None:
        self.address = address
        self._store: dist.Store | None = store
        self._run = run
        self._nonce = self._settings = ""
        # Connects again; None where this process hosts the store.
        self._connect: Callable[[], dist.Store] | None = None

    @classmethod
    def hosted(cls, interface: str, run: str, keys: LinkKeys | None = None) -> Place:
        """Host a store, for the views whose lowest member this process is.

        Args:
            interface: Address or name at which the other members reach this process.
            run: Name of the training run.
            keys: With keys, the store lets in the members with an allowed key.
        """
        hosted = open_store(interface, 0, keys)
        return cls(hosted.store, hosted.address, run)

    @classmethod
    def shared(cls, address: str, run: str, timeout_s: float, keys: LinkKeys | None) -> Place:
        """Connect to a store that ``diloco-comm store`` hosts for all members of its runs.

        Raises:
            torch.distributed.DistError: If the store does not answer.
        """

        def connect(seconds: float) -> dist.Store:
            store = _dial(address, seconds, keys)
            store.set_timeout(timedelta(seconds=_ANSWER_S))
            return _C.bounded_store(store, _ANSWER_S)

        place = cls(connect(timeout_s), address, run)
        place._connect = partial(connect, _ANSWER_S)
        return place

    def publish(self, nonce: str, settings: str) -> None:
        """Show what must be equal on all replicas, for a process that is refused.

        Args:
            nonce: The name of this process.

        Raises:
            torch.distributed.DistError: If the store does not answer.
        """
        self._nonce, self._settings = nonce, settings
        assert self._store is not None
        self._store.set(_settings_key(self._run, nonce), settings)

    def withdraw(self) -> None:
        """Undo ``publish``."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._store.delete_key(_settings_key(self._run, self._nonce))

    def tidy(self, view: View) -> None:
        """Delete what earlier views have left, when a view has begun; one member of them does."""
        try:
            if self._store is None:
                assert self._connect is not None
                self._store = self._connect()
            self.publish(self._nonce, self._settings)
            if self._connect is None or view.lowest.nonce == self._nonce:
                self._forget_before(view)
        except dist.DistError:
            # A store that was started again knows nothing. The next view tries again.
            self._store = None if self._connect is not None else self._store

    def _forget_before(self, view: View) -> None:
        # Older versions of torch do not tell the keys of a store, which then stay there.
        list_keys = getattr(self._store, "list_keys", None)
        assert self._store is not None
        for key in () if list_keys is None else list_keys():
            run, _, name = key.partition("/")
            if run == self._run and _is_old(name, view):
                self._store.delete_key(key)


def _is_old(name: str, view: View) -> bool:
    """Whether a key, without the name of the run, is of no use once a view has begun."""
    kind, *rest = name.split("/")
    if kind == _SETTINGS:
        return rest[0] not in {member.nonce for member in view.members}
    number = kind.removeprefix(_VIEW)
    is_of_workers = any(part.startswith(_WORKERS) for part in rest)
    return number.isdecimal() and int(number) < view.number and not is_of_workers


def settings_of(view: View, address: str, timeout_s: float, keys: LinkKeys | None = None) -> str:
    """Return what the lowest member of a view has published.

    Args:
        address: ``tcp://host:port`` of the store at which that member is found.

    Raises:
        torch.distributed.DistError: If the store does not answer, or does not know the member.
    """
    store, key = _dial(address, timeout_s, keys), _settings_key(view.run, view.lowest.nonce)
    if not store.check([key]):
        raise dist.DistStoreError(f"the store at {address} knows nothing of that replica")
    return str(store.get(key).decode())


def meeting_place(view: View, address: str, timeout_s: float, keys: LinkKeys | None) -> dist.Store:
    """Connect to the store at which the members of a view meet, under a prefix of this attempt.

    Raises:
        torch.distributed.DistError: If no store answers at the address.
    """
    return dist.PrefixStore(_prefix_of(view), _dial(address, timeout_s, keys))


def place_of_workers(
    view: View, replica: int, address: str, timeout_s: float, keys: LinkKeys | None
) -> dist.Store:
    """Connect to the store at which a replica's workers hear what became of an attempt.

    Raises:
        torch.distributed.DistError: If no store answers at the address.
    """
    prefix = f"{_prefix_of(view)}/{_WORKERS}{replica}"
    return dist.PrefixStore(prefix, _dial(address, timeout_s, keys))


def _dial(address: str, timeout_s: float, keys: LinkKeys | None) -> dist.Store:
    return dial_store(*parse_address("store", address), timeout_s, keys)


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
        _, place = place_of_store(registry)
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
