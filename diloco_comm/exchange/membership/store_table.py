"""The table of a fixed group: its record and beats on a store of ``torch.distributed``.

A store's ``compare_set`` returns the value that the key has afterwards. If the key is absent and
something was expected, a ``TCPStore`` creates nothing and returns the expectation. So the record is
stored behind a nonce of its writer, and only the own nonce coming back means success.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ...base.store_host import place_of_store
from ...group.table import Look, TableAway

T = TypeVar("T")
_NONCE_BYTES = 16
# Names of processes that are kept; a long-lived store may have seen more.
_MOST_NAMES = 1024


class StoreTable:
    """The table of the exchanges of one name; see ``group.table.Table``.

    The driver's thread alone calls the methods: a store that hangs holds nobody else up. They go
    over a connection of their own, as a wait of the program for a key holds a connection up.

    Args:
        store: Shared by the replicas, under a prefix of the exchanges' name.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._is_own = store, False
        self._id = b""
        # A connection that has broken never connects again, and torch logs each call.
        self._loss: TableAway | None = None

    @property
    def id(self) -> bytes:
        return self._id

    def swap(self, old: bytes, new: bytes) -> bool:
        return self._ask(lambda store: _replace(store, "record", old, new))

    def look(self, name: str, text: bytes) -> Look:
        def ask(store: dist.Store) -> Look:
            beats = self._beat(store, name, text)
            return Look(_get(store, "record")[_NONCE_BYTES:], beats, {})

        return self._ask(ask)

    def close(self) -> None:
        """Do nothing: the store is the program's."""

    def _beat(self, store: dist.Store, name: str, text: bytes) -> dict[str, bytes]:
        names = json.loads(_get(store, "names")[_NONCE_BYTES:] or b"[]")
        if name:
            store.set(f"beat/{name}", text)  # type: ignore[arg-type]
        while name and name not in names:
            old = _get(store, "names")[_NONCE_BYTES:]
            names = [*json.loads(old or b"[]"), name][-_MOST_NAMES:]
            if not _replace(store, "names", old, json.dumps(names).encode()):
                names = []
        if not names:
            return {}
        texts = store.multi_get([f"beat/{one}" for one in names])
        return {one: text for one, text in zip(names, texts, strict=True) if text}

    def _ask(self, call: Callable[[dist.Store], T]) -> T:
        if self._loss is not None:
            raise self._loss
        try:
            if not self._is_own:
                self._store, self._is_own = another_connection(self._store), True
            if not self._id:
                # A store that is cleared has another table then.
                self._id = bytes.fromhex(decide_once(self._store, "id", secrets.token_hex(16)))
            return call(self._store)
        except RuntimeError as error:
            # The errors of torch's stores are RuntimeErrors.
            away = TableAway(str(error).split("\n")[0])
            away.is_lost = isinstance(error, dist.DistNetworkError)
            self._loss = away if away.is_lost else None
            raise away from None


def another_connection(store: dist.Store) -> dist.Store:
    """Return a store that a wait on the given one does not hold up."""
    _, place = place_of_store(store)
    clone = getattr(store, "clone", None)
    return store if place is None or clone is None else clone()


def decide_once(store: dist.Store, key: str, value: str) -> str:
    """Set a key that is absent; return what the key holds then, which never changes again.

    With a store that lacks ``compare_set``, two processes that decide at once may differ.
    """
    return _swapped(store, key, b"", value.encode()).decode()


def read_known(store: dist.Store, keys: list[str], known: set[str]) -> dict[str, bytes]:
    """Return what the existing ones of the keys hold.

    Args:
        known: Keys that exist and are never deleted; what is found is added.
    """
    # get() of a key that does not exist would wait for it.
    known.update(key for key in keys if key not in known and store.check([key]))
    there = [key for key in keys if key in known]
    return dict(zip(there, store.multi_get(there), strict=True)) if there else {}


def _get(store: dist.Store, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""


def _replace(store: dist.Store, key: str, old: bytes, new: bytes) -> bool:
    """Replace what a key holds behind a nonce, b"" for nothing; return whether that was there."""
    stored = _get(store, key)
    if stored[_NONCE_BYTES:] != old:
        return False
    fresh = secrets.token_bytes(_NONCE_BYTES) + new
    return _swapped(store, key, stored, fresh) == fresh


def _swapped(store: dist.Store, key: str, old: bytes, new: bytes) -> bytes:
    """Set a key that holds ``old``, or is absent where that is b""; return what it holds then."""
    try:
        # Stores take bytes, but their stubs say text.
        return bytes(store.compare_set(key, old, new))  # type: ignore[arg-type]
    except RuntimeError as error:
        # A store written in Python lacks it, which an assertion of torch says.
        if "ot implemented" not in str(error):
            raise
    held = _get(store, key)
    if held == old:
        store.set(key, new)  # type: ignore[arg-type]
        held = new
    return held
