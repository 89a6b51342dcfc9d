"""The bytes that a streamed outer step must move, moved by plain loops at the same inner steps.

The floor of bar 17, a backend of against_torchft.py. When a fragment is sent, ours reads outer and
local parameters and writes the payload; when its result is applied, ours reads payload, outer
parameters and momentum, and writes outer parameters, momentum and local parameters (with alpha 0
the local ones are not read). The loops are those of csrc/codec/bench/floors.cpp, which do nothing
else.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from benchmarks.operators.operator_table import PATTERN, buffer
from benchmarks.support import common

# Elements; ranges of the loops are multiples of it.
_UNIT = 1024
_ROUNDS = 7


class Alone:
    """No exchange at all: what training costs by itself."""

    num_syncs = 0

    def step(self) -> None:
        """Do nothing."""

    def parts(self) -> dict[str, float]:
        return {}

    def outer_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


class Traffic(Alone):
    """Plain loops over buffers as large as the fragments; nothing is exchanged.

    Args:
        sizes: Elements of the fragments.
        sync_every: Inner steps between two sends of a fragment.
        first_sends: Inner step of each fragment's first send, counted from 1.
        delay: Inner steps from a send to its apply.
    """

    def __init__(
        self, sizes: Sequence[int], *, sync_every: int, first_sends: Sequence[int], delay: int
    ) -> None:
        self.fragments = [Buffers(size // _UNIT * _UNIT or _UNIT) for size in sizes]
        self.sync_every, self.first_sends, self.delay = sync_every, first_sends, delay
        self.inner_step = 0
        self.seconds = {"encode": 0.0, "exposed": 0.0, "outer_step": 0.0}
        largest = max(self.fragments, key=lambda one: one.codes.numel())
        self.loops = {
            "encode": fastest("encode", largest.encode()),
            "outer_step": fastest("outer_step", largest.outer_step()),
        }

    def step(self) -> None:
        """Move what is due after this inner step."""
        self.inner_step += 1
        for fragment, first in zip(self.fragments, self.first_sends, strict=True):
            if self._is_due(first):
                self._run("encode", fragment.encode())
            if self._is_due(first + self.delay):
                self._run("outer_step", fragment.outer_step())

    def _is_due(self, first: int) -> bool:
        return self.inner_step >= first and (self.inner_step - first) % self.sync_every == 0

    def _run(self, which: str, buffers: list[Tensor]) -> None:
        begin = time.perf_counter()
        torch.ops.diloco_comm._floor(self.loops[which], buffers)
        self.seconds[which] += time.perf_counter() - begin

    def parts(self) -> dict[str, float]:
        return dict(self.seconds)


class Buffers:
    """As much memory as one fragment of ours has: int8 codes stand for the payload."""

    def __init__(self, num_elements: int) -> None:
        names = ("outer", "params", "momentum")
        self.outer, self.params, self.momentum = (
            buffer(num_elements, torch.float32) for _ in names
        )
        self.codes = buffer(num_elements, torch.int8)
        rng = torch.Generator().manual_seed(1)
        pattern = torch.randn(min(num_elements, PATTERN), generator=rng)
        # Not zeros: some processors move these at twice the speed of anything else.
        for memory in (self.outer, self.params, self.momentum):
            for part in memory.split(PATTERN):
                part.copy_(pattern[: part.numel()])

    def encode(self) -> list[Tensor]:
        return [self.outer, self.params, self.codes]

    def outer_step(self) -> list[Tensor]:
        return [self.outer, self.momentum, self.params, self.codes]


def fastest(start: str, buffers: list[Tensor]) -> str:
    """Choose among the loops of one traffic, with all ranks at it, the same on every rank."""
    names = [name for name in torch.ops.diloco_comm._floors() if name.startswith(start)]
    runs = {n: functools.partial(torch.ops.diloco_comm._floor, n, buffers) for n in names}
    seconds = common.interleave(runs, rounds=_ROUNDS)
    medians = common.slowest_of_ranks([statistics.median(seconds[name]) for name in names])
    return names[medians.index(min(medians))]
