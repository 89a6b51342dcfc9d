"""Communication backend for low-communication training in PyTorch.

    from diloco_comm import DiLoCo, Nesterov

    diloco = DiLoCo(model, optimizer, sync_every=100, outer=Nesterov(lr=0.7, momentum=0.9))

Importing touches no device and starts no thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import extension
from .base.lazy import lazy_names

try:
    # The operators first: they say what to do when the extension is missing.
    from . import ops  # noqa: F401
except ImportError as error:
    extension.end_command(error)
    raise
from .base.errors import (
    LeftBehind,
    NonFiniteError,
    PeerLeft,
    ReplicaMismatch,
    RunEnded,
    SyncError,
)
from .exchange.collective import all_reduce, shutdown
from .methods.outer import SGD, Adam, FromTorch, HeavyBall, Nesterov, OuterOptimizer, WarmupCosine
from .methods.overlap import CO2, Blocking, Delayed, Eager, Overlap, Streaming
from .ops.wire import WireFormat
from .options import Link, NonFinite, StorePeers, Wire
from .rounds.handshake import connect_store
from .rounds.metrics import SyncMetrics, SyncTotals
from .training.diloco import DiLoCo
from .training.presets import co2, eager_diloco, fedavg, local_sgd, streaming_diloco

if TYPE_CHECKING:
    from .elastic.lighthouse import LighthouseDetector
    from .elastic.options import Elastic
    from .training.sampler import ElasticSampler

# What only few programs need.
__getattr__ = lazy_names(
    __name__,
    {
        "Elastic": ".elastic.options",
        "ElasticSampler": ".training.sampler",
        "LighthouseDetector": ".elastic.lighthouse",
    },
)

__version__ = "0.2.0"

__all__ = [
    "CO2",
    "SGD",
    "Adam",
    "Blocking",
    "Delayed",
    "DiLoCo",
    "Eager",
    "Elastic",
    "ElasticSampler",
    "FromTorch",
    "HeavyBall",
    "LeftBehind",
    "LighthouseDetector",
    "Link",
    "Nesterov",
    "NonFinite",
    "NonFiniteError",
    "OuterOptimizer",
    "Overlap",
    "PeerLeft",
    "ReplicaMismatch",
    "RunEnded",
    "StorePeers",
    "Streaming",
    "SyncError",
    "SyncMetrics",
    "SyncTotals",
    "WarmupCosine",
    "Wire",
    "WireFormat",
    "all_reduce",
    "co2",
    "connect_store",
    "eager_diloco",
    "fedavg",
    "local_sgd",
    "shutdown",
    "streaming_diloco",
]
