"""Norms of fragments whose elements are divided among the workers of a replica.

The norms measured in one block of the workers are posted as one small collective of fixed size. The
host reads them when they are needed: at the next send, or in the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base.memory import CPU, Reading, current, page_locked, rounded_norm
from ..methods.overlap import Overlap
from ..replica.workers import ReplicaWorkers
from .synced import SyncedPart


class SharedNorms:
    """The norms that one replica measures: of its pseudo-gradients, and of its outer steps.

    Args:
        workers: None when this worker has all elements.
        sent: Measure the pseudo-gradients; the policy says whether the outer steps are measured.
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
        self._device = next((part.device for part in parts if part.is_divided), CPU)
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
        """Keep the squared norm of a part's pseudo-gradient."""
        if self._sent is None or not part.is_divided:
            return Reading(squared)
        return self._sent.put(part.index, squared)

    def of_step(self, part: SyncedPart, squared: Tensor) -> Reading | SharedReading:
        """Keep the squared norm of a part's outer step."""
        return Reading(squared) if self._steps is None else self._steps.put(part.index, squared)

    def post_sent(self) -> None:
        """Post the norms of the pseudo-gradients of this block; once in each block."""
        if self._sent is not None and not self._is_sent_posted:
            self._is_sent_posted = True
            self._sent.post()

    def post_all(self) -> None:
        """Post the norms that are not posted yet, and begin anew for the next block.

        A worker whose block failed early posts here the norms that the others posted before.
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
        """Add a norm that this worker has measured; ``squared`` is fp64, the squared norm first."""
        place, self._used[part] = self._used[part], self._used[part] + 1
        self._values[part, place] = squared[0]
        return SharedReading(self, part, place)

    @property
    def is_posted(self) -> bool:
        return self._all is not None or self._sums is not None

    def post(self) -> None:
        """Send the values to the other workers; returns while they travel."""
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
        # Neither the host nor its stream waits now: the host reads a copy when it needs the norms.
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
        """Return the norm over all workers; NaN when a worker has not measured it, or is gone."""
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
        """Return NaN for all: another worker is gone, and the end of the block raises for that."""
        return torch.full_like(self._values, math.nan, device=CPU)


class SharedReading:
    """A norm of the whole fragment; it can be read when the board has been posted."""

    def __init__(self, board: NormBoard, part: int, place: int) -> None:
        self._board, self._part, self._place = board, part, place

    @property
    def is_there(self) -> bool:
        return self._board.is_posted

    def norm(self) -> float:
        return self._board.norm(self._part, self._place)
