"""The costs of one outer step, and the sums over all outer steps."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base.checks import warn
from ..base.memory import CPU, Reading, current, page_locked, rounded_norm
from ..exchange.exchange import Exchange
from ..exchange.work import Mean
from ..methods.overlap import Overlap
from ..replica.workers import ReplicaWorkers
from .part import RoundInFlight, SyncedPart

NUM_KEPT = 4096


@dataclass(frozen=True)
class SyncMetrics:
    """One exchange of one fragment.

    Attributes:
        round: Outer round of the fragment, from 0.
        fragment: Index of the fragment.
        inner_step: Inner steps done when the result was applied.
        sent_bytes, received_bytes: Payload and control bytes to and from the peers.
        encode_s: The training loop encoded the pseudo-gradient.
        exchange_s: From the first byte sent to the last one received.
        reduce_s: Decoding, averaging and encoding the own shard.
        exposed_s: The training loop waited for the result, doing nothing else.
        outer_step_s: The training loop decoded, stepped and wrote the parameters.
        overlap_fraction: Part of the exchange during which the training loop went on.
        pseudo_gradient_norm: L2 norm of this replica's pseudo-gradient; NaN unless
            ``norms=True``, since it takes one more pass over the parameters.
        weight: This replica's weight in the mean.
        is_applied: False when the round was voted down and skipped.
        is_reset: No wire carries this replica's values: the replica has taken the outer parameters,
            and its weight was 0.
        reset_replicas: All replicas that were reset in the round.
    """

    round: int
    fragment: int
    inner_step: int
    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    outer_step_s: float = 0.0
    overlap_fraction: float = 0.0
    pseudo_gradient_norm: float = math.nan
    weight: float = 1.0
    is_applied: bool = True
    is_reset: bool = False
    reset_replicas: tuple[int, ...] = ()


@dataclass
class SyncTotals:
    """Sums over all exchanges since the start; in ``num_reset`` of them this replica was reset."""

    num_syncs: int = 0
    num_skipped: int = 0
    num_reset: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def overlap_fraction(self) -> float:
        """Part of all exchange time during which the training loop went on."""
        return overlap_fraction(self.exchange_s, self.exposed_s)

    def add(self, metrics: SyncMetrics) -> None:
        """Count one more exchange."""
        self.num_syncs += 1
        self.num_skipped += not metrics.is_applied
        self.num_reset += metrics.is_reset
        for field in fields(self):
            if hasattr(metrics, field.name):
                total = getattr(self, field.name) + getattr(metrics, field.name)
                setattr(self, field.name, total)


def overlap_fraction(exchange_s: float, exposed_s: float) -> float:
    """Return the hidden part of an exchange, between 0 and 1; 0 when nothing was exchanged."""
    if exchange_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - exposed_s / exchange_s))


class Recorder:
    """Keep the latest metrics and all sums, and tell the callbacks."""

    def __init__(self) -> None:
        self.latest: deque[SyncMetrics] = deque(maxlen=NUM_KEPT)
        self.totals = SyncTotals()
        self.callbacks: list[Callable[[SyncMetrics], None]] = []
        self._untold: deque[SyncMetrics] = deque()
        self._is_telling = False

    def add(self, metrics: SyncMetrics) -> None:
        """Take in one exchange, applied or skipped."""
        self.latest.append(metrics)
        self.totals.add(metrics)
        self._untold.append(metrics)

    @contextmanager
    def deferred_callbacks(self) -> Iterator[None]:
        """Call the callbacks after the block, when this replica's state is consistent again.

        The first error of a callback is raised when all callbacks have been called; if the block
        has failed too, the callback's error is the cause of the block's error. After an interrupt,
        the next such block calls the callbacks.
        """
        try:
            yield
        except Exception as failure:
            error = self._tell()
            if error is not None:
                raise failure from error
            raise
        error = self._tell()
        if error is not None:
            raise error

    def _tell(self) -> Exception | None:
        """Call the callbacks; an exchange that ends during a callback is told after it."""
        if self._is_telling:
            return None
        try:
            try:
                return self._call_all()
            finally:
                self._is_telling = False
        finally:
            # A Ctrl-C may come just before the same line in the inner ``finally``.
            self._is_telling = False

    def _call_all(self) -> Exception | None:
        # Set here: Python 3.11 runs no ``finally`` after a Ctrl-C at the line of an inner ``try``.
        self._is_telling = True
        first: Exception | None = None
        while self._untold:
            metrics = self._untold.popleft()
            for callback in list(self.callbacks):
                try:
                    callback(metrics)
                except Exception as error:
                    first = first or error
        return first

    def refuse_in_callback(self) -> None:
        """Raise RuntimeError inside a callback."""
        if self._is_telling:
            raise RuntimeError(
                "an on_sync callback cannot call what needs the other replicas, which may call "
                "theirs at another step: do it in the training loop"
            )


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


logger = logging.getLogger(__name__)


class Records:
    """Write down the rounds of one replica."""

    def __init__(self, recorder: Recorder, exchange: Exchange) -> None:
        self._recorder, self._exchange = recorder, exchange
        self._has_warned_of_skips = False

    def skipped(
        self, part: SyncedPart, flight: RoundInFlight, inner_step: int, why: Exception
    ) -> None:
        """Record a round that no replica applies."""
        logger.warning("skipped: %s", why)
        metrics = SyncMetrics(
            round=flight.number,
            fragment=part.index,
            inner_step=inner_step,
            pseudo_gradient_norm=flight.measured_norm(),
            weight=flight.weight,
            is_applied=False,
            is_reset=flight.is_reset,
            reset_replicas=flight.reset_replicas(),
        )
        self._recorder.add(metrics)

    def applied(self, part: SyncedPart, flight: RoundInFlight, inner_step: int) -> None:
        """Record a round that was applied."""
        mean = flight.wait()
        # A round from a saved state was exchanged by another process: it took no seconds here.
        seconds = mean.seconds
        exchange_s = seconds.get("total", 0.0)
        metrics = SyncMetrics(
            round=flight.number,
            fragment=part.index,
            inner_step=inner_step,
            sent_bytes=mean.sent_bytes,
            received_bytes=mean.received_bytes,
            encode_s=seconds.get("encode", 0.0),
            exchange_s=exchange_s,
            reduce_s=seconds.get("reduce", 0.0),
            exposed_s=flight.exposed_s,
            outer_step_s=flight.outer_step_s,
            overlap_fraction=overlap_fraction(exchange_s, flight.exposed_s),
            pseudo_gradient_norm=flight.measured_norm(),
            weight=flight.weight,
            is_reset=flight.is_reset,
            reset_replicas=flight.reset_replicas(),
        )
        self._recorder.add(metrics)
        if metrics.reset_replicas:
            _log_reset(part, flight, metrics.reset_replicas)
        self._warn_of_skipped_steps(mean)

    def _warn_of_skipped_steps(self, mean: Mean) -> None:
        steps = [header.inner_step for header in mean.headers]
        if self._has_warned_of_skips or len(set(steps)) == 1:
            return
        self._has_warned_of_skips = True
        counts = dict(zip(self._exchange.members, steps, strict=True))
        warn(
            f"replicas have applied different numbers of inner steps ({counts} by replica): "
            "some of them skipped steps, as a GradScaler does after an overflow"
        )


def _log_reset(part: SyncedPart, flight: RoundInFlight, replicas: tuple[int, ...]) -> None:
    is_one = len(replicas) == 1
    logger.warning(
        "reset: fragment %d, round %d: replica%s %s had elements that are NaN, Inf or out of the "
        "wire's range, and %s; the others went on with their mean",
        part.index,
        flight.number,
        "" if is_one else "s",
        ", ".join(map(str, replicas)),
        f"took {'its' if is_one else 'their'} outer parameters"
        if part.has_outer
        else "took the mean of the others' buffers",
    )
