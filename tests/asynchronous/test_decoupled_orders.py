"""A syncer and its learners under any order of steps, messages, failures and returns.

Learner i moves element i of every fragment by 1 in each step, and no other element. So the values
tell whose steps a fragment holds, and how often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from diloco_comm.asynchronous.decoupled.learner import Learner, Receipt
from diloco_comm.asynchronous.decoupled.merges import SharedFragment, pieces_of
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

NUM_LEARNERS, NUM_FRAGMENTS, SYNC_EVERY, TOKENS = 4, 2, 2, 3
WIRE = WireFormat("fp32")
INDICES = st.integers(0, NUM_LEARNERS - 1)
Welcome = tuple[list[int], list[list[Tensor]]]
Place = tuple[int, int]  # fragment and number of a report


@dataclass
class Member:
    """A learner, its two queues of messages, and what the test knows of its reports."""

    learner: Learner
    tensors: list[Tensor]
    is_up: bool = False
    is_joined: bool = False  # the syncer has a connection to it
    is_welcome: bool = False  # it has the shared model
    has_failed: bool = False
    uplink: deque[Callable[[], None]] = field(default_factory=deque)
    downlink: deque[Call | Commit | Welcome] = field(default_factory=deque)
    # Steps of each report, by fragment and number; those of an earlier life; those that a commit
    # named which the learner has received.
    reported: dict[Place, int] = field(default_factory=dict)
    orphans: set[Place] = field(default_factory=set)
    received: set[Place] = field(default_factory=set)


class Orders(RuleBasedStateMachine):
    """Every rule is one event; Hypothesis chooses their order."""

    @initialize(
        quorum=st.integers(1, NUM_LEARNERS),
        tau=st.integers(0, 4),
        mode=st.sampled_from(["carry", "carry", "overwrite"]),
        present=st.integers(2, NUM_LEARNERS),
    )
    def begin(self, quorum: int, tau: int, mode: str, present: int) -> None:
        shapes = [[(NUM_LEARNERS,)]] * NUM_FRAGMENTS
        pieces = [pieces_of(each) for each in shapes]
        start = [torch.zeros(NUM_LEARNERS) for _ in shapes]
        shared = [
            SharedFragment([value], own, WIRE, SGD(1.0))
            for value, own in zip(start, pieces, strict=True)
        ]
        rule = QuorumRule(quorum=quorum, delay=tau)
        self.syncer = Syncer(shared, rule, sync_every=SYNC_EVERY, sync_s=0.2)
        self.now, self.mode, self.commits = 0.0, mode, list[Commit]()
        self.num_accepted = 0
        self.members: list[Member] = []
        for index in range(NUM_LEARNERS):
            tensors = [value.clone() for value in start]
            learner = Learner(
                str(index), [[t] for t in tensors], pieces, wire=WIRE, receipt=Receipt(mode=mode)
            )
            self.members.append(Member(learner, tensors))
        for member in self.members[:present]:
            member.is_up = member.is_joined = member.is_welcome = True
            self.syncer.join(member.learner.name)

    # ------------------------------------------------------------------------------- the events

    @rule(index=INDICES, seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def step(self, index: int, seconds: float) -> None:
        """A learner that is up always steps, whatever is under way."""
        member = self.members[index]
        if not member.is_welcome:
            return
        for tensor in member.tensors:
            tensor[index] -= 1.0
        learner = member.learner
        learner.stepped(TOKENS)
        self.send_reports(member)
        member.uplink.append(partial(self.syncer.stepped, learner.name, learner.num_steps, seconds))

    @rule(index=INDICES)
    def rest(self, index: int) -> None:
        """A learner pauses until its next step, and says what it has to report."""
        member = self.members[index]
        if member.is_welcome:
            progress = member.learner.progress()
            member.uplink.append(lambda: self.syncer.rest(member.learner.name, progress, self.now))

    @rule(order=st.lists(INDICES, min_size=1, max_size=6))
    def train(self, order: list[int]) -> None:
        """Steps of several learners, whose messages arrive at once."""
        for index in order:
            self.step(index, 1.0)
            self.arrive_at_the_syncer(index, 99)
            self.arrive_at_the_learner(index, 99)

    @rule(index=INDICES, count=st.sampled_from([1, 2, 99]))
    def arrive_at_the_syncer(self, index: int, count: int) -> None:
        uplink = self.members[index].uplink
        for _ in range(min(count, len(uplink))):
            uplink.popleft()()
            self.advance()

    @rule(index=INDICES, count=st.sampled_from([1, 2, 99]))
    def arrive_at_the_learner(self, index: int, count: int) -> None:
        for _ in range(min(count, len(self.members[index].downlink))):
            self.deliver(self.members[index])

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    @precondition(lambda self: sum(member.is_up for member in self.members) > 2)
    @rule(index=INDICES, is_seen=st.booleans())
    def die(self, index: int, is_seen: bool) -> None:
        """Messages that were sent may still arrive at the syncer; the others are lost."""
        member = self.members[index]
        if not member.is_up:
            return
        member.is_up = member.is_joined = member.is_welcome = False
        member.has_failed = True
        member.downlink.clear()
        member.orphans |= member.reported.keys() - member.received
        if is_seen:
            self.leave(member)

    @rule(index=INDICES)
    def detect(self, index: int) -> None:
        member = self.members[index]
        if not member.is_up and member.learner.name in self.syncer.learners:
            self.leave(member)

    @rule(index=INDICES)
    def come(self, index: int) -> None:
        """A new learner, or one that returns: what its old connection still held is dropped."""
        member = self.members[index]
        if member.is_up:
            return
        member.is_up = True
        member.uplink.clear()
        member.uplink.append(partial(self.join, member))

    @rule(index=INDICES)
    def restart(self, index: int) -> None:
        """Die and come back before the syncer notices."""
        self.die(index, False)
        self.come(index)
        self.arrive_at_the_syncer(index, 99)
        self.arrive_at_the_learner(index, 99)

    # ------------------------------------------------------------------------------ the messages

    def join(self, member: Member) -> None:
        name = member.learner.name
        if name in self.syncer.learners:
            self.syncer.leave(name, self.now)
        self.syncer.join(name, member.learner.num_steps)
        member.is_joined = True
        versions = [each.version for each in self.syncer.rounds]
        values = [fragment.copy_values() for fragment in self.syncer.fragments]
        member.downlink.append((versions, values))
        for fragment, each in enumerate(self.syncer.rounds):
            if each.phase in (Phase.CALLED, Phase.GRACE):
                member.downlink.append(Call(fragment, each.version))

    def leave(self, member: Member) -> None:
        self.syncer.leave(member.learner.name, self.now)
        self.advance()

    def send_reports(self, member: Member) -> None:
        for fragment, report, payloads in member.learner.reports():
            assert (fragment, report.seq) not in member.reported
            member.reported[fragment, report.seq] = report.steps
            member.uplink.append(partial(self.report, fragment, report, payloads))

    def report(self, fragment: int, report: Report, payloads: list[Tensor]) -> None:
        if not self.syncer.report(fragment, report, payloads, self.now):
            self.num_accepted += 1

    def advance(self) -> None:
        for message in self.syncer.advance(self.now):
            if isinstance(message, Commit):
                self.check_commit(message)
                self.commits.append(message)
            for name in self.syncer.learners:
                member = self.members[int(name)]
                if member.is_joined:
                    member.downlink.append(message)

    def deliver(self, member: Member) -> None:
        message = member.downlink.popleft()
        if isinstance(message, Call):
            member.learner.call(message.fragment, message.version)
        elif isinstance(message, Commit):
            member.learner.receive(message)
            place = message.fragment, message.merged.get(member.learner.name, 0)
            if place in member.reported and place not in member.orphans:
                member.received.add(place)
        else:
            member.learner.restart(*message)
            member.is_welcome = True
        self.send_reports(member)

    # ---------------------------------------------------------------------- what is never broken

    def check_commit(self, commit: Commit) -> None:
        """Versions follow one another; no report is merged twice; weights sum to one."""
        before = [each for each in self.commits if each.fragment == commit.fragment]
        assert commit.version == len(before) + 1
        earlier = {pair for each in before for pair in each.merged.items()}
        assert commit.merged and not earlier & commit.merged.items()
        assert sum(commit.merge.weights) == pytest.approx(1.0, rel=1e-12)
        for report in commit.merge.reports:
            steps = self.members[int(report.learner)].reported[commit.fragment, report.seq]
            assert (report.steps, report.tokens) == (steps, TOKENS * steps)

    @invariant()
    def an_accepted_report_is_merged_or_held(self) -> None:
        held = sum(len(each.reported) for each in self.syncer.rounds)
        assert self.num_accepted == held + sum(len(each.merged) for each in self.commits)

    @invariant()
    def the_shared_values_are_the_committed_steps(self) -> None:
        for index, fragment in enumerate(self.syncer.fragments):
            expected = [0.0] * NUM_LEARNERS
            for commit in (each for each in self.commits if each.fragment == index):
                for report, weight in zip(commit.merge.reports, commit.merge.weights, strict=True):
                    place = index, report.seq
                    expected[int(report.learner)] -= (
                        weight * self.members[int(report.learner)].reported[place]
                    )
            assert fragment.values[0].tolist() == pytest.approx(expected, abs=1e-3)

    @invariant()
    def the_books_balance(self) -> None:
        for member in self.members:
            for index, part in enumerate(member.learner.fragments):
                applied = sum(
                    member.reported[place] for place in member.received if place[0] == index
                )
                for book, unit in ((part.steps, 1), (part.tokens, TOKENS)):
                    assert book.learned == member.learner.num_steps * unit
                    parts = (book.applied, book.under_way, book.kept, book.lost)
                    assert book.learned == sum(parts) and min(parts) >= 0
                    assert book.applied == applied * unit
                    # With "carry" nothing is lost but by a failure.
                    assert self.mode == "overwrite" or member.has_failed or not book.lost

    @invariant()
    def parameters_are_the_base_and_the_progress(self) -> None:
        for number, member in enumerate(self.members):
            for part, tensor in zip(member.learner.fragments, member.tensors, strict=True):
                moved = (tensor - part.pieces[0].base).tolist()
                progress = [0.0] * NUM_LEARNERS
                progress[number] = -float(part.steps.kept + part.steps.under_way)
                assert moved == pytest.approx(progress, abs=1e-3)

    def teardown(self) -> None:
        """Once all messages have arrived, the learners have the newest version of everything."""
        members = [member for member in getattr(self, "members", ()) if member.is_up]
        self.settle(members)
        self.check_values(members)
        # All learners flush: with nobody in training, every step reaches the shared model.
        for index in range(NUM_LEARNERS if members else 0):
            self.detect(index)
        for _ in range(20):
            for member in members:
                self.rest(int(member.learner.name))
            self.settle(members)
            self.wait(2.0)
            self.settle(members)
        assert not any(
            p.steps.kept + p.steps.under_way for m in members for p in m.learner.fragments
        )
        self.check_values(members)

    def settle(self, members: list[Member]) -> None:
        """Deliver all messages, and those that answer them."""
        while any(member.uplink or member.downlink for member in members):
            for member in members:
                self.arrive_at_the_learner(int(member.learner.name), 1)
                self.arrive_at_the_syncer(int(member.learner.name), 1)

    def check_values(self, members: list[Member]) -> None:
        for member in members:
            for part, each, shared in zip(
                member.learner.fragments, self.syncer.rounds, self.syncer.fragments, strict=True
            ):
                assert part.version == each.version
                assert torch.equal(part.pieces[0].base, shared.values[0])


TestOrders = Orders.TestCase
TestOrders.settings = settings(
    max_examples=12, stateful_step_count=60, deadline=None, derandomize=True
)


@pytest.mark.nightly("30 s; TestOrders is the same with fewer examples")
class TestManyOrders(Orders.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(TestOrders.settings, max_examples=50)
