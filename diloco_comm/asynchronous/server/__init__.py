"""The server of asynchronous training: ``AsyncServer`` and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import lazy_names

if TYPE_CHECKING:
    from .server import AsyncServer

__all__ = ["AsyncServer"]
# The server needs pyzmq; the decisions and the storage in this package do not.
__getattr__ = lazy_names(__name__, {".server": "AsyncServer"})
