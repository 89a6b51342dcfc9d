"""The workers of asynchronous training: ``AsyncDiLoCo`` and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import lazy_names

if TYPE_CHECKING:
    from .worker import AsyncDiLoCo

__all__ = ["AsyncDiLoCo"]
# The worker needs pyzmq; the other modules of this package do not.
__getattr__ = lazy_names(__name__, {".worker": "AsyncDiLoCo"})
