"""The syncer: calls for reports, merges what a quorum reports, commits to all learners.

The syncer reads no clock and knows no connection: times are arguments, and ``advance`` returns the
messages that every learner is to get. The work is proportional to what has changed: a fragment is
looked at when its grace window is over, and after an event that may let the fragment be called.

The rounds of one fragment are a state machine: IDLE -> CALLED -> GRACE -> MERGING -> IDLE. The
syncer calls for reports; when K learners have reported, a grace window lets others join; then the
reports are merged and the new version is committed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from torch import Tensor

from ...replica.fragments import Schedule
from .merges import Gathered, SharedFragment, normalised, report_weight

# Reports of one merge: the outer step takes so many payloads.
MAX_REPORTS = 1024


class Phase(enum.Enum):
    """What the round of a fragment waits for."""

    IDLE = "idle"  # the call
    CALLED = "called"  # the quorum
    GRACE = "grace"  # the end of the grace window
    MERGING = "merging"  # the commit


@dataclass(frozen=True, kw_only=True)
class QuorumRule:
    """When the reports of a round are merged.

    Args:
        quorum: K, the distinct learners whose reports make a quorum, at most ``MAX_REPORTS``. Where
            fewer take part in a round, all of them make the quorum.
        gamma: The share of the slack that the grace window takes; 0 for no window. The
            default is this library's: the paper states none.
        delay: tau, the inner steps that a learner can take before a merge comes late.
    """

    quorum: int = 1
    gamma: float = 0.5
    delay: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.quorum, bool) or not isinstance(self.quorum, int) or self.quorum < 1:
            raise ValueError(f"quorum must be an integer of at least 1, got {self.quorum!r}")
        if self.quorum > MAX_REPORTS:
            raise ValueError(
                f"quorum must be at most {MAX_REPORTS}, the reports that one merge takes, got "
                f"{self.quorum}"
            )
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], got {self.gamma!r}")
        if self.delay < 0:
            raise ValueError(f"delay must not be negative, got {self.delay!r}")

    def window(self, step_s: float, quorum_s: float, sync_s: float) -> float:
        """Return the length of the grace window: min(gamma * slack, step_s).

        Args:
            step_s: Seconds of an inner step.
            quorum_s: Seconds from the call to the quorum.
            sync_s: Seconds to bring a commit to the learners.
        """
        slack = max(self.delay * step_s - quorum_s - sync_s, 0.0)
        return min(self.gamma * slack, step_s)


@dataclass(frozen=True)
class Report:
    """What a learner says about its progress on one fragment.

    Attributes:
        learner: Name of the learner.
        seq: Number of the report; a learner never uses a number twice for one fragment.
        base: Version of the fragment from which the progress is measured.
        steps, tokens: Inner steps and tokens of the progress.
    """

    learner: str
    seq: int
    base: int
    steps: int
    tokens: int


@dataclass(frozen=True)
class Merge:
    """The reports that make the next version, in the order of the learners' names.

    Attributes:
        version: The version that the reports start from.
        weights: tokens^2 / steps of each report, normalised to a sum of 1.
    """

    version: int
    reports: tuple[Report, ...]
    weights: tuple[float, ...]


@dataclass
class FragmentRound:
    """The round of one fragment.

    Attributes:
        version: Merges committed so far.
        phase: What the round waits for.
        learners: The learners that take part: live as far as the syncer knows.
        resting: Learners that rest and have nothing to report; a round does not wait for them.
        deadline: End of the grace window, in seconds; None outside of the window.
    """

    rule: QuorumRule
    version: int = 0
    phase: Phase = Phase.IDLE
    learners: set[str] = field(default_factory=set)
    resting: set[str] = field(default_factory=set)
    deadline: float | None = None
    _called_at: float = 0.0
    _reports: dict[str, Report] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Learners may report."""
        return self.phase in (Phase.CALLED, Phase.GRACE)

    @property
    def reported(self) -> frozenset[str]:
        """Learners with a report in this round."""
        return frozenset(self._reports)

    def join(self, learner: str) -> None:
        """Let a learner take part."""
        self.learners.add(learner)

    def leave(self, learner: str, now: float, step_s: float, sync_s: float) -> None:
        """Forget a learner that is gone. A report that has arrived counts all the same."""
        self.learners.discard(learner)
        self.resting.discard(learner)
        self._look(now, step_s, sync_s)

    def rest(self, learner: str, now: float, step_s: float, sync_s: float) -> None:
        """Do without a report of a learner that rests, until ``wake``."""
        self.resting.add(learner)
        self._look(now, step_s, sync_s)

    def wake(self, learner: str) -> None:
        """Count on a learner again."""
        self.resting.discard(learner)

    def call(self, now: float) -> None:
        """Open a round."""
        if self.phase is not Phase.IDLE:
            raise ValueError(f"a round can be called when it is idle, got phase {self.phase.value}")
        self.phase, self._called_at = Phase.CALLED, now

    def report(self, report: Report, now: float, step_s: float, sync_s: float) -> str:
        """Take a report, and return why it is refused, or "".

        A refused report changes nothing; its learner keeps the progress.

        Args:
            step_s, sync_s: As in ``QuorumRule.window``.
        """
        refusal = self.refusal(report)
        if refusal:
            return refusal
        self._reports[report.learner] = report
        self._look(now, step_s, sync_s)
        return ""

    def refusal(self, report: Report) -> str:
        """Return why a report would be refused now, or ""."""
        if report.base != self.version:
            return f"the report starts from version {report.base}, not from {self.version}"
        if not self.is_open:
            return f"the fragment takes no reports while it is {self.phase.value}"
        if report.learner not in self.learners:
            return f"learner {report.learner!r} takes no part"
        if report.learner in self._reports:
            return f"learner {report.learner!r} has reported in this round"
        if len(self._reports) >= MAX_REPORTS:
            return f"this round has {MAX_REPORTS} reports, and a merge takes no more"
        if report.tokens < 1 or report.steps < 1:
            return f"a report needs steps and tokens, got {report.steps} and {report.tokens}"
        return ""

    def _look(self, now: float, step_s: float, sync_s: float) -> None:
        """Open the grace window with the quorum; close it when no report can come any more."""
        waited_for = self.learners - self.resting
        present = len(waited_for | self.reported)
        if self.phase is Phase.CALLED and self._reports:
            if len(self._reports) < min(self.rule.quorum, present):
                return
            self.phase = Phase.GRACE
            self.deadline = now + self.rule.window(step_s, now - self._called_at, sync_s)
        is_full = len(self._reports) >= MAX_REPORTS
        if self.phase is Phase.GRACE and (is_full or waited_for <= self.reported):
            self.deadline = now

    def merge(self, now: float) -> Merge | None:
        """Return the reports to merge once the grace window is over, else None.

        End with ``commit``, or with ``reopen`` if the merge failed.
        """
        if self.phase is not Phase.GRACE or self.deadline is None or now < self.deadline:
            return None
        self.phase, self.deadline = Phase.MERGING, None
        reports = tuple(self._reports[learner] for learner in sorted(self._reports))
        weights = normalised([report_weight(each.tokens, each.steps) for each in reports])
        return Merge(self.version, reports, tuple(weights))

    def commit(self) -> None:
        """End the round: the merged version is the shared one."""
        if self.phase is not Phase.MERGING:
            raise ValueError(f"only a merge can be committed, got phase {self.phase.value}")
        self._reports.clear()
        self.version += 1
        self.phase = Phase.IDLE

    def reopen(self, now: float) -> None:
        """Undo ``merge`` after a failure: the reports stay, and their merge is due at once."""
        if self.phase is not Phase.MERGING:
            raise ValueError(f"only a merge can be undone, got phase {self.phase.value}")
        self.phase, self.deadline = Phase.GRACE, now


@dataclass(frozen=True)
class Call:
    """Asks all learners to report on a fragment from a version."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Commit:
    """Brings a new version of a fragment to all learners.

    Attributes:
        version: The new version.
        merged: For each learner whose report was merged, the report's number.
        values: The shared parameters, fp32 [num_elements] for each piece.
        merge: The reports and their weights.
        factors: The factors of the reports in each piece.
    """

    fragment: int
    version: int
    merged: dict[str, int]
    values: list[Tensor]
    merge: Merge
    factors: list[list[float]]


class Syncer:
    """Decides when the fragments are called and merged, and merges them.

    A fragment is called when a quorum of learners has taken ``sync_every`` inner steps since its
    last call. So the fastest K learners set the pace; the others report what they have. A fragment
    is called at once, beside this schedule, when a learner rests and has progress to report.

    Args:
        fragments: The shared model.
        rule: Quorum and grace window, the same for all fragments.
        sync_every: Inner steps between two calls of a fragment (H).
        offsets: The inner step of each fragment's first call, as in ``DiLoCo``.
        sync_s: Seconds that a commit takes to the learners, for the slack of the grace window.
    """

    def __init__(
        self,
        fragments: Sequence[SharedFragment],
        rule: QuorumRule,
        *,
        sync_every: int,
        offsets: Sequence[int] | None = None,
        sync_s: float = 0.0,
    ) -> None:
        if not fragments:
            raise ValueError("a syncer needs at least one fragment, got none")
        schedule = Schedule.plan(sync_every, len(fragments), offsets)
        self.sync_every, self.offsets = schedule.sync_every, schedule.offsets
        self.fragments, self.rule, self.sync_s = list(fragments), rule, sync_s
        self.rounds = [FragmentRound(rule) for _ in self.fragments]
        self._steps: dict[str, int] = {}
        self._step_s: dict[str, float] = {}
        # For each learner that rests: by fragment, the version from which it has progress, or -1.
        self._resting: dict[str, list[int]] = {}
        # The steps of each learner when a fragment was called last, by fragment.
        self._called: list[dict[str, int]] = [{} for _ in self.fragments]
        self._gathered = [Gathered(each.pieces, each.layouts, each.impl) for each in self.fragments]
        self._unsent: list[Call | Commit] = []
        # Ends of grace windows, each with its fragment; one that is not the ``deadline`` of the
        # fragment's round is out of date.
        self._windows: list[tuple[float, int]] = []
        # Fragments whose window is over, and fragments that may be called: heaps of numbers.
        self._over: list[int] = []
        self._changed: list[int] = []
        self._is_changed: set[int] = set()
        # By learner: the steps at which a fragment may be due, with the fragment; and the fragments
        # that have been due by these steps since their last call.
        self._due_at: dict[str, list[tuple[int, int]]] = {}
        self._is_said: dict[str, set[int]] = {}

    @property
    def learners(self) -> frozenset[str]:
        """The learners that take part."""
        return frozenset(self._steps)

    @property
    def step_s(self) -> float:
        """Mean seconds of an inner step over the learners; 0 as long as none is known."""
        return sum(self._step_s.values()) / len(self._step_s) if self._step_s else 0.0

    def steps(self) -> dict[str, int]:
        """Return the inner steps of all learners; any thread may call this method."""
        return self._steps.copy()

    def steps_of(self, learner: str) -> int:
        """Return the inner steps that a learner has taken."""
        return self._steps[learner]

    def step_s_of(self, learner: str) -> float | None:
        """Return the seconds of a learner's last inner step; None before its first."""
        return self._step_s.get(learner)

    @property
    def has_unsent(self) -> bool:
        """An ``advance`` that raised has left messages to the next one."""
        return bool(self._unsent)

    @property
    def deadline(self) -> float | None:
        """The end of the next grace window, in seconds; None if none is open."""
        while self._windows and self._is_old(*self._windows[0]):
            heappop(self._windows)
        ends = [self.rounds[index].deadline for index in self._over]
        ends += [end for end, _ in self._windows[:1]]
        return min((end for end in ends if end is not None), default=None)

    def _is_old(self, end: float, index: int) -> bool:
        """Whether a grace window has another end by now, or is no more open."""
        return self.rounds[index].deadline != end

    def _window(self, index: int, before: float | None) -> None:
        """Note the end of a fragment's grace window, unless the end is the same as before."""
        end = self.rounds[index].deadline
        if end is not None and end != before:
            heappush(self._windows, (end, index))

    def _change(self, index: int) -> None:
        """Look at a fragment in the next ``advance``: the fragment may be called."""
        if index not in self._is_changed:
            self._is_changed.add(index)
            heappush(self._changed, index)

    def _change_all(self) -> None:
        """Look at all fragments in the next ``advance``: the learners to wait for have changed."""
        self._changed = list(range(len(self.rounds)))
        self._is_changed = set(self._changed)

    def _plan(self, learner: str) -> None:
        """Note the steps of a learner at which each fragment may be due."""
        due_at = [
            (called[learner] + self.sync_every, index) for index, called in enumerate(self._called)
        ]
        heapify(due_at)
        self._due_at[learner], self._is_said[learner] = due_at, set()
        self._count(learner)

    def _count(self, learner: str) -> None:
        """Look at the fragments that the steps of a learner may have made due."""
        due_at, steps = self._due_at[learner], self._steps[learner]
        while due_at and due_at[0][0] <= steps:
            _, index = heappop(due_at)
            at = self._called[index][learner] + self.sync_every
            if at > steps:  # The fragment was called since.
                heappush(due_at, (at, index))
            else:
                self._is_said[learner].add(index)
                self._change(index)

    def _note_call(self, index: int) -> None:
        """Note the steps of all learners at the call of a fragment."""
        called = self._called[index]
        for learner, steps in self._steps.items():
            is_said, before = self._is_said[learner], called[learner]
            called[learner] = steps
            if index in is_said or steps < before:
                is_said.discard(index)
                heappush(self._due_at[learner], (steps + self.sync_every, index))

    def join(self, learner: str, steps: int = 0) -> None:
        """Let a learner take part that has taken ``steps`` inner steps."""
        self._steps[learner] = steps
        for index, each in enumerate(self.rounds):
            each.join(learner)
            is_first = each.version == 0 and each.phase is Phase.IDLE and steps == 0
            ahead = self.sync_every - self.offsets[index] if is_first else 0
            self._called[index][learner] = steps - ahead
        self._plan(learner)

    def leave(self, learner: str, now: float) -> None:
        """Forget a learner that is gone."""
        self._steps.pop(learner, None)
        self._step_s.pop(learner, None)
        self._resting.pop(learner, None)
        self._due_at.pop(learner, None)
        self._is_said.pop(learner, None)
        for called in self._called:
            called.pop(learner, None)
        for index, each in enumerate(self.rounds):
            before = each.deadline
            each.leave(learner, now, self.step_s, self.sync_s)
            self._window(index, before)
        self._change_all()

    def stepped(self, learner: str, steps: int, seconds: float) -> None:
        """Note how many inner steps a learner has taken, and the seconds of the last one."""
        if learner in self._steps:
            if steps != self._steps[learner] and self._resting.pop(learner, None) is not None:
                for each in self.rounds:
                    each.wake(learner)
                self._change_all()
            is_back = steps < self._steps[learner]
            self._steps[learner], self._step_s[learner] = steps, seconds
            if is_back:
                self._plan(learner)
            self._count(learner)

    def rest(self, learner: str, progress: Sequence[int], now: float) -> None:
        """Note that a learner takes no inner step for now; its next step ends the rest.

        Meanwhile no call waits for the learner's steps, and no round for a report that the learner
        does not have.

        Args:
            progress: For each fragment the version from which the learner has progress that is not
                merged, or -1. A fragment whose version is the present one is called.
        """
        if learner not in self._steps:
            return
        if learner not in self._resting:
            self._change_all()
        told = self._resting.get(learner, ())
        self._resting[learner] = list(progress)
        for index, (each, version) in enumerate(zip(self.rounds, progress, strict=True)):
            if version < 0:
                before = each.deadline
                each.rest(learner, now, self.step_s, self.sync_s)
                self._window(index, before)
            else:
                each.wake(learner)
                if not told or told[index] != version:
                    self._change(index)

    def report(self, fragment: int, report: Report, payloads: list[Tensor], now: float) -> str:
        """Take a report with the payload of each piece; return why it is refused, or "".

        Payloads of another size, or with NaN or Inf, are refused, and change nothing.
        """
        here = self.rounds[fragment]
        refusal = here.refusal(report) or self._gathered[fragment].add(report.learner, payloads)
        if refusal:
            return refusal
        before = here.deadline
        refusal = here.report(report, now, self.step_s, self.sync_s)
        self._window(fragment, before)
        return refusal

    def advance(self, now: float, most_merges: int | None = None) -> list[Call | Commit]:
        """Merge and call what is due, and return the messages to all learners, in order.

        Args:
            most_merges: Fragments to merge at most, since each commit has a copy of its values; the
                others stay due. None: all.

        If a merge raises before its outer step, the fragment's reports and the messages made before
        stay: the next ``advance`` merges these reports, and returns these messages too. If the step
        itself raises, half of it may be taken: the fragment is neither merged nor called any more.
        """
        for message in self.messages(now, most_merges):
            self._unsent.append(message)
        messages, self._unsent = self._unsent, []
        return messages

    def messages(self, now: float, most_merges: int | None = None) -> Iterator[Call | Commit]:
        """Yield what ``advance`` returns: each merge is made after the message before was taken.

        A caller that stops early finds the rest in the next call. If a merge raises, the messages
        before were taken.
        """
        while self._windows and self._windows[0][0] <= now:
            end, ended = heappop(self._windows)
            if not self._is_old(end, ended):
                heappush(self._over, ended)
        while (index := self._next(now, with_merges=most_merges != 0)) is not None:
            each = self.rounds[index]
            merge = None if most_merges == 0 else each.merge(now)
            if merge is not None:
                most_merges = None if most_merges is None else most_merges - 1
                self._change(index)
                yield self._commit(index, merge, now)
            self._is_changed.discard(index)
            is_due = self._is_due(index)
            if is_due or self._is_wanted(index):
                each.call(now)
                if is_due:
                    self._note_call(index)
                yield Call(index, each.version)

    def _next(self, now: float, *, with_merges: bool) -> int | None:
        """Return the first fragment to look at, or None."""
        found: list[int] = []
        while with_merges and self._over and not found:
            end = self.rounds[self._over[0]].deadline
            if end is not None and end <= now:
                found = [self._over[0]]
            else:
                heappop(self._over)
        while self._changed and self._changed[0] not in self._is_changed:
            heappop(self._changed)
        return min(found + self._changed[:1], default=None)

    def _commit(self, index: int, merge: Merge, now: float) -> Commit:
        gathered, fragment = self._gathered[index], self.fragments[index]
        learners = [report.learner for report in merge.reports]
        before = fragment.num_merges
        try:
            factors, room = gathered.factors(learners, merge.weights), fragment.room_for_copy()
            fragment.merge(gathered.payloads(learners), merge.weights, factors)
        except BaseException:
            # A step that broke off has moved some pieces: a second one would move them twice.
            if fragment.num_merges == before:
                self.rounds[index].reopen(now)
                self._window(index, None)
            raise
        merged = {report.learner: report.seq for report in merge.reports}
        values = fragment.copy_values(room)
        self.rounds[index].commit()
        gathered.clear()
        return Commit(index, self.rounds[index].version, merged, values, merge, factors)

    def _is_due(self, index: int) -> bool:
        """Return whether the schedule calls a fragment now."""
        active = [name for name in self._steps if name not in self._resting]
        if self.rounds[index].phase is not Phase.IDLE or not active:
            return False
        called = self._called[index]
        ready = [n for n in active if self._steps[n] - called[n] >= self.sync_every]
        return len(ready) >= min(self.rule.quorum, len(active))

    def _is_wanted(self, index: int) -> bool:
        """Return whether a learner that rests has progress on a fragment that may be called."""
        here = self.rounds[index]
        wanted = any(progress[index] == here.version for progress in self._resting.values())
        return wanted and here.phase is Phase.IDLE
