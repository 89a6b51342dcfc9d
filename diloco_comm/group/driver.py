"""The driver: the threads that run the agreement of one process with its clock, link and table.

The *core* is ``agreement.step`` with its state. The training thread tells the driver what happens
to it, and takes orders from the driver. On a thread of its own the driver hands every happening,
one at a time, to the core as an event.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..base.background import batch_threads
from ..base.checks import logger_of
from . import messages as ms
from . import state as st
from .agreement import step
from .beats import Beat, Way, evicted, name_of, stage_of
from .records import NO_RECORD, Key, Record
from .signs import EXCHANGE, Signs
from .table import Look, Seen, Swapped, Table, TableAway, TableThread, UnreadableRecord

logger = logger_of(__name__)

# If so many periods lie between two polls, this process was suspended, not the others silent.
_LATE = 3.0
# Seconds between two log lines that name the members for which this process waits.
_LINE_S = 60.0
# A process reads the table every ``_LOOK_S`` seconds times the number of processes that beat, and
# at the latest every ``_LONGEST_LOOK_S`` seconds; see ``look_s``.
_LOOK_S, _LONGEST_LOOK_S = 1 / 32, 5.0
# For so many seconds this process tries again where the table refuses its key: somebody may allow
# the key meanwhile.
_KEY_WAIT_S = 10.0
# Seconds that one call of ``link.told`` waits for messages.
_LISTEN_S = 0.5
# In so many first seconds of a wait, ``Driver.wait`` names nobody: the last news of the others may
# be that old.
_SOON_S = 2.0
# A process that waits for others to come reads the table after pauses that begin at about
# ``_HASTE_S`` seconds. Each is ``_HASTE_GROWTH`` times the one before, up to the period of polls.
_HASTE_S, _HASTE_GROWTH = 0.005, 1.5
# Messages that may wait for the driver; more are dropped, and their senders repeat them.
_MOST_HEARD = 4096
# So many frames of processes without a known beat are kept until the table is read, and so many
# frames that the link could not send.
_MOST_UNKNOWN = 64
# Seconds to wait for another process's settings, to name the setting that differs.
_ASK_S = 3.0
# The kind of a frame, in the byte behind the sender's nonce: a message of the agreement, a request
# for settings, the settings, the last frame of a process, the members of an attempt that leaves the
# receiver out.
_MESSAGE, _ASK, _SHOWN, _LEFT, _WITHOUT = range(5)
# The longest settings that are read, in bytes.
_MOST_SHOWN = 1 << 20


@dataclass(frozen=True)
class Ended:
    """Why this process takes no further part in its group, or why its caller waits no longer.

    Attributes:
        kind: "fenced", "refused", "over", "drained", "failed", "waited", or a kind that a user of
            the driver adds.
        reason: One sentence for people.
        missing, survivors: With "waited": numbers of the replicas that did not come, and of the
            others.
        cuts: Pairs of numbers of replicas that cannot reach each other.
    """

    kind: str
    reason: str
    missing: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    cuts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Frame:
    """The bytes that the link with the nonce ``link`` has sent."""

    link: str
    content: bytes


@dataclass(frozen=True)
class _Answer:
    """An answer of a table, or the error in its place, and the thread that had asked."""

    source: TableThread
    content: Seen | Swapped | Exception


Order = st.Seal | st.Connect | st.Enter | st.Fail | Ended
_KINDS: dict[type[st.End], str] = {
    st.Fence: "fenced",
    st.Refuse: "refused",
    st.Over: "over",
    st.Drained: "drained",
}


class Driver:
    """Carry out the decisions of the core for one process.

    Args:
        table: The table of the group. From now on only a thread of the driver uses it.
        state: The first state of the core.
        signs: Judges which other processes live.
        period_s: Seconds between two polls.
        shown: The settings that must be equal on all members, as JSON.

    Attributes:
        state: The newest state of the core.
        is_change_wanted: The headers of this process's rounds shall ask for a boundary.
        is_broken: The training thread shall stop at once.
        inner_step: The inner step that this process, or else its checkpoint, has reached.
        phase, serves, ways, store: The same fields of this process's beats, see ``Beat``.
        waits_since: The monotonic time since when the training thread waits for the other members;
            0 while it does not wait.
        waiting_for: The reason why the core waits; "" for nothing.
        loss: Why the table did not answer the last look; None if it did.
        beats: The last beat of every process, by rising key; None before the first look.
        figures: Returns a text about this process, which the host of the table keeps for people;
            called on the table's thread. None: no text.
        left_out_by: The number of a record, and the members of it that are about to go on without
            this process, as one of them has said last.
    """

    def __init__(
        self, table: Table, state: st.State, signs: Signs, *, period_s: float, shown: str
    ) -> None:
        self.state, self.signs = state, signs
        self._period_s, self._shown = period_s, shown
        self.is_change_wanted = self.is_broken = False
        self.inner_step = state.inner_step
        self.phase, self.store = "", ""
        self.serves = False
        self.ways = [signs.way.to_text()]
        self.waits_since = 0.0
        self.waiting_for, self._waiting_since = "", 0.0
        self.loss: TableAway | None = None
        self.figures: Callable[[Driver], bytes] | None = None
        self.beats: Mapping[Key, Beat] | None = None
        self.left_out_by: tuple[int, tuple[int, ...]] = (NO_RECORD, ())
        self._break: Callable[[], None] = lambda: None
        self._counter = 0
        self._events: queue.SimpleQueue[st.Event | _Answer | _Frame | None] = queue.SimpleQueue()
        self._table = self._thread_of(table)
        self._news = threading.Condition()
        self._orders: dict[type, Order] = {}
        self._ended: Ended | None = None
        self._by_link: dict[str, set[bytes]] = {}
        # The beats that were parsed at the last look, by their text.
        self._read: dict[bytes, Beat | None] = {}
        self._last_poll = self._last_seen = time.monotonic()
        self._line_at = self._loss_since = 0.0
        self._has_warned = self._is_closing = False
        # A refusal or failure to report once another process has shown its settings, the time at
        # which this process reports without them, and that other process.
        self._refused: tuple[st.Refuse | st.Fail, float, Key] | None = None
        # Frames that the link could not send, by receiver and kind. Then the present pause in
        # seconds, and the time at which these frames are sent, and the table is read, again.
        self._unsent: dict[tuple[bytes, int], bytes] = {}
        self._haste_s, self._haste_at = _HASTE_S, time.monotonic()
        # Frames of processes whose beats are yet to be read.
        self._unknown: deque[_Frame] = deque(maxlen=_MOST_UNKNOWN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="diloco_comm views")
        self._listener = threading.Thread(
            target=self._listen, daemon=True, name="diloco_comm messages"
        )

    def start(self) -> None:
        self.signs.link.told(self.signs.service, 0.0)
        with batch_threads():
            self.signs.start()
            self._listener.start()
            self._table.start()
            self._thread.start()

    def close(self, patience_s: float = 15.0) -> None:
        """End the threads and the connection to the table; idempotent.

        The other members are told that this process takes no further part.
        """
        self._events.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(patience_s)

    # --------------------------------------------------------------- for the training thread

    def tell(self, event: st.Event) -> None:
        """Tell the core what has happened to the training thread."""
        if isinstance(event, st.Demanded | st.GivenUp):
            with self._news:
                self._orders.pop(st.Fail, None)
                self._orders.pop(st.Connect, None)
        if isinstance(event, st.Broke | st.Boundary) and event.number == self.state.number:
            self.is_change_wanted = self.is_broken = False
        if isinstance(event, st.Broke | st.Boundary | st.Demanded):
            self._order_again(event)
        self._events.put(event)

    def _order_again(self, event: st.Broke | st.Boundary | st.Demanded) -> None:
        """Give the present orders again: a Ctrl-C may have lost one that was taken."""
        # Read once: the driver's thread may replace the state meanwhile.
        state = self.state
        record, joint = state.record, state.joint
        number = -1 if isinstance(event, st.Demanded) else event.number
        if record is not None and 0 <= number < record.number:
            self._order(st.Enter(record))
        elif state.stage is st.Stage.SEALING:
            self._order(st.Seal(state.number))
        elif number >= 0 and joint is not None and not joint.is_connected:
            self._order(st.Connect(joint.attempt, joint.members))

    def lost(self, numbers: Collection[int]) -> None:
        """Note the numbers of members to which a round has lost its connection."""
        record = self.state.record
        members = () if record is None else record.members
        self.signs.lost(key.nonce for key in members if key.number in numbers)

    def on_break(self, function: Callable[[], None]) -> None:
        """Call ``function``, on the driver's thread, when rounds under way are to fail."""
        self._break = function

    def next_order(self, timeout_s: float) -> Order | None:
        """Take the next order; None if none came in time. ``Ended`` is returned again and again."""
        with self._news:
            self._news.wait_for(lambda: self._orders or self._ended, timeout_s)
            if self._ended is not None:
                return self._ended
            for kind in (st.Enter, st.Seal, st.Fail, st.Connect):
                if kind in self._orders:
                    return self._orders.pop(kind)
            return None

    @property
    def has_order(self) -> bool:
        """Whether ``next_order`` would return at once."""
        return bool(self._orders) or self._ended is not None

    @property
    def is_ending(self) -> bool:
        """Whether a refusal or failed demand only waits for the setting that its text will name."""
        return self._refused is not None

    @property
    def waits(self) -> str:
        """Why this process waits, the table's silence first; "" if it does not wait."""
        name = self.state.settings.table_name
        return self.waiting_for if self.loss is None else f"for the {name}: {self.loss}"

    def warn_if_ended(self) -> None:
        """Log once that this replica's group cannot change any more."""
        if self._ended is not None and self._ended.kind == "failed" and not self._has_warned:
            self._has_warned = True
            logger.error("this replica trains on until its group changes: %s", self._ended.reason)

    def move(self, table: Table) -> None:
        """Go on with another table, for instance where the present one has died."""
        self._table.leave()
        self._table = self._thread_of(table)
        self.loss = None
        self._table.start()
        self._table.look()

    def _thread_of(self, table: Table) -> TableThread:
        def post(content: Seen | Swapped | Exception) -> None:
            self._events.put(_Answer(thread, content))

        def figures() -> bytes:
            return b"" if self.figures is None else self.figures(self)

        thread = TableThread(table, self._period_s, self._own_beat, post, figures)
        return thread

    def look(self) -> None:
        """Read the table soon."""
        self._table.look()

    def store_of(self, key: Key) -> str:
        """Return the address of the store that a process uses; "" if its beat names none."""
        if key == self.state.key:
            return self.store
        beat = (self.beats or {}).get(key)
        return "" if beat is None else beat.store

    def ways_of(self, key: Key) -> list[Way] | None:
        """Return the addresses of the links of a replica's workers; None if these are not known."""
        beat = (self.beats or {}).get(key)
        if key == self.state.key:
            found = [Way.from_text(text) for text in self.ways]
        else:
            found = [Way.from_text(text) for text in (() if beat is None else beat.ways)]
        return [way for way in found if way is not None] or None

    # ------------------------------------------------------------------- the driver's thread

    def _run(self) -> None:
        try:
            while self._take_turn():
                pass
        except Exception as error:
            logger.exception("membership of replica %d has failed", self.state.key.number)
            self._end("failed", f"{type(error).__name__}: {error}")
        finally:
            self._is_closing = True
            step = self.inner_step.to_bytes(8, "little", signed=True)
            # Where the run has ended, the last beat says so, and no frame needs to.
            has_ended = self.state.is_finished and not self.state.settings.is_fixed
            for key in () if has_ended else self._base():
                self._send(key.nonce, _LEFT, step)
            self._table.close(self._period_s + 5.0 + 5.0)
            self.signs.close()
            self._break = lambda: None

    def _take_turn(self) -> bool:
        """Handle what has happened, or poll; return False when the thread shall end."""
        now = time.monotonic()
        due = self._last_poll + self._period_s - now
        if due <= 0:
            self._poll()
            return True
        if self._hastens:
            if now >= self._haste_at:
                self._hasten(now)
                return True
            due = min(due, self._haste_at - now)
        try:
            news = self._events.get(timeout=due)
        except queue.Empty:
            return True
        if isinstance(news, _Frame):
            self._hear(news)
        elif isinstance(news, _Answer):
            # A former table may have answered before this process has left it.
            if news.source is self._table:
                self._take_answer(news.content)
        elif news is not None:
            if isinstance(news, st.Demanded | st.GivenUp):
                self._forget_refusal()
            if isinstance(news, st.Demanded | st.JoinerReady):
                self._haste_s, self._haste_at = _HASTE_S, 0.0
            self._step(news)
        return news is not None

    def _take_answer(self, content: Seen | Swapped | Exception) -> None:
        if isinstance(content, Seen):
            self._see(content)
        elif isinstance(content, Swapped):
            self._step(st.Swapped(content.new, content.outcome))
        elif isinstance(content, TableAway):
            self._note_loss(content)
        else:
            raise content

    @property
    def _hastens(self) -> bool:
        """Whether this process waits for others that may come at any moment."""
        return self.state.stage is st.Stage.NEWCOMER or self.state.demand is not None

    def _hasten(self, now: float) -> None:
        """Send unsent frames again and read the table between two polls; ever more rarely."""
        self._haste_s = min(self._period_s, _HASTE_GROWTH * self._haste_s)
        self._haste_at = now + self._haste_s
        unsent, self._unsent = self._unsent, {}
        for (nonce, kind), content in unsent.items():
            self._send(nonce, kind, content)
        self._look_after_others()
        self._table.look()

    def _poll(self) -> None:
        now, before = time.monotonic(), self._last_poll
        self._last_poll = now
        self._ask_again()
        if now - before > _LATE * self._period_s:
            # This process was suspended, so the others cannot be blamed for their silence.
            self.signs.stood_still(now - before)
            return
        self._look_after_others()
        self._step(st.Passed())
        self._break_off_silent_round()
        self._say_who_is_waited_for()

    def _base(self) -> tuple[Key, ...]:
        """Return the members of the record that is entered or, for a newcomer, in the table."""
        record = self.state.record or self.state.in_table
        return () if record is None else record.members

    def _look_after_others(self, newest: Record | None = None) -> None:
        """Judge which processes live, and tell the core if that has changed.

        Args:
            newest: A record that this process has just read. A newcomer judges its members.
        """
        base = self._base() if self.state.record or newest is None else newest.members
        beats = (self.beats or {}).values()
        newcomers = [beat.key for beat in beats if not (beat.place.entered or beat.is_gone)]
        self.signs.want(key.nonce for key in (*base, *newcomers))
        # Only in an exchange does the training thread wait for others.
        waited = self._waited if self.phase == EXCHANGE else 0.0
        before, life = self.state.life, self.signs.judge(base, waited)
        if life == before or self.state.stage is st.Stage.GONE:
            return
        members = {key.nonce: key.number for key in base}
        news = (life.suspected | life.dead) - before.suspected - before.dead
        if found := sorted(members[nonce] for nonce in news & members.keys()):
            self._say_suspected(tuple(found))
        self._step(life)

    def _break_off_silent_round(self) -> None:
        """Let rounds fail that wait for a silent member, or for a group that left this one out."""
        stage, base = self.state.stage, self._base()
        is_training = stage is st.Stage.TRAINING
        is_inside = is_training or stage is st.Stage.SEALING
        is_outside = stage is st.Stage.GONE and not self.state.is_finished
        if self._waited < 2 * self._period_s or not (is_inside or is_outside):
            return
        silent = self.state.life.suspected & {key.nonce for key in base}
        # Members that this process does not hear count even if they still beat in the table. A
        # process that seals breaks off no round that can still end.
        is_broken = self.is_broken and is_training
        if is_outside or is_broken or silent or self.signs.unreachable(base):
            self.is_broken = True
            self._break_off()

    @property
    def _waited(self) -> float:
        """Seconds for which the training thread has waited."""
        since = self.waits_since
        return time.monotonic() - since if since else 0.0

    def wait(self) -> tuple[float, tuple[int, ...]]:
        """Return for how long this process has waited for others, and for whom; from any thread.

        Returns:
            Seconds, 0 without a wait; and the numbers of the members that it waits for, as far as
            these are known.
        """
        waited, since = self._waited, self._waiting_since
        if since:
            waited = max(waited, time.monotonic() - since)
        return waited, self.signs.awaited(self._base()) if waited >= _SOON_S else ()

    def _say_who_is_waited_for(self) -> None:
        """Log once a minute which members live and keep the group waiting."""
        if self.state.record is None:
            return
        texts, now = self.signs.waited_for(self._base(), self._waited), time.monotonic()
        if texts and now - self._line_at >= _LINE_S:
            self._line_at = now
            logger.warning("waiting for %s: alive, and not taking part", ", ".join(texts))

    # ------------------------------------------------------------------------------ the table

    def _own_beat(self) -> tuple[str, bytes]:
        """Return name and text of the next beat of this process; on the table's thread."""
        self._counter += 1
        state = self.state
        stage = stage_of(state)
        if self._is_closing and not state.is_finished:
            stage = "gone"
        place = st.place_of(state, self.inner_step)
        ways = tuple(self.ways)
        beat = Beat(place, self._counter, stage, self.phase, ways, self.store, self.serves)
        return name_of(state.key), beat.to_bytes()

    def _see(self, seen: Seen) -> None:
        """Tell the core what the table holds, if its record can be read."""
        try:
            newest = Record.from_bytes(seen.look.record) if seen.look.record else None
        except ValueError as error:
            run, table = self.state.settings.run, seen.table.hex()
            self._note_loss(
                UnreadableRecord(
                    f"the record of run {run!r} in the table {table} cannot be read, and is looked "
                    f"at again: {error}"
                )
            )
            return
        now, before = time.monotonic(), self._last_seen
        self._last_seen = now
        if self.loss is not None or now - before > self.signs.suspect_after_s / 2:
            # No beats were read meanwhile, so nobody's silence counts.
            self.signs.stood_still(now - before)
        if self.loss is not None:
            self.loss = None
            self._say_whether_cut_off()
            logger.warning("the %s answers again", self.state.settings.table_name)
        look, beats = seen.look, self._beats_of(seen.look)
        self._table.period_s = look_s(len(beats), self._period_s, self.signs.suspect_after_s)
        self.signs.note(beats, self._table.period_s)
        if self._is_new_number_taken(beats, look.record):
            self._table.look()
            return
        self.beats = {beat.key: beat for beat in beats}
        self._by_link = {}
        for beat in beats:
            if beat.ways and (way := Way.from_text(beat.ways[0])) is not None:
                self._by_link.setdefault(way.nonce, set()).add(beat.key.nonce)
        leaving = evicted(look.beats)
        if name_of(self.state.key) in leaving and not self.state.is_leaving:
            logger.warning("somebody has asked this replica to leave its group")
            self._step(st.Leave())
        places = tuple([self._place_in(beat) for beat in beats if not _is_old(beat)])
        known = self._base()
        evict = frozenset(key.number for key in known if name_of(key) in leaving)
        self._look_after_others(newest)
        self._step(st.Looked(look.record, seen.table, places, evict))
        unknown, self._unknown = self._unknown, deque(maxlen=_MOST_UNKNOWN)
        for frame in unknown:
            if frame.content[:16] in self._by_link.get(frame.link, ()):
                self._hear(frame)

    def _beats_of(self, look: Look) -> list[Beat]:
        """Return the beats in a look, by rising key; a text that has not changed is not parsed."""
        before, self._read, beats = self._read, {}, []
        for name, text in look.beats.items():
            beat = before[text] if text in before else Beat.from_bytes(text)
            self._read[text] = beat
            # A beat under another process's name does not count.
            if beat is not None and name_of(beat.key) == name:
                count = look.counts.get(name, beat.counter)
                beats.append(beat if count == beat.counter else replace(beat, counter=count))
        return sorted(beats, key=lambda one: one.key)

    def _place_in(self, beat: Beat) -> st.Place:
        is_fresh = self.signs.is_fresh(beat.key.nonce)
        return beat.place if is_fresh else replace(beat.place, is_fresh=False)

    def _is_new_number_taken(self, beats: Sequence[Beat], record: bytes) -> bool:
        """Overridden: change the replica number if another process has it; return whether so."""
        return False

    def _note_loss(self, error: TableAway) -> None:
        if self.loss is None or error.is_other != self.loss.is_other:
            level = logging.ERROR if error.is_other else logging.WARNING
            logger.log(level, "rounds go on, but nobody can come or go: %s", error)
        if self.loss is None or error.is_refused != self.loss.is_refused:
            self._loss_since = time.monotonic()
        self.loss = error
        self._say_whether_cut_off()
        if error.is_refused and time.monotonic() - self._loss_since > _KEY_WAIT_S:
            self._end("refused", str(error))
            self.is_broken = True
            self._break_off()

    def _say_whether_cut_off(self) -> None:
        """Tell the others over the link whether this process reaches the table.

        A process that does not reach the table cannot change its group, so the others do not give
        it up as busy.
        """
        self.signs.is_cut_off = self.loss is not None
        self.signs.set_progress(self.inner_step, self.phase)

    # ------------------------------------------------------------------------------- messages

    def _listen(self) -> None:
        """Take frames from the link, on a thread of its own."""
        link, service = self.signs.link, self.signs.service
        with contextlib.suppress(RuntimeError):  # The link was closed.
            while not self._is_closing:
                for nonce, content in link.told(service, _LISTEN_S):
                    if self._events.qsize() < _MOST_HEARD:
                        self._events.put(_Frame(nonce, content))

    def _hear(self, frame: _Frame) -> None:
        nonce, kind, content = frame.content[:16], frame.content[16:17], frame.content[17:]
        if nonce not in self._by_link.get(frame.link, ()):
            # The sender's beat is not known: read the table, and handle the frame if it is there.
            self._unknown.append(frame)
            self._table.look()
            return
        if kind == bytes([_ASK]):
            shown = zlib.compress(self._shown.encode())
            self._send(nonce, _SHOWN, shown if len(shown) < ms.MAX_MESSAGE_BYTES else b"")
        elif kind == bytes([_SHOWN]):
            self._take_shown(nonce, content)
        elif kind == bytes([_WITHOUT]) and len(content) % 4 == 0 and len(content) > 4:
            number, *numbers = struct.unpack(f"<{len(content) // 4}I", content)
            self.left_out_by = number, tuple(numbers)
        elif kind == bytes([_LEFT]) and len(content) == 8:
            self.signs.has_left(nonce, int.from_bytes(content, "little", signed=True))
            self._look_after_others()
        else:
            try:
                message = ms.decode(content)
            except ValueError as error:
                logger.debug("a message of another process is not read: %s", error)
                return
            self._step(st.Heard(nonce, message))

    def _send(self, nonce: bytes, kind: int, content: bytes) -> None:
        way = self.signs.way_to(nonce)
        if way is not None:
            frame = self.state.nonce + bytes([kind]) + content
            # The core repeats a message that the link cannot send. A process that waits for others
            # does not wait for that: it sends the message as soon as the link has connected.
            with contextlib.suppress(RuntimeError):
                has_left = self.signs.link.tell(way.nonce, self.signs.service, frame)
                if self._hastens and not has_left and len(self._unsent) < _MOST_UNKNOWN:
                    self._unsent[nonce, kind] = content

    def _take_shown(self, nonce: bytes, content: bytes) -> None:
        """Refuse with the setting that differs, as another process has now shown its settings."""
        if self._refused is None or self._refused[2].nonce != nonce:
            return
        self._refuse(self._words_of_difference(self._refused[2].number, shown_of(content)))

    def _ask_again(self) -> None:
        """Ask again for another process's settings; after ``_ASK_S``, refuse without them."""
        if self._refused is None:
            return
        action, until, other = self._refused
        if time.monotonic() > until:
            self._refuse(self._difference_of_links(other) or action.reason)
        else:
            self._send(other.nonce, _ASK, b"")

    def _difference_of_links(self, other: Key) -> str:
        """Overridden: say how the links of both processes differ, so that they cannot connect.

        Returns:
            One sentence; "" if they do not differ.
        """
        return ""

    def _refuse(self, reason: str) -> None:
        """End this process, or fail its caller's demand, as settings differ."""
        assert self._refused is not None
        if isinstance(self._refused[0], st.Fail):
            self._order(replace(self._refused[0], reason=reason))
        else:
            self._end("refused", reason)
        self._refused = None

    def _forget_refusal(self) -> None:
        """Drop a refusal of a former demand, which the caller of the next one must not get."""
        self._refused = None
        with self._news:
            self._orders.pop(st.Fail, None)

    def _words_of_difference(self, other: int, shown: str) -> str:
        """Say how the settings of another process differ from the own ones."""
        numbers = self.state.key.number, other
        return ms.other_settings(self.state.settings.run, *numbers, self._shown, shown)

    # -------------------------------------------------------------------------------- actions

    def _step(self, event: st.Event) -> None:
        before = self.state
        self.state, actions = step(before, event)
        for action in actions:
            self._carry_out(action)
        if self.state is not before and _is_news(before, self.state):
            # A look also publishes a beat: the others shall learn of the change at once.
            self._table.look()

    def _carry_out(self, action: st.Action) -> None:
        if isinstance(action, st.Send):
            self._send(action.nonce, _MESSAGE, ms.encode(action.message))
        elif isinstance(action, st.Read):
            self._table.look()
        elif isinstance(action, st.Swap):
            self._table.ask_swap(action.old, action.new)
        elif isinstance(action, st.Seal):
            self._order(action)
            self.is_broken = True
            if not action.is_patient:
                self._break_off()
        elif isinstance(action, st.Enter):
            self.is_change_wanted = self.is_broken = False
            self._unsent = {}
            self._has_entered(action.record)
            self._order(action, drops=(st.Seal, st.Connect, st.Fail))
        elif isinstance(action, st.Refuse | st.Fail) and action.other is not None:
            self._refused = action, time.monotonic() + _ASK_S, action.other
            self._ask_again()
        elif isinstance(action, st.Connect):
            self._tell_left_out(action.members)
            self._order(action)
        elif isinstance(action, st.Fail):
            self._order(action)
        elif isinstance(action, st.Pend):
            self.is_change_wanted = True
        elif isinstance(action, st.PutOff):
            seconds = action.num_polls * self._period_s
            said = "replica %d is not let in for %.0f s, as no group with it could connect: %s"
            logger.warning(said, action.number, seconds, action.failure)
        elif isinstance(action, st.Wait):
            self._waiting_since = (self._waiting_since or time.monotonic()) * bool(action.reason)
            self.waiting_for = action.reason
            self._say_waiting(action.reason)
        elif isinstance(action, st.End):
            self._end(_KINDS[type(action)], action.reason)

    def _tell_left_out(self, members: Collection[Key]) -> None:
        """Tell the members that an attempt leaves out with which members the attempt goes on."""
        away = [key for key in self._base() if key not in members] if self.state.record else []
        numbers = [self.state.number, *[key.number for key in members]]
        for key in away:
            self._send(key.nonce, _WITHOUT, struct.pack(f"<{len(numbers)}I", *numbers))

    def _order(self, order: Order, drops: Collection[type] = ()) -> None:
        with self._news:
            for kind in drops:
                self._orders.pop(kind, None)
            self._orders[type(order)] = order
            self._news.notify_all()

    def _break_off(self) -> None:
        """Let the rounds fail for which the training thread waits."""
        try:
            self._break()
        except RuntimeError as error:
            logger.warning("a round could not be broken off: %s", error)

    def _end(self, kind: str, reason: str) -> None:
        with self._news:
            self._ended = self._ended or Ended(kind, reason)
            self._news.notify_all()

    # ------------------------------------------------------------- for the rooms above this one

    def _has_entered(self, record: Record) -> None:
        """Overridden: called when this process has entered a record."""

    def _say_waiting(self, reason: str) -> None:
        """Overridden: tell the user why this process waits; "" when it waits no longer."""

    def _say_suspected(self, numbers: tuple[int, ...]) -> None:
        """Overridden: tell the user which members have fallen silent."""


def _is_old(beat: Beat) -> bool:
    """Whether the process of a beat has ended without ever entering a record."""
    return beat.is_gone and beat.place.entered == NO_RECORD and not beat.place.is_finished


def _is_news(before: st.State, after: st.State) -> bool:
    """Whether a beat of the new state differs in fields by which other processes decide."""
    names = ("entered", "has_state", "follows", "is_leaving", "is_finished", "cuts")
    has_gone = after.stage is st.Stage.GONE and before.stage is not st.Stage.GONE
    return has_gone or any(getattr(before, name) is not getattr(after, name) for name in names)


def look_s(num_beats: int, least_s: float, suspect_after_s: float) -> float:
    """Return the seconds between two looks at the table: a large group looks less often.

    Args:
        num_beats: Processes that beat.
        least_s: The shortest time to return.
        suspect_after_s: A third of this time is the longest to return, unless ``least_s`` is more.
    """
    longest_s = max(least_s, min(_LONGEST_LOOK_S, suspect_after_s / 3))
    return min(max(least_s, num_beats * _LOOK_S), longest_s)


def shown_of(content: bytes) -> str:
    """Return the settings of another process from its answer, as JSON; "" if it holds none."""
    try:
        return zlib.decompressobj().decompress(content, _MOST_SHOWN).decode()
    except (zlib.error, UnicodeDecodeError):
        return ""
