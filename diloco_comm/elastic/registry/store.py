"""The registry on a store of ``torch.distributed`` that the program brings: not durable."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ...exchange.membership.stores import StoreTable
from ...group.table import Look
from .protocol import (
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

        A beat that has not changed for 600 seconds of this process is left out.
        """
        return dict(self.look(member, text).beats)

    def look(self, name: str, text: bytes) -> Look:
        """Publish a beat, and return all beats, and the record as it is then; see ``Table``."""
        check_beat(name, text)
        look = super().look(name, text)
        beats = {one: beat for one, beat in look.beats.items() if not self._is_old(one)}
        return look._replace(beats=beats)

    def close(self) -> None:
        """Ask the store nothing more; idempotent."""
        self._is_closed = True

    def _check(self, old: bytes, new: bytes) -> None:
        check_swap(old, new)

    # -------------------------------------------------------------------------- under the lock

    def _identify(self) -> None:
        """Learn the registry's id, and give it one if it has none; or compare the id."""
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
