"""Norms of fragments of which each worker of a replica has a part.

What is measured in a block of steps that all workers of the replica enter is posted as one small
collective of fixed size, and looked at when it is needed, at the next send or in the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base.memory import CPU, Reading, page_locked, rounded_norm
from ..exchange.nccl.sending import current
from ..methods.overlap import Overlap
from ..replica.workers import ReplicaWorkers
from .synced import SyncedFragment, SyncedPart


class SharedNorms:
    """What one replica measures: of what it sends, and of its outer steps.

    Args:
        workers: None when this worker has all elements.
        sent: Whether what is sent is measured; the policy says whether the steps are.
    """

    def __init__(
        self,
        workers: ReplicaWorkers | None,
        parts: Sequence[SyncedPart],
        policy: Overlap,
        *,
        sent: bool,
    ) -> None:
        self._workers, self._num_parts = workers, len(parts)
        self._device = next((p.device for p in parts if isinstance(p, SyncedFragment)), CPU)
        self._measures_sent, self._measures_steps = sent, policy.measures_steps
        measures = workers is not None and (sent or policy.measures_steps)
        self._side = _C.OwnStream(self._device) if measures and self._device != CPU else None
        # Of one part, a block sends one round at most; flush() applies all that are under way.
        self._num_steps = policy.rounds + 1
        self._sent: NormBoard | None = None
        self._steps: NormBoard | None = None
        self._is_sent_posted = False
        self._open()

    def _open(self) -> None:
        if self._workers is None:
            return
        if self._measures_sent:
            self._sent = NormBoard(self._workers, self._num_parts, 1, self._device, self._side)
        if self._measures_steps:
            shape = (self._num_parts, self._num_steps)
            self._steps = NormBoard(self._workers, *shape, self._device, self._side)
        self._is_sent_posted = False

    def of_sent(self, part: SyncedPart, squared: Tensor) -> Reading | SharedReading:
        """Keep the squared norm of what a part sends."""
        # Buffers are not divided among workers, each has its own.
        if self._sent is None or not isinstance(part, SyncedFragment):
            return Reading(squared)
        return self._sent.put(part.index, squared)

    def of_step(self, part: SyncedPart, squared: Tensor) -> Reading | SharedReading:
        """Keep the squared norm of a part's outer step."""
        return Reading(squared) if self._steps is None else self._steps.put(part.index, squared)

    def post_sent(self) -> None:
        """Post what was measured of what is sent in this block; once in each."""
        if self._sent is not None and not self._is_sent_posted:
            self._is_sent_posted = True
            self._sent.post()

    def post_all(self) -> None:
        """Post the rest, and begin anew for the next block.

        A worker whose block failed early posts here what its workmates posted before.
        """
        if self._workers is None:
            return
        self.post_sent()
        if self._steps is not None:
            self._steps.post()
        self._open()


class NormBoard:
    """Squared norms of each worker's elements, added up over the workers of the replica.

    Each part has ``depth`` places, so that all workers send the same number of values, whatever
    they have measured. The sum is fp64 in the workers' order and the norm is rounded to fp32: it
    is that of one worker with all the elements, unless it lies within 1e-12 of itself from where
    that rounding turns: then it may be one step of fp32 off, on all workers of the replica alike.

    Args:
        side: What values on a device are sent from; None when they are in host memory.
    """

    def __init__(
        self,
        workers: ReplicaWorkers,
        num_parts: int,
        depth: int,
        device: torch.device,
        side: _C.OwnStream | None,
    ) -> None:
        self._group, self._size, self._side = workers.group, workers.size, side
        shape = (num_parts, depth)
        self._values = torch.full(shape, math.nan, dtype=torch.float64, device=device)
        self._used = [0] * num_parts
        self._all: Tensor | None = None
        self._work: Any = None
        self._event: torch.Event | None = None
        self._sums: Tensor | None = None

    def put(self, part: int, squared: Tensor) -> SharedReading:
        """Add what this worker has measured; ``squared`` is fp64, the squared norm first."""
        place, self._used[part] = self._used[part], self._used[part] + 1
        self._values[part, place] = squared[0]
        return SharedReading(self, part, place)

    @property
    def is_posted(self) -> bool:
        return self._all is not None or self._sums is not None

    def post(self) -> None:
        """Send the values to the workmates; returns while they travel."""
        try:
            self._post()
        except RuntimeError:
            self._sums = self._none()

    def _post(self) -> None:
        values = self._values
        everyone = values.new_empty(self._size, *values.shape)
        outs = list(everyone.unbind())
        if self._side is None:
            self._work = dist.all_gather(outs, values, group=self._group, async_op=True)
            self._all = everyone
            return
        # The host looks at a copy when it needs the norms, and neither it nor its stream waits now.
        side = self._side.stream
        side.wait_stream(torch.accelerator.current_stream(values.device))
        self._all = page_locked(tuple(everyone.shape), everyone.dtype)
        for tensor in (values, everyone):
            tensor.record_stream(side)
        with current(side):
            dist.all_gather(outs, values, group=self._group, async_op=True).wait()
            self._all.copy_(everyone, non_blocking=True)
            self._event = torch.Event(values.device)
            self._event.record(side)

    def norm(self, part: int, place: int) -> float:
        """Return the norm over all workers; NaN when one of them has none, or is gone."""
        if self._sums is None:
            self._sums = self._add_up()
        return rounded_norm(float(self._sums[part, place]))

    def _add_up(self) -> Tensor:
        assert self._all is not None
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            return self._none()
        if self._event is not None:
            self._event.synchronize()
        total = torch.zeros_like(self._all[0])
        for values in self._all:
            total += values
        return total

    def _none(self) -> Tensor:
        """A workmate is gone, as the end of the block says."""
        return torch.full_like(self._values, math.nan, device=CPU)


class SharedReading:
    """A norm of the whole fragment, to be had when the board has been posted."""

    def __init__(self, board: NormBoard, part: int, place: int) -> None:
        self._board, self._part, self._place = board, part, place

    @property
    def is_there(self) -> bool:
        return self._board.is_posted

    def norm(self) -> float:
        return self._board.norm(self._part, self._place)
