"""What small real replicas must arrive at: their training in one process, with failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fault_replicas import (
    BLOCK,
    LR,
    MOMENTUM,
    Result,
    Setup,
    hash_of,
    make_model,
    make_optimizer,
    take_inner_step,
)
from torch import Tensor, nn

from diloco_comm import WireFormat
from diloco_comm.ops import reference
from diloco_comm.ops.wire import Layout
from diloco_comm.replica.fragments import make_fragments, trainable_parameters


class Simulation:
    """The same training in one process, with the operators of ``reference``."""

    def __init__(self, setup: Setup, numbers: Iterable[int]) -> None:
        self.setup = setup
        self.wire = WireFormat(setup.wire, BLOCK)
        self.replicas: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self.fragments: dict[int, Any] = {}
        self.step_count: dict[int, int] = {}
        self.round = [0] * setup.fragments
        for number in numbers:
            self._add(number)
        first = next(iter(self.fragments.values()))
        self.outer = [self._flat(fragment) for fragment in first]
        self.momentum = [torch.zeros_like(outer) for outer in self.outer]

    def _add(self, number: int) -> None:
        model = make_model()
        optimizer = make_optimizer(model)
        self.replicas[number] = model, optimizer
        named = trainable_parameters(model, [optimizer])
        self.fragments[number] = make_fragments(model, named, self.setup.fragments)
        self.step_count[number] = 0

    @staticmethod
    def _flat(fragment: Any) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in fragment.tensors()]).clone()

    def train(self, number: int, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.step_count[number] += 1
            take_inner_step(*self.replicas[number], number, self.step_count[number])

    def run(
        self,
        members: Sequence[int],
        first: int,
        last: int,
        skip: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """Take inner steps first..last with their exchanges but those of (step, fragment)."""
        for step in range(first, last + 1):
            for number in members:
                self.train(number)
            for fragment in self.setup.schedule.due(step):
                if (step, fragment) not in skip:
                    self.sync(fragment, members)

    def sync(self, fragment: int, members: Sequence[int]) -> None:
        parts = [self.fragments[number][fragment].tensors() for number in members]
        outer, momentum = self.outer[fragment], self.momentum[fragment]
        layout = Layout.plan(outer.numel(), len(members), 1, self.wire)
        terms = reference.all_reduce(
            parts,
            layout,
            outers=[outer] * len(members),
            replicas=members,
            round=self.round[fragment],
            fragment=fragment,
        )
        payloads, coefficients = zip(*terms, strict=True)
        form = (layout.run_elements, self.wire.name, self.wire.block_size)
        reference.outer_step(
            outer, momentum, [], payloads, coefficients, 0, outer.numel(), *form, "nesterov",
            LR, MOMENTUM,
        )  # fmt: skip
        for tensors in parts:
            reference.merge(outer, tensors)
        self.round[fragment] += 1

    def join(self, number: int) -> None:
        """Add a fresh replica that starts at the outer parameters."""
        self._add(number)
        for fragment, outer in zip(self.fragments[number], self.outer, strict=True):
            reference.merge(outer, fragment.tensors())

    def check(self, number: int, result: Result) -> None:
        """Compare a replica's end with ours, bit for bit."""
        model, _ = self.replicas[number]
        assert result.rounds == self.round
        assert result.outer == hash_of(self.outer), f"outer parameters of replica {number}"
        assert result.momentum == hash_of(self.momentum), f"momentum of replica {number}"
        assert result.local == hash_of(list(model.parameters())), f"parameters of replica {number}"
