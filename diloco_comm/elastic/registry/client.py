"""Clients of a registry at its own server or on a store, and ``connect``, which chooses one."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ... import _C
from ...base.checks import timeout_seconds
from ...base.service.addresses import is_loopback, parse_address, tcp_address, with_scheme
from ...base.service.keys import LinkKeys, link_keys
from ...base.store_host import credentials
from ...exchange.membership.stores import StoreTable
from ...group.table import Look
from .protocol import (
    KeyRefused,
    PlainLook,
    Registry,
    RegistryMismatch,
    RegistryUnavailable,
    check_beat,
    check_run,
    check_swap,
)

T = TypeVar("T")

_ROOT = "diloco-comm"


class StoreRegistry(StoreTable):
    """The registry of one run on a store.

    Any thread may call the methods. Calls of several threads are made one after another. A call
    lasts as long as the store's own call: a ``TCPStore`` waits for a host that does not answer.

    Args:
        store: The store with the registry. Once its connection has broken, all calls fail.
        run: Name of the run.
        timeout_s: Seconds after which a call fails that waits for other threads' calls.
        registry_id: The id of the registry that must answer; "" accepts the first that answers.

    Attributes:
        registry_id: The registry's random id, which the store keeps; "" before the first answer.

    Raises:
        ValueError: If the run's name is not of the allowed form.
    """

    is_durable = False

    def __init__(
        self, store: dist.Store, run: str, timeout_s: float, registry_id: str = ""
    ) -> None:
        super().__init__(dist.PrefixStore(f"{_ROOT}/{check_run(run)}", store), run)
        self.run, self.timeout_s = run, timeout_s
        self.registry_id, self._is_known, self._is_closed = registry_id, False, False
        self.address = f"of the {type(store).__name__}"
        self._lock = threading.Lock()
        self._root = dist.PrefixStore(_ROOT, store)

    @property
    def id(self) -> bytes:
        return bytes.fromhex(self.registry_id)

    def read(self) -> bytes:
        """Return the record, b"" if there is none; see ``Registry.read``."""
        return self.look("", b"").record

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat, and return all last beats; see ``Registry.beat``.

        A beat that has not changed for 600 seconds, as this process counts them, is left out.
        """
        return dict(self.look(member, text).beats)

    def look(self, name: str, text: bytes) -> Look:
        """Publish a beat, and return all beats, and the record as it is then; see ``Table``."""
        check_beat(name, text)
        look = super().look(name, text)
        beats = {one: beat for one, beat in look.beats.items() if not self._is_old(one)}
        return look._replace(beats=beats)

    def close(self) -> None:
        """End the use of the store, so that later calls fail; idempotent."""
        self._is_closed = True

    def _check(self, old: bytes, new: bytes) -> None:
        check_swap(old, new)

    # -------------------------------------------------------------------------- under the lock

    def _identify(self) -> None:
        """Compare the registry's id with the expected one; learn or set it if none is expected."""
        if self.registry_id:
            there = self._root.check(["registry-id"])
            found = self._root.get("registry-id").decode() if there else ""
        else:
            fresh = secrets.token_hex(16)
            found = self.registry_id = self._root.compare_set("registry-id", "", fresh).decode()
        if found != self.registry_id:
            raise RegistryMismatch(
                f"the registry {self.address} is {found or 'empty'}, and the run {self.run!r} "
                f"belongs to the registry {self.registry_id}: was the store started again?"
            )

    def _ask(self, call: Callable[[dist.Store], T]) -> T:
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._unavailable(f"is asked by another thread for {self.timeout_s:g} s")
        try:
            if self._is_closed:
                raise self._unavailable("is closed")
            if not self._is_known:
                self._identify()
                self._is_known = True
            return call(self._store)
        except RegistryMismatch:
            raise
        except NotImplementedError as error:
            raise ValueError(f"the store has no compare_set: {error}") from None
        except RuntimeError as error:
            # The errors of torch's stores are RuntimeErrors.
            self._is_known = False
            raise self._unavailable(f"has not answered: {str(error).splitlines()[0]}") from None
        finally:
            self._lock.release()

    def _unavailable(self, reason: str) -> RegistryUnavailable:
        return RegistryUnavailable(f"the registry {self.address} {reason}")


# ---------------------------------------------------------------------- addresses and records


# With less time left than this, a call is not repeated: it would only report that time is over.
_LEAST_S = 0.1
# Words in the errors of a store client, and the words for them in an error of a registry.
_IN_A_REGISTRY = (
    ("give Link(keys=...), or --keys", "give key=, or --key"),
    ("is not there any more", "does not answer, as nothing listens there"),
)
# A server says this to a client whose key may only read, and that has tried to write.
_READS_ONLY = "may only read here"
_FORMS = (
    'tcp://host:port, such as "tcp://192.0.2.1:29400", or etcd://host:port or etcds://host:port, '
    "or a torch.distributed.Store"
)


def connect(
    address: str | dist.Store,
    *,
    run: str,
    timeout_s: float = 5.0,
    key: str | Path | None = None,
    insecure: bool = False,
    registry_id: str = "",
) -> Registry:
    """Return the registry of one run; the first call of a method connects.

    Args:
        address: ``tcp://host:port`` for the server of ``diloco-comm registry``;
            ``etcd://host:port`` for etcd, or ``etcds://host:port`` for etcd with TLS (several
            members: ``etcd://host:port,host:port``); or a ``torch.distributed.Store``: the result
            of ``connect_store`` is a way to that server, a ``TCPStore`` is a registry by itself.
        run: Name of the run: 1 to 100 printable characters, no space and no slash.
        timeout_s: Seconds after which a call without an answer raises ``RegistryUnavailable``.
        key: For ``tcp``: folder with the keys of this process, or a file ``NAME.key_secret`` in
            it (``diloco-comm keys make``). For ``etcds``: folder with ``ca.pem``, and
            ``client.pem`` with ``client-key.pem`` if etcd asks for a certificate; without ``key``
            the system's certificates count.
        insecure: Connect to another machine without keys, or to etcd without TLS.
        registry_id: The ``registry_id`` that must answer; "" for any.

    Raises:
        ValueError: If an argument is not of its form, or the address needs keys.
    """
    timeout, run = timeout_seconds(timeout_s, "timeout_s"), check_run(run)
    if registry_id and not re.fullmatch("[0-9a-f]{32}", registry_id):
        raise ValueError(f"registry_id must be 32 hexadecimal digits, got {registry_id!r}")
    if isinstance(address, _C.StoreClient):
        return RegistryClient(address, run, timeout, None, registry_id)
    if isinstance(address, dist.Store):
        return StoreRegistry(address, run, timeout, registry_id)
    scheme = with_scheme(address).partition("://")[0] if isinstance(address, str) else ""
    if scheme == "tcp":
        if key is None and not insecure and not is_loopback(parse_address("registry", address)[0]):
            raise ValueError(
                f"{address} is another machine: give key= (made by `diloco-comm keys make`), or "
                "insecure=True to trust the network"
            )
        return RegistryClient(address, run, timeout, key, registry_id)
    if scheme in ("etcd", "etcds"):
        from .etcd import EtcdRegistry

        return EtcdRegistry(address, run, timeout, key, insecure, registry_id)
    raise ValueError(f"registry must be {_FORMS}, got {address!r}")


class RegistryClient(PlainLook):
    """The registry of one run at the server of ``diloco-comm registry``.

    Any thread may call the methods. Calls of several threads are made one after another, and the
    time in which a call waits for others counts as its own.

    Args:
        address: ``tcp://host:port``; or a connection that the program has made, with its keys.
        run: Name of the run.
        timeout_s: Seconds after which a call without an answer fails.
        key: Folder with the keys of this process, or a file ``NAME.key_secret`` in it.
        registry_id: The id of the registry that must answer; "" for any.

    Attributes:
        registry_id: The registry's random id in hexadecimal digits; "" before the first answer.

    Raises:
        ValueError: If the address or a name is not of its form, or a key is missing or invalid.
    """

    def __init__(
        self,
        address: str | _C.StoreClient,
        run: str,
        timeout_s: float,
        key: str | Path | None = None,
        registry_id: str = "",
    ) -> None:
        self._given = None if isinstance(address, str) else address
        self._place = (
            parse_address("registry", address)
            if isinstance(address, str)
            else (address.host, address.port)
        )
        self.address = tcp_address(*self._place)
        self.run, self.timeout_s = check_run(run), timeout_s
        self.registry_id, self._keys = registry_id, _keys_of(key)
        self._lock = threading.Lock()
        self._client: _C.StoreClient | None = None
        # The answer of the last look.
        self._version = self._revision = 0
        self._record, self._beats, self._counts = b"", dict[str, bytes](), dict[str, int]()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._client = None

    @property
    def is_durable(self) -> bool:
        """Whether the server has a journal; asks the server if it has not answered yet.

        Raises:
            RegistryUnavailable: If the server does not answer.
        """
        if self._client is None or not self._client.found_id:
            self.read()
        return self._call(lambda client, _: client.is_durable)

    def read(self) -> bytes:
        """Return the record, b"" if there is none; see ``Registry.read``."""
        return self._call(lambda client, limit: client.read_record(self.run, limit)[0])

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it equals ``old``; see ``Registry.swap``."""
        check_swap(old, new)
        return self._call(lambda client, limit: client.swap_record(self.run, old, new, limit))

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat, and return all last beats; see ``Registry.beat``."""
        check_beat(member, text)
        *_, beats = self._call(
            lambda client, limit: client.look(self.run, member, text, 0, 0, limit)
        )
        return {name: last for name, last, _ in beats}

    def look(self, name: str, text: bytes) -> Look:
        """Publish a member's beat, and return the record, all beats, and how often each has beaten.

        To save traffic, the server sends only texts whose first line has changed, and the record
        only if it has changed.

        Returns:
            The record, the last beat of each member, and for each member a number that rises with
            each beat. All but the first line of a text may be from an earlier beat.

        Raises:
            RegistryUnavailable: If there is no answer in time.
        """
        check_beat(name, text)
        return self._call(lambda client, limit: self._look(client, name, text, limit))

    def post(self, name: str, text: bytes) -> None:
        """Leave a text with the server, unless there is no connection; see ``Table.post``."""
        client = self._client  # another thread may close meanwhile
        if client is not None:
            with contextlib.suppress(dist.DistError):
                client.post(self.run, name, text)

    def _look(self, client: _C.StoreClient, member: str, text: bytes, limit: float) -> Look:
        known = self._version, self._revision
        version, revision, record, counts, is_whole, beats = client.look(
            self.run, member, text, *known, limit
        )
        changed = {name: last for name, last, _ in beats}
        found = changed if is_whole else {**self._beats, **changed}
        if revision != self._revision:
            self._record = record
        # The server sends its counts, modulo 256, in this order of the names.
        names = sorted(found, key=str.encode)
        if len(names) != len(counts):
            self._version = 0
            raise RegistryUnavailable(f"the registry {self.address} has answered for other members")
        before = self._counts
        self._counts = {
            name: before.get(name, 0) + (count - before.get(name, 0)) % 256
            for name, count in zip(names, counts, strict=True)
        }
        self._version, self._revision, self._beats = version, revision, found
        return Look(self._record, found, self._counts)

    def _call(self, ask: Callable[[_C.StoreClient, float], T]) -> T:
        deadline = time.monotonic() + self.timeout_s
        if not self._lock.acquire(timeout=self.timeout_s):
            raise RegistryUnavailable(
                f"another thread has asked the registry {self.address} for {self.timeout_s:g} s"
            )
        try:
            return self._ask(ask, deadline)
        finally:
            self._lock.release()

    def _ask(self, ask: Callable[[_C.StoreClient, float], T], deadline: float) -> T:
        client = self._client = self._client or self._open()
        while True:
            try:
                return ask(client, max(0.0, deadline - time.monotonic()))
            except dist.DistError as error:
                # If nobody listens, the request was not sent: try again, the server may come back.
                is_absent = isinstance(error, dist.DistNetworkError) and not _is_other(client)
                if not is_absent or time.monotonic() + _LEAST_S > deadline:
                    raise self._failure(client, str(error).splitlines()[0]) from None
            finally:
                self.registry_id = client.table_id

    def _open(self) -> _C.StoreClient:
        if self._given is not None:
            # Open a second connection, as the program's own may be busy with a long wait.
            return self._given.another(self.registry_id)
        return _C.StoreClient(
            *self._place,
            *credentials(self._keys),
            self.timeout_s,
            table_id=self.registry_id,
            connects=False,
        )

    def _failure(self, client: _C.StoreClient, sentence: str) -> Exception:
        if _is_other(client):
            return RegistryMismatch(
                f"the registry at {self.address} is {client.found_id}, and the run {self.run!r} "
                f"belongs to the registry {client.table_id}: was the server started with another "
                "journal folder?"
            )
        if client.is_refused:
            # The next call opens a new client, in case the server allows this key by then.
            self._client = None
        name = f"the registry at {self.address}"
        for words, ours in (("the store at " + self.address, name), *_IN_A_REGISTRY):
            sentence = sentence.replace(words, ours)
        text = sentence if sentence.startswith(name) else f"{name}: {sentence}"
        is_refused = client.is_refused or _READS_ONLY in sentence
        return KeyRefused(text) if is_refused else RegistryUnavailable(text)


def _keys_of(key: str | Path | None) -> LinkKeys | None:
    try:
        return link_keys(key)
    except ValueError as error:
        text = re.sub(r"^keys(?= must)", "key", str(error)).replace("give keys=", "give key=")
        raise ValueError(text) from None


def _is_other(client: _C.StoreClient) -> bool:
    """Whether another registry than the expected one has answered."""
    return client.found_id not in ("", client.table_id)
