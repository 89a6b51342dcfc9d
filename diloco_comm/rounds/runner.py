"""Rounds of the parts under ``Blocking`` and ``Streaming``, and what all policies have in common.

A part is sent and, some inner steps later, its result is merged into the local parameters. These
still hold what a lost round had, so that the next send carries it. See ``turns`` for the policies
that move the local parameters at each send.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..base import checks
from ..base.errors import NonFiniteError, SyncError
from ..base.interrupts import Uninterruptible
from ..base.trace import exchanged, span
from ..exchange.buffers import ExchangeBuffers
from ..exchange.exchange import Exchange
from ..exchange.headers import Header, Kind
from ..exchange.membership.regroup import Repair
from ..exchange.work import ExchangeWork
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers
from .agreement import handshake, history
from .agreement.nonfinite import Streaks
from .agreement.resets import OnReset, Resets
from .flights import Arrival, RoundInFlight, arrival_of
from .metrics import Recorder
from .norms import SharedNorms
from .records import Records
from .synced import OuterStep, SyncedFragment, SyncedPart, squared_norm

Weight = float | Callable[[], float]


@dataclass
class _Open:
    """A round whose outer step is enqueued, and does nothing if the replicas vote it down."""

    part: SyncedPart
    flight: RoundInFlight
    exposed_s: float
    outer_step_s: float

    def undo(self) -> None:
        """Take back what the host has counted."""
        if isinstance(self.part, SyncedFragment):
            self.part.state.num_steps -= 1


class RoundRunner:
    """Take the parts of one replica through their rounds on an exchange.

    Args:
        layout: Hash of names, shapes, fragments and schedule, equal on all replicas.
        weight: This replica's weight, or what returns it at each step that sends.
        norms: Measure each pseudo-gradient's norm.
        workers: Those who have the rest of this replica's elements; None: nobody.
        on_reset: See ``resets``.

    Attributes:
        leaves_verdicts: The device may decide whether a round counts, and the host look later.
        whole: What an interrupt must not divide; what waits for other replicas is outside of it.
    """

    leaves_verdicts: ClassVar[bool] = True

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
        self.weight = weight
        self.norms = norms
        self.impl = impl
        self._norms = SharedNorms(workers, parts, settings.overlap, sent=norms)
        self._records = Records(recorder, exchange)
        self._streaks = Streaks(settings)
        self._resets = Resets(exchange, parts, settings, impl, workers=workers, on_reset=on_reset)
        self._open: list[_Open] = []
        self.whole = Uninterruptible()

    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        """Send the parts and apply everything that is due; raise the first failure after that.

        Args:
            parts: Due at this step; each has a slot.
            inner_step: Steps done.
            num_skipped: Those of them that left the weights unchanged.
            kind: "sync" follows the overlap policy, "flush" is applied at once.

        Raises:
            SyncError: See ``DiLoCo.step``.
        """
        late = self._look_at_verdicts(inner_step, parts)
        weight, refusal = self._offered_weight() if parts else (0.0, None)
        sent: list[tuple[SyncedPart, RoundInFlight]] = []
        with self.whole():
            try:
                for part in parts:
                    flight = self.send(part, inner_step, num_skipped, weight, kind)
                    sent.append((part, flight))
            except Exception as error:
                refusal = refusal or error
            failure = self._ship(sent)
        refusal = refusal or failure
        try:
            self.receive(inner_step)
        except Exception as error:
            # When the group died between two sends, the part that was sent tells why.
            if refusal is None or isinstance(refusal, SyncError):
                raise
            raise refusal from error
        # When it died after the last step, the round whose verdict was open does.
        if refusal is not None and not (late and isinstance(refusal, SyncError)):
            raise self._cause(refusal)
        if late is not None:
            raise late from refusal

    def _ship(self, sent: Sequence[tuple[SyncedPart, RoundInFlight]]) -> Exception | None:
        """Send what ``send`` has held, post what was measured; return what failed beside it."""
        if not sent:
            return None  # A block of the workers ends with what is not done here.
        failure: Exception | None = None
        try:
            self._resets.ship(sent, self._leave_local)
        except Exception as error:
            failure = error
        # The workers of a replica decide before they post, all in the same order.
        if not self._resets.is_undecided:
            self._norms.post_sent()
        return failure

    def _leave_local(self, part: SyncedFragment, fresh: RoundInFlight | None) -> None:
        """Prepare for local parameters that are overwritten by the outer ones.

        Args:
            fresh: The round of the part that is held, if there is one.
        """

    def _cause(self, error: Exception) -> Exception:
        """Return why a part could not be sent: a round under way that ended the epoch says more."""
        if isinstance(error, SyncError) and error.stage == "start":
            for flight in [flight for part in self.parts for flight in part.in_flight]:
                try:
                    flight.wait()
                except SyncError as cause:
                    return cause
        return error

    def flush(self, inner_step: int, num_skipped: int) -> None:
        """Apply all that is in flight, and what was trained since; a collective call.

        Raises:
            NonFiniteError: Some of it was skipped; all of the rest is applied.
        """
        with self._streaks.flushing(self.exchange.members):
            self._flush(inner_step, num_skipped)

    def _flush(self, inner_step: int, num_skipped: int) -> None:
        self.settle_verdicts(inner_step)
        drained = [part for part in self.parts if part.in_flight]
        self.receive(inner_step, everything=True)
        self.settle_verdicts(inner_step)
        stale = self.stale_parts(inner_step)
        self.exchange_parts(stale, inner_step, num_skipped, "flush")
        self.settle_verdicts(inner_step)
        for part in drained:
            if part not in stale and isinstance(part, SyncedFragment):
                part.write_local(self.impl)

    def stale_parts(self, inner_step: int) -> list[SyncedPart]:
        """List the parts of which any replica holds something unsent; a collective call."""
        steps = [inner_step - part.last_sent or int(part.owes) for part in self.parts]
        views = handshake.gather_json(self.exchange, [steps, history.own_past(self.parts)])
        history.refuse_other_past(self.exchange, self.parts, [past for _, past in views])
        has_news = [any(news[part.index] for news, _ in views) for part in self.parts]
        return [p for p, is_new in zip(self.parts, has_news, strict=True) if is_new and p.buffers]

    def current_weight(self) -> float:
        """Return this replica's weight for what is sent now; calls ``weight`` if it is callable.

        Raises:
            ValueError: If it is negative or not finite.
            TypeError: If it is no number.
        """
        weight = self.weight() if callable(self.weight) else self.weight
        return checks.not_negative("weight", weight)

    def _offered_weight(self) -> tuple[float, Exception | None]:
        """Return the weight to send with; if there is none, NaN and why.

        With a NaN the round fails at once on all replicas, who would wait for this one in vain.
        """
        try:
            return self.current_weight(), None
        except Exception as error:
            if self.exchange.size == 1:
                raise
            return math.nan, error

    def send(
        self,
        part: SyncedPart,
        inner_step: int,
        num_skipped: int,
        weight: float,
        kind: Kind,
    ) -> RoundInFlight:
        """Encode a part and hand it to the engine; returns while it travels.

        Args:
            weight: This replica's, see ``_offered_weight``; the others as in ``exchange_parts``.

        Raises:
            SyncError: The group died before.
        """
        buffers, policy = part.buffers, self.settings.overlap
        assert buffers is not None
        number = part.next_round
        lr = self.lr(part, number)
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
        )
        reading = self._norms.of_sent(part, self._squared_norm(part)) if self.norms else None
        is_flush = kind == "flush"
        delay = 0 if is_flush else policy.steps()
        is_overlapped = not is_flush and (delay > 0 or policy.rounds > 0)
        with span("encode", part.index, number):
            work = self._start(part, buffers, header, is_overlapped)
        apply_step = -1 if policy.rounds else inner_step + delay
        flight = RoundInFlight(
            number=number,
            kind=kind,
            sent_step=inner_step,
            apply_step=apply_step,
            # Without a weight it does not count, neither here before it has failed.
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

    def _start(
        self, part: SyncedPart, buffers: ExchangeBuffers, header: Header, is_overlapped: bool
    ) -> ExchangeWork:
        return self.exchange.start(
            buffers,
            outer=part.state.outer if isinstance(part, SyncedFragment) else None,
            params=part.tensors(),
            loader=part.loader if isinstance(part, SyncedFragment) else None,
            header=header,
            stochastic=self.settings.rounding == "stochastic",
            seed=self.settings.seed,
            overlapped=is_overlapped,
            is_held=self._resets.is_on,
        )

    def lr(self, part: SyncedPart, number: int) -> float:
        """Return the outer learning rate of one of the part's rounds."""
        if not isinstance(part, SyncedFragment):
            return 0.0
        return self.settings.outer.lr_at(number, part.state)

    def receive(self, inner_step: int, *, everything: bool = False) -> None:
        """Wait for all exchanges due by now (or all), then apply those that were agreed on.

        A round that succeeded is applied by the other replicas, so it is applied here too when
        another one failed. An interrupted wait leaves all of them in flight, for the next call.

        Raises:
            SyncError: The first failure; nothing of that round was applied.
        """
        due = [
            (part, flight)
            for part in self.parts
            for flight in part.in_flight
            if everything or flight.apply_step <= inner_step
        ]
        arrivals = [self._wait(part, flight) for part, flight in due]
        first: Exception | None = None
        with self.whole():
            for (part, flight), (arrival, exposed_s) in zip(due, arrivals, strict=True):
                try:
                    self._arrive(part, flight, arrival, inner_step, exposed_s)
                except Exception as error:
                    # What a warning filter raises costs no other part its round.
                    first = first or error
        if first is not None:
            raise first

    def _arrive(
        self,
        part: SyncedPart,
        flight: RoundInFlight,
        arrival: Arrival | SyncError,
        inner_step: int,
        exposed_s: float,
    ) -> None:
        assert part.in_flight[0] is flight
        part.in_flight.popleft()
        if isinstance(arrival, SyncError):
            self._report(part, flight, inner_step, arrival)
        else:
            self._merge(part, flight, arrival, inner_step, exposed_s)

    def _wait(self, part: SyncedPart, flight: RoundInFlight) -> tuple[Arrival | SyncError, float]:
        begin = time.perf_counter()
        arrival: Arrival | SyncError
        try:
            with span("wait", part.index, flight.number):
                takes = self.leaves_verdicts and part.takes_verdict
                arrival = flight.offer() if takes else flight.wait()
            if arrival.outcome is not None and arrival.outcome.verdict is None:
                exchanged(part.index, flight.number, arrival.outcome.seconds.get("total", 0.0))
        except SyncError as error:
            arrival = error
        return arrival, time.perf_counter() - begin

    def _merge(
        self,
        part: SyncedPart,
        flight: RoundInFlight,
        arrival: Arrival,
        inner_step: int,
        exposed_s: float,
    ) -> None:
        assert part.buffers is not None
        policy = self.settings.overlap
        verdict = None if arrival.outcome is None else arrival.outcome.verdict
        step = OuterStep(
            arrival.terms,
            arrival.layout,
            arrival.outer_lr,
            self.impl,
            alpha=0.0 if flight.kind == "flush" else policy.alpha,
            own=None if flight.is_reset or flight.sent_step == inner_step else flight.own,
            verdict=verdict,
        )
        outer_step_s = self._step(part, flight.number, step)
        if verdict is not None:
            self._open.append(_Open(part, flight, exposed_s, outer_step_s))
            return
        self._applied(part, flight, arrival, inner_step, exposed_s, outer_step_s)

    def _applied(
        self,
        part: SyncedPart,
        flight: RoundInFlight,
        arrival: Arrival,
        inner_step: int,
        exposed_s: float,
        outer_step_s: float,
    ) -> None:
        self._commit(part, flight, arrival)
        part.last_sent = flight.sent_step
        self._record(part, flight, inner_step, exposed_s, outer_step_s)

    def settle_verdicts(self, inner_step: int) -> None:
        """Find out whether rounds whose outer step was left to the device were applied.

        Raises:
            SyncError: The first failure, as ``receive`` would have; the state is as before.
        """
        late = self._look_at_verdicts(inner_step)
        if late is not None:
            raise late

    def _look_at_verdicts(
        self, inner_step: int, parts: Sequence[SyncedPart] | None = None
    ) -> Exception | None:
        """As ``settle_verdicts``, but return the failure.

        Replicas may see it at different steps, so it must not keep one of them from sending.

        Args:
            parts: Wait for the verdicts of these; None: of all. The others are only looked at.
        """
        first: Exception | None = None
        for one in list(self._open):
            must = parts is None or one.part in parts
            assert one.flight.work is not None
            if not (must or one.flight.work.done()):
                continue
            arrival: Arrival | SyncError
            try:
                arrival = one.flight.wait()
            except SyncError as error:
                arrival = error
            with self.whole():
                try:
                    self._close_verdict(one, arrival, inner_step)
                except Exception as error:
                    first = first or error
        return first

    def _close_verdict(self, one: _Open, arrival: Arrival | SyncError, inner_step: int) -> None:
        self._open.remove(one)
        if isinstance(arrival, SyncError):
            one.undo()
            self._report(one.part, one.flight, inner_step, arrival)
            return
        times = one.exposed_s, one.outer_step_s
        self._applied(one.part, one.flight, arrival, inner_step, *times)

    def _record(
        self,
        part: SyncedPart,
        flight: RoundInFlight,
        inner_step: int,
        exposed_s: float,
        outer_step_s: float,
    ) -> None:
        """Write down that a round was applied; raise if a replica was reset once too often."""
        try:
            self._records.applied(
                part, flight, inner_step, exposed_s=exposed_s, outer_step_s=outer_step_s
            )
        finally:
            self._streaks.applied(part, flight.number, flight.reset_replicas())

    # ------------------------------------------------------------------------------ failures

    def settle(self, repairs: Sequence[Repair], inner_step: int) -> None:
        """Begin in a new group: apply the rounds that count, and lose the others under way.

        Args:
            repairs: Rounds that count and that this replica has not applied.
        """
        self._streaks.forget()
        with self.whole():
            for part in self.parts:
                missed = {r.round: r for r in repairs if r.fragment == part.index}
                self._settle_part(part, missed, inner_step)

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
        is_late = flight is not None and flight.sent_step != inner_step and not flight.is_reset
        arrival = arrival_of(repair, flight)
        step = OuterStep(
            repair.terms,
            repair.layout,
            # That of the round: those who applied it had that one.
            arrival.outer_lr,
            self.impl,
            alpha=alpha,
            own=flight.own if flight is not None and is_late else None,
        )
        part.apply(step)
        part.last_sent = inner_step if flight is None else flight.sent_step
        self._repaired(part, repair, arrival)

    def _repaired(self, part: SyncedPart, repair: Repair, arrival: Arrival) -> None:
        part.round = repair.round + 1
        part.weight_sum = arrival.weight_sum
        history.applied(part, repair.round, arrival)

    def _lose(self, part: SyncedPart, flight: RoundInFlight) -> None:
        """Give up a round: its mean counts as zero, on all replicas alike."""

    def drop(self) -> None:
        """Wait for what is in flight and forget it, with what is owed: a state will be loaded."""
        with contextlib.suppress(SyncError):
            self.settle_verdicts(-1)
        for part in self.parts:
            for flight in part.in_flight:
                self._wait(part, flight)
            part.in_flight.clear()
            part.corrections = []
            part.owes = part.is_ahead = False
            part.equal_at = -1
            if part.buffers is not None:
                part.buffers.forget()

    # ------------------------------------------------------------------------------- records

    def _step(self, part: SyncedPart, number: int, step: OuterStep) -> float:
        begin = time.perf_counter()
        with span("outer_step", part.index, number):
            part.apply(step)
        return time.perf_counter() - begin

    def _commit(self, part: SyncedPart, flight: RoundInFlight, arrival: Arrival) -> None:
        assert part.buffers is not None
        part.buffers.commit()
        part.round = flight.number + 1
        part.weight_sum = arrival.weight_sum
        history.applied(part, flight.number, arrival)

    def _report(
        self, part: SyncedPart, flight: RoundInFlight, inner_step: int, error: SyncError
    ) -> None:
        """Raise for a round that no replica applies, or record that it was skipped."""
        if not isinstance(error, NonFiniteError) or self.settings.on_nonfinite == "raise":
            raise error
        self._records.skipped(part, flight, inner_step, error)
        self._streaks.skipped(part, error, flight.reset_replicas())

    def _squared_norm(self, part: SyncedPart) -> Tensor:
        if isinstance(part, SyncedFragment):
            return part.squared_norm(self.impl)
        return squared_norm(None, part.tensors(), self.impl)

    def post_norms(self) -> None:
        """Let the workmates have what was measured; each block that they enter ends with it."""
        try:
            self._resets.finish(self._leave_local)
        finally:
            self._norms.post_all()
