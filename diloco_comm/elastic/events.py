"""The events for ``Elastic(on_event=)``, and the times that ``DiLoCo.elastic_totals()`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewChanged:
    """This replica trains in another view.

    Attributes:
        number: The view's number.
        members, joined, left: Numbers of the replicas in this view, of those among them that are
            new, and of the members of the view before that are gone.
        reason: Why the view has changed, in one clause.
        seconds: Seconds in which this replica did not train because of the change.
        inner_step: The step from which all members go on.
        copied_bytes: Bytes of state that newcomers were given while all members waited.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    reason: str
    seconds: float
    inner_step: int
    copied_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"view {self.number}: replicas {list(self.members)} train from inner step "
            f"{self.inner_step} ({self.reason}; {self.seconds:.1f} s without training)"
        )


@dataclass(frozen=True)
class Suspected:
    """The members ``replicas`` have been silent for so long that they may be dead."""

    replicas: tuple[int, ...]

    def __str__(self) -> str:
        return f"nothing is heard of replicas {list(self.replicas)}"


@dataclass(frozen=True)
class Waiting:
    """This replica waits, for what ``reason`` says; "" when the wait is over."""

    reason: str

    def __str__(self) -> str:
        return f"waiting {self.reason}" if self.reason else "the wait is over"


@dataclass(frozen=True)
class Fenced:
    """The others go on without this replica, for this reason."""

    reason: str

    def __str__(self) -> str:
        return f"the others go on without this replica: {self.reason}"


@dataclass(frozen=True)
class JoinProgress:
    """This replica copies the state of a group that trains, before it joins.

    Attributes:
        received_bytes: Bytes of outer state and of logged rounds.
        total_bytes: Bytes of the outer state.
        rounds_behind: Rounds by which the copy lags; -1 while a part of the state is missing.
        is_ready: The copy is nearly up to date, and this replica asks to be let in.
    """

    received_bytes: int
    total_bytes: int
    rounds_behind: int
    is_ready: bool

    def __str__(self) -> str:
        what = "ready to join" if self.is_ready else "copying the state before joining"
        behind = "" if self.rounds_behind < 0 else f", {self.rounds_behind} rounds behind"
        return f"{what}: {self.received_bytes} bytes received of {self.total_bytes}{behind}"


Happening = ViewChanged | Suspected | JoinProgress | Waiting | Fenced


# ------------------------------------------------------------------------------------------- totals


@dataclass(frozen=True)
class ElasticTotals:
    """Sums over all changes of the group since this replica's ``DiLoCo`` was constructed.

    Attributes:
        elapsed_s: Seconds since ``DiLoCo`` was constructed.
        joining_s: Seconds from the construction to the first view of this replica.
        forming_s: Seconds without training because of later changes. They begin with the training
            step in which a round broke off, so that the wait for a lost replica counts.
        waiting_s: Seconds of ``joining_s`` and ``forming_s`` in which this replica waited for
            enough replicas, for the registry, or for a member to stop. A wait that goes on counts
            with its seconds so far.
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
        """The share, from 0 to 1, of the time since the first view that changes left for training.

        0 before the first view.
        """
        trained = self.elapsed_s - self.joining_s
        if not self.num_views or trained <= 0:
            return 0.0
        return max(0.0, 1.0 - self.forming_s / trained)


class Meter:
    """Measures the times of one replica; each ``now`` is in seconds of one monotonic clock."""

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
