"""Asynchronous Local-SGD and decoupled training: a server owns the model, workers come and go.

docs/explanation/asynchronous.md and docs/explanation/decoupled.md have the equations and the
settings. This package imports without pyzmq; the names in it need pyzmq, the extra ``[async]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .decoupled.attached import DecoupledDiLoCo
    from .decoupled.server import DecoupledServer
    from .server import AsyncServer
    from .worker import AsyncDiLoCo

__all__ = ["AsyncDiLoCo", "AsyncServer", "DecoupledDiLoCo", "DecoupledServer"]
__getattr__ = lazy_names(
    __name__,
    {
        ".decoupled.attached": "DecoupledDiLoCo",
        ".decoupled.server": "DecoupledServer",
        ".server": "AsyncServer",
        ".worker": "AsyncDiLoCo",
    },
)
