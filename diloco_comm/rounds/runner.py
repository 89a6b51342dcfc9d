"""The rounds of one replica: what all overlap policies have in common.

The results of ``StepTimed`` are due some inner steps after their send, those of ``SendTimed`` at a
later send of the same part.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from ..base import checks
from ..base.errors import NonFiniteError, ReplicaMismatch, SyncError
from ..base.interrupts import Uninterruptible
from ..base.trace import exchanged, span
from ..exchange.exchange import Exchange
from ..exchange.headers import Header, Kind
from ..exchange.membership.regroup import Repair
from ..exchange.sentences import named
from ..exchange.work import ExchangeWork, Mean
from ..methods.outer import Update
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers
from . import history
from .consensus import Ending, end_like_others, has_ended
from .history import SameData
from .metrics import Recorder, Records, SharedNorms
from .nonfinite import OnReset, Resets, Streaks
from .part import Measure, RoundInFlight, SyncedPart, mean_of, weight_sum

# This replica's weight, or the function that returns it at each step that sends.
Weight = float | Callable[[], float]


class Weighing:
    """Ask for the weight once at each inner step that sends: the function may reset a counter."""

    def __init__(self, weight: Weight, exchange: Exchange) -> None:
        self._weight, self._exchange = weight, exchange
        # Of the last send, by its inner step.
        self._last: dict[int, float] = {}

    def offered(self, inner_step: int) -> tuple[float, Exception | None]:
        """Return the weight to send with; NaN and the error if ``weight`` raises or is none.

        What is sent again at an inner step has the weight of the first send, unless that was 0:
        if all replicas have no weight, the round fails, and a function may do better later. With
        NaN the round fails at once on all replicas; without a send they would wait in vain.
        """
        try:
            if self._last.get(inner_step):
                return self._last[inner_step], None
            given = self._weight() if callable(self._weight) else self._weight
            weight = checks.not_negative("weight", given)
            self._last = {inner_step: weight}
            return weight, None
        except Exception as error:
            if self._exchange.size == 1:
                raise
            return math.nan, error

    def forget(self) -> None:
        """Ask anew at the next send: the inner steps are those of a saved state."""
        self._last = {}


logger = logging.getLogger(__name__)


class RoundRunner(ABC):
    """Take the parts of one replica through their rounds on an exchange.

    Args:
        layout: Hash of names, shapes, fragments and schedule, equal on all replicas.
        weight: This replica's weight, or what returns it at each step that sends.
        norms: Measure each pseudo-gradient's norm.
        workers: The workers that hold the rest of this replica's elements; None without any.
        on_reset: See ``nonfinite.Resets``.

    Attributes:
        same_data: Looks for replicas that train on the same data.
        announces_change: What is sent says that a change of the group is due.
        is_change_due: A round was applied of which a replica has said so.
        voted_down: The inner step of the last round that was voted down, by the part's index.
        uninterruptible: Guards sections that Ctrl-C must not split. Entered while waiting for the
            replica's workers, never while waiting for other replicas.
    """

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
        self._weighing = Weighing(weight, exchange)
        self.norms = norms
        self.impl = impl
        self._norms = SharedNorms(workers, parts, settings.overlap, sent=norms)
        self._records = Records(recorder, exchange)
        self.same_data = SameData(exchange)
        self._streaks = Streaks(settings)
        self._resets = Resets(exchange, parts, settings, impl, workers=workers, on_reset=on_reset)
        self.voted_down: dict[int, int] = {}
        self.announces_change = self.is_change_due = False
        self.uninterruptible = Uninterruptible()

    # ----------------------------------------------------------------------- one outer step

    @abstractmethod
    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        """Send the parts and apply everything that is due; raise the first failure after that.

        Args:
            parts: Due to be sent at this step; each has buffers.
            inner_step: Steps done.
            num_skipped: Those of them that left the weights unchanged.
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
        with self.uninterruptible():
            ending.reach(self.parts, self.impl, self._writing)

    @abstractmethod
    def _flush(self, inner_step: int, num_skipped: int, ending: Ending) -> None:
        """As ``flush``, without the limits on skipped rounds, and without the end of training."""

    def end_like_others(self) -> None:
        """End training where others of a new group have; see ``consensus``. A collective call."""
        with self.uninterruptible():
            end_like_others(self.exchange, self.parts, self.impl, self._writing)

    def has_ended(self) -> bool:
        """Whether no outer parameters are ahead of their iterate."""
        return all(map(has_ended, self.parts))

    def _writing(self, part: SyncedPart) -> AbstractContextManager[None]:
        """Return a block that changes the outer state of a part."""
        return contextlib.nullcontext()

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

    def send(
        self, part: SyncedPart, inner_step: int, num_skipped: int, weight: float, kind: Kind
    ) -> RoundInFlight:
        """Encode a part and hand it to the engine; returns while it travels.

        Args:
            weight: This replica's, see ``Weighing``; the others as in ``exchange_parts``.

        Raises:
            SyncError: The group died before.
        """
        policy = self.settings.overlap
        number = part.next_round
        lr = part.outer_lr(self.settings.outer, number)
        header = Header(
            kind=kind,
            layout_hash=self.layout,
            fragment=part.index,
            round=number,
            sync_every=self.settings.sync_every,
            num_fragments=len(self.parts),
            weight=weight,
            outer_lr=lr * policy.current_inner_lr(),
            inner_step=inner_step - num_skipped,
            gap=policy.gap_for(part.step_norm, part.largest_norm),
            history=part.history,
            is_change_due=self.announces_change,
            digest=self.same_data.digest(part, inner_step, waits=kind == "flush"),
        )
        reading = None
        if self.norms:
            reading = self._norms.of_sent(part, part.squared_norm(self.impl))
        delay = 0 if kind == "flush" else policy.steps()
        is_overlapped = delay > 0 or (kind != "flush" and policy.rounds > 0)
        with span("encode", part.index, number):
            work = self._start(part, header, is_overlapped)
        flight = RoundInFlight(
            number=number,
            kind=kind,
            sent_step=inner_step,
            apply_step=-1 if policy.rounds else inner_step + delay,
            # A round without a weight counts as nothing here too, before it has failed.
            weight=0.0 if math.isnan(weight) else weight,
            lr=lr,
            own=work.payload,
            layout=work.layout,
            reading=reading,
            members=self.exchange.members,
            work=work,
        )
        part.in_flight.append(flight)
        return flight

    def _start(self, part: SyncedPart, header: Header, is_overlapped: bool) -> ExchangeWork:
        assert part.buffers is not None
        return self.exchange.start(
            part.buffers,
            outer=part.outer_at_rest,
            params=part.tensors(),
            loader=part.loader,
            header=header,
            stochastic=self.settings.rounding == "stochastic",
            seed=self.settings.seed,
            overlapped=is_overlapped,
            is_held=self._resets.is_on,
        )

    def _ship(self, sent: Sequence[tuple[SyncedPart, RoundInFlight]]) -> Exception | None:
        """Let go the rounds that ``send`` has held, and post the norms; return the first failure.

        Without rounds nothing is done here: ``post_norms`` does it when the workers' block ends.
        """
        if not sent:
            return None
        failure: Exception | None = None
        try:
            self._resets.ship(sent, self._leave_local)
        except Exception as error:
            failure = error
        # The workers of a replica decide on resets before they post, all in the same order.
        if not self._resets.is_undecided:
            self._norms.post_sent()
        return failure

    def post_norms(self) -> None:
        """End a block of the replica's workers: decide on resets, and post what was measured."""
        try:
            self._resets.finish(self._leave_local)
        finally:
            self._norms.post_all()

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

    def _wait(self, part: SyncedPart, flight: RoundInFlight) -> Mean | SyncError:
        """Return the result of a round, or why it has none."""
        begin = time.perf_counter()
        result: Mean | SyncError
        try:
            with span("wait", part.index, flight.number):
                result = self._result_of(part, flight)
            if result.verdict is None and flight.work is not None:
                exchanged(part.index, flight.number, result.seconds.get("total", 0.0))
        except SyncError as error:
            result = error
        flight.exposed_s = time.perf_counter() - begin
        return result

    @abstractmethod
    def _result_of(self, part: SyncedPart, flight: RoundInFlight) -> Mean:
        """Wait for a round, as far as the host must before it applies the round."""

    def _step(
        self,
        part: SyncedPart,
        flight: RoundInFlight,
        update: Update,
        own: Tensor | None = None,
        measure: Measure | None = None,
    ) -> None:
        """Apply an update, and keep the time that this took."""
        begin = time.perf_counter()
        with span("outer_step", part.index, flight.number):
            part.apply(update, own=own, measure=measure)
        flight.outer_step_s = time.perf_counter() - begin

    def _commit(self, part: SyncedPart, flight: RoundInFlight, mean: Mean) -> None:
        """Count a round as applied; its buffers are free."""
        assert part.buffers is not None
        part.buffers.commit()
        self._count(part, flight.number, flight, mean)

    def _count(
        self, part: SyncedPart, number: int, flight: RoundInFlight | None, mean: Mean
    ) -> None:
        part.round = number + 1
        part.weight_sum = weight_sum(mean)
        if flight is None or flight.has_digest:
            history.applied(part, number, mean)

    def _record(self, part: SyncedPart, flight: RoundInFlight, inner_step: int) -> None:
        """Write down that a round was applied; raise if a replica was reset once too often."""
        self.is_change_due |= any(header.is_change_due for header in flight.wait().headers)
        try:
            self._records.applied(part, flight, inner_step)
            self.same_data.look(part, flight)
        finally:
            self._streaks.applied(part, flight.number, flight.reset_replicas())

    # ------------------------------------------------------------------------------ failures

    def _report(
        self, part: SyncedPart, flight: RoundInFlight, inner_step: int, error: SyncError
    ) -> None:
        """Raise for a round that no replica applies, or record that it was skipped.

        A round that others answer with a flush is left to that flush: an optimizer step that a
        GradScaler skips on one replica does not count there.
        """
        if isinstance(error, ReplicaMismatch) and error.ended:
            logger.warning(
                "%s at inner step %d, and this replica after it: flush() shares the rest",
                f"{named(error.ended)} ended training",
                inner_step,
            )
            return
        if isinstance(error, NonFiniteError):
            self.voted_down[part.index] = flight.sent_step
        if not isinstance(error, NonFiniteError) or self.settings.on_nonfinite == "raise":
            raise error
        self._records.skipped(part, flight, inner_step, error)
        self._streaks.skipped(part, error, flight.reset_replicas())

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

    def _settle_part(self, part: SyncedPart, missed: dict[int, Repair], inner_step: int) -> None:
        flights = list(part.in_flight)
        part.in_flight.clear()
        for number in sorted(missed):
            flight = next((f for f in flights if f.number == number), None)
            self._repair(part, missed[number], flight, inner_step)
        for flight in flights:
            if flight.number not in missed:
                self._lose(part, flight)

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

    @abstractmethod
    def _lose(self, part: SyncedPart, flight: RoundInFlight) -> None:
        """Give up a round: its mean counts as zero, on all replicas."""

    def drop(self) -> None:
        """Wait for what is in flight and forget it, and what is owed."""
        with contextlib.suppress(SyncError):
            self.settle_verdicts(-1)
        self._weighing.forget()
        for part in self.parts:
            for flight in part.in_flight:
                self._wait(part, flight)
            part.in_flight.clear()
            part.corrections = []
            part.owes = part.is_ahead = False
            part.equal_at = -1
            if part.buffers is not None:
                part.buffers.forget()
