"""Which members have come to a meeting, which live elsewhere, and which are given up.

Participants of a meeting renew a mark on the store, and so do the engines in training. No two
clocks are compared, and a time in which this process stood still counts little.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..stores import read_known

# (nonce, beat) of a hello.
Mark = tuple[str, int]
_LONGEST_LOOK_S = 1.0
_PULSE_PERIOD_S = 1.0
# Counters rise once a second.
_STEADY_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Seconds that a meeting waits.

    Attributes:
        timeout: For members that live and do not come, and for the meeting as a whole.
        unheard: For members of which nothing is heard.
        silence: For the next sign of life of one that was heard.
    """

    timeout: float
    unheard: float
    silence: float


class OwnTime:
    """Time as this process has spent it: a stop of any length counts as at most a second.

    A caller that waits for a store calls ``tick`` after each of its answers: a wait is no stop.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Return the seconds since the last call, and add them to the total."""
        now = time.monotonic()
        passed = min(now - self._last, _LONGEST_LOOK_S)
        self._last = now
        self.total += passed
        return passed


class Pulses:
    """The members of a training group that live, as the counters show that their engines raise.

    Args:
        store: Of the exchange.
        group: Returns its epoch and members; it may change.
        silence: Seconds after which a counter that stands still says nothing any more.
        entered: Another epoch in which members may beat, and its members: a change that failed here
            may have succeeded there.
    """

    def __init__(
        self,
        store: dist.Store,
        group: Callable[[], tuple[int, Sequence[int]]],
        silence: float,
        entered: tuple[int, Sequence[int]] = (0, ()),
    ) -> None:
        self._store, self._group, self._silence = store, group, silence
        self._entered = entered
        self._counters: dict[str, bytes] = {}
        self._known: set[str] = set()
        self._age: dict[int, float] = {}
        self._num_rises: Counter[int] = Counter()
        self._time = OwnTime()
        self._next = 0.0

    def look(self, absent: Collection[int]) -> None:
        """Read the counters of these replicas, at most once a second."""
        passed = self._time.tick()
        self._age = {replica: age + passed for replica, age in self._age.items()}
        if self._time.total < self._next:
            return
        self._next = self._time.total + _PULSE_PERIOD_S
        keys = {
            f"{epoch}/board/beat/{replica}": replica
            for epoch, members in (self._group(), self._entered)
            for replica in sorted(set(absent) & set(members))
        }
        for key, value in read_known(self._store, list(keys), self._known).items():
            before = self._counters.get(key)
            self._counters[key] = value
            if before is not None and before != value:
                self._age[keys[key]] = 0.0
                self._num_rises[keys[key]] += 1

    def risen(self, times: int) -> set[int]:
        """Return the replicas whose counters were seen to rise so often."""
        return {replica for replica, number in self._num_rises.items() if number >= times}

    def rising(self, times: int) -> set[int]:
        """Return the replicas of ``risen`` whose counters still rise."""
        return {replica for replica in self.risen(times) if self._age[replica] < _STEADY_S}

    def lives(self, replica: int) -> bool:
        return self._age.get(replica, self._silence) < self._silence


@dataclass
class _Peer:
    mark: Mark | None = None
    is_first_look: bool = True
    is_heard: bool = False  # its process, since it came
    silent_s: float = 0.0
    has_gone: bool = False  # came, and took its hello back


@dataclass
class Attendance:
    """The other members of a meeting, as one participant sees them."""

    replica: int
    members: Sequence[int]
    limits: Limits
    pulses: Pulses
    is_newcomer: bool = False
    time: OwnTime = field(default_factory=OwnTime)

    def __post_init__(self) -> None:
        self._seen_at = self.time.total
        self._peers = {member: _Peer() for member in self.members if member != self.replica}

    @property
    def heard(self) -> set[int]:
        """Members that are here now; an old hello of a member is not enough."""
        return {r for r, peer in self._peers.items() if peer.is_heard}

    def see(self, marks: dict[int, Mark]) -> None:
        """Take in the hellos that lie on the store now."""
        self.time.tick()
        passed, self._seen_at = self.time.total - self._seen_at, self.time.total
        for replica, peer in self._peers.items():
            mark = marks.get(replica)
            if mark == peer.mark:
                peer.silent_s += passed
            else:
                # A hello that was there before this process came may be that of a dead process.
                is_same = mark is not None and peer.mark is not None and mark[0] == peer.mark[0]
                peer.is_heard = mark is not None and (is_same or not peer.is_first_look)
                peer.has_gone = mark is None
                peer.silent_s = 0.0
            peer.mark, peer.is_first_look = mark, False
        absent = [r for r, peer in self._peers.items() if not peer.is_heard]
        # Another process may have a newcomer's number.
        self.pulses.look([self.replica, *absent] if self.is_newcomer else absent)

    def hear(self, replica: int) -> None:
        """Note another sign of life of a member's present process."""
        if replica in self._peers and not self._peers[replica].is_heard:
            self._peers[replica].is_heard = True
            self._peers[replica].silent_s = 0.0

    def given_up(self) -> dict[int, str]:
        """Return members that are not waited for any longer, and why; empty to go on waiting."""
        reasons = {}
        for replica, peer in self._peers.items():
            if peer.is_heard and peer.silent_s >= self.limits.silence:
                reasons[replica] = f"came, and was silent for {self.limits.silence:g} s then"
            elif not peer.is_heard and (self.is_over or peer.silent_s >= self._limit(replica)):
                reasons[replica] = f"did not come within {self._limit(replica):g} s"
        return reasons

    def _limit(self, replica: int) -> float:
        return self.limits.timeout if self.pulses.lives(replica) else self.limits.unheard

    @property
    def is_over(self) -> bool:
        return self.time.total > self.limits.timeout

    def describe(self) -> str:
        """Name the members that are waited for; empty when all are here."""
        parts = []
        for replica, peer in self._peers.items():
            if peer.is_heard and peer.silent_s < 2.0:
                continue
            if peer.is_heard:
                state = f"last heard of {peer.silent_s:.0f} s ago"
            elif self.pulses.lives(replica):
                state = "it lives, and has not come yet"
            else:
                state = "it has left again" if peer.has_gone else "never heard of"
            parts.append(f"replica {replica} ({state})")
        return ", ".join(parts)
