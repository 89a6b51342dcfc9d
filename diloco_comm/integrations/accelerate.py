"""DiLoCo for a training loop of one's own on ``accelerate``.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    diloco = attach(accelerator, model, optimizer, sync_every=100)

The loop stays as it is. Source: accelerate 1.15, ``optimizer.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..diloco import DiLoCo
from .attaching import Make


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    make: Make = DiLoCo,
    **arguments: Any,
) -> DiLoCo:
    """Attach to a prepared model and optimizer; checkpoints of the accelerator carry the state.

    ``accelerator.save_state(folder)`` saves the outer state too and ``load_state(folder)`` goes on
    from it to the same bytes. Each replica needs a folder of its own, since local parameters
    differ. With gradient accumulation only the steps that are taken are counted.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        arguments: Of ``make``: ``sync_every=100`` and so on.

    Raises:
        ValueError: Under DeepSpeed, whose optimizer steps inside ``accelerator.backward``.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "under DeepSpeed the optimizer steps inside accelerator.backward(), where no hook "
            "runs: use DiLoCo(..., attach=False) and call diloco.step() after each applied step"
        )
    diloco = make(accelerator.unwrap_model(model), optimizer, **arguments)
    accelerator.register_for_checkpointing(diloco)
    return diloco
