"""The stores at which groups of gloo and devices connect: on a member, or one that all share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import torch.distributed as dist

from ..base.service.addresses import parse_address
from ..base.store_host import dial_store, open_store, place_of_store, resolve

# Seconds in which a store that all members share answers, when nobody needs the answer to go on.
_ANSWER_S = 5.0


class Place:
    """The store of this process: its own, or one that all members share.

    Attributes:
        address: ``tcp://host:port`` of the store.
    """

    def __init__(self, store: dist.Store, address: str, run: str) -> None:
        self.address = address
        self._store: dist.Store | None = store
        self._run = run
        # Connects again; None where this process hosts the store.
        self._connect: Callable[[], dist.Store] | None = None

    @classmethod
    def hosted(cls, interface: str, run: str) -> Place:
        """Host a store, for the views whose lowest member this process is.

        Args:
            interface: Address or name at which the other members reach this process.
            run: Name of the training run.
        """
        hosted = open_store(interface, 0)
        return cls(hosted.store, hosted.address, run)

    @classmethod
    def shared(cls, address: str, run: str, timeout_s: float) -> Place:
        """Connect to a store that ``diloco-comm store`` hosts for all members of its runs.

        Raises:
            torch.distributed.DistError: If the store does not answer.
        """

        def connect(seconds: float) -> dist.Store:
            store = _dial(address, seconds)
            store.set_timeout(timedelta(seconds=_ANSWER_S))
            return store

        place = cls(connect(timeout_s), address, run)
        place._connect = partial(connect, _ANSWER_S)
        return place

    def tidy(self, attempt: str, *, is_lowest: bool) -> None:
        """Delete what other attempts have left, when a view has begun; one member of them does.

        Args:
            attempt: The one that has led to the view.
            is_lowest: This process is the lowest member of the view.
        """
        if self._connect is not None and not is_lowest:
            return
        try:
            if self._store is None:
                assert self._connect is not None
                self._store = self._connect()
            # Older versions of torch do not tell the keys of a store, which then stay there.
            list_keys = getattr(self._store, "list_keys", None)
            for key in () if list_keys is None else list_keys():
                run, _, rest = key.partition("/")
                if run == self._run and rest.partition("/")[0] != attempt:
                    self._store.delete_key(key)
        except dist.DistError:
            # A store that was started again knows nothing. The next view tries again.
            self._store = None if self._connect is not None else self._store


def meeting_place(run: str, attempt: str, address: str, timeout_s: float) -> dist.Store:
    """Connect to the store at which the members of an attempt meet, under a prefix of the attempt.

    Args:
        address: ``tcp://host:port``.

    Raises:
        torch.distributed.DistError: If no store answers at the address.
    """
    return dist.PrefixStore(f"{run}/{attempt}", _dial(address, timeout_s))


def _dial(address: str, timeout_s: float) -> dist.Store:
    return dial_store(*parse_address("store", address), timeout_s)


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
