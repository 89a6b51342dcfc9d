"""The methods that ``decoupled.py`` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.asynchronous.methods import SPEEDS
from diloco_comm import ops
from diloco_comm.asynchronous.decoupled.merges import WatchedFragment
from diloco_comm.asynchronous.decoupled.syncer import QuorumRule
from diloco_comm.ops.wire import Layout

MOMENTUM = 0.9
OVERLAP_STEPS = 2


@dataclass(frozen=True)
class Method:
    """A setting of decoupled training.

    Attributes:
        quorum: K; 0 for all learners.
        grace: gamma, the share of the slack that the grace window takes.
        merge: "mean" or "rda".
        receipt: What learners do with a commit.
        wire: Format of the payloads in both directions.
        has_feedback: Rounding errors of a payload are added to the next one, in both directions.
        is_synchronous: Learners wait: all have the speed of the slowest one, and the link takes no
            time.
        rate_of: The method whose learning rate is taken; its own is searched if "".
        start: Where the search for the learning rate begins.
    """

    quorum: int = 1
    grace: float = 0.0
    merge: str = "mean"
    receipt: str = "overwrite"
    wire: str = "fp32"
    has_feedback: bool = False
    is_synchronous: bool = False
    rate_of: str = ""
    start: float = 0.7

    def rule(self, num_learners: int) -> QuorumRule:
        return QuorumRule(quorum=self.quorum or num_learners, gamma=self.grace, delay=OVERLAP_STEPS)


STREAMING, DELAYED = "Streaming", "DN + DyLU"
GRACE = "K=1, grace"
METHODS = {
    STREAMING: Method(quorum=0, is_synchronous=True),
    "K=1": Method(),
    GRACE: Method(grace=0.5),
    "K=M": Method(quorum=0),
    "K=1, RDA": Method(merge="rda"),
    "K=1, grace, RDA": Method(grace=0.5, merge="rda"),
    "K=M, RDA": Method(quorum=0, merge="rda"),
    "K=1, carry": Method(receipt="carry", start=0.1),
    "K=1, grace, carry": Method(grace=0.5, receipt="carry", start=0.3),
    "K=1, grace, int4": Method(grace=0.5, wire="int4", rate_of=GRACE),
    "K=1, grace, int4 feedback": Method(grace=0.5, wire="int4", has_feedback=True, rate_of=GRACE),
}
# The asynchronous server of benchmarks/asynchronous/convergence.py, and where its search begins.
ASYNCHRONOUS = {DELAYED: 0.3}
NAMES = (STREAMING, DELAYED, *(name for name in METHODS if name != STREAMING))


def seconds_of(speeds: str, num_learners: int, steps: int) -> float:
    """Return the virtual time in which learners that never wait take ``steps`` in the mean."""
    return steps * num_learners / sum(1 / s for s in SPEEDS[speeds](num_learners))


def steps_in_equal_time(speeds: str, num_learners: int, steps: int) -> int:
    """Return the steps that learners take in this time if all wait for the slowest one."""
    slowest = max(SPEEDS[speeds](num_learners))
    return round(seconds_of(speeds, num_learners, steps) / slowest)


class CodedFragment(WatchedFragment):
    """A fragment that sends its changes on the wire of the reports.

    The learners' values are the sum of the decoded changes. With feedback a change is taken from
    the learners' values, so that the next change mends the rounding error of this one; without
    feedback it is taken from the last shared values, and the errors add up.
    """

    def __init__(self, *args: Any, has_feedback: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._has_feedback = has_feedback
        self._at_learners = [each.clone() for each in self.values]
        self._sent = [each.clone() for each in self.values]
        self._num_sent = 0

    @property
    def coded_bytes(self) -> int:
        """Bytes of one coded commit."""
        return sum(layout.payload_bytes for layout in self.layouts)

    def copy_values(self, room: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return copies of the values that the learners have after the newest commit."""
        if self._num_sent < self.num_merges:
            self._num_sent = self.num_merges
            for index, layout in enumerate(self.layouts):
                self._send(index, layout)
        room = self.room_for_copy() if room is None else room
        return [copy.copy_(each) for copy, each in zip(room, self._at_learners, strict=True)]

    def _send(self, index: int, layout: Layout) -> None:
        base = self._at_learners[index] if self._has_feedback else self._sent[index]
        form = (layout.num_elements, layout.run_elements, layout.wire.name, layout.wire.block_size)
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        change = torch.empty_like(base)
        ops.encode(base, [self.values[index]], payload, 0, *form)
        ops.decode([payload], [1.0], [change], 0, *form)
        self._at_learners[index] -= change
        self._sent[index].copy_(self.values[index])
