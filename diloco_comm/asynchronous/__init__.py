"""Asynchronous Local-SGD and decoupled training: a server owns the model, workers come and go.

docs/explanation/asynchronous.md and docs/explanation/decoupled.md have the equations and the
settings. This package imports without pyzmq; the names in it need pyzmq, the extra ``[async]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .decoupled.attached import DecoupledDiLoCo, DecoupledMetrics
    from .decoupled.server import DecoupledServer
    from .rules import Buffered, DelayedNesterov, Immediate, ServerRule
    from .server import AsyncServer
    from .worker import AsyncDiLoCo

__all__ = [
    "AsyncDiLoCo",
    "AsyncServer",
    "Buffered",
    "DecoupledDiLoCo",
    "DecoupledMetrics",
    "DecoupledServer",
    "DelayedNesterov",
    "Immediate",
    "ServerRule",
]
__getattr__ = lazy_names(
    __name__,
    {
        ".decoupled.attached": "DecoupledDiLoCo DecoupledMetrics",
        ".decoupled.server": "DecoupledServer",
        ".rules": "Buffered DelayedNesterov Immediate ServerRule",
        ".server": "AsyncServer",
        ".worker": "AsyncDiLoCo",
    },
)
