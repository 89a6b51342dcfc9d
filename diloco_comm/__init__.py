"""Communication backend for low-communication training in PyTorch.

    from diloco_comm import DiLoCo, Nesterov

    diloco = DiLoCo(model, optimizer, sync_every=100, outer=Nesterov(lr=0.7, momentum=0.9))

Importing touches no device, starts no thread, and loads torch with the first name that needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.lazy import lazy_names

if TYPE_CHECKING:
    from .base.errors import (
        LeftBehind,
        NonFiniteError,
        PeerLeft,
        ReplicaMismatch,
        RunEnded,
        SyncError,
    )
    from .elastic.options import Elastic
    from .exchange.collective import all_reduce, shutdown
    from .methods.outer import (
        SGD,
        Adam,
        FromTorch,
        HeavyBall,
        Nesterov,
        OuterOptimizer,
        WarmupCosine,
    )
    from .methods.overlap import CO2, Blocking, Delayed, Eager, Overlap, Streaming
    from .ops.wire import WireFormat
    from .options import Link, NonFinite, StorePeers, Wire
    from .rounds.handshake import connect_store
    from .rounds.metrics import SyncMetrics, SyncTotals
    from .training.diloco import DiLoCo
    from .training.presets import co2, eager_diloco, fedavg, local_sgd, streaming_diloco
    from .training.sampler import ElasticSampler

__version__ = "0.3.0"

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

__dir__ = __all__.copy
__getattr__ = lazy_names(
    __name__,
    {
        ".": "ops",
        # The operators load the extension, or say what to do when the extension is missing.
        ".ops": "_C",
        ".base.errors": "LeftBehind NonFiniteError PeerLeft ReplicaMismatch RunEnded SyncError",
        ".elastic.options": "Elastic",
        ".exchange.collective": "all_reduce shutdown",
        ".methods.outer": "Adam FromTorch HeavyBall Nesterov OuterOptimizer SGD WarmupCosine",
        ".methods.overlap": "Blocking CO2 Delayed Eager Overlap Streaming",
        ".ops.wire": "WireFormat",
        ".options": "Link NonFinite StorePeers Wire",
        ".rounds.handshake": "connect_store",
        ".rounds.metrics": "SyncMetrics SyncTotals",
        ".training.diloco": "DiLoCo",
        ".training.presets": "co2 eager_diloco fedavg local_sgd streaming_diloco",
        ".training.sampler": "ElasticSampler",
    },
)
