"""The verdict after a failed round: which members are missing, and which live."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...base.errors import LeftBehind, PeerLeft, SyncError, named
from ...group.beats import CHANGING
from ...group.driver import Driver
from ...group.reach import largest_group
from ...group.records import Key
from .own_link import OwnLink

_POLL_S = 0.02
_MANY = 1 << 62
# A living peer that has closed a connection has so many seconds beyond the patience to publish a
# beat that says why: the peer has left, or is CHANGING.
_CLOSED_S = 1.0
_SEALED = "a change of the group has begun"


@dataclass(frozen=True)
class Verdict:
    """The state of the other members, as one replica has found it after a failure.

    Attributes:
        replica: Number of the replica that judges.
        members: Numbers of all members.
        left: The last inner step of each member that has said that it leaves, by number.
        ended: Numbers of members whose processes have ended.
        silent: Numbers of members that were not heard within ``patience``.
        unheard: The nonces of the silent members.
        cuts: Pairs of numbers of replicas that live but cannot reach each other.
        survivors: Numbers of the largest set of living members that all reach each other.
        patience: Seconds for which this replica has waited for signs of life.
        cause: Why the driver has broken the rounds off; "" if it has not.
        left_out_by: Numbers of members that are about to go on without this replica.
    """

    replica: int
    members: tuple[int, ...]
    left: dict[int, int] = field(default_factory=dict)
    ended: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    unheard: tuple[bytes, ...] = ()
    cuts: tuple[tuple[int, int], ...] = ()
    survivors: tuple[int, ...] = ()
    patience: float = 0.0
    cause: str = ""
    left_out_by: tuple[int, ...] = ()

    @property
    def gone(self) -> set[int]:
        """The members that do not live, as far as this replica knows."""
        return {*self.left, *self.ended, *self.silent}

    def with_cuts(self, cuts: Iterable[tuple[int, int]]) -> Verdict:
        """Return this verdict with these cut pairs, and the survivors that follow from them."""
        alive = [number for number in self.members if number not in self.gone]
        pairs = sorted(pair for pair in cuts if {*pair} <= {*alive})
        return replace(self, cuts=tuple(pairs), survivors=tuple(largest_group(alive, pairs)))

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple([one for one in self.members if one not in self.survivors])

    def told(self, error: SyncError) -> SyncError:
        """Return the error of a failed exchange with this verdict in its text and attributes."""
        text = str(error)
        where, _, cause = text.partition(" s: ")
        if re.search(r"failed at \S+ after [\d.]+$", where):
            cause = self.cause if _SEALED in cause else cause
            text = f"{where} s ({cause})" if cause else f"{where} s"
        kind: type[SyncError] = type(error)
        if self.left and error.stage == "header":
            kind = PeerLeft
        if self.replica in self.missing or self.left_out_by:
            kind = LeftBehind
        # The error of a call after the epoch has failed repeats the first one, verdict and all.
        found = kind(str(error) if error.stage == "start" else f"{text}: {self._findings()}")
        vars(found).update({**vars(error)})
        found.missing, found.survivors, found.cuts = self.missing, self.survivors, self.cuts
        if self.left_out_by:
            found.survivors = self.left_out_by
            found.missing = tuple([one for one in self.members if one not in self.left_out_by])
        if isinstance(found, PeerLeft):
            found.replicas, found.inner_steps = tuple(self.left), tuple(self.left.values())
        if isinstance(found, LeftBehind):
            found.went_on_in = None
        found.__cause__ = error.__cause__
        return found

    def _findings(self) -> str:
        parts = []
        if self.left:
            words = "closed its DiLoCo and left, at inner step"
            if len(self.left) > 1:
                words = "closed their DiLoCo and left, at inner steps"
            steps = ", ".join(map(str, self.left.values()))
            parts.append(f"{named(list(self.left))} {words} {steps}")
        if self.ended:
            parts += [f"replica {number} has ended" for number in self.ended]
        if self.silent:
            parts.append(f"{named(self.silent)} did not report within {self.patience:.1f} s")
        if self.left_out_by:
            parts.append(f"{named(self.left_out_by)} left replica {self.replica} out of the group")
        if self.cuts:
            parts.append(words_of(self.cuts))
        text = "; ".join(parts) or "all other replicas live"
        if self.replica in self.missing or self.left_out_by:
            own = f"replica {self.replica}"
            return (
                f"{text}; the others have decided to go on without {own}: {own} may come back as a "
                'newcomer: close this DiLoCo, then make a new one with init="join"'
            )
        return text + (f"; the others go on without {named(self.missing)}" if self.cuts else "")


def judge(
    peers: Sequence[tuple[Key, str]],
    replica: int,
    link: OwnLink,
    driver: Driver | None,
    error: SyncError,
    patience: float,
) -> Verdict:
    """Find out which members are missing after a failure.

    Args:
        peers: For each member, its process and the nonce of the link of this worker's peer there.
        replica: Number of this replica.
        link: The link of this worker.
        driver: The driver at worker 0; None at other workers, which judge by the link alone.
        error: The failure.
        patience: Most seconds to wait for signs of life. A member that has closed a connection has
            ``_CLOSED_S`` more.
    """
    began = time.monotonic()
    members = tuple([key.number for key, _ in peers])
    others = [(key, nonce) for key, nonce in peers if key.number != replica]
    counters: dict[bytes, int] = {}
    while True:
        elapsed = time.monotonic() - began
        if driver is not None and not counters and elapsed > patience / 2:
            # From now on a new beat counts as life; an earlier one may be from before the failure.
            counters = driver.signs.counters()
        left, ended, open_, closed = {}, [], [], []
        lives = link.life()
        known = {} if driver is None else driver.signs.left()
        dead = frozenset() if driver is None else driver.state.life.dead
        silent = frozenset() if driver is None else driver.state.life.suspected
        has_failed = _that_have_failed(driver)
        for key, nonce in others:
            life = lives.get(nonce)
            if key.nonce in known:
                left[key.number] = known[key.nonce]
            elif key.nonce in dead or (life is not None and life.is_refused):
                ended.append(key.number)
            elif key.nonce in silent or life is None or not life.is_connected:
                open_.append(key)
            elif not life.silent_s < elapsed:
                open_.append(key)
            elif key.number in error.missing and key not in has_failed:
                # This living member has closed a connection: wait for a beat that says why. It has
                # left, or is CHANGING.
                closed.append(key)
        is_over = elapsed >= patience + (_CLOSED_S if closed and driver is not None else 0.0)
        if not (open_ or closed) or is_over or (elapsed >= patience and not closed):
            break
        if driver is not None:
            driver.look()
        time.sleep(_POLL_S)
    beaten = {} if driver is None else driver.signs.counters()
    lone = [key for key in open_ if beaten.get(key.nonce, 0) > counters.get(key.nonce, _MANY)]
    found = Verdict(
        replica,
        members,
        left=dict(sorted(left.items())),
        ended=tuple(sorted(ended)),
        silent=tuple(sorted(key.number for key in open_ if key not in lone)),
        unheard=tuple([key.nonce for key in open_ if key not in lone]),
        patience=patience,
        left_out_by=_left_out_by(driver),
    )
    own = {_pair(replica, key.number) for key in lone}
    return found.with_cuts(own | _told_cuts(driver, dict(others)))


def with_told_cuts(found: Verdict, peers: Sequence[tuple[Key, str]], driver: Driver) -> Verdict:
    """Return a verdict with the cuts that the other members have found, too.

    Waits until all living members have reported, ``patience`` seconds at most.
    """
    gone, began = found.gone, time.monotonic()
    alive = {key for key, _ in peers if key.number not in gone}
    while time.monotonic() - began < found.patience:
        # A member may leave as soon as its caller has the error.
        if alive <= _that_have_failed(driver) | _that_have_left(driver):
            break
        driver.look()
        time.sleep(_POLL_S)
    others = {key: nonce for key, nonce in peers if key.number != found.replica}
    told = replace(found, left_out_by=_left_out_by(driver))
    return told.with_cuts({*found.cuts, *_told_cuts(driver, others)})


def _left_out_by(driver: Driver | None) -> tuple[int, ...]:
    if driver is None or driver.left_out_by[0] != driver.state.number:
        return ()
    return driver.left_out_by[1]


def words_of(cuts: Sequence[tuple[int, int]]) -> str:
    """Return a clause for people that names pairs of replicas that cannot reach each other."""
    return ", and ".join(f"replicas {a} and {b} live but cannot reach each other" for a, b in cuts)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (min(one, other), max(one, other))


def _that_have_failed(driver: Driver | None) -> set[Key]:
    """Return the processes whose beats say CHANGING.

    Their training threads were told to stop for good in their record, or have stopped, and wait for
    the next record.
    """
    beats = {} if driver is None else driver.beats or {}
    return {key for key, beat in beats.items() if beat.stage == CHANGING}


def _that_have_left(driver: Driver) -> set[Key]:
    return {key for key, beat in (driver.beats or {}).items() if beat.is_gone}


def _told_cuts(driver: Driver | None, others: dict[Key, str]) -> set[tuple[int, int]]:
    """Return the pairs of numbers that cannot reach each other, as members' fresh beats say."""
    if driver is None:
        return set()
    numbers = {key.nonce: key.number for key in others}
    numbers[driver.state.nonce] = driver.state.key.number
    return {
        _pair(place.key.number, numbers[other])
        for place in driver.state.places
        if place.key in others and place.is_fresh
        for other in place.cut
        if other in numbers
    }
