"""Decoupled training on a virtual clock: real merges, and learners of any speed in one process.

    run = DecoupledRun(syncer, learners, link=Link(latency_s=0.1))
    run.until(seconds=60.0)

Speeds, the link and failures are parameters. A run depends on nothing but these parameters, the
models, the data and the seeds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .learner import Learner
from .syncer import Call, Commit, Report, Syncer

# The order of events at one instant: inner steps end, then messages travel, then steps begin. So a
# message that needs no time arrives before the next inner step.
_END, _MESSAGE, _BEGIN = range(3)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between a learner and the syncer, the same in both directions.

    Args:
        latency_s: Seconds from the last byte sent to the last byte received.
        bytes_per_s: Bytes a second; infinite by default.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise ValueError(
                "latency_s must not be negative and bytes_per_s positive, got "
                f"{self.latency_s!r} and {self.bytes_per_s!r}"
            )


@dataclass
class VirtualLearner:
    """A learner with its own speed and failures.

    Args:
        learner: The learner.
        train_step: Takes one inner step on the learner's tensors.
        step_s: Virtual seconds of an inner step.
        tokens: Tokens of an inner step.
        outages: Pairs (from, to) of virtual seconds without the learner, in order.
    """

    learner: Learner
    train_step: Callable[[], None]
    step_s: float
    tokens: int = 1
    outages: Sequence[tuple[float, float]] = ()
    is_up: bool = field(default=True, init=False)
    # Counts failures: what belongs to an earlier life is dropped.
    life: int = field(default=0, init=False)
    # The syncer sends to connected learners. A failure ends the connection, until the next join.
    is_connected: bool = field(default=True, init=False)
    is_between_steps: bool = field(default=True, init=False)
    inbox: list[Call | Commit] = field(default_factory=list, init=False)
    uplink_free_at: float = field(default=0.0, init=False)
    downlink_free_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not self.step_s > 0 or self.tokens < 1:
            raise ValueError(
                f"step_s must be positive and tokens at least 1, got {self.step_s!r} and "
                f"{self.tokens!r}"
            )
        times = [time for outage in self.outages for time in outage]
        if any(not a < b for a, b in itertools.pairwise([0.0, *times])):
            raise ValueError(f"outages must follow one another in time, got {list(self.outages)}")


class DecoupledRun:
    """A syncer and its learners.

    Args:
        syncer: The syncer, whose model has the learners' first values.
        learners: The learners, of different names.
        link: The connection of every learner.
        detection_s: Seconds until the syncer notices that a learner has failed.

    Attributes:
        now: Virtual seconds.
        commits: Every commit so far, in order.
        refusals: Why reports were refused, in order.
        bytes_up: Bytes of all reports that were sent.
    """

    def __init__(
        self,
        syncer: Syncer,
        learners: Sequence[VirtualLearner],
        *,
        link: Link | None = None,
        detection_s: float = 0.0,
    ) -> None:
        self.learners = {each.learner.name: each for each in learners}
        if not learners or len(self.learners) != len(learners):
            names = [each.learner.name for each in learners]
            raise ValueError(f"a run needs learners of different names, got {names}")
        self.syncer, self.link, self.detection_s = syncer, link or Link(), detection_s
        self.now = 0.0
        self.commits: list[Commit] = []
        self.refusals: list[str] = []
        self.bytes_up = 0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        for each in learners:
            syncer.join(each.learner.name)
            self._at(0.0, _BEGIN, self._begin, each, each.life)
            for start, end in each.outages:
                self._at(start, _END, self._fail, each)
                self._at(end, _MESSAGE, self._return, each)

    def until(self, *, seconds: float) -> None:
        """Run all events up to and including this virtual time."""
        while self._events and self._events[0][0] <= seconds:
            self.now, _, _, act = heapq.heappop(self._events)
            act()
        self.now = max(self.now, seconds)

    def _at(self, time: float, kind: int, act: Callable[..., None], *args: object) -> None:
        event = (time, kind, next(self._numbers), lambda: act(*args))
        heapq.heappush(self._events, event)

    # ------------------------------------------------------------------------------- the learners

    def _begin(self, one: VirtualLearner, life: int) -> None:
        if one.is_up and one.life == life:
            one.is_between_steps = False
            self._at(self.now + one.step_s, _END, self._end, one, life)

    def _end(self, one: VirtualLearner, life: int) -> None:
        """End an inner step: take what has arrived, report what is called for, go on."""
        if not one.is_up or one.life != life:
            return
        one.train_step()
        one.learner.stepped(one.tokens)
        one.is_between_steps = True
        inbox, one.inbox = one.inbox, []
        for message in inbox:
            self._take(one, message)
        self._send_reports(one)
        self._to_syncer(one, 0, self._stepped, one.learner.name, one.learner.num_steps, one.step_s)
        self._at(self.now, _BEGIN, self._begin, one, life)

    def _take(self, one: VirtualLearner, message: Call | Commit) -> None:
        if isinstance(message, Commit):
            one.learner.receive(message)
        else:
            one.learner.call(message.fragment, message.version)

    def _send_reports(self, one: VirtualLearner) -> None:
        for index, report, payloads in one.learner.reports():
            size = sum(payload.nbytes for payload in payloads)
            self.bytes_up += size
            self._to_syncer(one, size, self._reported, index, report, payloads)

    def _arrive(self, one: VirtualLearner, life: int, message: Call | Commit) -> None:
        """Deliver a message: between two inner steps at once, else at the end of the step."""
        if not one.is_up or one.life != life:
            return
        if not one.is_between_steps:
            one.inbox.append(message)
            return
        self._take(one, message)
        self._send_reports(one)

    # ------------------------------------------------------------------------------- the messages

    def _to_syncer(
        self, one: VirtualLearner, size: int, act: Callable[..., None], *args: object
    ) -> None:
        life = one.life

        def arrive() -> None:
            if one.life == life:
                act(*args)
                self._advance()

        one.uplink_free_at = max(one.uplink_free_at, self.now) + size / self.link.bytes_per_s
        self._at(one.uplink_free_at + self.link.latency_s, _MESSAGE, arrive)

    def _to_learner(
        self, one: VirtualLearner, size: int, act: Callable[..., None], *args: object
    ) -> None:
        one.downlink_free_at = max(one.downlink_free_at, self.now) + size / self.link.bytes_per_s
        time = one.downlink_free_at + self.link.latency_s
        self._at(time, _MESSAGE, act, one, one.life, *args)

    def _advance(self) -> None:
        """Send what the syncer has to say, and come back at the end of its next grace window."""
        for message in self.syncer.advance(self.now):
            size = 0
            if isinstance(message, Commit):
                self.commits.append(message)
                size = sum(values.nbytes for values in message.values)
            for name in sorted(self.syncer.learners):
                if self.learners[name].is_connected:
                    self._to_learner(self.learners[name], size, self._arrive, message)
        deadline = self.syncer.deadline
        if deadline is not None:
            self._at(max(deadline, self.now), _MESSAGE, self._advance_at, deadline)

    def _advance_at(self, deadline: float) -> None:
        if self.syncer.deadline == deadline:
            self._advance()

    # --------------------------------------------------------------------------------- the syncer

    def _stepped(self, name: str, steps: int, seconds: float) -> None:
        self.syncer.stepped(name, steps, seconds)

    def _reported(self, index: int, report: Report, payloads: list) -> None:
        refusal = self.syncer.report(index, report, payloads, self.now)
        if refusal:
            self.refusals.append(refusal)

    # ------------------------------------------------------------------------------- the failures

    def _fail(self, one: VirtualLearner) -> None:
        one.is_up, one.is_connected, one.life = False, False, one.life + 1
        one.inbox.clear()
        self._at(self.now + self.detection_s, _MESSAGE, self._detect, one, one.life)

    def _detect(self, one: VirtualLearner, life: int) -> None:
        if one.life == life and not one.is_up:
            self._leave(one)

    def _leave(self, one: VirtualLearner) -> None:
        self.syncer.leave(one.learner.name, self.now)
        self._advance()

    def _return(self, one: VirtualLearner) -> None:
        """Come back with an empty memory; the syncer sends the whole model."""
        one.is_up, one.is_between_steps = True, True
        one.uplink_free_at = one.downlink_free_at = self.now
        self._to_syncer(one, 0, self._join, one)

    def _join(self, one: VirtualLearner) -> None:
        if one.learner.name in self.syncer.learners:
            self.syncer.leave(one.learner.name, self.now)
        self.syncer.join(one.learner.name, one.learner.num_steps)
        one.is_connected = True
        versions = [each.version for each in self.syncer.rounds]
        values = [fragment.copy_values() for fragment in self.syncer.fragments]
        size = sum(flat.nbytes for each in values for flat in each)
        self._to_learner(one, size, self._welcome, versions, values)
        for index, each in enumerate(self.syncer.rounds):
            if each.phase.value in ("called", "grace"):
                self._to_learner(one, 0, self._arrive, Call(index, each.version))

    def _welcome(self, one: VirtualLearner, life: int, versions: list, values: list) -> None:
        if one.is_up and one.life == life:
            one.learner.restart(versions, values)
            self._at(self.now, _BEGIN, self._begin, one, life)
