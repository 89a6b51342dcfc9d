"""Which processes live: as their links tell, and as their beats in the table tell."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import _C
from .beats import FINISHED, Beat, Way
from .records import Key
from .state import Life

# Seconds of silence after which a process is not heard any more to which there is no connection.
_LOST_S = 2.0
# Seconds after which the link is asked again for ways that it does not have, and seconds after
# which a newcomer counts as cut off.
_REACH_AGAIN_S = 3.0
# Seconds without a beat, after a round has lost the connection to the process.
_UNHEARD_S = 2.0
# The phase of a process that does not hear its table, and of one that waits for the others.
CUT_OFF, EXCHANGE, STEPS = "cut off", "exchange", "steps"


@dataclass
class _Sight:
    """The knowledge of one process.

    Attributes:
        since: When its beat was another one last, by the monotonic clock.
        counter: The counter of the last beat.
        rises: The counter was seen to rise: an old beat may come from a dead process.
        wanted_at: Since when the link is asked for a way; 0: never.
    """

    beat: Beat
    since: float
    counter: int
    rises: bool = False
    wanted_at: float = 0.0


class Signs:
    """The life of the other processes of a group.

    Args:
        nonce: The name of this process in its group.
        link: The link of this process, and ``way`` to it.
        service: Names what the link connects for this group, equal on all members.
        suspect_after_s: Seconds without a byte, and without a beat, after which a process is
            suspected.
        busy_after_s: The same for a process whose link is heard, and which takes no part in any
            round: without a beat, or while this process waits for it.

    Attributes:
        is_cut_off: The table does not answer here, so that this process cannot change its group.
    """

    def __init__(
        self,
        nonce: bytes,
        link: _C.Link,
        way: Way,
        service: str,
        suspect_after_s: float,
        busy_after_s: float,
    ) -> None:
        self._nonce = nonce
        self.link, self.way, self.service = link, way, service
        self.suspect_after_s, self._busy_after_s = suspect_after_s, busy_after_s
        self.is_cut_off = False
        self._sights: dict[bytes, _Sight] = {}
        # Processes whose beats the table had last.
        self._there: set[bytes] = set()
        # When the table was read last. While no look is answered, no beat is late.
        self._looked_at = time.monotonic()
        self._period_s = 0.0
        self._lives: dict[bytes, _C.PeerLife] = {}
        self._unheard: frozenset[bytes] = frozenset()
        self._ended: set[bytes] = set()
        # Members that have kept this process waiting for too long, until they take part again.
        self._stuck: set[bytes] = set()
        # Processes that have said that they end, with the inner step that they have reached.
        self._left: dict[bytes, int] = {}
        # Processes that were waited for in vain, and how often each has beaten then.
        self._given_up: dict[bytes, int] = {}
        self._mutex = threading.Lock()
        self._wanted: tuple[tuple[str, ...], ...] = ()
        self._news, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._reach, daemon=True, name="diloco_comm signs")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let the link connect to nobody any more; idempotent."""
        self._is_closed = True
        self._news.set()

    def set_progress(self, inner_step: int, phase: str) -> None:
        """Say to the others how far this process is, see ``DiLoCo.doing``."""
        with self._mutex:
            self.link.set_progress(inner_step, CUT_OFF if self.is_cut_off else phase)

    # ------------------------------------------------------------------------------- beats

    def note(self, beats: Sequence[Beat], period_s: float = 0.0) -> None:
        """Take the last beats of all processes.

        Args:
            period_s: Seconds between two beats of a process.
        """
        now = self._looked_at = time.monotonic()
        self._period_s = period_s
        for beat in beats:
            nonce, last = beat.key.nonce, self._sights.get(beat.key.nonce)
            if last is None:
                self._sights[nonce] = _Sight(beat, now, beat.counter)
                continue
            if beat.counter != last.counter:
                last.since, last.counter, last.rises = now, beat.counter, True
            last.beat = beat
        self._there = {beat.key.nonce for beat in beats}

    def is_fresh(self, nonce: bytes) -> bool:
        """Whether the table has heard of a process lately."""
        sight = self._sights.get(nonce)
        return sight is not None and self._silence(sight) < self.suspect_after_s

    def _silence(self, sight: _Sight) -> float:
        return self._looked_at - sight.since

    def stood_still(self, seconds: float) -> None:
        """Note that this process stood still: that is no silence of the others."""
        now = time.monotonic()
        for sight in self._sights.values():
            sight.since = min(now, sight.since + seconds)

    def has_left(self, nonce: bytes, inner_step: int) -> None:
        """Note that a process has said that it ends."""
        self._left[nonce] = inner_step

    def left(self) -> dict[bytes, int]:
        """Return the processes that have said that they end, each with its inner step."""
        gone = [sight.beat for sight in list(self._sights.values()) if sight.beat.is_gone]
        return {**self._left, **{beat.key.nonce: beat.place.inner_step for beat in gone}}

    def counters(self) -> dict[bytes, int]:
        """Return the counter of the last beat of each process."""
        return {nonce: sight.counter for nonce, sight in list(self._sights.items())}

    def give_up(self, nonces: Iterable[bytes]) -> None:
        """Suspect processes that were waited for in vain, until they are heard again."""
        counters = self.counters()
        self._given_up = {nonce: counters.get(nonce, 0) for nonce in nonces}

    def way_to(self, nonce: bytes) -> Way | None:
        """Return where the link of a process is found; None where that is not known."""
        sight = self._sights.get(nonce)
        return None if sight is None or not sight.beat.ways else Way.from_text(sight.beat.ways[0])

    # ------------------------------------------------------------------------------- links

    def is_alike(self, way: Way) -> bool:
        """Whether both links, or none of them, have keys: others cannot connect."""
        return bool(way.key) == bool(self.way.key)

    def differs(self, nonce: bytes) -> bool:
        """Whether a process lives, and one of its link and the own link has keys."""
        sight, way = self._sights.get(nonce), self.way_to(nonce)
        is_alive = sight is not None and sight.rises and self.is_fresh(nonce)
        return is_alive and way is not None and not self.is_alike(way)

    def want(self, nonces: Iterable[bytes]) -> None:
        """Let the link connect to these processes, as far as their links are known."""
        ways = set()
        for nonce in nonces:
            way = self.way_to(nonce)
            if way is not None and way.nonce != self.way.nonce and self.is_alike(way):
                ways.add(way.words)
                sight = self._sights[nonce]
                sight.wanted_at = sight.wanted_at or time.monotonic()
        wanted = tuple(sorted(ways))
        if wanted != self._wanted:
            self._wanted = wanted
            self._news.set()

    def _reach(self) -> None:
        """Let the link connect, on a thread of its own: a name server may take its time."""
        with contextlib.suppress(RuntimeError):  # The link was closed.
            while not self._is_closed:
                self.link.reach(self.service, self._wanted)
                self._news.wait(_REACH_AGAIN_S)
                self._news.clear()
            self.link.reach(self.service, [])

    def lost(self, nonces: Iterable[bytes]) -> None:
        """Note processes to which a round has lost its connection."""
        self._unheard = frozenset(nonces)

    # ---------------------------------------------------------------------------- judgement

    def judge(self, base: Sequence[Key], waited: float = 0.0) -> Life:
        """Return which processes seem to live.

        Args:
            base: Members of the record that this process knows.
            waited: Seconds for which the training thread has waited for the other members.
        """
        by_link = {life.nonce: life for life in self.link.life()}
        ways = {nonce: self.way_to(nonce) for nonce in self._sights}
        # Another thread may read the former ones.
        self._lives = {
            n: by_link[way.nonce] for n, way in ways.items() if way and way.nonce in by_link
        }
        members = {key.nonce for key in base}
        self._forget(members)
        known = members | self._sights.keys()
        self._left = {nonce: step for nonce, step in self._left.items() if nonce in known}
        # A process that has ended stays so when the link is not asked for it any more.
        self._ended |= {nonce for nonce, life in self._lives.items() if life.is_refused}
        self._ended -= {nonce for nonce in self._lives if self._is_heard(nonce)}
        # The place of a member that has taken all steps says so, and the others need not stop.
        sights = self._sights.items()
        self._ended |= self.left().keys() - {n for n, s in sights if s.beat.stage == FINISHED}
        self._ended &= known
        self._note_stuck(members, waited)
        suspected = {nonce for nonce in self._sights if self._is_suspected(nonce, members)}
        cut = {nonce for nonce, sight in self._sights.items() if self._is_cut(nonce, sight)}
        own = {self._nonce}
        return Life(
            suspected=frozenset(suspected - own),
            dead=frozenset(self._ended - own),
            cut=frozenset(cut - members - own),
        )

    def _note_stuck(self, members: set[bytes], waited: float) -> None:
        """Note the members that live and take no part, while this process waits for them."""
        for nonce in members & self._lives.keys():
            life = self._lives[nonce]
            # Some wait themselves, for the same member.
            if life.still_s < self._busy_limit_s or life.phase in (EXCHANGE, CUT_OFF):
                self._stuck.discard(nonce)
            elif waited >= self._busy_limit_s:
                self._stuck.add(nonce)
        self._stuck &= members

    @property
    def _busy_limit_s(self) -> float:
        return max(self._busy_after_s, self.suspect_after_s)

    def _forget(self, members: set[bytes]) -> None:
        """Forget processes that are not in the table, and that nobody waits for."""
        # A table that was started again has few beats for a while. A member is suspected until the
        # others go on without it, which may take longer than a table keeps beats.
        now, limit = time.monotonic(), self._busy_limit_s
        kept = members | self._there
        sights = self._sights.items()
        self._sights = {n: s for n, s in sights if n in kept or now - s.since < limit}

    def unreachable(self, keys: Iterable[Key]) -> list[Key]:
        """Return processes that were heard on the link, and are not for ``suspect_after``."""
        silent = {nonce: life.silent_s for nonce, life in self._lives.items()}
        limit = self.suspect_after_s
        return [key for key in keys if limit <= silent.get(key.nonce, 0.0) < math.inf]

    def beats(self, key: Key) -> bool:
        """Whether the table hears of a process that its link may not hear."""
        sight = self._sights.get(key.nonce)
        return sight is not None and self._silence(sight) < self.suspect_after_s / 2

    def _is_heard(self, nonce: bytes) -> bool:
        life = self._lives.get(nonce)
        if life is None or life.is_refused:
            return False
        return life.silent_s < (self.suspect_after_s if life.is_connected else _LOST_S)

    def _is_suspected(self, nonce: bytes, members: set[bytes]) -> bool:
        sight = self._sights[nonce]
        silence = self._silence(sight)
        # The training thread may replace the processes that are given up.
        given_up = self._given_up
        if nonce in given_up:
            life = self._lives.get(nonce)
            is_heard = life is not None and life.silent_s < _LOST_S and not life.is_refused
            if sight.counter == given_up[nonce] and not is_heard:
                return True
            del given_up[nonce]
        if self._is_heard(nonce):
            # A process that takes part, and does not reach the table, stays.
            still = min(silence, self._lives[nonce].still_s)
            return nonce in self._stuck or still >= self._busy_limit_s
        if nonce not in members and not sight.rises:
            return True
        unheard = min(max(_UNHEARD_S, 2.5 * self._period_s), self.suspect_after_s)
        return silence >= (unheard if nonce in self._unheard else self.suspect_after_s)

    def _is_cut(self, nonce: bytes, sight: _Sight) -> bool:
        is_late = sight.wanted_at and time.monotonic() - sight.wanted_at > _REACH_AGAIN_S
        return bool(is_late) and sight.rises and not self._is_heard(nonce)

    def awaited(self, base: Sequence[Key]) -> tuple[int, ...]:
        """Return the numbers of the other members that are not heard, or are in no exchange."""
        lives, found = self._lives, list[int]()
        for number, nonce in base:
            life = lives.get(nonce)
            is_there = life is not None and life.phase in (EXCHANGE, CUT_OFF)
            if nonce != self._nonce and not (is_there and self._is_heard(nonce)):
                found.append(number)
        return tuple(found)

    def waited_for(self, base: Sequence[Key], waited: float) -> list[str]:
        """Describe the members that live and take no part, if this process waits for them.

        Args:
            waited: Seconds for which the training thread has waited.
        """
        texts = []
        for key in base:
            life, sight = self._lives.get(key.nonce), self._sights.get(key.nonce)
            if life is None or sight is None or not self._is_heard(key.nonce):
                continue
            # Others may wait for the same member.
            is_still = life.phase != EXCHANGE and life.still_s >= self.suspect_after_s
            is_still &= waited >= self.suspect_after_s
            if self._silence(sight) >= self.suspect_after_s or is_still:
                at = f"inner step {life.inner_step}"
                phase = f", phase {life.phase}" if life.phase else ""
                still = f"still for {life.still_s:.0f} s"
                texts.append(f"replica {key.number} ({at}{phase}, {still})")
        return texts
