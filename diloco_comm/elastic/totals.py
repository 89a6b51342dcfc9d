"""What membership has cost one replica: sums since its construction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticTotals:
    """Sums over all changes of the group, as this replica has lived them.

    Attributes:
        elapsed_s: Seconds since ``DiLoCo`` was constructed.
        joining_s: Seconds from there to the first view of this replica.
        forming_s: Seconds without training because of later changes. They begin with the training
            step in which a round broke off, so that the wait for a lost replica counts.
        waiting_s: Seconds of these two in which this replica waited for enough replicas, for the
            registry, or for a member to stop; what a running wait has taken so far counts.
        num_views: Views in which this replica has trained.
        rounds_discarded: Rounds of one fragment that this replica had sent and that count for no
            replica. A survivor shares what it learned in such a round with its next send.
    """

    elapsed_s: float = 0.0
    joining_s: float = 0.0
    forming_s: float = 0.0
    waiting_s: float = 0.0
    num_views: int = 0
    rounds_discarded: int = 0

    @property
    def goodput(self) -> float:
        """Part of the time since the first view in which changes did not stop the training.

        From 0 to 1; 0 before the first view.
        """
        trained = self.elapsed_s - self.joining_s
        if not self.num_views or trained <= 0:
            return 0.0
        return max(0.0, 1.0 - self.forming_s / trained)


class Meter:
    """Take the times of one replica; ``now`` is in seconds, of one clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._begin = now
        self._joining_s = self._forming_s = self._waited_s = 0.0
        self._num_views = self._rounds_discarded = 0
        self._waits_since: float | None = None

    def entered(self, now: float, seconds: float) -> None:
        """Count a view that this replica has entered, after ``seconds`` without training."""
        if self._num_views:
            self._forming_s += seconds
        else:
            self._joining_s = now - self._begin
        self._num_views += 1

    def waits(self, now: float, is_waiting: bool) -> None:
        """Note that a wait begins, goes on for another reason, or ends."""
        if self._waits_since is not None:
            self._waited_s += now - self._waits_since
        self._waits_since = now if is_waiting else None

    def discarded(self, number: int) -> None:
        self._rounds_discarded += number

    def totals(self, now: float) -> ElasticTotals:
        """Return the sums up to now."""
        waiting = 0.0 if self._waits_since is None else now - self._waits_since
        is_joining = self._num_views == 0
        return ElasticTotals(
            elapsed_s=now - self._begin,
            joining_s=now - self._begin if is_joining else self._joining_s,
            forming_s=self._forming_s,
            waiting_s=self._waited_s + waiting,
            num_views=self._num_views,
            rounds_discarded=self._rounds_discarded,
        )
