"""Metrics: the costs of each round, sums over all rounds, and norms over a replica's workers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base.checks import logger_of, warn
from ..base.memory import CPU, Reading, current, rounded_norm
from ..exchange.round import Mean
from ..methods.overlap import Overlap
from ..replica.workers import ReplicaWorkers
from .part import NormReading, RoundInFlight, SyncedPart

logger = logger_of(__name__)

NUM_KEPT = 4096


@dataclass(frozen=True)
class SyncMetrics:
    """One exchange of one fragment.

    Attributes:
        round: Outer round of the fragment, from 0.
        fragment: Index of the fragment.
        inner_step: Inner steps done when the result was applied.
        sent_bytes, received_bytes: Payload and control bytes to and from the peers; of an exchange
            on streams (NCCL), payload bytes only.
        encode_s: Seconds in which the training loop encoded the pseudo-gradient; 0 on streams.
        exchange_s: Seconds of the exchange on the engine's thread, with headers and votes; on
            streams, the device's seconds from the first chunk to the result of the vote.
        reduce_s: Seconds for decoding, averaging and encoding the runs that this replica owns; 0 on
            streams.
        exposed_s: Seconds for which the training loop, or its stream on a device, only waited for
            the result.
        outer_step_s: Seconds in which the training loop decoded the mean, took the outer step and
            wrote the parameters; on a device, enqueued this work.
        overlap_fraction: Share of the exchange during which the training loop went on, 0 to 1; 0
            if the call that sent the round also applied its result.
        pseudo_gradient_norm: L2 norm of this replica's pseudo-gradient; NaN unless
            ``norms=True``, since it takes one more pass over the parameters.
        weight: This replica's weight in the mean.
        is_applied: False if the round was voted down and skipped.
        is_reset: This replica had values that cannot be encoded, and was reset: its local
            parameters became the outer ones, and its weight was 0.
        reset_replicas: Numbers of all replicas that were reset in the round.
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

    @property
    def hidden_s(self) -> float:
        """Seconds of the exchange during which the training loop went on."""
        return self.overlap_fraction * self.exchange_s


@dataclass
class SyncTotals:
    """Sums of ``SyncMetrics`` over all exchanges since the start.

    Attributes:
        num_syncs: All exchanges, skipped ones too.
        num_skipped: Exchanges whose rounds were voted down.
        num_reset: Exchanges in which this replica was reset.
    """

    num_syncs: int = 0
    num_skipped: int = 0
    num_reset: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def overlap_fraction(self) -> float:
        """Share of all exchange time during which the training loop went on; 0 for no exchange."""
        return self.hidden_s / self.exchange_s if self.exchange_s > 0 else 0.0


class Recorder:
    """Keeps the latest metrics and all sums, and calls the callbacks.

    Attributes:
        latest: The metrics of the latest exchanges, oldest first.
        totals: Sums over all exchanges.
        since: Sums over the exchanges since the last ``take``.
        awaited_s: For each other replica, by number, the seconds for which this one has waited
            until the other began a round that was applied. Waits of a device's stream do not count.
        since_awaited_s: The same since the last ``take``.
        callbacks: Functions that are called after every exchange.
        progress: Called before the callbacks while lines of level INFO are logged, see
            ``Progress.tell``; None: not called.
        waiting: Functions that are called once, when the present step has ended.
        is_telling: Whether a callback is being called.
    """

    def __init__(self) -> None:
        self.latest: deque[SyncMetrics] = deque(maxlen=NUM_KEPT)
        self.totals, self.since = SyncTotals(), SyncTotals()
        self.awaited_s: defaultdict[int, float] = defaultdict(float)
        self.since_awaited_s: defaultdict[int, float] = defaultdict(float)
        self.callbacks: list[Callable[[SyncMetrics], None]] = []
        self.progress: Callable[[], None] | None = None
        # Signal handlers may append to this deque at any moment.
        self.waiting: deque[Callable[[], object]] = deque()
        self._untold: deque[SyncMetrics] = deque()
        self.is_telling = False
        self._has_warned_of_skips = False

    def take(self) -> tuple[SyncTotals, Mapping[int, float]]:
        """Return ``since`` and ``since_awaited_s``, and begin both anew."""
        taken = self.since, self.since_awaited_s
        self.since, self.since_awaited_s = SyncTotals(), defaultdict(float)
        return taken

    def add(self, metrics: SyncMetrics) -> None:
        """Add the metrics of one exchange, applied or skipped."""
        self.latest.append(metrics)
        for totals in (self.totals, self.since):
            totals.num_syncs += 1
            totals.num_skipped += not metrics.is_applied
            totals.num_reset += metrics.is_reset
            for field in fields(totals):
                if hasattr(metrics, field.name):
                    total = getattr(totals, field.name) + getattr(metrics, field.name)
                    setattr(totals, field.name, total)
        if self.callbacks or (self.progress is not None and logger.isEnabledFor(logging.INFO)):
            self._untold.append(metrics)

    def applied(
        self, flight: RoundInFlight, mean: Mean, inner_step: int, reset: tuple[int, ...]
    ) -> None:
        """Record a round that was applied; ``reset`` are the replicas that were reset in it."""
        # A round from a saved state was exchanged by another process: it took no seconds here.
        seconds = mean.seconds
        exchange_s = seconds.get("total", 0.0)
        # For an exchange on streams, the stream's waiting time counts, not the host's.
        exposed_s = seconds.get("exposed", flight.exposed_s)
        # If the call that sent the round also applies it, nothing could be hidden.
        is_at_once = flight.kind == "flush" or flight.sent_step in (flight.apply_step, inner_step)
        can_hide = exchange_s > 0 and not is_at_once
        metrics = SyncMetrics(
            round=flight.number,
            fragment=flight.part.index,
            inner_step=inner_step,
            sent_bytes=mean.sent_bytes,
            received_bytes=mean.received_bytes,
            encode_s=seconds.get("encode", 0.0),
            exchange_s=exchange_s,
            reduce_s=seconds.get("reduce", 0.0),
            exposed_s=exposed_s,
            outer_step_s=flight.outer_step_s,
            overlap_fraction=max(0.0, 1.0 - exposed_s / exchange_s) if can_hide else 0.0,
            pseudo_gradient_norm=flight.norm if flight.reading is None else flight.measured_norm(),
            weight=flight.weight,
            is_reset=flight.is_reset,
            reset_replicas=reset,
        )
        self.add(metrics)
        if flight.work is not None:
            for replica, seconds_of_it in flight.work.awaited_s.items():
                self.awaited_s[replica] += seconds_of_it
                self.since_awaited_s[replica] += seconds_of_it
        if reset:
            _log_reset(flight, reset)
        if not self._has_warned_of_skips:
            for header in mean.headers:
                if header.inner_step != mean.headers[0].inner_step:
                    self._warn_of_skipped_steps(flight, mean)
                    break

    def _warn_of_skipped_steps(self, flight: RoundInFlight, mean: Mean) -> None:
        self._has_warned_of_skips = True
        steps = [header.inner_step for header in mean.headers]
        counts = dict(zip(flight.members, steps, strict=True))
        warn(
            f"replicas have applied different numbers of inner steps ({counts} by replica): "
            "some of them skipped steps, as a GradScaler does after an overflow"
        )

    def skipped(self, flight: RoundInFlight, inner_step: int, why: Exception) -> None:
        """Record a round that no replica applies."""
        logger.warning("skipped: %s", why)
        metrics = SyncMetrics(
            round=flight.number,
            fragment=flight.part.index,
            inner_step=inner_step,
            pseudo_gradient_norm=flight.measured_norm(),
            weight=flight.weight,
            is_applied=False,
            is_reset=flight.is_reset,
            reset_replicas=flight.reset_replicas(),
        )
        self.add(metrics)

    @contextlib.contextmanager
    def deferred_callbacks(self) -> Iterator[None]:
        """Call the callbacks after the block, when this replica's state is consistent again.

        The first error of a callback is raised when all callbacks have been called; if the block
        has failed too, the callback's error is the cause of the block's error. After an interrupt,
        the next such block calls the callbacks.
        """
        try:
            yield
        except Exception as failure:
            error = self._tell(self._untold_calls()) if self._untold else None
            if error is not None:
                raise failure from error
            raise
        error = self._tell(self._untold_calls()) if self._untold else None
        if error is not None:
            raise error

    def call_after_step(self, function: Callable[[], object], *, at_once: bool) -> None:
        """Call a function when the present step has ended; if ``at_once``, now."""
        if not callable(function):
            raise TypeError(f"after_step takes a function without arguments, got {function!r}")
        if at_once:
            function()
        elif function not in self.waiting:
            self.waiting.append(function)

    def call_waiting(self) -> None:
        """Call the functions in ``waiting``; raise the first error after that."""
        # A function that is added meanwhile waits for the next step.
        error = self._tell(self.waiting.popleft() for _ in range(len(self.waiting)))
        if error is not None:
            raise error

    def _tell(self, calls: Iterable[Callable[[], object]]) -> Exception | None:
        """Call ``calls`` and return the first error; do nothing within a callback.

        Exchanges that end during a callback are reported after it.
        """
        if self.is_telling:
            return None
        try:
            try:
                return self._call_all(calls)
            finally:
                self.is_telling = False
        finally:
            # Once more: a Ctrl-C may come just before the same line in the inner ``finally``.
            self.is_telling = False

    def _call_all(self, calls: Iterable[Callable[[], object]]) -> Exception | None:
        # Set here: Python 3.11 runs no ``finally`` after a Ctrl-C at the line of an inner ``try``.
        self.is_telling = True
        first: Exception | None = None
        for call in calls:
            try:
                call()
            except Exception as error:
                first = first or error
        return first

    def _untold_calls(self) -> Iterator[Callable[[], object]]:
        if self.progress is not None:
            yield self.progress
        while self._untold:
            metrics = self._untold.popleft()
            yield from [partial(callback, metrics) for callback in self.callbacks]


def _log_reset(flight: RoundInFlight, replicas: tuple[int, ...]) -> None:
    is_one = len(replicas) == 1
    logger.warning(
        "reset: fragment %d, round %d: replica%s %s had elements that are NaN, Inf or out of the "
        "wire's range, and %s; the others went on with their mean",
        flight.part.index,
        flight.number,
        "" if is_one else "s",
        ", ".join(map(str, replicas)),
        f"took {'its' if is_one else 'their'} outer parameters"
        if flight.part.has_outer
        else "took the mean of the others' buffers",
    )


# ------------------------------------------------------- norms over the workers of a replica


class SharedNorms:
    """Norms of fragments whose elements are divided among the workers of a replica.

    The workers add up the squared norms of one block, see ``RoundRunner.all_workers``, in a small
    collective of fixed size. The host reads the results when they are needed: at the next send, or
    in the metrics.

    Args:
        policy: Says whether the norms of outer steps are measured.
        sent: Measure the norms of pseudo-gradients.
    """

    def __init__(
        self, workers: ReplicaWorkers, parts: Sequence[SyncedPart], policy: Overlap, *, sent: bool
    ) -> None:
        device = next((part.device for part in parts if part.has_outer), CPU)
        side = _C.OwnStream(device) if device != CPU else None
        board = partial(NormBoard, workers.group, len(parts), device, side)
        # A block sends at most one round of a part. But flush() applies all rounds under way.
        self._open_sent = partial(board, 1) if sent else None
        self._open_steps = partial(board, policy.rounds + 1) if policy.measures_steps else None
        self._open()

    def _open(self) -> None:
        self._sent = None if self._open_sent is None else self._open_sent()
        self._steps = None if self._open_steps is None else self._open_steps()

    def of_sent(self, part: SyncedPart, squared: Tensor) -> NormReading:
        """Add the squared norm of this worker's share of a pseudo-gradient; return the reading."""
        assert self._sent is not None
        return self._sent.put(part.index, squared)

    def of_step(self, part: SyncedPart, squared: Tensor) -> NormReading:
        """Add the squared norm of this worker's share of an outer step; return the reading."""
        assert self._steps is not None
        return self._steps.put(part.index, squared)

    def post_sent(self) -> None:
        """Start the collective for this block's pseudo-gradients, unless it was started."""
        if self._sent is not None and not self._sent.is_posted:
            self._sent.post()

    def post_all(self) -> None:
        """Start the block's collectives that were not started yet; prepare for the next block.

        A worker whose block failed early starts here the collectives that the others have started.
        """
        self.post_sent()
        if self._steps is not None:
            self._steps.post()
        self._open()


class NormBoard:
    """The squared norms of one block, added up over the workers of a replica.

    All workers send the same number of values, ``depth`` for each part, whatever they have
    measured. The sum is taken in fp64, in the workers' order, and the norm is rounded to fp32. So
    the norm equals the norm that one worker with all elements would find. Only within a relative
    1e-12 of a rounding boundary may it differ by one unit of fp32, equally on all workers.

    Args:
        group: The process group of the replica's workers.
        num_parts: Number of parts.
        side: Stream that sends values on a device; None when they are in host memory.
        depth: The most norms of one part in a block.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_parts: int,
        device: torch.device,
        side: _C.OwnStream | None,
        depth: int,
    ) -> None:
        self._group, self._side = group, side
        self._values = torch.full((num_parts, depth), math.nan, dtype=torch.float64, device=device)
        self._used = [0] * num_parts
        self.is_posted = False
        self._work: Any = None
        # The values of all workers; None if another worker is gone, for which the block's end
        # raises.
        self._all: Reading | None = None

    def put(self, part: int, squared: Tensor) -> SharedReading:
        """Add a norm that this worker has measured; return its reading.

        Args:
            part: Index of the part.
            squared: fp64, the squared norm first.
        """
        place, self._used[part] = self._used[part], self._used[part] + 1
        self._values[part, place] = squared[0]
        return SharedReading(self, part * self._values.shape[1] + place)

    def post(self) -> None:
        """Start to gather the values of all workers, without waiting."""
        self.is_posted = True
        values = self._values
        everyone = values.new_empty(self._group.size(), *values.shape)
        outs = list(everyone.unbind())
        with contextlib.suppress(RuntimeError):
            if self._side is None:
                self._work = dist.all_gather(outs, values, group=self._group, async_op=True)
                self._all = Reading(everyone.view(-1))
                return
            # Neither the host nor the training's stream waits here: the host reads a copy later.
            side = self._side.stream
            side.wait_stream(torch.accelerator.current_stream(values.device))
            for tensor in (values, everyone):
                tensor.record_stream(side)
            with current(side):
                dist.all_gather(outs, values, group=self._group, async_op=True).wait()
                self._all = Reading(everyone.view(-1))

    def norm(self, place: int) -> float:
        """Return the norm at a place over all workers; NaN if a worker lacks it, or is gone."""
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            self._all = None
        self._work = None
        if self._all is None:
            return math.nan
        total = 0.0
        for squared in self._all.values()[place :: self._values.numel()]:
            total += squared
        return rounded_norm(total)


@dataclass(frozen=True)
class SharedReading:
    """A norm of a whole fragment, at one place of a board; readable after ``NormBoard.post``."""

    board: NormBoard
    place: int

    @property
    def is_there(self) -> bool:
        return self.board.is_posted

    def norm(self) -> float:
        return self.board.norm(self.place)
