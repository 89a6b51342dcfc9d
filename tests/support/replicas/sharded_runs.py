"""Policies under which a run of sharded replicas must be that of unsharded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco_comm import CO2, Delayed, DiLoCo, Eager, HeavyBall, Streaming

MOMENTUM = {"outer": HeavyBall(0.5, 0.9), "norms": True}
POLICIES: list[dict[str, Any]] = [
    {"overlap": None, "norms": True},
    {"overlap": Streaming(delay=1, alpha=0.5), "norms": True},
    {"overlap": Delayed(2)},
    {"overlap": Eager()},
    {"overlap": Eager(2, "skip")},
    {"overlap": CO2(0.002, "gap-aware"), **MOMENTUM},
    {"overlap": "with functions", **MOMENTUM},
]


def resolved(arguments: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Replace the name of a policy that only a worker can make."""
    if arguments.get("overlap") != "with functions":
        return arguments
    return {**arguments, "overlap": with_functions(optimizer)}


def with_functions(optimizer: torch.optim.Optimizer) -> CO2:
    """Return a policy that follows the inner learning rate, and let that fall with each step."""
    group = optimizer.param_groups[0]
    optimizer.register_step_pre_hook(lambda *_: group.update(lr=group["lr"] * 0.9))
    return CO2(0.2, lambda last, largest: 1 + last * largest, lambda: group["lr"])


def norms_of(diloco: DiLoCo) -> Tensor:
    """Return the norms in the metrics, and those that make the staleness gap."""
    norms = [metrics.pseudo_gradient_norm for metrics in diloco.metrics()]
    steps = [part.step_norms.read() for part in diloco.parts]
    return torch.tensor([*norms, *(norm for pair in steps for norm in pair)], dtype=torch.float64)
