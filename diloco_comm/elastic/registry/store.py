"""The registry on a store of ``torch.distributed``: for tests and small runs, not durable.

A store's ``compare_set`` returns the value that the key has afterwards. If the key is absent and
something was expected, a ``TCPStore`` creates nothing and returns the expectation. So every record
is stored behind a nonce of its writer, and only the own nonce coming back means success.
"""

from __future__ import annotations

import atexit
import json
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ...base.service.addresses import is_loopback, parse_address
from ...base.store_host import resolve
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
# Links that were given up and whose store still has not answered. With so many no new one is made.
_MAX_LEFT = 4
# Seconds for which the end of the process waits for stores that have not answered.
_PATIENCE_S = 8.0


class StoreRegistry:
    """The registry of one run on a store.

    Any thread may call the methods. Calls of several threads are made one after another. The store
    is used by a thread of this object, because a store whose host hangs may never answer.

    Args:
        store: A store, or ``store://host:port`` of a ``TCPStore``. A store that is given as an
            object is of no use any more once its connection has ended; an address is connected
            again.
        run: Name of the run.
        timeout_s: Seconds after which a call without an answer fails.
        insecure: Allow the address of another machine.
        registry_id: The registry that must answer; "" for the one that answers first.

    Attributes:
        registry_id: A random name in the store's memory; "" before the first answer.

    Raises:
        ValueError: If the address or a name is not of its form.
    """

    is_durable = False

    def __init__(
        self,
        store: str | dist.Store,
        run: str,
        timeout_s: float,
        insecure: bool = False,
        registry_id: str = "",
    ) -> None:
        self.run, self.timeout_s = check_run(run), timeout_s
        self.registry_id = registry_id
        self.address = store if isinstance(store, str) else f"of the {type(store).__name__}"
        self._host = None
        if isinstance(store, str):
            self._host = parse_address("registry", store, scheme="store")
        if self._host is not None and not insecure and not is_loopback(self._host[0]):
            raise ValueError(
                f"{store} is another machine, and a TCPStore has no keys: give insecure=True to "
                "trust the network, or use the server of `diloco-comm registry`"
            )
        self._lock = threading.Lock()
        self._left: list[_Link] = []
        self._link = _Link(None if isinstance(store, str) else store)
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
        self._link.end()

    # ----------------------------------------------------------------------- on the link's thread

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

    # ----------------------------------------------------------------------------- on any thread

    def _call(self, ask: Callable[[dist.Store], T]) -> T:
        deadline = time.monotonic() + self.timeout_s
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._unavailable(f"is asked by another thread for {self.timeout_s:g} s")
        link = self._link
        try:
            return link.call(lambda: ask(self._reach(link)), deadline - time.monotonic())
        except FutureTimeout:
            self._leave(link)
            raise self._unavailable(f"has not answered for {self.timeout_s:g} s") from None
        except RegistryMismatch:
            raise
        except NotImplementedError as error:
            raise ValueError(f"the store has no compare_set: {error}") from None
        except RuntimeError as error:
            # The errors of torch's stores are RuntimeErrors.
            self._leave(link)
            raise self._unavailable(f"has failed: {str(error).splitlines()[0]}") from None
        finally:
            self._lock.release()

    def _reach(self, link: _Link) -> dist.Store:
        """Return the link's store, connected and identified."""
        if link.store is None:
            if self._host is None:
                raise RuntimeError("the store is closed")
            link.store = _connect(*self._host, self.timeout_s)
        if not link.is_known:
            self._identify(link.store)
            link.is_known = True
        return link.store

    def _leave(self, link: _Link) -> None:
        """Connect again for the next call, if there is an address."""
        link.is_known = False
        self._left = [other for other in self._left if other.is_alive]
        if self._host is not None and len(self._left) < _MAX_LEFT:
            link.end()
            self._left.append(link)
            self._link = _Link(None)

    def _unavailable(self, reason: str) -> RegistryUnavailable:
        return RegistryUnavailable(f"the registry {self.address} {reason}")


class _Link:
    """A store, and the daemon thread that uses the store.

    Attributes:
        store: None before the first call connects.
        is_known: The store's id has been compared.
    """

    def __init__(self, store: dist.Store | None) -> None:
        self.store, self.is_known = store, False
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The thread of a link that nobody has ended ends with the link.
        weakref.finalize(self, self._calls.put, None).atexit = False
        _links.add(self)
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, which a store that never answers may keep from ending."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Run a function on the thread, and return its result.

        Raises:
            concurrent.futures.TimeoutError: If the thread has not ended the function in time. The
                thread goes on, and later functions wait for it.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._calls,), name="diloco-registry", daemon=True
            )
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function))
        try:
            return future.result(max(0.0, seconds))
        except FutureTimeout:
            # A function that has not begun never will.
            future.cancel()
            raise

    def end(self) -> None:
        """End the thread when it has ended its function, and let go of the store."""
        self._calls.put(None)
        self.store = None

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))


_links: weakref.WeakSet[_Link] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads: one that returns from C++ while Python ends would abort the process."""
    links, deadline = list(_links), time.monotonic() + _PATIENCE_S
    for link in links:
        link.end()
    for link in links:
        link.join(deadline - time.monotonic())


def _run(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        # Nothing may keep the store alive while the thread waits.
        del call, future, function


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


def _connect(host: str, port: int, timeout_s: float) -> dist.Store:
    try:
        resolve(host, port, "the registry's store", seconds=0.0)
    except OSError as error:
        raise dist.DistStoreError(str(error)) from None
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _get(store: dist.Store, key: str) -> bytes:
    """Return the value of a key, b"" if it is absent; ``get`` alone would wait for the key."""
    return store.get(key) if store.check([key]) else b""


def _compare_set(store: dist.Store, key: str, stored: bytes, new: bytes) -> bool:
    """Replace a stored value, or an absent one, by ``new`` behind a nonce."""
    fresh = secrets.token_bytes(_NONCE_BYTES) + new
    # Stores take bytes, but their stubs say text.
    return store.compare_set(key, stored, fresh) == fresh  # type: ignore[arg-type]
