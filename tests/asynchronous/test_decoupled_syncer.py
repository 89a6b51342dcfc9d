"""The syncer: hostile payloads are refused, and a merge that fails can be repeated."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from diloco_comm.asynchronous.decoupled.merges import Piece, SharedFragment
from diloco_comm.asynchronous.decoupled.syncer import (
    Call,
    Commit,
    Phase,
    QuorumRule,
    Report,
    Syncer,
)
from diloco_comm.methods.outer import SGD
from diloco_comm.ops.wire import WireFormat

SIZE = 4


def called_syncer(merge: str, num_fragments: int = 1, lr: object = 1.0) -> Syncer:
    """Return a syncer of learners a and b whose fragments are called; the last one has ``lr``."""
    fragments = [
        SharedFragment(
            [torch.zeros(SIZE)],
            [Piece((0,), SIZE, merge)],
            WireFormat("fp32"),
            SGD(lr if index == num_fragments - 1 else 1.0),  # type: ignore[arg-type]
        )
        for index in range(num_fragments)
    ]
    rule = QuorumRule(quorum=2, gamma=0.0)
    syncer = Syncer(fragments, rule, sync_every=1, offsets=[1] * num_fragments)
    for name in "ab":
        syncer.join(name)
        syncer.stepped(name, 1, 1.0)
    assert len(syncer.advance(0.0)) == num_fragments
    return syncer


def payload_of(syncer: Syncer, *values: float) -> list[Tensor]:
    """Return an fp32 payload: its elements, then padding of zeros."""
    payload = torch.zeros(syncer.fragments[0].layouts[0].payload_bytes, dtype=torch.uint8)
    payload[: 4 * SIZE] = torch.tensor(values).view(torch.uint8)
    return [payload]


def send(syncer: Syncer, name: str, payloads: list[Tensor], fragment: int = 0) -> str:
    return syncer.report(fragment, Report(name, 1, 0, 1, 10), payloads, 1.0)


@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_payloads_that_are_not_finite_are_refused(merge: str, bad: float) -> None:
    syncer = called_syncer(merge)
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    assert send(syncer, "a", good) == ""
    hostile = payload_of(syncer, 1.0, bad, 3.0, 4.0)
    assert send(syncer, "b", hostile) == "the payload of piece 0 holds NaN or Inf"
    assert syncer.advance(9.0) == [] and syncer.rounds[0].reported == {"a"}
    assert send(syncer, "b", good) == ""
    (commit,) = syncer.advance(9.0)
    assert isinstance(commit, Commit) and commit.merged == {"a": 1, "b": 1}
    assert commit.values[0].tolist() == pytest.approx([-1.0, -2.0, -3.0, -4.0])


def test_payloads_of_another_size_are_refused() -> None:
    syncer = called_syncer("mean")
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    assert "one payload for each piece: 1, not 2" in send(syncer, "a", [*good, *good])
    assert f"must have {good[0].numel()} bytes, got 3" in send(syncer, "a", [good[0][:3]])
    assert not syncer.rounds[0].reported


def test_a_merge_that_fails_is_repeated() -> None:
    """The commit of another fragment, made in the same call, is not lost."""
    failures = ["the rate is not known yet"]

    def lr(step: int) -> float:
        if failures:
            raise RuntimeError(failures.pop())
        return 0.5

    syncer = called_syncer("mean", num_fragments=2, lr=lr)
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    assert not any(send(syncer, name, good, index) for name in "ab" for index in (0, 1))
    with pytest.raises(RuntimeError, match="not known yet"):
        syncer.advance(2.0)
    assert syncer.rounds[1].phase is Phase.GRACE and syncer.deadline == 2.0
    assert syncer.fragments[1].values[0].tolist() == [0.0] * SIZE
    commits = [each for each in syncer.advance(3.0) if not isinstance(each, Call)]
    assert [(each.fragment, each.version) for each in commits] == [(0, 1), (1, 1)]
    assert commits[1].values[0].tolist() == [-0.5, -1.0, -1.5, -2.0]
    with pytest.raises(ValueError, match="only a merge can be undone, got phase idle"):
        syncer.rounds[1].reopen(3.0)


def merged_with(syncer: Syncer, names: str, base: int) -> Commit:
    """Let these learners report on fragment 0, and return the commit."""
    payloads = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    for name in names:
        assert not syncer.report(0, Report(name, base + 1, base, 1, 10), payloads, 1.0)
    commit, *_ = syncer.advance(1.0)
    assert isinstance(commit, Commit) and commit.merged.keys() == set(names)
    return commit


def test_a_learner_that_rests_is_called_beside_the_schedule() -> None:
    """H = 4, K = 1: a call after step 4, one for the remainder after step 5, the next after 8."""
    fragment = SharedFragment(
        [torch.zeros(SIZE)], [Piece((0,), SIZE, "mean")], WireFormat("fp32"), SGD(1.0)
    )
    syncer = Syncer([fragment], QuorumRule(gamma=0.0), sync_every=4)
    syncer.join("a")

    def called_after(steps: int) -> bool:
        syncer.stepped("a", steps, 1.0)
        return syncer.advance(0.0) == [Call(0, syncer.rounds[0].version)]

    assert [called_after(steps) for steps in range(1, 5)] == [False, False, False, True]
    merged_with(syncer, "a", 0)
    assert not called_after(5)
    # The learner's progress starts from a version that is not the present one any more.
    syncer.rest("a", [0], 0.0)
    assert syncer.advance(0.0) == []
    syncer.rest("a", [1], 0.0)
    assert syncer.advance(0.0) == [Call(0, 1)] and syncer.advance(0.0) == []
    merged_with(syncer, "a", 1)
    syncer.rest("a", [-1], 0.0)
    assert syncer.advance(0.0) == []
    assert [called_after(steps) for steps in range(6, 9)] == [False, False, True]


def test_the_schedule_and_the_rounds_do_without_learners_that_rest() -> None:
    syncer = called_syncer("mean")
    syncer.rest("b", [-1], 1.0)
    syncer.rest("stranger", [0], 1.0)
    merged_with(syncer, "a", 0)
    syncer.stepped("a", 2, 1.0)
    assert syncer.advance(2.0) == [Call(0, 1)]
    merged_with(syncer, "a", 1)
    # With its next step b counts again: the same number of steps is none.
    syncer.stepped("b", 1, 1.0)
    assert syncer.rounds[0].resting == {"b"}
    syncer.stepped("b", 2, 1.0)
    assert syncer.rounds[0].resting == frozenset()
    syncer.stepped("a", 3, 1.0)
    assert syncer.advance(3.0) == [Call(0, 2)]
    assert not send_at(syncer, "a", 2) and syncer.advance(9.0) == []
    # If all learners rest, nobody's steps are waited for.
    syncer.rest("b", [-1], 9.0)
    syncer.rest("a", [2], 9.0)
    (commit,) = syncer.advance(9.0)
    assert isinstance(commit, Commit) and commit.merged == {"a": 3}
    assert syncer.advance(9.0) == []


def send_at(syncer: Syncer, name: str, base: int) -> str:
    report = Report(name, base + 1, base, 1, 10)
    return syncer.report(0, report, payload_of(syncer, 1.0, 2.0, 3.0, 4.0), 1.0)


def test_merges_beyond_the_most_stay_due() -> None:
    """Every commit has a copy of its values: few of them are in memory at once."""
    syncer = called_syncer("mean", num_fragments=3)
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    assert not any(send(syncer, name, good, index) for name in "ab" for index in range(3))
    for index in range(3):
        (commit,) = syncer.advance(2.0, most_merges=1)
        assert isinstance(commit, Commit) and (commit.fragment, commit.version) == (index, 1)
    assert syncer.advance(2.0, most_merges=1) == []


# ------------------------------------------------------------------- fragments without a change


class LooksAtAll(Syncer):
    """The plain version of ``advance``: it looks at all fragments at each call."""

    def advance(self, now: float, most_merges: int | None = None) -> list[Call | Commit]:
        messages: list[Call | Commit] = []
        for index, each in enumerate(self.rounds):
            merge = None if most_merges == 0 else each.merge(now)
            if merge is not None:
                messages.append(self._commit(index, merge, now))
                most_merges = None if most_merges is None else most_merges - 1
            is_due = self._is_due(index)
            if is_due or self._is_wanted(index):
                each.call(now)
                if is_due:
                    self._called[index].update(self._steps)
                messages.append(Call(index, each.version))
        return messages

    @property
    def deadline(self) -> float | None:
        return min((r.deadline for r in self.rounds if r.deadline is not None), default=None)


class Pair:
    """A syncer and its plain version, to which the same things happen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_fragments = self.random.choice([1, 3, 7])
        rule = QuorumRule(
            quorum=self.random.choice([1, 2, 3]), gamma=self.random.choice([0.0, 1.0]), delay=4
        )
        sync_every, offsets = self.random.choice([1, 3, 8]), None
        if sync_every == 1:
            offsets = [1] * self.num_fragments
        self.syncers = [
            kind(
                [
                    SharedFragment(
                        [torch.zeros(SIZE)],
                        [Piece((0,), SIZE, "mean")],
                        WireFormat("fp32"),
                        SGD(1.0),
                    )
                    for _ in range(self.num_fragments)
                ],
                rule,
                sync_every=max(sync_every, self.num_fragments) if offsets is None else sync_every,
                offsets=offsets,
                sync_s=0.1,
            )
            for kind in (Syncer, LooksAtAll)
        ]
        self.now, self.seq, self.num_messages = 0.0, 0, 0
        self.steps = dict.fromkeys("abcd", 0)

    def event(self) -> None:
        draw, new = self.random, self.syncers[0]
        name = draw.choice("abcd")
        kind = draw.choices(
            ["step", "report", "rest", "join", "leave", "wait"], [8, 12, 2, 2, 0.5, 4]
        )[0]
        if kind == "step":
            # A learner may come back with fewer steps.
            steps = self.steps[name] + draw.choice([0, 1, 1, 2, 5, 30, -3])
            self.steps[name] = max(0, steps)
            for each in self.syncers:
                each.stepped(name, self.steps[name], 1.0)
        elif kind == "report":
            index = draw.randrange(self.num_fragments)
            self.seq += 1
            report = Report(name, self.seq, new.rounds[index].version, 1, 10)
            payloads = payload_of(new, *(draw.random() for _ in range(SIZE)))
            said = [each.report(index, report, payloads, self.now) for each in self.syncers]
            assert said[0] == said[1]
        elif kind == "rest":
            progress = [draw.choice([-1, each.version, each.version + 1]) for each in new.rounds]
            for each in self.syncers:
                each.rest(name, progress, self.now)
        elif kind == "join":
            for each in self.syncers:
                if name in each.learners:
                    each.leave(name, self.now)
                each.join(name, self.steps[name])
        elif kind == "leave":
            for each in self.syncers:
                each.leave(name, self.now)
        else:
            self.now += draw.choice([0.2, 1.0, 5.0])

    def compare(self) -> None:
        """Both say the same, in the same order, and open the same windows."""
        most = self.random.choice([None, None, 1, 0])
        new, plain = (each.advance(self.now, most) for each in self.syncers)
        assert [_shown(each) for each in new] == [_shown(each) for each in plain]
        assert self.syncers[0].deadline == self.syncers[1].deadline
        self.num_messages += len(new)


def _shown(message: Call | Commit) -> object:
    if isinstance(message, Call):
        return message
    values = [each.tolist() for each in message.values]
    return message.fragment, message.version, message.merged, values, message.merge


@pytest.mark.parametrize("seed", range(12))
def test_a_fragment_is_looked_at_whenever_something_may_be_due(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(1500):
        pair.event()
        if pair.random.random() < 0.7:
            pair.compare()
    assert pair.num_messages > 50


def test_a_caller_that_stops_early_finds_the_rest_in_the_next_call() -> None:
    """A disk that takes no commit: the merges after it wait, and so does the next call."""
    syncer = called_syncer("mean", num_fragments=3)
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    assert not any(send(syncer, name, good, index) for name in "ab" for index in range(3))
    for name in "ab":
        syncer.stepped(name, 2, 1.0)
    first = next(syncer.messages(2.0))
    assert isinstance(first, Commit) and first.fragment == 0 and syncer.deadline == 1.0
    assert syncer.advance(2.0, most_merges=0) == [Call(0, 1)]
    rest = [(type(each), each.fragment) for each in syncer.advance(2.0)]
    assert rest == [(Commit, 1), (Call, 1), (Commit, 2), (Call, 2)]


def test_the_looks_at_fragments_are_as_many_as_the_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flush of many fragments: each one is reported and merged by itself."""
    looks, size = [0], 300
    is_due = Syncer._is_due

    def counted(self: Syncer, index: int) -> bool:
        looks[0] += 1
        return is_due(self, index)

    syncer = called_syncer("mean", num_fragments=size)
    monkeypatch.setattr(Syncer, "_is_due", counted)
    good = payload_of(syncer, 1.0, 2.0, 3.0, 4.0)
    for index in range(size):
        assert not any(send(syncer, name, good, index) for name in "ab")
        (commit,) = syncer.advance(2.0)
        assert isinstance(commit, Commit) and syncer.advance(2.0) == []
        assert syncer.deadline is None
    syncer.stepped("a", 2, 1.0)
    assert syncer.advance(3.0) == []
    syncer.stepped("b", 2, 1.0)
    assert len(syncer.advance(3.0)) == size
    assert size <= looks[0] <= 4 * size
