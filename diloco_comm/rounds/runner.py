"""The rounds of one replica: what all overlap policies have in common.

The results of ``StepTimed`` are due some inner steps after their send, and the results of
``SendTimed`` at a later send of the same part.
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

# Stands for a span that nobody records, and for a change of state that nobody reads.
NO_BLOCK: AbstractContextManager[None] = contextlib.nullcontext()


class RoundRunner(ABC):
    """Take the parts of one replica through their rounds on an exchange.

    Args:
        layout: Hash of names, shapes, fragments and schedule, equal on all replicas.
        weight: This replica's weight, or a function that returns it at each step that sends.
        norms: Measure each pseudo-gradient's norm.
        workers: The workers that hold the rest of this replica's elements; None without any.
        on_reset: See ``nonfinite.Resets``.

    Attributes:
        same_data: Looks for replicas that train on the same data.
        log: Keeps the rounds that are applied; None where no replica may join beside training.
        announces_change: The headers say that a change of the group is due.
        is_change_due: A replica has said so in a round that was applied.
        voted_down: The inner step of the last round that was voted down, by the part's index.
        uninterruptible: Guards sections that Ctrl-C must not split. Entered while waiting for the
            replica's workers, never while waiting for other replicas.
    """

    # An outer step may be enqueued before the replicas' vote is known.
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
            parts: Due to be sent at this step; each has buffers.
            inner_step: Steps done.
            num_skipped: Steps among them that left the weights unchanged.
            kind: "sync" follows the overlap policy, "flush" is applied at once.

        Raises:
            SyncError: See ``DiLoCo.step``.
        """

    def flush(self, inner_step: int, num_skipped: int, is_final: bool | None) -> None:
        """Apply all that is in flight, and what was trained since; a collective call.

        A NonFiniteError says that some of it was skipped; all of the rest is applied.

        Args:
            is_final: See ``Ending``.
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
        """End training where others of a new group have; see ``consensus``. A collective call."""
        with self.uninterruptible():
            return end_like_others(self.exchange, self.parts, self.impl, self._writing, beside)

    def has_ended(self) -> bool:
        """Whether training has ended for all parts, and was not gone on with."""
        return all(map(has_ended, self.parts))

    def _writing(self, part: SyncedPart) -> AbstractContextManager[None]:
        """Return a block that changes the outer state of a part."""
        return NO_BLOCK if self.log is None else self.log.writing(part)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Run a block that changes the outer state of all parts, and that no Ctrl-C interrupts."""
        with self.uninterruptible(), ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(self._writing(part))
            yield

    def _stale_parts(self, inner_step: int, ending: Ending) -> list[SyncedPart]:
        """As ``history.stale_parts``, once the others have ended too."""
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
        """Take the outer step that others have taken at a send without this replica."""

    def has_unsent(self, inner_step: int) -> bool:
        """Whether this replica holds something that was not shared."""
        in_flight = any(part.in_flight for part in self.parts)
        return in_flight or any(history.unsent(self.parts, inner_step))

    @abstractmethod
    def settle_verdicts(self, inner_step: int) -> None:
        """Find out whether outer steps left to the device were taken; raise the first failure."""

    # ------------------------------------------------------------------------------- sending

    def _offered_weight(self, inner_step: int) -> tuple[float, Exception | None]:
        """Return the weight to send with; NaN and the error if ``weight`` raises or is none.

        ``weight`` is asked once at each inner step that sends: the function may reset a counter.
        A second send at an inner step has the weight of the first send, unless that was 0: if all
        replicas have no weight, the round fails, and a function may do better later. With NaN the
        round fails at once on all replicas; without a send they would wait in vain.
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
        """Encode a part and hand it to the engine; returns while it travels.

        Args:
            weight: This replica's, see ``_offered_weight``; the others as in ``exchange_parts``.

        Raises:
            SyncError: The group died before.
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
            # The new round may take the buffers of the last one; a dead group encodes nothing.
            state.last_update = None
        is_traced = _profiler_enabled() or self._has_nvtx
        with span("encode", part.index, number) if is_traced else NO_BLOCK:
            work = self.exchange.start(
                part.buffers,
                # The stored tensor: the loader brings the elements that lie in host memory.
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
            # A round without a weight counts as nothing here too, before it has failed.
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
        """Send the encoded rounds after the check for NaN, and start the norms' collective.

        Without rounds nothing is done here: ``post_norms`` does it when the workers' block ends.

        Returns:
            The first failure.
        """
        failure: Exception | None = None
        if self._resets.is_on and sent:
            try:
                self._resets.ship(sent, self._leave_local)
            except Exception as error:
                failure = error
            # The workers of a replica decide on resets before they post, all in the same order.
            if self._resets.is_undecided:
                return failure
        if self._norms is not None and sent:
            self._norms.post_sent()
        return failure

    def post_norms(self) -> None:
        """End a block of the replica's workers: decide on resets, and post what was measured."""
        try:
            self._resets.finish(self._leave_local)
        finally:
            if self._norms is not None:
                self._norms.post_all()

    @contextlib.contextmanager
    def all_workers(self, parts: Iterable[SyncedPart], *, is_idle: bool = False) -> Iterator[None]:
        """Run a block that writes local parameters of these parts, on all workers of the replica.

        If one worker fails, all raise. The exchange keeps the error of the last block.

        Args:
            is_idle: Nothing is sent in the block; without parts the workers need not meet.
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
            # A copy: the frames of the error itself would live as long as the exchange.
            self.exchange.last_error = type(error)(str(error))
            raise
        if not is_idle:
            self.exchange.last_error = None

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Run a call in which the workers of this replica meet again and again.

        All of them must meet equally often: a Ctrl-C comes at the end of the call. A second one
        comes at once, and then this worker can meet the others no more.
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
        """Prepare for local parameters that are overwritten by the outer ones.

        Args:
            fresh: The round of the part that is held, if there is one.
        """

    def _cause(self, error: Exception) -> Exception:
        """Return why a part could not be sent: a round under way that ended the epoch says more."""
        if isinstance(error, SyncError) and error.stage == "start":
            for flight in (flight for part in self.parts for flight in part.in_flight):
                try:
                    flight.wait()
                except SyncError as cause:
                    return cause
        return error

    # ---------------------------------------------------------------------- waiting, applying

    def _wait(self, flight: RoundInFlight) -> Mean | SyncError:
        """Return the result of a round, or why it has none."""
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
        """Write down that a round was applied; raise if a replica was reset once too often."""
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
        """Raise for a round that no replica applies, or record that it was skipped.

        A round that others answer with a flush is left to that flush: an optimizer step that a
        GradScaler skips on one replica does not count there.
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
        """Return the last applied round of each part, now that no exchange is under way.

        Args:
            unreported: Takes the error of a round that was skipped without any report.
        """
        with contextlib.suppress(SyncError):
            try:
                self.settle_verdicts(inner_step)
            except NonFiniteError as error:
                unreported.append(error)
        return {part.index: part.round - 1 for part in self.parts}

    def settle(self, repairs: Sequence[Repair], inner_step: int, agreed_step: int) -> None:
        """Begin in a new group: apply the rounds that count, and lose the others under way.

        Args:
            repairs: The rounds that count.
            agreed_step: Inner step of the slowest replica, from which all go on: some may have
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
        """Lay out what is owed as the buffers of a group of another size are."""

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
        """Apply a round that counts and that this replica has not applied."""
        is_merged = flight is not None and flight.kind != "flush"
        alpha = self.settings.overlap.alpha if is_merged else 0.0
        mean = mean_of(repair, flight)
        # The learning rate of the round: replicas that have applied it had that one.
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
        """Wait for what is in flight and forget it, and what is owed."""
        with contextlib.suppress(SyncError):
            self.settle_verdicts(-1)
        self.exchange.take_repairs()
        # The inner steps come from a saved state: ask for the weight anew.
        self._last_weight = {}
        for part in self.parts:
            for flight in part.in_flight:
                self._wait(flight)
            part.forget()
