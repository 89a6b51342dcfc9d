"""The record of each round: its costs, the sums over all rounds, and norms over workers."""

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
        sent_bytes, received_bytes: Payload and control bytes to and from the peers.
        encode_s: The training loop encoded the pseudo-gradient.
        exchange_s: From the first byte sent to the last one received.
        reduce_s: Decoding, averaging and encoding the own shard.
        exposed_s: The training loop, or its stream on a device, waited for the result, doing
            nothing else.
        outer_step_s: The training loop decoded, stepped and wrote the parameters.
        overlap_fraction: Part of the exchange during which the training loop went on, 0 to 1; 0
            where the result was applied by the call that sent the round.
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

    @property
    def hidden_s(self) -> float:
        """Seconds of the exchange during which the training loop went on."""
        return self.overlap_fraction * self.exchange_s


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
    hidden_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def overlap_fraction(self) -> float:
        """Part of all exchange time during which the training loop went on; 0 without any."""
        return self.hidden_s / self.exchange_s if self.exchange_s > 0 else 0.0


class Recorder:
    """Keep the latest metrics and all sums, and tell the callbacks.

    Attributes:
        since: Sums over the exchanges that ``progress`` has not taken yet.
        awaited_s: Seconds for which this replica has waited until another one, by its number, began
            a round that was applied. Waits of a stream on a device are not measured.
        since_awaited_s: Those in the exchanges of ``since``.
        callbacks: Called after every exchange.
        progress: Called before them while lines of level INFO are logged; see ``Progress.tell``.
        waiting: Called once, when the present step has ended.
        is_telling: A callback is being called.
    """

    def __init__(self) -> None:
        self.latest: deque[SyncMetrics] = deque(maxlen=NUM_KEPT)
        self.totals, self.since = SyncTotals(), SyncTotals()
        self.awaited_s: defaultdict[int, float] = defaultdict(float)
        self.since_awaited_s: defaultdict[int, float] = defaultdict(float)
        self.callbacks: list[Callable[[SyncMetrics], None]] = []
        self.progress: Callable[[], None] | None = None
        # Signal handlers add to it, in the middle of anything.
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
        """Take in one exchange, applied or skipped."""
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
        # On streams the training stands still for other times than the host waits.
        exposed_s = seconds.get("exposed", flight.exposed_s)
        # The call that sends a round may apply the result, too.
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
        """Call a function when the step has ended, or at once."""
        if not callable(function):
            raise TypeError(f"after_step takes a function without arguments, got {function!r}")
        if at_once:
            function()
        elif function not in self.waiting:
            self.waiting.append(function)

    def call_waiting(self) -> None:
        """Call what waits for the end of the step, and raise the first error after that."""
        # A function that one of them adds waits for the next step.
        error = self._tell(self.waiting.popleft() for _ in range(len(self.waiting)))
        if error is not None:
            raise error

    def _tell(self, calls: Iterable[Callable[[], object]]) -> Exception | None:
        """Call the callbacks; an exchange that ends during a callback is told after it."""
        if self.is_telling:
            return None
        try:
            try:
                return self._call_all(calls)
            finally:
                self.is_telling = False
        finally:
            # A Ctrl-C may come just before the same line in the inner ``finally``.
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

    The norms measured in one block of the workers are posted as one small collective of fixed size.
    The host reads them when they are needed: at the next send, or in the metrics.

    Args:
        sent: Measure the pseudo-gradients; the policy says whether the outer steps are measured.
    """

    def __init__(
        self, workers: ReplicaWorkers, parts: Sequence[SyncedPart], policy: Overlap, *, sent: bool
    ) -> None:
        device = next((part.device for part in parts if part.has_outer), CPU)
        side = _C.OwnStream(device) if device != CPU else None
        board = partial(NormBoard, workers.group, len(parts), device, side)
        # A block sends one round of a part at most; flush() applies all that are under way.
        self._open_sent = partial(board, 1) if sent else None
        self._open_steps = partial(board, policy.rounds + 1) if policy.measures_steps else None
        self._open()

    def _open(self) -> None:
        self._sent = None if self._open_sent is None else self._open_sent()
        self._steps = None if self._open_steps is None else self._open_steps()

    def of_sent(self, part: SyncedPart, squared: Tensor) -> NormReading:
        """Keep the squared norm of a part's pseudo-gradient."""
        assert self._sent is not None
        return self._sent.put(part.index, squared)

    def of_step(self, part: SyncedPart, squared: Tensor) -> NormReading:
        """Keep the squared norm of a part's outer step."""
        assert self._steps is not None
        return self._steps.put(part.index, squared)

    def post_sent(self) -> None:
        """Post the norms of the pseudo-gradients of this block; once in each block."""
        if self._sent is not None and not self._sent.is_posted:
            self._sent.post()

    def post_all(self) -> None:
        """Post the norms that are not posted yet, and begin anew for the next block.

        A worker whose block failed early posts here the norms that the others posted before.
        """
        self.post_sent()
        if self._steps is not None:
            self._steps.post()
        self._open()


class NormBoard:
    """Squared norms of each worker's elements, added up over the workers of the replica.

    Each part has ``depth`` places, so that all workers send the same number of values, whatever
    they have measured. The sum is fp64 in the workers' order and the norm is rounded to fp32: it
    equals the norm of one worker with all the elements, unless it lies within 1e-12 of itself from
    where that rounding turns. Then it may be one step of fp32 off, on all workers of the replica.

    Args:
        side: Stream that sends values on a device; None when they are in host memory.
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
        # Values of all workers; None if another worker is gone, and the end of the block raises.
        self._all: Reading | None = None

    def put(self, part: int, squared: Tensor) -> SharedReading:
        """Add a norm that this worker has measured; ``squared`` is fp64, the squared norm first."""
        place, self._used[part] = self._used[part], self._used[part] + 1
        self._values[part, place] = squared[0]
        return SharedReading(self, part * self._values.shape[1] + place)

    def post(self) -> None:
        """Send the values to the other workers; returns while they travel."""
        self.is_posted = True
        values = self._values
        everyone = values.new_empty(self._group.size(), *values.shape)
        outs = list(everyone.unbind())
        with contextlib.suppress(RuntimeError):
            if self._side is None:
                self._work = dist.all_gather(outs, values, group=self._group, async_op=True)
                self._all = Reading(everyone.view(-1))
                return
            # Neither the host nor its stream waits now: the host reads a copy when it needs it.
            side = self._side.stream
            side.wait_stream(torch.accelerator.current_stream(values.device))
            for tensor in (values, everyone):
                tensor.record_stream(side)
            with current(side):
                dist.all_gather(outs, values, group=self._group, async_op=True).wait()
                self._all = Reading(everyone.view(-1))

    def norm(self, place: int) -> float:
        """Return the norm over all workers; NaN when a worker has not measured it, or is gone."""
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
    """A norm of the whole fragment; it can be read when the board has been posted."""

    board: NormBoard
    place: int

    @property
    def is_there(self) -> bool:
        return self.board.is_posted

    def norm(self) -> float:
        return self.board.norm(self.place)
