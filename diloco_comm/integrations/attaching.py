"""Attach DiLoCo to a model that a trainer has made, or has loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..diloco import DiLoCo
from ..shards import local

Make = Callable[..., DiLoCo]


def attach(
    make: Make,
    model: nn.Module,
    optimizer: Any,
    arguments: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
) -> DiLoCo:
    """Make a DiLoCo for a trainer's model and optimizer.

    Args:
        make: ``DiLoCo`` or a preset; called as ``make(model, optimizer, **arguments)``.
        saved: The state to go on from. Local parameters are then those that the trainer has
            loaded: they differ between replicas, and stay.
    """
    if saved is None:
        return make(model, optimizer, **arguments)
    # Attaching gives all replicas the weights of the first; that is undone here.
    loaded = [(tensor, tensor.clone()) for tensor in _local_tensors(model)]
    diloco = make(model, optimizer, **arguments)
    try:
        with torch.no_grad():
            for tensor, value in loaded:
                tensor.copy_(value)
        diloco.load_state_dict(saved)
    except BaseException:
        diloco.close()
        raise
    return diloco


def _local_tensors(model: nn.Module) -> list[Tensor]:
    """Return what attaching may write: trained parameters and buffers, detached."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [local(tensor) for tensor in [*trained, *model.buffers()]]
