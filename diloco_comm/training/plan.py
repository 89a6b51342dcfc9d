"""The plan of a replica: the parts of a model, their schedule, and hashes that peers compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _C
from ..methods.settings import Settings
from ..ops.wire import WireFormat
from ..replica import sharding
from ..replica.fragments import (
    Fragment,
    Named,
    Schedule,
    cut_parameters,
    describe,
    describe_parameters,
    fragments_of,
    layout_hash,
    trainable_parameters,
)
from ..replica.workers import ReplicaWorkers
from ..rounds.part import SyncedBuffers, SyncedFragment, SyncedPart


@dataclass(frozen=True)
class Plan:
    """The parts of one replica, or of one of its workers.

    Attributes:
        parts: The fragments, and then the averaged buffers if there are any.
        device: The device of all parameters.
        schedule: The inner steps at which each part is sent.
        num_fragments: Number of parts with parameters.
        worker: This worker's name among the replica's workers, such as "1of4"; "" without others.
        description: One line for each tensor, equal on all replicas.
        layout: Hash of names, shapes, fragments and schedule, for the elements of this worker.
        saved_layout: The same hash for the whole parameters.
        shard_group: The replica's workers, if all of them hold the same parameters; else None.
        delay: Inner steps from a send to its outer step; None if the step comes at a later send.
    """

    parts: list[SyncedPart]
    device: torch.device
    schedule: Schedule
    num_fragments: int
    worker: str
    description: list[str]
    layout: int
    saved_layout: int
    shard_group: ReplicaWorkers | None
    delay: int | None

    def parameter_parts(self) -> list[SyncedFragment]:
        """Return the parts with parameters."""
        return [part for part in self.parts if isinstance(part, SyncedFragment)]

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters that are exchanged."""
        return [param for part in self.parameter_parts() for param in part.fragment.params]

    def named(self) -> Named:
        """Return all parameters that are exchanged, with their names in the model."""
        parts = [part.fragment for part in self.parameter_parts()]
        return [pair for one in parts for pair in zip(one.names, one.params, strict=True)]

    def has_own_progress(self) -> bool:
        """Whether any local parameter differs from its outer one."""
        return any(part.differs_from_local() for part in self.parameter_parts())

    def words(self, settings: Settings, inner_step: int) -> list[str]:
        """Return the settings and the progress so far, for ``repr`` and the log."""
        rounds = sorted({part.round for part in self.parts})
        return [
            f"sync_every={settings.sync_every}",
            f"overlap={_call(settings.overlap.config())}",
            f"outer={_call(settings.outer.config())}",
            f"wire={settings.wire.config()}",
            f"{self.num_fragments} fragment{'s'[: self.num_fragments > 1]}",
            f"inner step {inner_step}",
            f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}",
        ]

    def sent_at(self, inner_step: int) -> list[SyncedPart]:
        """Return the parts that are sent after this inner step."""
        return [self.parts[index] for index in self.schedule.due(inner_step)]

    def written_at(self, inner_step: int, saved: Mapping[int, set[int]]) -> list[SyncedPart]:
        """Return the parts whose local parameters this inner step writes, if nothing fails.

        The result follows from the schedule alone, so all workers of a replica get the same parts.

        Args:
            saved: The parts with a round from a saved state, by the inner step that applies it.
        """
        sent = inner_step - (self.delay or 0)
        indices = {*self.schedule.due(sent), *saved.get(inner_step, ())}
        return [self.parts[index] for index in sorted(indices)]

    def next_due(self, inner_step: int, saved: Mapping[int, set[int]]) -> int:
        """Return the first inner step after this one that sends, or that may write or wait.

        Args:
            saved: As in ``written_at``.
        """
        is_left_to_device = self.device.type != "cpu" and self.delay is not None
        if is_left_to_device and any(part.takes_verdict for part in self.parts):
            # Every step must check for votes that have become known on the device.
            return inner_step + 1
        delay = self.delay or 0
        flights = [flight.apply_step for part in self.parts for flight in part.in_flight]
        return min(
            self.schedule.next(inner_step),
            self.schedule.next(inner_step - delay) + delay,
            *(step for step in flights if step >= 0),
            *(step for step in saved if step > inner_step),
        )


def make_plan(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    settings: Settings,
    *,
    shard_group: ReplicaWorkers | None,
    offload: str | None,
) -> Plan:
    """Cut the parameters that the optimizers train into parts.

    Raises:
        ValueError, TypeError: If the model or the settings cannot be exchanged.
    """
    named = trainable_parameters(model, optimizers)
    device = sharding.local(named[0][1]).device
    settings.wire.check_names([name for name, _ in named])
    cut = cut_parameters(model, named, settings.fragments)
    offsets = Schedule.plan(settings.sync_every, len(cut), settings.offsets).offsets
    pieces = _with_one_wire(cut, offsets, settings)
    blocks = [piece.wire.block_size for piece in pieces]
    fragments = fragments_of(
        model, [piece.named for piece in pieces], blocks if settings.align_tensors else None
    )
    schedule = Schedule(settings.sync_every, tuple(piece.offset for piece in pieces))
    worker = sharding.worker([param for _, param in named])
    if shard_group is not None:
        shares = zip(fragments, blocks, strict=True)
        fragments = [shard_group.share(one, block) for one, block in shares]
        worker = shard_group.worker
    wires, loader = [piece.wire for piece in pieces], _loader(device, offload)
    parts: list[SyncedPart] = [*_parameter_parts(fragments, wires, settings, loader)]
    description = describe_parameters(fragments)
    layout = layout_hash(fragments, schedule)
    saved_layout = layout_hash(fragments, schedule, whole=True)
    if settings.average_buffers:
        buffers = SyncedBuffers(len(fragments), model)
        parts.append(buffers)
        description += [describe(f"buffer {n}", t) for n, t in buffers.named().items()]
        offsets = (*schedule.offsets, settings.sync_every)
        schedule = Schedule(settings.sync_every, offsets)
    return Plan(
        parts,
        device,
        schedule,
        len(fragments),
        worker,
        description,
        layout,
        saved_layout,
        shard_group,
        None if settings.overlap.rounds else settings.overlap.steps(),
    )


class _Piece(NamedTuple):
    """Parameters of one fragment that have one wire."""

    named: Named
    wire: WireFormat
    offset: int


def _with_one_wire(
    cut: Sequence[Named], offsets: Sequence[int], settings: Settings
) -> list[_Piece]:
    """Divide each fragment by the wires of its parameters; its pieces are sent at one time."""
    pieces = []
    for named, offset in zip(cut, offsets, strict=True):
        for index, (_, wire) in enumerate(settings.wire.groups):
            of_group = [pair for pair in named if settings.wire.group_of(pair[0]) == index]
            if of_group:
                pieces.append(_Piece(of_group, wire, offset))
    return pieces


def _loader(device: torch.device, offload: str | None) -> _C.ChunkLoader | None:
    if offload is None:
        return None
    if device.type == "cpu":
        raise ValueError("offload='cpu' is for parameters on a GPU, these are in CPU memory")
    return _C.ChunkLoader(device)


def _parameter_parts(
    fragments: Sequence[Fragment],
    wires: Sequence[WireFormat],
    settings: Settings,
    loader: _C.ChunkLoader | None,
) -> list[SyncedFragment]:
    return [
        SyncedFragment(
            fragment,
            settings.outer,
            wire,
            settings.error_feedback,
            feedback_decay=settings.feedback_decay,
            carries=settings.overlap.rounds > 0,
            # ``Eager`` adds own payloads to the mean, so all payloads must come to all replicas.
            must_gather=not settings.overlap.is_shared,
            loader=loader,
        )
        for fragment, wire in zip(fragments, wires, strict=True)
    ]


def _call(config: Mapping[str, Any]) -> str:
    arguments = [f"{k}={v!r}" for k, v in config.items() if k != "name" and v is not None]
    return f"{config['name']}({', '.join(arguments)})"
