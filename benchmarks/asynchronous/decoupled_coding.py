"""A shared fragment whose commits are coded, for ``decoupled.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco_comm import ops
from diloco_comm.asynchronous.decoupled.fragments import WatchedFragment
from diloco_comm.ops.wire import Layout


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
