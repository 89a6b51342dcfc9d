"""Signs of life: which processes seem to live, by their links and by their beats in the table."""

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

# A process without a connection to this one counts as heard for so many seconds of silence.
_LOST_S = 2.0
# Seconds between two tries to connect the link to processes that it does not reach, and seconds
# after which a process that it still does not reach counts as cut off.
_REACH_AGAIN_S = 3.0
# After a round has lost the connection to a process, so many seconds without a beat are enough to
# suspect the process; 2.5 times the seconds between two beats if that is longer.
_UNHEARD_S = 2.0
# Phases that a process tells its peers over the link: its table does not answer it, it waits for
# the others in an exchange, or it takes inner steps.
CUT_OFF, EXCHANGE, STEPS = "cut off", "exchange", "steps"


@dataclass
class _Sight:
    """The beats of one other process, as far as this process has seen them.

    Attributes:
        beat: The last beat.
        since: The monotonic time at which the counter has changed last.
        counter: The counter of the last beat.
        rises: Whether the counter was seen to rise. If not, the beat may be old, and its process
            dead.
        wanted_at: The monotonic time since when the link tries to connect; 0: it does not.
    """

    beat: Beat
    since: float
    counter: int
    rises: bool = False
    wanted_at: float = 0.0


class Signs:
    """Judges which other processes of a group live.

    Args:
        nonce: The name of this process in its group.
        link: The link of this process.
        way: The address of ``link``.
        service: The name of this group on the link, equal on all members.
        suspect_after_s: Seconds without a byte over the link, and without a beat, after which a
            process is suspected.
        busy_after_s: Seconds after which a process is suspected although its link is heard, as its
            training stands still: either it has not beaten so long, or this process has waited
            for it so long.

    Attributes:
        is_cut_off: The table does not answer this process, which so cannot change its group.
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
        # Processes that had a beat in the table at the last look.
        self._there: set[bytes] = set()
        # When the table was read last. Silence is measured up to then: while the table does not
        # answer, no beat is late.
        self._looked_at = time.monotonic()
        self._period_s = 0.0
        self._lives: dict[bytes, _C.PeerLife] = {}
        self._unheard: frozenset[bytes] = frozenset()
        self._ended: set[bytes] = set()
        # Members that live, and have kept this process waiting for ``_busy_limit_s`` or longer.
        self._stuck: set[bytes] = set()
        # The last inner step of each process that has said that it ends.
        self._left: dict[bytes, int] = {}
        # Processes that were waited for in vain, and the counter of their last beat at that time.
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
        """Tell the others over the link how far this process is, and what its loop does."""
        with self._mutex:
            self.link.set_progress(inner_step, CUT_OFF if self.is_cut_off else phase)

    # ------------------------------------------------------------------------------- beats

    def note(self, beats: Sequence[Beat], period_s: float = 0.0) -> None:
        """Take the beats of a look at the table.

        Args:
            beats: The last beat of each process.
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
        """Whether a process has beaten in the last ``suspect_after_s``."""
        sight = self._sights.get(nonce)
        return sight is not None and self._silence(sight) < self.suspect_after_s

    def _silence(self, sight: _Sight) -> float:
        return self._looked_at - sight.since

    def stood_still(self, seconds: float) -> None:
        """Note that this process was suspended; those seconds count as nobody's silence."""
        now = time.monotonic()
        for sight in self._sights.values():
            sight.since = min(now, sight.since + seconds)

    def has_left(self, nonce: bytes, inner_step: int) -> None:
        """Note that a process has said that it ends, after this inner step."""
        self._left[nonce] = inner_step

    def left(self) -> dict[bytes, int]:
        """Return the processes that have said that they end, each with its inner step."""
        gone = [sight.beat for sight in list(self._sights.values()) if sight.beat.is_gone]
        return {**self._left, **{beat.key.nonce: beat.place.inner_step for beat in gone}}

    def counters(self) -> dict[bytes, int]:
        """Return the counter of the last beat of each process."""
        return {nonce: sight.counter for nonce, sight in list(self._sights.items())}

    def give_up(self, nonces: Iterable[bytes]) -> None:
        """Suspect processes that were waited for in vain, until they beat or are heard again."""
        counters = self.counters()
        self._given_up = {nonce: counters.get(nonce, 0) for nonce in nonces}

    def way_to(self, nonce: bytes) -> Way | None:
        """Return the address of a process's link; None if its beat is not known."""
        sight = self._sights.get(nonce)
        return None if sight is None or not sight.beat.ways else Way.from_text(sight.beat.ways[0])

    # ------------------------------------------------------------------------------- links

    def is_alike(self, way: Way) -> bool:
        """Whether the own link can connect to this one: both have keys, or neither has."""
        return bool(way.key) == bool(self.way.key)

    def differs(self, nonce: bytes) -> bool:
        """Whether a process lives, but only one of its link and the own link has keys."""
        sight, way = self._sights.get(nonce), self.way_to(nonce)
        is_alive = sight is not None and sight.rises and self.is_fresh(nonce)
        return is_alive and way is not None and not self.is_alike(way)

    def want(self, nonces: Iterable[bytes]) -> None:
        """Let the link connect to each of these processes whose address is known."""
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
        """Connect the link to the wanted processes; on a thread of its own, as this may be slow."""
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
        # A new dictionary, as another thread may read the former one.
        self._lives = {
            n: by_link[way.nonce] for n, way in ways.items() if way and way.nonce in by_link
        }
        members = {key.nonce for key in base}
        self._forget(members)
        known = members | self._sights.keys()
        self._left = {nonce: step for nonce, step in self._left.items() if nonce in known}
        # A process that has ended counts as ended also when the link tries no more to reach it.
        self._ended |= {nonce for nonce, life in self._lives.items() if life.is_refused}
        self._ended -= {nonce for nonce in self._lives if self._is_heard(nonce)}
        # A member that has finished all its steps is not dead: the others need not stop for it.
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
        """Note the members that live but take no part in a round that this process waits for."""
        for nonce in members & self._lives.keys():
            life = self._lives[nonce]
            # A member in an exchange waits, too: another member holds it up.
            if life.still_s < self._busy_limit_s or life.phase in (EXCHANGE, CUT_OFF):
                self._stuck.discard(nonce)
            elif waited >= self._busy_limit_s:
                self._stuck.add(nonce)
        self._stuck &= members

    @property
    def _busy_limit_s(self) -> float:
        return max(self._busy_after_s, self.suspect_after_s)

    def _forget(self, members: set[bytes]) -> None:
        """Forget processes that are no members, and have had no beat in the table for long."""
        # A table that was started again has few beats for a while, so processes are kept for some
        # time. Members are kept in any case: it may take longer to go on without a member than a
        # table keeps its beat.
        now, limit = time.monotonic(), self._busy_limit_s
        kept = members | self._there
        sights = self._sights.items()
        self._sights = {n: s for n, s in sights if n in kept or now - s.since < limit}

    def unreachable(self, keys: Iterable[Key]) -> list[Key]:
        """Return those that the link has heard once, but not in the last ``suspect_after_s``."""
        silent = {nonce: life.silent_s for nonce, life in self._lives.items()}
        limit = self.suspect_after_s
        return [key for key in keys if limit <= silent.get(key.nonce, 0.0) < math.inf]

    def beats(self, key: Key) -> bool:
        """Whether a process has beaten within half of ``suspect_after_s``, linked or not."""
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
        # Read once: the training thread may replace this dictionary meanwhile.
        given_up = self._given_up
        if nonce in given_up:
            life = self._lives.get(nonce)
            is_heard = life is not None and life.silent_s < _LOST_S and not life.is_refused
            if sight.counter == given_up[nonce] and not is_heard:
                return True
            del given_up[nonce]
        if self._is_heard(nonce):
            # A process that does not reach the table, but takes part in rounds, is not suspected.
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
        """Return the numbers of the members for which an exchange of this process waits.

        These are not heard, or are in no exchange themselves.
        """
        lives, found = self._lives, list[int]()
        for number, nonce in base:
            life = lives.get(nonce)
            is_there = life is not None and life.phase in (EXCHANGE, CUT_OFF)
            if nonce != self._nonce and not (is_there and self._is_heard(nonce)):
                found.append(number)
        return tuple(found)

    def waited_for(self, base: Sequence[Key], waited: float) -> list[str]:
        """Describe, for a log line, the members that live but keep this process waiting.

        Args:
            base: All members.
            waited: Seconds for which the training thread has waited.
        """
        texts = []
        for key in base:
            life, sight = self._lives.get(key.nonce), self._sights.get(key.nonce)
            if life is None or sight is None or not self._is_heard(key.nonce):
                continue
            # A member in an exchange waits, too.
            is_still = life.phase != EXCHANGE and life.still_s >= self.suspect_after_s
            is_still &= waited >= self.suspect_after_s
            if self._silence(sight) >= self.suspect_after_s or is_still:
                at = f"inner step {life.inner_step}"
                phase = f", phase {life.phase}" if life.phase else ""
                still = f"still for {life.still_s:.0f} s"
                texts.append(f"replica {key.number} ({at}{phase}, {still})")
        return texts
