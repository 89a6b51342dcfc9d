"""Rounds of the parts under ``Blocking`` and ``Streaming``.

A part is sent and, some inner steps later, its result is merged into the local parameters. These
still hold what a lost round had, so that the next send carries it. See ``send_timed`` for the
policies that move the local parameters at each send.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..base.errors import SyncError
from ..exchange.headers import Kind
from ..exchange.membership.regroup import Repair
from ..exchange.work import Mean
from .consensus import Ending
from .part import RoundInFlight, SyncedPart
from .round_log import RoundLog
from .runner import RoundRunner


class StepTimed(RoundRunner):
    """Take the parts of one replica through rounds that end some inner steps after their send.

    On a device, an outer step may be enqueued before the replicas' vote is known. It does nothing
    if they vote the round down. The host learns the verdict at the next send of that part.

    Attributes:
        log: Keeps the rounds that are applied; None where no replica may join beside training.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: RoundLog | None = None
        self._undecided: list[tuple[SyncedPart, RoundInFlight]] = []

    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        late = self._look_at_verdicts(inner_step, parts)
        refusal = self._send_all(parts, inner_step, num_skipped, kind)
        try:
            self.receive(inner_step)
        except Exception as error:
            # When the group died between two sends, the part that was sent tells why.
            if refusal is None or isinstance(refusal, SyncError):
                raise
            raise refusal from error
        # If the group died since the last step, the round that awaited its verdict tells why.
        if refusal is not None and not (late and isinstance(refusal, SyncError)):
            raise self._cause(refusal)
        if late is not None:
            raise late from refusal

    def _send_all(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind
    ) -> Exception | None:
        """Send the parts, as many as can be; return the first failure."""
        weight, first = self._weighing.offered(inner_step) if parts else (0.0, None)
        sent: list[tuple[SyncedPart, RoundInFlight]] = []
        with self.uninterruptible():
            try:
                for part in parts:
                    sent.append((part, self.send(part, inner_step, num_skipped, weight, kind)))
            except Exception as error:
                first = first or error
            failure = self._ship(sent)
        return first or failure

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
        results = [self._wait(part, flight) for part, flight in due]
        first: Exception | None = None
        with self.uninterruptible():
            for (part, flight), result in zip(due, results, strict=True):
                try:
                    self._arrive(part, flight, result, inner_step)
                except Exception as error:
                    # An error that a warning filter raises costs no other part its round.
                    first = first or error
        if first is not None:
            raise first

    def _result_of(self, part: SyncedPart, flight: RoundInFlight) -> Mean:
        return flight.offer() if part.takes_verdict else flight.wait()

    def _arrive(
        self, part: SyncedPart, flight: RoundInFlight, result: Mean | SyncError, inner_step: int
    ) -> None:
        assert part.in_flight[0] is flight
        part.in_flight.popleft()
        if isinstance(result, SyncError):
            self._report(part, flight, inner_step, result)
            return
        alpha = 0.0 if flight.kind == "flush" else self.settings.overlap.alpha
        update = self._update(part, result, alpha=alpha, verdict=result.verdict)
        with self._writing(part):
            self._step(part, flight, update, own=flight.own_after(inner_step))
            if result.verdict is None:
                self._commit(part, flight, result)
        if result.verdict is None:
            self._applied(part, flight, inner_step)
        else:
            self._undecided.append((part, flight))

    def _applied(self, part: SyncedPart, flight: RoundInFlight, inner_step: int) -> None:
        part.last_sent = flight.sent_step
        self._record(part, flight, inner_step)

    def _writing(self, part: SyncedPart) -> AbstractContextManager[None]:
        return nullcontext() if self.log is None else self.log.writing(part)

    def _count(
        self, part: SyncedPart, number: int, flight: RoundInFlight | None, mean: Mean
    ) -> None:
        before = part.history
        super()._count(part, number, flight, mean)
        if self.log is not None:
            self.log.add(part, number, before, mean)

    def _settle_part(self, part: SyncedPart, missed: dict[int, Repair], inner_step: int) -> None:
        with self._writing(part):
            super()._settle_part(part, missed, inner_step)

    def _flush(self, inner_step: int, num_skipped: int, ending: Ending) -> None:
        self.settle_verdicts(inner_step)
        self.receive(inner_step, everything=True)
        self.settle_verdicts(inner_step)
        stale = self._stale_parts(inner_step, ending)
        self.exchange_parts(stale, inner_step, num_skipped, "flush")
        self.settle_verdicts(inner_step)
        # The last merge of a part left a share of the local values, of whatever age it is.
        for part in self.parts:
            if part not in stale:
                part.write_local(self.impl)

    def _lose(self, part: SyncedPart, flight: RoundInFlight) -> None:
        """Do nothing: the local parameters still hold the round, and the next send carries it."""

    def _leave_local(self, part: SyncedPart, fresh: RoundInFlight | None) -> None:
        """Do nothing: between two sends nothing is owed."""

    # ------------------------------------------------------------------------------ verdicts

    def settle_verdicts(self, inner_step: int) -> None:
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
        for part, flight in list(self._undecided):
            assert flight.work is not None
            if not (parts is None or part in parts or flight.work.done()):
                continue
            result: Mean | SyncError
            try:
                result = flight.wait()
            except SyncError as error:
                result = error
            with self.uninterruptible():
                try:
                    self._decide(part, flight, result, inner_step)
                except Exception as error:
                    first = first or error
        return first

    def _decide(
        self, part: SyncedPart, flight: RoundInFlight, result: Mean | SyncError, inner_step: int
    ) -> None:
        self._undecided.remove((part, flight))
        if isinstance(result, SyncError):
            part.uncount_step()
            self._report(part, flight, inner_step, result)
        else:
            self._commit(part, flight, result)
            self._applied(part, flight, inner_step)
