"""The rounds of one fragment as a state machine that reads no clock.

A round goes IDLE -> CALLED -> GRACE -> MERGING -> IDLE. The syncer calls for reports; when K
learners have reported, a grace window lets others join; then the reports are merged and the new
version is committed. Times are arguments, in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .merging import normalised, report_weight

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
