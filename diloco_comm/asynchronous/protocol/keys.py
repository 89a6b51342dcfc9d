"""The CURVE keys of ``base/service/curve.py``, which other servers use too."""

from __future__ import annotations

from ...base.service.addresses import is_loopback
from ...base.service.curve import (
    ALLOWED,
    SERVER,
    WORKER,
    make_keys,
    protect_server,
    protect_worker,
)

__all__ = [
    "ALLOWED",
    "SERVER",
    "WORKER",
    "is_loopback",
    "make_keys",
    "protect_server",
    "protect_worker",
]
