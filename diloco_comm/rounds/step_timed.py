"""Rounds of the parts under ``Blocking`` and ``Streaming``.

A part is sent and, some inner steps later, its result is merged into the local parameters. If the
round is lost, the local parameters still contain its values, and the next send includes them.
``send_timed`` is for the policies that change the local parameters at each send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd import _profiler_enabled

from ..base.errors import SyncError
from ..exchange.round import Kind, Mean
from .consensus import Ending
from .part import RoundInFlight, SyncedPart
from .runner import NO_BLOCK, RoundRunner


class StepTimed(RoundRunner):
    """Takes the parts of one replica through rounds that end some inner steps after their send.

    On a device, an outer step may be enqueued before the replicas' votes are known; the round is
    *pending* then. The step does nothing if the round is voted down. The host learns the result of
    the vote, the *verdict*, at the next send of that part at the latest.
    """

    leaves_verdict = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The pending rounds.
        self._undecided: list[RoundInFlight] = []

    def exchange_parts(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind = "sync"
    ) -> None:
        late = self._look_at_verdicts(inner_step, parts) if self._undecided else None
        refusal = self._send_all(parts, inner_step, num_skipped, kind)
        try:
            self.receive(inner_step)
        except Exception as error:
            if late is not None:
                # The pending round failed first: others may have seen that and left, which is why
                # this send fails.
                raise late from error
            # If the group failed between two sends, the error of the round under way says why.
            if refusal is None or isinstance(refusal, SyncError):
                raise
            raise refusal from error
        # If the group failed since the last step, the error of the pending round says why.
        if refusal is not None and not (late and isinstance(refusal, SyncError)):
            raise self._cause(refusal)
        if late is not None:
            raise late from refusal

    def _send_all(
        self, parts: Sequence[SyncedPart], inner_step: int, num_skipped: int, kind: Kind
    ) -> Exception | None:
        """Send the parts in order, up to the first that fails; return the first failure.

        If the function of the weight fails, all parts are sent with the weight NaN, so that the
        other replicas do not wait.
        """
        weight, first = self._offered_weight(inner_step) if parts else (0.0, None)
        sent: list[RoundInFlight] = []
        with self.uninterruptible():
            try:
                for part in parts:
                    sent.append(self.send(part, inner_step, num_skipped, weight, kind))
            except Exception as error:
                first = first or error
            failure = self._ship(sent)
        return first or failure

    def receive(self, inner_step: int, *, everything: bool = False) -> None:
        """Wait for all exchanges that are due, then apply the rounds that were agreed on.

        If one round fails, the others are applied all the same, as the other replicas do so. If a
        Ctrl-C interrupts the wait, all rounds stay in flight for the next call.

        Args:
            everything: Take all exchanges as due.

        Raises:
            SyncError: The first failure; nothing of that round was applied.
        """
        due: list[RoundInFlight] = []
        results: list[Mean | SyncError] = []
        for part in self.parts:
            for flight in part.in_flight:
                if everything or flight.apply_step <= inner_step:
                    due.append(flight)
        for flight in due:
            results.append(self._wait(flight))
        first: Exception | None = None
        with self.uninterruptible():
            for flight, result in zip(due, results, strict=True):
                try:
                    self._arrive(flight, result, inner_step)
                except Exception as error:
                    # Go on with the other parts, also after a warning that a filter made an error.
                    first = first or error
        if first is not None:
            raise first

    def _arrive(self, flight: RoundInFlight, result: Mean | SyncError, inner_step: int) -> None:
        part = flight.part
        assert part.in_flight[0] is flight
        part.in_flight.popleft()
        if isinstance(result, SyncError):
            self._report(flight, inner_step, result)
            return
        alpha = 0.0 if flight.kind == "flush" else self.settings.overlap.alpha
        update = self._update(part, result, alpha=alpha, verdict=result.verdict)
        with NO_BLOCK if self.log is None else self.log.writing(part):
            self._step(flight, update, own=flight.own_after(inner_step))
            if result.verdict is None:
                self._commit(flight, result)
        if result.verdict is None:
            part.last_sent = flight.sent_step
            self._record(flight, inner_step)
        else:
            flight.state = "pending"
            self._undecided.append(flight)

    def _flush(self, inner_step: int, num_skipped: int, ending: Ending) -> None:
        self.settle_verdicts(inner_step)
        self.receive(inner_step, everything=True)
        self.settle_verdicts(inner_step)
        stale = self._stale_parts(inner_step, ending)
        self.exchange_parts(stale, inner_step, num_skipped, "flush")
        self.settle_verdicts(inner_step)
        # With alpha > 0 the last merge kept a share of the local values: take the outer ones now.
        for part in self.parts:
            if part not in stale:
                part.write_local(self.impl)

    def _leave_local(self, part: SyncedPart, fresh: RoundInFlight | None) -> None:
        """Do nothing: under these policies a part has no debts."""

    # ------------------------------------------------------------------------------ verdicts

    def settle_verdicts(self, inner_step: int) -> None:
        late = self._look_at_verdicts(inner_step)
        if late is not None:
            raise late

    def _look_at_verdicts(
        self, inner_step: int, parts: Sequence[SyncedPart] | None = None
    ) -> Exception | None:
        """Learn the verdicts of pending rounds; return the first failure instead of raising it.

        Replicas may learn of a failure at different steps, and each must still send.

        Args:
            parts: Wait for the verdicts of these parts; learn other verdicts only if they are
                known by now. None: wait for all.
        """
        first: Exception | None = None
        for flight in list(self._undecided):
            assert flight.work is not None
            if not (parts is None or flight.part in parts or flight.work.done()):
                continue
            result: Mean | SyncError
            try:
                result = flight.wait()
            except SyncError as error:
                result = error
            with self.uninterruptible():
                try:
                    self._decide(flight, result, inner_step)
                except Exception as error:
                    first = first or error
        return first

    def _decide(self, flight: RoundInFlight, result: Mean | SyncError, inner_step: int) -> None:
        assert flight.state == "pending"
        self._undecided.remove(flight)
        if isinstance(result, SyncError):
            with self._writing(flight.part):
                flight.part.uncount_step()
            self._report(flight, inner_step, result)
        else:
            with self._writing(flight.part):
                self._commit(flight, result)
            flight.part.last_sent = flight.sent_step
            if _profiler_enabled() or self._has_nvtx:
                self._trace(flight)
            self._record(flight, inner_step)
