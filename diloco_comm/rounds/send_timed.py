"""Rounds of the parts under ``Delayed``, ``Eager`` and ``CO2``.

A part takes a *turn* each time it is due: wait for the round that it sent ``rounds`` turns ago,
encode outer - local, start the new round, step the outer optimizer on the old one, and set the
local parameters to the outer ones. What a lost round had is then nowhere but in its payload, which
is decoded and owed to the next encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from ..base.errors import NonFiniteError, SyncError
from ..exchange.headers import Kind
from ..exchange.membership.regroup import Repair
from ..methods.overlap import Own, Terms
from ..ops.residuals import drop_bad
from ..ops.wire import Layout
from .agreement import consensus, handshake
from .flights import Arrival, RoundInFlight, arrival_of
from .runner import RoundRunner
from .synced import OuterStep, SyncedFragment, SyncedPart


class SendTimed(RoundRunner):
    """Take the parts of one replica through their turns; see ``RoundRunner`` for the arguments.

    What is sent in a turn depends on whether the round that is due counts, so the host must know.
    """

    leaves_verdicts: ClassVar[bool] = False

    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        """Send the next round of each part, and take its outer step on the one that is due.

        Everything is encoded and on its way before the first outer step begins. A part whose due
        round failed, or that could not be sent, is left as it is.
        """
        if not parts:
            return
        weight, first = self._offered_weight()
        due = [part.in_flight[0] if self._is_due(part) else None for part in parts]
        waits = [
            (None, 0.0) if flight is None else self._wait(part, flight)
            for part, flight in zip(parts, due, strict=True)
        ]
        moves: list[tuple[SyncedPart, RoundInFlight | None, RoundInFlight, float]] = []
        with self.whole():
            for part, flight, (arrival, exposed_s) in zip(parts, due, waits, strict=True):
                try:
                    if flight is not None and isinstance(arrival, SyncError):
                        self._fail(part, flight, inner_step, arrival)
                        flight = None
                    fresh = self.send(part, inner_step, num_skipped, weight, kind)
                    moves.append((part, flight, fresh, exposed_s))
                except Exception as error:
                    first = first or error
            failure = self._ship([(part, fresh) for part, _, fresh, _ in moves])
            first = first or failure
            for part, flight, fresh, exposed_s in moves:
                try:
                    self._advance(part, flight, fresh, inner_step, exposed_s)
                except Exception as error:
                    first = first or error
        if first is not None:
            raise self._cause(first)

    def send(
        self, part: SyncedPart, inner_step: int, num_skipped: int, weight: float, kind: Kind
    ) -> RoundInFlight:
        last = part.in_flight[-1].work if part.in_flight else None
        # The vote on that round comes after this encoding, which must not lose its round too.
        if last is not None and _keeps_residual(part) and last.has_bad_values():
            _clean_residuals(part)
        return super().send(part, inner_step, num_skipped, weight, kind)

    def _is_due(self, part: SyncedPart) -> bool:
        return len(part.in_flight) >= self.settings.overlap.rounds

    def _advance(
        self,
        part: SyncedPart,
        due: RoundInFlight | None,
        fresh: RoundInFlight,
        inner_step: int,
        exposed_s: float,
    ) -> None:
        """Take the outer step that follows the send of ``fresh``."""
        policy = self.settings.overlap
        is_first = due is None and fresh.number < policy.rounds and fresh.kind != "flush"
        has_local = not self._resets.has_taken_outer
        if is_first and policy.first == "sync":
            fresh.is_local_kept = has_local
            self._advance_at_once(part, fresh, inner_step)
            return
        part.owes, part.last_sent = part.owes and fresh.is_reset, fresh.sent_step
        if is_first and policy.first == "skip":
            if has_local:
                self._stay(part, fresh)
            return
        part.is_ahead = False
        if isinstance(part, SyncedFragment):
            arrived = None if due is None else due.arrival
            weight_sum = part.weight_sum if arrived is None else arrived.weight_sum
            sums = (fresh.weight, weight_sum) if weight_sum else (1.0, self.exchange.size)
            # Zeros count nothing with any coefficient, but with one the outer step is taken.
            sums = (1.0, self.exchange.size) if fresh.is_reset else sums
            fresh.coefficient = policy.own_coefficient(*sums)
        self._finish(part, due, fresh, inner_step, exposed_s)

    def _advance_at_once(self, part: SyncedPart, fresh: RoundInFlight, inner_step: int) -> None:
        arrival, exposed_s = self._wait(part, fresh)
        if isinstance(arrival, SyncError):
            self._fail(part, fresh, inner_step, arrival)
            return
        part.owes, part.last_sent = part.owes and fresh.is_reset, fresh.sent_step
        self._finish(part, fresh, None, inner_step, exposed_s)

    def _stay(self, part: SyncedPart, fresh: RoundInFlight) -> None:
        """Leave the local parameters as they are; the next encoding sees what was sent again."""
        if not isinstance(part, SyncedFragment):
            return
        assert part.buffers is not None and fresh.own is not None
        part.is_ahead = True
        part.buffers.residuals.rewind()
        part.buffers.residuals.owe(part.decode(fresh.own, fresh.layout, self.impl).neg_())

    def _finish(
        self,
        part: SyncedPart,
        due: RoundInFlight | None,
        fresh: RoundInFlight | None,
        inner_step: int,
        exposed_s: float,
    ) -> None:
        """Take an outer step on the round that is due, and count it as applied."""
        arrival = None if due is None else due.arrival
        flight = due or fresh
        assert flight is not None
        step = self._outer_step(part, arrival, due, fresh, inner_step)
        outer_step_s = self._step(part, flight.number, step)
        part.corrections = []
        if due is not None and arrival is not None:
            part.in_flight.remove(due)
            self._commit(part, due, arrival)
            self._record(part, due, inner_step, exposed_s, outer_step_s)

    def _outer_step(
        self,
        part: SyncedPart,
        arrival: Arrival | None,
        due: RoundInFlight | None,
        fresh: RoundInFlight | None,
        inner_step: int,
    ) -> OuterStep:
        flight = due or fresh
        assert flight is not None
        mean: Terms = [] if arrival is None else arrival.terms
        layout = flight.layout if arrival is None else arrival.layout
        if not isinstance(part, SyncedFragment):
            is_late = due is not None and due.sent_step != inner_step
            own = due.own if due is not None and is_late and not due.is_reset else None
            return OuterStep(mean, layout, 0.0, self.impl, own=own)
        policy = self.settings.overlap
        stale = list(part.corrections)
        if due is not None and due.own is not None and due.coefficient:
            stale.append(Own(due.own, due.coefficient, due.layout))
        added = None
        if fresh is not None and fresh.own is not None and fresh.coefficient:
            added = Own(fresh.own, fresh.coefficient, fresh.layout)
        inner_lr = policy.current_inner_lr()
        if arrival is not None:
            penalty = arrival.gap * inner_lr
            mean = [(payload, coefficient / penalty) for payload, coefficient in mean]
        return OuterStep(
            policy.gradient(mean, added, stale),
            layout,
            (flight if added is None or fresh is None else fresh).lr * inner_lr,
            self.impl,
            clip=math.inf if policy.clip is None else policy.clip,
            measured=partial(self._norms.of_step, part) if policy.measures_steps else None,
        )

    def _flush(self, inner_step: int, num_skipped: int) -> None:
        stale = self.stale_parts(inner_step)
        self.exchange_parts(stale, inner_step, num_skipped, "flush")
        self.drain(inner_step)
        if not self.settings.overlap.is_shared:
            self._equalize()

    def _equalize(self) -> None:
        """Make the outer parameters of all replicas equal, unless they are; a collective call."""
        parts = [part for part in self.parts if isinstance(part, SyncedFragment)]
        changed = [part.index for part in parts if part.state.num_steps != part.equal_at]
        views = handshake.gather_json(self.exchange, changed)
        differing = [part for part in parts if any(part.index in view for view in views)]
        # Replicas that do this at different times would not find each other.
        with self.whole():
            consensus.equalize(self.exchange, differing, self.impl)
            for part in parts:
                part.equal_at = part.state.num_steps

    def drain(self, inner_step: int) -> None:
        """Wait for all rounds and take an outer step on each; nothing is sent.

        What was trained since the last send must have been sent.

        Raises:
            SyncError: The first failure; later rounds of that part stay in flight.
        """
        first: Exception | None = None
        for part in self.parts:
            try:
                while part.in_flight:
                    self._drain_one(part, part.in_flight[0], inner_step)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _drain_one(self, part: SyncedPart, flight: RoundInFlight, inner_step: int) -> None:
        arrival, exposed_s = self._wait(part, flight)
        with self.whole():
            if isinstance(arrival, SyncError):
                self._fail(part, flight, inner_step, arrival)
                return
            self._owe_progress(part)
            self._finish(part, flight, None, inner_step, exposed_s)

    def _owe_progress(self, part: SyncedPart, *, always: bool = False) -> None:
        """Owe what the local parameters hold beyond the outer ones; they are about to lose it."""
        if isinstance(part, SyncedFragment) and (part.is_ahead or always):
            assert part.buffers is not None
            part.buffers.residuals.owe(part.progress())
            part.owes = part.owes or always
            part.is_ahead = False

    def _leave_local(self, part: SyncedFragment, fresh: RoundInFlight | None) -> None:
        # What is owed takes out what the local parameters hold of rounds that were sent.
        if not part.is_ahead:
            return
        assert part.buffers is not None
        part.is_ahead = False
        if fresh is not None and not fresh.is_reset:
            return  # It has that with it.
        for flight in part.in_flight:
            if flight is not fresh and flight.own is not None:
                part.buffers.residuals.owe(part.decode(flight.own, flight.layout, self.impl))

    # ------------------------------------------------------------------------------ failures

    def _fail(
        self, part: SyncedPart, flight: RoundInFlight, inner_step: int, error: SyncError
    ) -> None:
        """Leave out a round that failed.

        When the group is dead the round stays in flight: ``settle`` learns what became of it.
        """
        if self.exchange.is_dead:
            raise error
        part.in_flight.remove(flight)
        self._lose(part, flight)
        if isinstance(error, NonFiniteError) and self.exchange.replica in error.replicas:
            _clean_residuals(part)
        self._report(part, flight, inner_step, error)

    def _lose(self, part: SyncedPart, flight: RoundInFlight) -> None:
        """Owe what a round had sent; its mean counts as zero, on all replicas alike."""
        if not isinstance(part, SyncedFragment):
            return
        assert part.buffers is not None
        if flight.is_local_kept:
            part.buffers.residuals.rewind()
        elif flight.own is not None and not flight.is_reset:
            part.buffers.residuals.owe(part.decode(flight.own, flight.layout, self.impl))
            part.owes = True
            if flight.coefficient:
                own = Own(flight.own.clone(), flight.coefficient, flight.layout)
                part.corrections.append(_laid_out(own, part.buffers.layout))
        if flight.own is not None:
            part.buffers.release(flight.own)

    def _settle_part(self, part: SyncedPart, missed: dict[int, Repair], inner_step: int) -> None:
        super()._settle_part(part, missed, inner_step)
        if part.buffers is not None:
            part.corrections = [_laid_out(own, part.buffers.layout) for own in part.corrections]

    def _repair(
        self, part: SyncedPart, repair: Repair, flight: RoundInFlight | None, inner_step: int
    ) -> None:
        if flight is None or not isinstance(part, SyncedFragment):
            super()._repair(part, repair, flight, inner_step)
            return
        if flight.is_local_kept:
            # What was sent is in the local parameters, too, and is not owed on top.
            self._stay(part, flight)
        self._owe_progress(part, always=True)
        arrival = arrival_of(repair, flight)
        part.apply(self._outer_step(part, arrival, flight, None, inner_step))
        part.corrections = []
        self._repaired(part, repair, arrival)


def _laid_out(own: Own, layout: Layout) -> Own:
    return Own(own.layout.rearrange(own.payload, layout), own.coefficient, layout)


def _keeps_residual(part: SyncedPart) -> bool:
    return part.buffers is not None and part.buffers.residual is not None


def _clean_residuals(part: SyncedPart) -> None:
    """Drop from what is owed what no wire can carry: it would spoil every round to come."""
    assert part.buffers is not None
    for residual in (part.buffers.residuals.added, *part.buffers.residuals.reductions()):
        if residual is not None:
            drop_bad(residual, part.buffers.wire)
