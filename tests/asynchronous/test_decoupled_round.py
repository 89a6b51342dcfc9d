"""The round of a fragment on a virtual clock: quorum, grace window, and what is never broken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diloco_comm.asynchronous.decoupled.syncer import (
    MAX_REPORTS,
    FragmentRound,
    Merge,
    Phase,
    QuorumRule,
    Report,
)

STEP_S, SYNC_S = 1.0, 0.25
NAMES = ("a", "b", "c", "d")


def report_of(name: str, seq: int = 1, base: int = 0, steps: int = 2, tokens: int = 10) -> Report:
    return Report(name, seq, base, steps, tokens)


def called(names: Sequence[str] = "abc", **options) -> FragmentRound:
    each = FragmentRound(QuorumRule(**options))
    for name in names:
        each.join(name)
    each.call(0.0)
    return each


def send(each: FragmentRound, name: str, now: float, **numbers: int) -> str:
    return each.report(report_of(name, **numbers), now, STEP_S, SYNC_S)


def test_the_quorum_counts_distinct_learners() -> None:
    each = called(quorum=2, gamma=0.0)
    assert send(each, "a", 1.0) == ""
    assert "'a' has reported" in send(each, "a", 1.0, seq=2)
    assert each.merge(9.0) is None and each.phase is Phase.CALLED
    assert send(each, "b", 2.0) == ""
    merge = each.merge(2.0)
    assert merge is not None and [r.learner for r in merge.reports] == ["a", "b"]
    assert merge.weights == (0.5, 0.5)


def test_a_round_takes_as_many_reports_as_a_merge() -> None:
    """1024; the next learner keeps the progress for the next round."""
    each = called((), quorum=1, delay=100_000)
    names = [f"{number:04d}" for number in range(MAX_REPORTS + 1)]
    for name in names:
        each.join(name)
    assert not any(send(each, name, 1.0) for name in names[:-1])
    assert "has 1024 reports, and a merge takes no more" in send(each, names[-1], 1.0)
    # The grace window need not last any longer.
    merge = each.merge(1.0)
    assert merge is not None and [r.learner for r in merge.reports] == names[:-1]
    each.commit()
    each.call(2.0)
    assert send(each, names[-1], 2.0, base=1) == ""


def test_weights_are_tokens_squared_over_steps() -> None:
    each = called("ab", quorum=2)
    send(each, "b", 1.0, tokens=200, steps=10)
    send(each, "a", 1.0, tokens=100, steps=10)
    merge = each.merge(1.0)
    assert merge is not None and merge.weights == (0.2, 0.8)


@pytest.mark.parametrize(
    ("tau", "gamma", "quorum_s", "window"),
    [
        (3, 0.5, 1.0, 0.875),  # 0.5 * (3 - 1 - 0.25)
        (3, 1.0, 1.0, 1.0),  # not longer than one step
        (1, 0.5, 2.0, 0.0),  # no slack
        (3, 0.0, 1.0, 0.0),
    ],
)
def test_grace_window(tau: int, gamma: float, quorum_s: float, window: float) -> None:
    each = called(quorum=1, gamma=gamma, delay=tau)
    send(each, "a", quorum_s)
    assert each.deadline == quorum_s + window
    if window:
        assert each.merge(quorum_s + window / 2) is None
        assert send(each, "b", quorum_s + window / 2) == ""
        assert each.deadline == quorum_s + window  # a late report does not prolong the window
    merge = each.merge(quorum_s + window)
    assert merge is not None and len(merge.reports) == (2 if window else 1)


def test_the_window_ends_with_the_last_report() -> None:
    each = called("ab", quorum=1, gamma=1.0, delay=9)
    send(each, "a", 1.0)
    send(each, "b", 1.5)
    assert each.deadline == 1.5


def test_the_window_ends_when_the_missing_learner_leaves() -> None:
    each = called("ab", quorum=1, gamma=1.0, delay=9)
    send(each, "a", 1.0)
    each.leave("b", 1.25, STEP_S, SYNC_S)
    assert each.deadline == 1.25


def test_a_round_does_without_learners_that_rest() -> None:
    each = called("abc", quorum=3)
    send(each, "a", 1.0)
    each.rest("b", 2.0, STEP_S, SYNC_S)
    assert each.phase is Phase.CALLED
    each.wake("b")
    each.rest("c", 2.0, STEP_S, SYNC_S)
    assert each.phase is Phase.CALLED
    each.rest("b", 3.0, STEP_S, SYNC_S)
    assert each.deadline == 3.0
    merge = each.merge(3.0)
    assert merge is not None and merge.weights == (1.0,)
    # A learner that was gone, and comes back under its name, does not rest.
    each.leave("b", 4.0, STEP_S, SYNC_S)
    each.join("b")
    assert each.resting == {"c"}


def test_fewer_learners_than_the_quorum_are_enough() -> None:
    each = called("abc", quorum=3)
    send(each, "a", 1.0)
    each.leave("b", 2.0, STEP_S, SYNC_S)
    assert each.phase is Phase.CALLED
    each.leave("c", 2.0, STEP_S, SYNC_S)
    merge = each.merge(2.0)
    assert merge is not None and merge.weights == (1.0,)


def test_a_report_outlives_its_learner() -> None:
    each = called("ab", quorum=2)
    send(each, "a", 1.0)
    each.leave("a", 1.0, STEP_S, SYNC_S)
    assert each.phase is Phase.CALLED
    send(each, "b", 2.0)
    merge = each.merge(2.0)
    assert merge is not None and len(merge.reports) == 2


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"base": 1}, "starts from version 1, not from 0"),
        ({"steps": 0}, "needs steps and tokens, got 0 and 10"),
        ({"tokens": 0}, "needs steps and tokens, got 2 and 0"),
    ],
)
def test_refused_reports(numbers: dict[str, int], sentence: str) -> None:
    each = called()
    assert sentence in send(each, "a", 1.0, **numbers)
    assert not each.reported


def test_wrong_order() -> None:
    each = called("a")
    with pytest.raises(ValueError, match="called when it is idle, got phase called"):
        each.call(1.0)
    with pytest.raises(ValueError, match="only a merge can be committed, got phase called"):
        each.commit()
    assert "'z' takes no part" in send(each, "z", 1.0)
    send(each, "a", 1.0)
    assert each.merge(1.0) is not None and each.merge(1.0) is None
    assert "while it is merging" in send(each, "a", 1.0)
    each.commit()
    assert "while it is idle" in send(each, "a", 1.0, base=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quorum": 0}, "quorum must be an integer of at least 1, got 0"),
        ({"gamma": 1.5}, "gamma must lie in \\[0, 1\\], got 1.5"),
        ({"delay": -1}, "delay must not be negative, got -1"),
    ],
)
def test_wrong_rules(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        QuorumRule(**options)


class Rounds(RuleBasedStateMachine):
    """Any order of calls, reports, departures and the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.round = FragmentRound(QuorumRule(quorum=2, gamma=0.5, delay=3))
        self.now = 0.0
        self.seq = 0
        self.taken: set[tuple[str, int]] = set()
        self.committed: list[tuple[str, int]] = []
        self.merge: Merge | None = None
        for name in NAMES[:3]:
            self.round.join(name)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.round.phase is Phase.IDLE)
    @rule()
    def call(self) -> None:
        self.round.call(self.now)

    @rule(name=st.sampled_from(NAMES), behind=st.integers(0, 1), steps=st.integers(1, 9))
    def report(self, name: str, behind: int, steps: int) -> None:
        self.seq += 1
        before = self.round.reported
        report = Report(name, self.seq, self.round.version - behind, steps, 5 * steps)
        refusal = self.round.report(report, self.now, STEP_S, SYNC_S)
        if refusal:
            assert self.round.reported == before
        else:
            assert not behind and name not in before
            self.taken.add((name, self.seq))

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.round.leave(name, self.now, STEP_S, SYNC_S)

    @rule(name=st.sampled_from(NAMES), rests=st.booleans())
    def rest(self, name: str, rests: bool) -> None:
        if rests and name in self.round.learners:
            self.round.rest(name, self.now, STEP_S, SYNC_S)
        else:
            self.round.wake(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.round.join(name)

    @rule()
    def decide(self) -> None:
        deadline = self.round.deadline
        merge = self.round.merge(self.now)
        assert (merge is not None) == (deadline is not None and self.now >= deadline)
        if merge is not None:
            self.merge = merge
            assert sum(merge.weights) == pytest.approx(1.0, rel=1e-12)
            assert all(report.base == self.round.version for report in merge.reports)

    @precondition(lambda self: self.round.phase is Phase.MERGING)
    @rule()
    def commit(self) -> None:
        assert self.merge is not None
        version = self.round.version
        self.round.commit()
        assert self.round.version == version + 1 and not self.round.reported
        self.committed += [(report.learner, report.seq) for report in self.merge.reports]
        self.merge = None

    @invariant()
    def nothing_is_committed_twice_and_nothing_is_lost(self) -> None:
        assert len(self.committed) == len(set(self.committed))
        assert len(self.taken) == len(self.committed) + len(self.round.reported)
        assert set(self.committed) <= self.taken

    @invariant()
    def the_window_is_bounded(self) -> None:
        assert (self.round.deadline is not None) == (self.round.phase is Phase.GRACE)
        if self.round.deadline is not None:
            # The deadline is never further than one inner step from the present.
            assert self.round.deadline <= self.now + STEP_S


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
