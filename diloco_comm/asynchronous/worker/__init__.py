"""The workers of asynchronous training: ``AsyncDiLoCo`` and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import AsyncDiLoCo

__all__ = ["AsyncDiLoCo"]


def __getattr__(name: str) -> object:
    # On first use: the worker needs pyzmq, the other modules of this package do not.
    if name in __all__:
        from . import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
