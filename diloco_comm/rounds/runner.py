"""``RoundRunner``: sends and applies the rounds of one replica; the base for all overlap policies.

In its subclass ``StepTimed`` a result is due some inner steps after its send; in ``SendTimed``, at
a later send of the same part.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import _profiler_enabled

from ..base import checks
from ..base.checks import logger_of
from ..base.errors import NonFiniteError, ReplicaMismatch, SyncError, named
from ..base.interrupts import Uninterruptible, deferred_interrupts
from ..base.memory import Reading
from ..base.trace import exchanged, has_nvtx, span
from ..exchange.exchange import Exchange
from ..exchange.membership.change import Repair
from ..exchange.round import Header, Kind, Mean
from ..methods.outer import Update
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers
from . import history
from .consensus import Ending, end_like_others, has_ended
from .metrics import Recorder, SharedNorms
from .nonfinite import OnReset, Resets, Streaks
from .part import Measure, NormReading, RoundInFlight, SyncedFragment, SyncedPart, mean_of
from .round_log import RoundLog

logger = logger_of(__name__)

# This replica's weight, or the function that returns it at each step that sends.
Weight = float | Callable[[], float]

# A block that does nothing: in place of a profiler's span, or of a guarded change of state.
NO_BLOCK: AbstractContextManager[None] = contextlib.nullcontext()


class RoundRunner(ABC):
    """Takes the parts of one replica through their rounds on an exchange.

    Args:
        parts: The fragments, and the averaged buffers if there are any.
        layout: Hash of names, shapes, fragments and schedule, equal on all replicas.
        weight: This replica's weight, or a function that returns it at each step that sends.
        norms: Measure each pseudo-gradient's norm.
        impl: Implementation of the operators.
        workers: The workers that hold the rest of this replica's elements; None without any.
        on_reset: See ``nonfinite.Resets``.

    Attributes:
        same_data: Finds replicas that train on the same data.
        log: Keeps the rounds that are applied; None where no replica may join beside training.
        announces_change: Set this for headers that ask for a boundary.
        is_change_due: A header in an applied round has asked for a boundary.
        voted_down: By the index of a part, the inner step at which its last round that was voted
            down had been sent.
        uninterruptible: Guards sections that Ctrl-C must not split. These may wait for the
            replica's workers, but never for other replicas.
    """

    # Whether outer steps may be enqueued on a device before the replicas' votes are known.
    leaves_verdict = False

    def __init__(
        self,
        exchange: Exchange,
        parts: Sequence[SyncedPart],
        settings: Settings,
        recorder: Recorder,
        *,
        layout: int,
        weight: Weight,
        norms: bool,
        impl: str,
        workers: ReplicaWorkers | None = None,
        on_reset: OnReset | None = None,
    ) -> None:
        self.exchange = exchange
        self.parts = parts
        self.settings = settings
        self.layout = layout
        self._weight = weight
        # The last weight that was sent, by its inner step.
        self._last_weight: dict[int, float] = {}
        self.norms = norms
        self.impl = impl
        self._workers = workers
        policy = settings.overlap
        self._delay = policy.steps()
        self._gap = None if policy.measures_steps else policy.gap_for(0.0, 0.0)
        self._norms: SharedNorms | None = None
        if workers is not None and (norms or policy.measures_steps):
            self._norms = SharedNorms(workers, parts, policy, sent=norms)
        self._recorder = recorder
        self.same_data = history.SameData(exchange)
        self._streaks = Streaks(settings)
        self._resets = Resets(exchange, parts, settings, impl, workers=workers, on_reset=on_reset)
        self.log: RoundLog | None = None
        self.voted_down: dict[int, int] = {}
        self.announces_change = self.is_change_due = False
        self.uninterruptible = Uninterruptible()
        self._has_nvtx = has_nvtx()

    # ----------------------------------------------------------------------- one outer step

    @abstractmethod
    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        """Send the parts and apply everything that is due; raise the first failure after that.

        Args:
            parts: The parts that are due to be sent at this step; each has buffers.
            inner_step: Number of inner steps taken.
            num_skipped: How many of these left the weights unchanged.
            kind: "sync" follows the overlap policy; a round of kind "flush" is applied at once.

        Raises:
            SyncError: See ``DiLoCo.step``.
        """

    def flush(self, inner_step: int, num_skipped: int, is_final: bool | None) -> None:
        """Apply all rounds in flight, and send and apply the training since; a collective call.

        Args:
            is_final: Whether this ends training; see ``Ending``.

        Raises:
            NonFiniteError: If some rounds were skipped; all others are applied.
        """
        ending = Ending(is_final)
        with self._streaks.flushing(self.exchange.members):
            self._flush(inner_step, num_skipped, ending)
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        with self.uninterruptible():
            ending.reach(self.parts, self.impl, self._writing)

    @abstractmethod
    def _flush(self, inner_step: int, num_skipped: int, ending: Ending) -> None:
        """As ``flush``, without the limits on skipped rounds, and without the end of training."""

    def end_like_others(self, beside: Any = None) -> list[Any] | None:
        """End training for parts that others in a new group have ended; see ``consensus``.

        A collective call.
        """
        with self.uninterruptible():
            return end_like_others(self.exchange, self.parts, self.impl, self._writing, beside)

    def has_ended(self) -> bool:
        """Whether training has ended for all parts, and has not gone on since."""
        return all(map(has_ended, self.parts))

    def _writing(self, part: SyncedPart) -> AbstractContextManager[None]:
        """Return a context for a block that changes the outer state of a part."""
        return NO_BLOCK if self.log is None else self.log.writing(part)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Run a block that changes the outer state of all parts, and that no Ctrl-C interrupts."""
        with self.uninterruptible(), ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(self._writing(part))
            yield

    def _stale_parts(self, inner_step: int, ending: Ending) -> list[SyncedPart]:
        """Return the parts with training to send, once all replicas are in this flush.

        Until then, follow the sends of the other replicas; see ``_follow``.
        """
        while True:
            try:
                own = ending.own(self.parts)
                stale, views = history.stale_parts(self.exchange, self.parts, inner_step, own)
                break
            except ReplicaMismatch as error:
                if self.exchange.replica not in error.ended:
                    raise
                self._follow(self.parts[error.fragment], inner_step)
        ending.hear(self.exchange, views)
        return stale

    def _follow(self, part: SyncedPart, inner_step: int) -> None:  # noqa: B027
        """Take the outer step that others have taken at a send in which this replica had ended."""

    def has_unsent(self, inner_step: int) -> bool:
        """Whether this replica has rounds in flight, or training that it has not sent."""
        in_flight = any(part.in_flight for part in self.parts)
        return in_flight or any(history.unsent(self.parts, inner_step))

    @abstractmethod
    def settle_verdicts(self, inner_step: int) -> None:
        """Learn the votes of all pending outer steps on the device; raise the first failure."""

    # ------------------------------------------------------------------------------- sending

    def _offered_weight(self, inner_step: int) -> tuple[float, Exception | None]:
        """Return the weight to send with, and None; or NaN and the error of a failed ``weight``.

        A function ``weight`` is called once at each inner step that sends, as it may reset a
        counter. A second send at that step has the same weight, unless it was 0: a round in which
        all weights are 0 fails, and the function may return another value later. A weight of NaN
        lets the round fail at once on all replicas; without a send they would wait in vain.
        """
        try:
            if self._last_weight.get(inner_step):
                return self._last_weight[inner_step], None
            given = self._weight() if callable(self._weight) else self._weight
            is_plain = type(given) is float and 0.0 <= given < math.inf
            weight = given if is_plain else checks.not_negative("weight", given)
            self._last_weight = {inner_step: weight}
            return weight, None
        except Exception as error:
            if self.exchange.size == 1:
                raise
            return math.nan, error

    def send(
        self, part: SyncedPart, inner_step: int, num_skipped: int, weight: float, kind: Kind
    ) -> RoundInFlight:
        """Encode a part and hand it to the engine; return its round, which is under way then.

        Args:
            weight: This replica's weight, see ``_offered_weight``.
            inner_step, num_skipped, kind: See ``exchange_parts``.

        Raises:
            SyncError: If the group has failed before.
        """
        settings, policy = self.settings, self.settings.overlap
        number = part.in_flight[-1].number + 1 if part.in_flight else part.round
        state = part.state if isinstance(part, SyncedFragment) else None
        lr = 0.0 if state is None else settings.outer.lr_at(number, state)
        gap, digest = self._gap, 0
        if gap is None:
            gap = policy.gap_for(*part.step_norms.read())
        if self.same_data.is_wanted:
            digest = self.same_data.digest(part, inner_step, waits=kind == "flush")
        header = Header(
            kind=kind,
            layout_hash=self.layout,
            fragment=part.index,
            round=number,
            sync_every=settings.sync_every,
            num_fragments=len(self.parts),
            weight=weight,
            outer_lr=lr if policy.inner_lr is None else lr * policy.current_inner_lr(),
            inner_step=inner_step - num_skipped,
            gap=gap,
            history=part.history,
            is_change_due=self.announces_change,
            digest=digest,
        )
        reading: NormReading | None = None
        if self.norms:
            squared = part.squared_norm(self.impl)
            reading = Reading(squared)
            if self._norms is not None and part.has_outer:
                reading = self._norms.of_sent(part, squared)
        delay = 0 if kind == "flush" else self._delay
        assert part.buffers is not None
        if state is not None and not self.exchange.engine.dead_reason:
            # The new round may overwrite the buffers of the last one, so its mean is lost now. In a
            # group that has failed, nothing is encoded and the mean stays.
            state.last_update = None
        is_traced = _profiler_enabled() or self._has_nvtx
        with span("encode", part.index, number) if is_traced else NO_BLOCK:
            work = self.exchange.start(
                part.buffers,
                # The stored tensor: if it is in host memory, the loader copies it to the device.
                outer=None if state is None else state.outer,
                params=part.tensors(),
                loader=part.loader,
                header=header,
                stochastic=settings.rounding == "stochastic",
                seed=settings.seed,
                overlapped=delay > 0 or (kind != "flush" and policy.rounds > 0),
                is_held=self._resets.is_on,
            )
        if state is not None:
            state.last_update = None
        flight = RoundInFlight(
            part=part,
            number=number,
            kind=kind,
            sent_step=inner_step,
            apply_step=-1 if policy.rounds else inner_step + delay,
            # A round without a weight will fail; until then, count it as nothing here.
            weight=0.0 if math.isnan(weight) else weight,
            lr=lr,
            own=work.own.tensor,
            layout=work.layout,
            reading=reading,
            members=self.exchange.members,
            work=work,
        )
        part.in_flight.append(flight)
        return flight

    def _ship(self, sent: Sequence[RoundInFlight]) -> Exception | None:
        """Check held rounds for bad values and send them; start the norms' collective.

        Without rounds this does nothing: ``post_norms`` does it at the end of the workers' block.

        Returns:
            The first failure, or None.
        """
        failure: Exception | None = None
        if self._resets.is_on and sent:
            try:
                self._resets.ship(sent, self._leave_local)
            except Exception as error:
                failure = error
            # All workers of a replica must agree on resets before the norms' collective starts.
            if self._resets.is_undecided:
                return failure
        if self._norms is not None and sent:
            self._norms.post_sent()
        return failure

    def post_norms(self) -> None:
        """End a block of the replica's workers: agree on resets, start the norms' collective."""
        try:
            self._resets.finish(self._leave_local)
        finally:
            if self._norms is not None:
                self._norms.post_all()

    @contextlib.contextmanager
    def all_workers(self, parts: Iterable[SyncedPart], *, is_idle: bool = False) -> Iterator[None]:
        """Run a block that writes local parameters of these parts, on all workers of the replica.

        If one worker fails, all raise. ``exchange.last_error`` becomes a copy of the block's
        SyncError; without an error None, unless ``is_idle``.

        Args:
            parts: The parts whose local parameters the block may write.
            is_idle: Nothing is sent in the block; if it has no parts, the workers need not meet.
        """
        fragments = [part.fragment for part in parts if isinstance(part, SyncedFragment)]
        try:
            if self._workers is None or (is_idle and not fragments):
                yield
            else:
                # An interrupt of this worker alone would leave the others with one vote too few.
                with self.uninterruptible(), self._workers.all_workers(fragments):
                    try:
                        yield
                    finally:
                        self.post_norms()
        except SyncError as error:
            # Keep a copy without traceback, whose frames would live as long as the exchange.
            self.exchange.last_error = type(error)(str(error))
            raise
        if not is_idle:
            self.exchange.last_error = None

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Run a block with several collective calls of this replica's workers.

        All workers must make the same calls, so a Ctrl-C is deferred to the end of the block. A
        second Ctrl-C interrupts at once; then this worker can make no more such calls.
        """
        if self._workers is None:
            yield
            return
        self.uninterruptible.refuse_if_broken()
        with deferred_interrupts():
            try:
                yield
            except Exception:
                raise
            except BaseException:
                self.uninterruptible.is_broken = True
                raise

    @abstractmethod
    def _leave_local(self, part: SyncedPart, fresh: RoundInFlight | None) -> None:
        """Called before the local parameters of a part are overwritten with the outer ones.

        Args:
            fresh: The part's round that is held, or None.
        """

    def _cause(self, error: Exception) -> Exception:
        """Return why a send failed: the error of a round under way that has ended the epoch.

        Without such a round, return ``error``.
        """
        if isinstance(error, SyncError) and error.stage == "start":
            for flight in (flight for part in self.parts for flight in part.in_flight):
                try:
                    flight.wait()
                except SyncError as cause:
                    return cause
        return error

    # ---------------------------------------------------------------------- waiting, applying

    def _wait(self, flight: RoundInFlight) -> Mean | SyncError:
        """Wait for a round; return its mean, or the error why it has none."""
        begin = time.perf_counter()
        index, number = flight.part.index, flight.number
        result: Mean | SyncError
        is_traced = _profiler_enabled() or self._has_nvtx
        try:
            leaves_verdict = self.leaves_verdict and flight.part.takes_verdict
            with span("wait", index, number) if is_traced else NO_BLOCK:
                result = flight.wait(leaves_verdict=leaves_verdict)
        except SyncError as error:
            result = error
        # A round may be waited for again, after a Ctrl-C or in a flush.
        flight.exposed_s += time.perf_counter() - begin
        if is_traced:
            self._trace(flight)
        return result

    def _trace(self, flight: RoundInFlight) -> None:
        """Tell profilers how long an exchange took, once that is known."""
        if flight.mean is not None and flight.work is not None:
            seconds = flight.mean.seconds
            times = seconds.get("total", 0.0), seconds.get("exposed", flight.exposed_s)
            exchanged(flight.part.index, flight.number, *times)

    def _step(
        self,
        flight: RoundInFlight,
        update: Update,
        own: Tensor | None = None,
        measure: Measure | None = None,
    ) -> None:
        """Apply an update, and keep the time that this took."""
        begin = time.perf_counter()
        is_traced = _profiler_enabled() or self._has_nvtx
        part = flight.part
        with span("outer_step", part.index, flight.number) if is_traced else NO_BLOCK:
            part.apply(update, own=own, measure=measure)
        flight.outer_step_s = time.perf_counter() - begin

    def _commit(self, flight: RoundInFlight, mean: Mean) -> None:
        """Count a round as applied; its buffers are free."""
        assert flight.part.buffers is not None
        flight.part.buffers.commit()
        self._count(flight.part, flight.number, flight, mean)

    def _count(
        self, part: SyncedPart, number: int, flight: RoundInFlight | None, mean: Mean
    ) -> None:
        before = part.history
        if flight is not None:
            flight.state = "applied"
        part.applied(number, mean)
        if self.log is not None:
            self.log.add(part, number, before, mean)

    def _record(self, flight: RoundInFlight, inner_step: int) -> None:
        """Record the metrics of an applied round; raise if a replica was reset once too often."""
        part, mean, reset = flight.part, flight.mean, flight.reset_replicas()
        assert mean is not None
        for header in mean.headers:
            self.is_change_due |= header.is_change_due
        try:
            self._recorder.applied(flight, mean, inner_step, reset)
            if self.same_data.is_wanted:
                self.same_data.look(flight)
        finally:
            if reset or self._streaks.is_counting:
                self._streaks.applied(part, flight.number, reset)

    # ------------------------------------------------------------------------------ failures

    def _report(self, flight: RoundInFlight, inner_step: int, error: SyncError) -> None:
        """Raise the error of a round that no replica applies, or record that it was skipped.

        If the round failed because others are in ``flush`` already, log so and do nothing else:
        this replica's flush sends the training again. Replicas may reach a flush after different
        numbers of sends, as a GradScaler may skip a step on one of them.
        """
        flight.state = "lost"
        if isinstance(error, ReplicaMismatch) and error.ended:
            logger.warning(
                "%s at inner step %d, and this replica after it: flush() shares the rest",
                f"{named(error.ended)} ended training",
                inner_step,
            )
            return
        if isinstance(error, NonFiniteError):
            self.voted_down[flight.part.index] = flight.sent_step
        if not isinstance(error, NonFiniteError) or self.settings.on_nonfinite == "raise":
            raise error
        self._recorder.skipped(flight, inner_step, error)
        self._streaks.skipped(flight.part, error, flight.reset_replicas())

    def last_rounds(self, inner_step: int, unreported: list[NonFiniteError]) -> dict[int, int]:
        """Return the last applied round of each part; call this when no exchange is under way.

        Args:
            unreported: Gets the error of a skipped round that nobody has raised yet.
        """
        with contextlib.suppress(SyncError):
            try:
                self.settle_verdicts(inner_step)
            except NonFiniteError as error:
                unreported.append(error)
        return {part.index: part.round - 1 for part in self.parts}

    def settle(self, repairs: Sequence[Repair], inner_step: int, agreed_step: int) -> None:
        """Begin in a new group: apply the rounds that count, and give up the others under way.

        Args:
            repairs: The rounds that count, and that this replica has yet to apply.
            inner_step: This replica's inner step.
            agreed_step: Inner step of the slowest replica, from which all go on. Others may have
                trained on until their next send failed.
        """
        self._streaks.forget()
        with self.uninterruptible():
            for part in self.parts:
                missed = {r.round: r for r in repairs if r.fragment == part.index}
                self._settle_part(part, missed, inner_step)
            for part in self.parts:
                part.last_sent -= inner_step - agreed_step

    def begin_group(self) -> None:  # noqa: B027
        """Convert what is owed to the layout of the new group's buffers."""

    def _settle_part(self, part: SyncedPart, missed: dict[int, Repair], inner_step: int) -> None:
        flights = list(part.in_flight)
        with self._writing(part):
            part.in_flight.clear()
            for number in sorted(missed):
                flight = next((f for f in flights if f.number == number), None)
                self._repair(part, missed[number], flight, inner_step)
            for flight in flights:
                if flight.number not in missed:
                    self._lose(flight)

    def _repair(
        self, part: SyncedPart, repair: Repair, flight: RoundInFlight | None, inner_step: int
    ) -> None:
        """Apply a round that counts, and that this replica has yet to apply."""
        is_merged = flight is not None and flight.kind != "flush"
        alpha = self.settings.overlap.alpha if is_merged else 0.0
        mean = mean_of(repair, flight)
        # Use the learning rate in the round's headers, with which the others have applied it.
        update = self._update(part, mean, alpha=alpha)
        part.apply(update, own=None if flight is None else flight.own_after(inner_step))
        part.last_sent = inner_step if flight is None else flight.sent_step
        self._count(part, repair.round, flight, mean)

    def _update(
        self, part: SyncedPart, mean: Mean, *, alpha: float, verdict: Tensor | None = None
    ) -> Update:
        """Return the outer step on the mean of a round."""
        return Update(
            mean.terms,
            part.tensors(),
            mean.layout,
            mean.headers[0].outer_lr,
            alpha,
            impl=self.impl,
            verdict=verdict,
        )

    def _lose(self, flight: RoundInFlight) -> None:
        """Give up a round: its mean counts as zero, on all replicas."""
        flight.state = "lost"

    def drop(self) -> None:
        """Wait for the rounds in flight; then forget them, and what is owed."""
        with contextlib.suppress(SyncError):
            self.settle_verdicts(-1)
        self.exchange.take_repairs()
        # A state with other inner steps will be loaded: the last weight does not hold there.
        self._last_weight = {}
        for part in self.parts:
            for flight in part.in_flight:
                self._wait(flight)
            part.forget()
