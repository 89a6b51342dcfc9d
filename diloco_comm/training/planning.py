"""What is exchanged when: the parts of a model, their schedule, and how others may know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import _C
from ..methods.settings import Settings
from ..replica import sharding
from ..replica.fragments import (
    Fragment,
    Schedule,
    describe,
    describe_parameters,
    layout_hash,
    make_fragments,
    trainable_parameters,
)
from ..replica.shard_group import ShardGroup
from ..rounds.synced import SyncedBuffers, SyncedFragment, SyncedPart


@dataclass(frozen=True)
class Plan:
    """The parts of one replica, or of one of its workers.

    Attributes:
        device: Of all parameters.
        schedule: When each part is sent.
        num_fragments: Parts with parameters; the buffers come after them.
        worker: Who this is among those that hold the shards of the replica; "" alone.
        description: One line for each tensor, equal on all replicas.
        layout: Hash of names, shapes, fragments and schedule, of what this worker has.
        saved_layout: The same of the whole parameters.
    """

    parts: list[SyncedPart]
    device: torch.device
    schedule: Schedule
    num_fragments: int
    worker: str
    description: list[str]
    layout: int
    saved_layout: int


def make_plan(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    settings: Settings,
    *,
    shard_group: ShardGroup | None,
    offload: str | None,
) -> Plan:
    """Cut what the optimizers train into parts.

    Raises:
        ValueError, TypeError: For a model or settings that cannot be.
    """
    named = trainable_parameters(model, optimizers)
    device = sharding.local(named[0][1]).device
    fragments = make_fragments(model, named, settings.fragments)
    schedule = Schedule.plan(settings.sync_every, len(fragments), settings.offsets)
    worker = sharding.worker([param for _, param in named])
    if shard_group is not None:
        fragments = [shard_group.share(one, settings.wire.block_size) for one in fragments]
        worker = shard_group.worker
    parts: list[SyncedPart] = [*_parameter_parts(fragments, settings, _loader(device, offload))]
    description = describe_parameters(fragments)
    layouts = [layout_hash(fragments, schedule, whole=whole) for whole in (False, True)]
    if settings.average_buffers:
        buffers = SyncedBuffers(len(fragments), model)
        parts.append(buffers)
        description += [describe(f"buffer {n}", t) for n, t in buffers.named().items()]
        offsets = (*schedule.offsets, settings.sync_every)
        schedule = Schedule(settings.sync_every, offsets)
    return Plan(parts, device, schedule, len(fragments), worker, description, *layouts)


def _loader(device: torch.device, offload: str | None) -> _C.ChunkLoader | None:
    if offload is None:
        return None
    if device.type == "cpu":
        raise ValueError("offload='cpu' is for parameters on a GPU, these are in CPU memory")
    return _C.ChunkLoader(device)


def _parameter_parts(
    fragments: Sequence[Fragment], settings: Settings, loader: _C.ChunkLoader | None
) -> list[SyncedFragment]:
    return [
        SyncedFragment(
            fragment,
            settings.outer,
            settings.wire,
            settings.error_feedback,
            carries=settings.overlap.rounds > 0,
            loader=loader,
        )
        for fragment in fragments
    ]
