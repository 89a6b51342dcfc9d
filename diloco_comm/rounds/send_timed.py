"""Rounds of the parts under ``Delayed``, ``Eager`` and ``CO2``.

A round is due ``rounds`` sends after its own send. At each send a part waits for the round that is
due, encodes c(outer) - local, where c rounds to the parameter's dtype, and starts a new round.
Then it takes the outer step of the round that is due, and sets the local parameters to the outer
ones. From then on the values of the new round are only in its payload. If the round is lost, the
payload is decoded and *owed*: added to the next encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..base.errors import NonFiniteError, ReplicaMismatch, SyncError
from ..base.memory import Reading
from ..exchange.membership.change import Repair
from ..exchange.round import Kind, Mean
from ..methods.outer import Update
from ..methods.overlap import Own, Terms
from ..ops.residuals import drop_bad
from ..ops.wire import Layout
from . import consensus, handshake
from .consensus import Ending
from .part import Measure, RoundInFlight, SyncedFragment, SyncedPart, mean_of, mixed, weight_sum
from .runner import RoundRunner


class SendTimed(RoundRunner):
    """Takes the parts of one replica through rounds that end at a later send.

    The next payload depends on whether the due round counts, so the host waits for its votes.
    """

    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        """Send a new round of each part, and take the outer step of its round that is due.

        All parts are encoded and sent before the first outer step. A part that could not be sent is
        left unchanged.
        """
        if not parts:
            return
        weight, first = self._offered_weight(inner_step)
        due: list[RoundInFlight | None] = []
        results: list[Mean | SyncError | None] = []
        for part in parts:
            due.append(part.in_flight[0] if self._is_due(part) else None)
        for flight in due:
            results.append(None if flight is None else self._wait(flight))
        # The rounds that were sent, and for each the round of its part that has arrived; None where
        # none was due, or the due one has failed.
        sent: list[RoundInFlight] = []
        arrived: list[RoundInFlight | None] = []
        with self.uninterruptible():
            for part, flight, result in zip(parts, due, results, strict=True):
                try:
                    if flight is not None and isinstance(result, SyncError):
                        self._fail(flight, inner_step, result)
                        flight = None
                    sent.append(self.send(part, inner_step, num_skipped, weight, kind))
                    arrived.append(flight)
                except Exception as error:
                    first = first or error
            failure = self._ship(sent)
            first = first or failure
            for flight, fresh in zip(arrived, sent, strict=True):
                try:
                    self._advance(flight, fresh, inner_step)
                except Exception as error:
                    first = first or error
        if first is not None:
            raise self._cause(first)

    def send(
        self, part: SyncedPart, inner_step: int, num_skipped: int, weight: float, kind: Kind
    ) -> RoundInFlight:
        last = part.in_flight[-1].work if part.in_flight else None
        keeps_residual = part.buffers is not None and part.buffers.residual is not None
        # If the last round has bad values, its vote has yet to come. Take them out of the residual,
        # or this encoding would fail, too.
        if last is not None and keeps_residual and last.has_bad_values():
            _clean_residuals(part)
        return super().send(part, inner_step, num_skipped, weight, kind)

    def settle_verdicts(self, inner_step: int) -> None:
        """Do nothing: here no outer step is pending on the device."""

    def _is_due(self, part: SyncedPart) -> bool:
        return len(part.in_flight) >= self.settings.overlap.rounds

    def _advance(self, due: RoundInFlight | None, fresh: RoundInFlight, inner_step: int) -> None:
        """Take the outer step after the send of ``fresh``, the new round of a part.

        Args:
            due: The part's round that is due and agreed on; None without one.
        """
        policy, part = self.settings.overlap, fresh.part
        is_first = due is None and fresh.number < policy.rounds and fresh.kind != "flush"
        has_local = not self._resets.has_taken_outer
        if is_first and policy.first == "sync":
            fresh.is_local_kept = has_local
            self._advance_at_once(fresh, inner_step)
            return
        self._carry(fresh)
        if is_first and policy.first == "skip":
            if has_local:
                part.keep_local(fresh, self.impl)
            return
        part.owed.is_ahead = False
        if part.has_outer:
            fresh.coefficient = self._own_coefficient(due, fresh)
        self._finish(part, due, fresh, inner_step)

    def _carry(self, fresh: RoundInFlight) -> None:
        """Note that a round was sent, and with it the owed values, unless it was reset to zeros."""
        part = fresh.part
        part.owed.is_lost, part.last_sent = part.owed.is_lost and fresh.is_reset, fresh.sent_step

    def _own_coefficient(self, due: RoundInFlight | None, fresh: RoundInFlight) -> float:
        arrived = None if due is None else due.mean
        total = fresh.part.weight_sum if arrived is None else weight_sum(arrived)
        # A reset payload is zeros, so any coefficient will do; the outer step needs some term.
        if fresh.is_reset or not total:
            return self.settings.overlap.own_coefficient(1.0, self.exchange.size)
        return self.settings.overlap.own_coefficient(fresh.weight, total)

    def _advance_at_once(self, fresh: RoundInFlight, inner_step: int) -> None:
        result = self._wait(fresh)
        if isinstance(result, SyncError):
            self._fail(fresh, inner_step, result)
            return
        self._carry(fresh)
        self._finish(fresh.part, fresh, None, inner_step)

    def _finish(
        self,
        part: SyncedPart,
        due: RoundInFlight | None,
        fresh: RoundInFlight | None,
        inner_step: int,
    ) -> None:
        """Take the outer step after a send, or of a drained round; count ``due`` as applied."""
        mean = None if due is None else due.mean
        flight = due or fresh
        assert flight is not None
        update = self._update_on(part, mean, due, fresh)
        own = None if due is None or part.has_outer else due.own_after(inner_step)
        self._step(flight, update, own=own, measure=self._measure(part))
        part.owed.corrections = []
        if due is not None and mean is not None:
            part.in_flight.remove(due)
            self._commit(due, mean)
            self._record(due, inner_step)

    def _measure(self, part: SyncedPart) -> Measure | None:
        if not part.has_outer or not self.settings.overlap.measures_steps:
            return None
        return Reading if self._norms is None else partial(self._norms.of_step, part)

    def _update_on(
        self,
        part: SyncedPart,
        mean: Mean | None,
        due: RoundInFlight | None,
        fresh: RoundInFlight | None,
    ) -> Update:
        """Return the outer step on a mean, with own payloads that the policy adds or takes out.

        Args:
            mean: The mean of ``due``; None without one.
            due: The round that is due, or None.
            fresh: The new round, or None.
        """
        flight = due or fresh
        assert flight is not None
        policy, inner_lr, penalty = self.settings.overlap, 1.0, 1.0
        terms: Terms = [] if mean is None else mean.terms
        layout = flight.layout if mean is None else mean.layout
        if part.has_outer:
            stale = part.owed.corrections + ([] if due is None else due.own_share())
            added = [] if fresh is None else fresh.own_share()
            if policy.inner_lr is not None:
                inner_lr = policy.current_inner_lr()
            if mean is not None:
                penalty = mean.headers[0].gap * inner_lr
                terms = [(payload, coefficient / penalty) for payload, coefficient in terms]
            terms = policy.gradient(terms, added[0] if added else None, stale)
            if not (terms or policy.is_shared) and len(flight.members) > 1:
                # Even without a term, take a step, so that the momentum decays as on the others.
                terms, layout = _nothing(mean, fresh) or (terms, layout)
            if fresh is not None and (added or not policy.is_shared):
                flight = fresh
        return Update(
            terms,
            part.tensors(),
            layout,
            flight.lr * inner_lr,
            clip=math.inf if policy.clip is None else policy.clip,
            penalty=penalty,
            base_lr=None if policy.inner_lr is None else flight.lr,
            impl=self.impl,
        )

    def _flush(self, inner_step: int, num_skipped: int, ending: Ending) -> None:
        self._drop_unanswered(inner_step)
        stale = self._stale_parts(inner_step, ending)
        self.exchange_parts(stale, inner_step, num_skipped, "flush")
        self.drain(inner_step)
        if not self.settings.overlap.is_shared:
            # End on the own last round first, as its payloads are still in the buffers; then take
            # the mean over the replicas.
            self._end(ending)
            self._equalize()

    def _drop_unanswered(self, inner_step: int) -> None:
        """Give up the rounds that failed because other replicas were in a flush already."""
        for part in self.parts:
            for flight in list(part.in_flight):
                result = self._wait(flight)
                if isinstance(result, ReplicaMismatch) and result.ended:
                    self._fail(flight, inner_step, result)

    def _follow(self, part: SyncedPart, inner_step: int) -> None:
        if not self._is_due(part):
            return
        due = part.in_flight[0]
        result = self._wait(due)
        with self.uninterruptible():
            if isinstance(result, SyncError):
                self._fail(due, inner_step, result)
                return
            # The step overwrites the local parameters, whose training was not sent: owe it.
            part.owe_progress()
            part.owed.is_lost = part.has_outer
            self._finish(part, due, None, inner_step)

    def _equalize(self) -> None:
        """Set outer parameters and momenta of all replicas to their means; a collective call.

        The local parameters become the outer ones. Fragments on which no replica has taken an outer
        step since the last such call are left unchanged.
        """
        parts = [part for part in self.parts if isinstance(part, SyncedFragment)]
        own = [_numbers(part) for part in parts]
        each = list(zip(*handshake.gather_json(self.exchange, own), strict=True))
        differing = [
            part
            for part, views in zip(parts, each, strict=True)
            if any(num_steps != equal_at for _, num_steps, equal_at, *_ in views)
        ]
        # All replicas must do this together: a Ctrl-C must not leave one of them out.
        with self.uninterruptible():
            consensus.equalize(self.exchange, differing, self.impl)
            for part, views in zip(parts, each, strict=True):
                state = part.state
                has_ended = state.ended_at == state.num_steps
                state.num_steps = state.equal_at = max(num_steps for _, num_steps, *_ in views)
                pasts = sorted({past for past, *_ in views})
                if part in differing and len(pasts) > 1:
                    # Replicas that have ended have mixed their step count into their histories.
                    # Mix all histories, so that they are equal again.
                    part.history = mixed(*pasts)
                if has_ended:
                    state.ended_at = state.num_steps
                numbers = [view[3:] for view in views if view[3] is not None]
                state.last_lr, state.last_momentum = next(iter(numbers), (None, None))

    def drain(self, inner_step: int) -> None:
        """Wait for all rounds in flight and take the outer step of each, without any send.

        All training before this call must have been sent.

        Raises:
            SyncError: The first failure; later rounds of that part stay in flight.
        """
        first: Exception | None = None
        for part in self.parts:
            try:
                while part.in_flight:
                    self._drain_one(part.in_flight[0], inner_step)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _drain_one(self, flight: RoundInFlight, inner_step: int) -> None:
        part, result = flight.part, self._wait(flight)
        with self.uninterruptible():
            if isinstance(result, SyncError):
                self._fail(flight, inner_step, result)
                return
            if part.owed.is_ahead:
                part.owe_progress()
            self._finish(part, flight, None, inner_step)

    def _leave_local(self, part: SyncedPart, fresh: RoundInFlight | None) -> None:
        # If the part is ahead, its residual holds minus the sent values that are still in the local
        # parameters, which are now overwritten.
        if not part.owed.is_ahead:
            return
        part.owed.is_ahead = False
        if fresh is not None and not fresh.is_reset:
            return  # The fresh round was encoded with that residual, so the debt is settled.
        for flight in part.in_flight:
            if flight is not fresh and flight.own is not None:
                part.owe_round(flight, self.impl)

    # ------------------------------------------------------------------------------ failures

    def _fail(self, flight: RoundInFlight, inner_step: int, error: SyncError) -> None:
        """Give up a round that failed, and report it.

        If the group has failed, raise, and leave the round in flight: ``settle`` decides on it.
        """
        if self.exchange.is_dead:
            raise error
        flight.part.in_flight.remove(flight)
        self._lose(flight)
        if isinstance(error, NonFiniteError) and self.exchange.replica in error.replicas:
            _clean_residuals(flight.part)
        self._report(flight, inner_step, error)

    def _lose(self, flight: RoundInFlight) -> None:
        """Owe the values of a lost round; its mean counts as zero, on all replicas alike."""
        super()._lose(flight)
        part = flight.part
        if not part.has_outer:
            return
        assert part.buffers is not None
        if flight.is_local_kept:
            part.buffers.residuals.rewind()
        elif flight.own is not None and not flight.is_reset:
            part.owe_round(flight, self.impl)
            part.owed.is_lost = True
            for own in flight.own_share():
                kept = Own(own.payload.clone(), own.coefficient, own.layout)
                part.owed.corrections.append(_laid_out(kept, part.buffers.layout))
        if flight.own is not None:
            part.buffers.release(flight.own)

    def begin_group(self) -> None:
        for part in self.parts:
            if part.buffers is not None:
                layout, corrections = part.buffers.layout, part.owed.corrections
                part.owed.corrections = [_laid_out(own, layout) for own in corrections]

    def _repair(
        self, part: SyncedPart, repair: Repair, flight: RoundInFlight | None, inner_step: int
    ) -> None:
        if flight is None or not part.has_outer:
            super()._repair(part, repair, flight, inner_step)
            return
        if flight.is_local_kept:
            # The local parameters still contain the payload: take it out of what is owed below.
            part.keep_local(flight, self.impl)
        part.owe_progress()
        part.owed.is_lost = True
        mean = mean_of(repair, flight)
        part.apply(self._update_on(part, mean, flight, None), measure=self._measure(part))
        part.owed.corrections = []
        self._count(part, repair.round, flight, mean)


def _numbers(part: SyncedFragment) -> list[Any]:
    state = part.state
    return [part.history, state.num_steps, state.equal_at, state.last_lr, state.last_momentum]


def _nothing(mean: Mean | None, fresh: RoundInFlight | None) -> tuple[Terms, Layout] | None:
    """Return some payload with coefficient 0, as a term, and its layout; None without any."""
    if mean is not None and mean.terms:
        return [(mean.terms[0][0], 0.0)], mean.layout
    if fresh is not None and fresh.own is not None:
        return [(fresh.own, 0.0)], fresh.layout
    return None


def _laid_out(own: Own, layout: Layout) -> Own:
    return Own(own.layout.rearrange(own.payload, layout), own.coefficient, layout)


def _clean_residuals(part: SyncedPart) -> None:
    """Set residuals that cannot be encoded to zero: they would make every later round fail."""
    assert part.buffers is not None
    for residual in (part.buffers.residuals.added, *part.buffers.residuals.reductions()):
        if residual is not None:
            drop_bad(residual, part.buffers.wire)
