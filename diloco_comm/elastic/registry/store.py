"""The registry on a store of ``torch.distributed`` that the program brings: for tests, not durable.

A store's ``compare_set`` returns the value that the key has afterwards. If the key is absent and
something was expected, a ``TCPStore`` creates nothing and returns the expectation. So every record
is stored behind a nonce of its writer, and only the own nonce coming back means success.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .protocol import (
    DROP_AFTER_S,
    RegistryMismatch,
    RegistryUnavailable,
    check_beat,
    check_run,
    check_swap,
)

T = TypeVar("T")

_ROOT = "diloco-comm/"
_NONCE_BYTES = 16


class StoreRegistry:
    """The registry of one run on a store.

    Any thread may call the methods. Calls of several threads are made one after another. A call
    lasts as long as the store's own call: a ``TCPStore`` waits for a host that stands still.

    Args:
        store: Is of no use any more once its connection has ended.
        run: Name of the run.
        timeout_s: Seconds after which a call fails that waits for other threads' calls.
        registry_id: The registry that must answer; "" for the one that answers first.

    Attributes:
        registry_id: A random name in the store's memory; "" before the first answer.

    Raises:
        ValueError: If the name is not of its form.
    """

    is_durable = False

    def __init__(
        self, store: dist.Store, run: str, timeout_s: float, registry_id: str = ""
    ) -> None:
        self.run, self.timeout_s = check_run(run), timeout_s
        self.registry_id, self._is_known = registry_id, False
        self.address = f"of the {type(store).__name__}"
        self._lock = threading.Lock()
        self._store: dist.Store | None = store
        self._seen = _Seen()
        self._record = f"{_ROOT}{run}/record"
        self._members = f"{_ROOT}{run}/members"

    def read(self) -> bytes:
        """Return the record, b"" if there is none; see ``Registry.read``."""
        return self._call(lambda store: _get(store, self._record)[_NONCE_BYTES:])

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it equals ``old``; see ``Registry.swap``."""
        check_swap(old, new)
        return self._call(lambda store: self._swap(store, old, new))

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat, and return all last beats; see ``Registry.beat``.

        A beat that has not changed for 600 seconds of this process is left out.
        """
        check_beat(member, text)
        return self._call(lambda store: self._beat(store, member, text))

    def close(self) -> None:
        """Let go of the store; idempotent."""
        self._store = None

    # -------------------------------------------------------------------------- under the lock

    def _swap(self, store: dist.Store, old: bytes, new: bytes) -> bool:
        stored = _get(store, self._record)
        if stored[_NONCE_BYTES:] != old:
            return False
        return _compare_set(store, self._record, stored, new)

    def _beat(self, store: dist.Store, member: str, text: bytes) -> dict[str, bytes]:
        names = self._names(store, member)
        if member:
            store.set(self._key_of(member), text)  # type: ignore[arg-type]
        beats = {name: _get(store, self._key_of(name)) for name in names}
        return self._seen.recent({name: text for name, text in beats.items() if text})

    def _names(self, store: dist.Store, member: str) -> list[str]:
        """Return the members that have beaten, ``member`` added to them."""
        while True:
            stored = _get(store, self._members)
            names = json.loads(stored[_NONCE_BYTES:] or b"[]")
            if not member or member in names:
                return names
            fresh = json.dumps([*names, member]).encode()
            if _compare_set(store, self._members, stored, fresh):
                return [*names, member]

    def _key_of(self, member: str) -> str:
        return f"{_ROOT}{self.run}/beats/{member}"

    def _identify(self, store: dist.Store) -> None:
        """Learn the registry's id, and give it one if it has none; or compare the id."""
        key = f"{_ROOT}registry-id"
        fresh = secrets.token_hex(_NONCE_BYTES)
        if self.registry_id:
            found = _get(store, key).decode()
        else:
            found = self.registry_id = store.compare_set(key, "", fresh).decode()
        if found != self.registry_id:
            raise RegistryMismatch(
                f"the registry {self.address} is {found or 'empty'}, and the run {self.run!r} "
                f"belongs to the registry {self.registry_id}: was the store started again?"
            )

    def _call(self, ask: Callable[[dist.Store], T]) -> T:
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._unavailable(f"is asked by another thread for {self.timeout_s:g} s")
        try:
            if self._store is None:
                raise self._unavailable("is closed")
            if not self._is_known:
                self._identify(self._store)
                self._is_known = True
            return ask(self._store)
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


class _Seen:
    """When each beat was last another than before."""

    def __init__(self) -> None:
        self._changed: dict[str, tuple[bytes, float]] = {}

    def recent(self, beats: dict[str, bytes]) -> dict[str, bytes]:
        """Return the beats without those that have not changed for long."""
        now = time.monotonic()
        for name, text in beats.items():
            if self._changed.get(name, (None, 0.0))[0] != text:
                self._changed[name] = (text, now)
        last = now - DROP_AFTER_S
        return {name: text for name, text in beats.items() if self._changed[name][1] >= last}


def _get(store: dist.Store, key: str) -> bytes:
    """Return the value of a key, b"" if it is absent; ``get`` alone would wait for the key."""
    return store.get(key) if store.check([key]) else b""


def _compare_set(store: dist.Store, key: str, stored: bytes, new: bytes) -> bool:
    """Replace a stored value, or an absent one, by ``new`` behind a nonce."""
    fresh = secrets.token_bytes(_NONCE_BYTES) + new
    # Stores take bytes, but their stubs say text.
    return store.compare_set(key, stored, fresh) == fresh  # type: ignore[arg-type]
