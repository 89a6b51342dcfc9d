"""A registry as the table of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...group.table import TableAway
from .protocol import KeyRefused, Registry, RegistryMismatch, RegistryUnavailable

T = TypeVar("T")


class RegistryTable:
    """The table of one run: its record and beats at a registry; see ``group.table.Table``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def id(self) -> bytes:
        return bytes.fromhex(self._registry.registry_id)

    def read(self) -> bytes:
        return self._ask(self._registry.read)

    def swap(self, old: bytes, new: bytes) -> bool:
        return self._ask(lambda: self._registry.swap(old, new))

    def beat(self, name: str, text: bytes) -> dict[str, bytes]:
        return self._ask(lambda: self._registry.beat(name, text))

    def close(self) -> None:
        self._registry.close()

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RegistryMismatch as error:
            raise TableAway(str(error), is_other=True) from None
        except RegistryUnavailable as error:
            raise TableAway(str(error), is_refused=isinstance(error, KeyRefused)) from None
