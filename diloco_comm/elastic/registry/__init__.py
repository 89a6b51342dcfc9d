"""The registry: one small durable record for each run, changed by compare-and-set, and beats.

``connect`` finds the implementation for an address: the server of ``diloco-comm registry``, or
etcd; or for a store of ``torch.distributed``.
"""

from __future__ import annotations

from .client import connect
from .protocol import Registry, RegistryMismatch, RegistryUnavailable

__all__ = ["Registry", "RegistryMismatch", "RegistryUnavailable", "connect"]
