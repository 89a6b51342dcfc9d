"""DiLoCo for a user's own training loop on ``accelerate``::

    replicas = replica_per_process()                 # before the Accelerator is made
    model, optimizer = accelerator.prepare(model, optimizer)
    diloco = attach(accelerator, model, optimizer, sync_every=100, **replicas)
    loader = diloco.shard(loader)
    accelerator.register_for_checkpointing(loader.sampler)
    loader = accelerator.prepare(loader)

The training loop stays as it is.
Source: accelerate 1.15, ``optimizer.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..base.checks import warn
from ..replica import sharding
from ..training.diloco import DiLoCo
from .attachment import Make, check, choices_for, without_arguments
from .division import refuse_if_alone_in_a_job, refuse_if_spans_replicas

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..training.arguments import Arguments

_REMEDY = (
    "write `replicas = replica_per_process()` (of diloco_comm.integrations.launch) before the "
    "Accelerator is made, and attach(accelerator, model, optimizer, ..., **replicas)"
)


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    make: Make = DiLoCo,
    **arguments: Unpack[Arguments],
) -> DiLoCo:
    """Attach DiLoCo to a prepared model and optimizer, and save its state with the accelerator's.

    ``accelerator.save_state(folder)`` saves the outer state too. After ``load_state(folder)``
    training continues with the same bytes. Each replica needs its own folder, since local
    parameters differ. Accelerate deletes the oldest folder before it writes a new one: with
    ``total_limit=1`` nothing is left if that save fails, and a warning says so. With
    gradient accumulation DiLoCo counts the optimizer's steps.

    Args:
        model: As ``accelerator.prepare`` has returned it.
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        arguments: Arguments of ``make``, such as ``sync_every=100``.

    Raises:
        ValueError: Under DeepSpeed, whose engine steps inside ``accelerator.backward``; if the
            prepared model averages gradients over several replicas; if the accelerator knows of one
            process in a job of several; if the model is not what ``accelerator.prepare`` returned;
            inside accelerate's ``find_executable_batch_size``, which begins one replica anew.
        TypeError: For an argument that ``make`` does not have.
    """
    given = check(attach, make, arguments)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "under DeepSpeed the accelerator holds no optimizer of the model's own parameters: use "
            "FSDP2 or DDP inside a replica, or DeepSpeed without ZeRO in a loop of your own"
        )
    _refuse_if_restarted()
    _refuse_if_unwrapped(accelerator, model)
    choices = choices_for(make, given)
    refuse_if_spans_replicas(model, choices, _REMEDY)
    refuse_if_alone_in_a_job(accelerator.num_processes, choices, _REMEDY)
    diloco = without_arguments(make)(accelerator.unwrap_model(model), optimizer, **given)
    # A prepared loader divides the batches of a replica among its workers.
    diloco._batches_at_once = 1 if accelerator.split_batches else accelerator.num_processes
    accelerator.register_for_checkpointing(diloco)
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and project.total_limit == 1:
        warn(
            "ProjectConfiguration(total_limit=1) deletes the only checkpoint before the next one "
            "is written, and a kill meanwhile leaves none: give total_limit=2"
        )
    return diloco


def _refuse_if_restarted() -> None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.utils.memory":
            raise ValueError(
                "find_executable_batch_size begins the training of one replica anew when its "
                "memory is full, and the others would wait for it: call attach() outside of it, "
                "with a batch size that fits on every replica"
            )
        frame = frame.f_back


def _refuse_if_unwrapped(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise for the model inside accelerate's DDP: the later checks need the DDP around it."""
    is_ddp = accelerator.distributed_type.value.startswith("MULTI_")
    is_known = any(model is known for known in getattr(accelerator, "_models", ()))
    if is_ddp and is_known and not any(sharding.around(model)):
        raise ValueError(
            "attach() needs the model that accelerator.prepare() has returned, and was given the "
            "model inside that wrapper"
        )
