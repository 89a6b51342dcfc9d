"""The server of asynchronous training: ``AsyncServer`` and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import AsyncServer

__all__ = ["AsyncServer"]


def __getattr__(name: str) -> object:
    # On first use: the server needs pyzmq, the decisions and the storage do not.
    if name in __all__:
        from . import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
