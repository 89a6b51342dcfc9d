"""Settings that have a name in the literature; every argument of ``DiLoCo`` may be added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .diloco import DiLoCo
from .outer import SGD
from .rounds import Weight

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def fedavg(
    model: nn.Module, optimizer: Optimizers, *, sync_every: int, weight: Weight, **arguments: Any
) -> DiLoCo:
    """Average the replicas' parameters, each weighted by its samples (arXiv 1602.05629).

    Args:
        weight: Samples this replica trained on in the round, a number or a callable.
    """
    arguments = {"outer": SGD(lr=1.0), "wire": "fp32", **arguments}
    return DiLoCo(model, optimizer, sync_every=sync_every, weight=weight, **arguments)


def local_sgd(
    model: nn.Module, optimizer: Optimizers, *, sync_every: int, **arguments: Any
) -> DiLoCo:
    """Average the replicas' parameters, all alike (arXiv 1805.09767)."""
    arguments = {"outer": SGD(lr=1.0), "wire": "fp32", **arguments}
    return DiLoCo(model, optimizer, sync_every=sync_every, **arguments)
