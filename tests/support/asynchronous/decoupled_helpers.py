"""Decoupled runs on the virtual clock for tests: small tensors, moved by plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco_comm.asynchronous.decoupled.learner import Learner, Receipt
from diloco_comm.asynchronous.decoupled.merges import SharedFragment, pieces_of
from diloco_comm.asynchronous.decoupled.syncer import QuorumRule, Syncer
from diloco_comm.asynchronous.decoupled.virtual import DecoupledRun, Link, VirtualLearner
from diloco_comm.methods.outer import SGD, OuterOptimizer
from diloco_comm.ops.wire import WireFormat


@dataclass
class Setting:
    """What the learners of a run have in common."""

    wire: str = "fp32"
    merge: str = "mean"
    outer: OuterOptimizer | None = None
    receipt: Receipt = field(default_factory=Receipt)
    error_feedback: bool = False
    rule: QuorumRule = field(default_factory=QuorumRule)
    sync_every: int = 4
    offsets: Sequence[int] | None = None

    def run(
        self,
        models: Sequence[Sequence[Sequence[Tensor]]],
        steps: Sequence[Callable[[], None]],
        *,
        seconds: Sequence[float],
        tokens: Sequence[int] | None = None,
        outages: dict[int, Sequence[tuple[float, float]]] | None = None,
        link: Link | None = None,
        **options: Any,
    ) -> DecoupledRun:
        """Make a run of learners named "0", "1", ...: the fragments and the step of each."""
        wire = WireFormat(self.wire)
        pieces = [pieces_of([t.shape for t in each], self.merge, least=1) for each in models[0]]
        outer = self.outer or SGD(1.0)
        shared = [
            SharedFragment(each, own, wire, outer)
            for each, own in zip(models[0], pieces, strict=True)
        ]
        syncer = Syncer(shared, self.rule, sync_every=self.sync_every, offsets=self.offsets)
        virtual = [
            VirtualLearner(
                Learner(
                    str(i),
                    model,
                    pieces,
                    wire=wire,
                    receipt=self.receipt,
                    error_feedback=self.error_feedback,
                ),
                steps[i],
                seconds[i],
                tokens[i] if tokens else 1,
                (outages or {}).get(i, ()),
            )
            for i, model in enumerate(models)
        ]
        return DecoupledRun(syncer, virtual, link=link, **options)


def counting(num: int, sizes: Sequence[int] = (3, 5)) -> tuple[list, list[Callable[[], None]]]:
    """Return ``num`` models of zeros, and steps that subtract 1 from every element."""
    models = [[[torch.zeros(size)] for size in sizes] for _ in range(num)]

    def step_of(model: list[list[Tensor]]) -> Callable[[], None]:
        def step() -> None:
            for tensor in (t for each in model for t in each):
                tensor.sub_(1.0)

        return step

    return models, [step_of(model) for model in models]
