"""The thread that beats, polls the registry and carries out what the core decides.

The training thread tells the driver what happens to it, and waits for its orders.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from .. import _C
from ..exchange.membership.own_link import OwnLink
from . import core
from .beats import FINISHED, GONE, READY, TRAINING, Beat
from .core import events as ev
from .exits import Ended, is_asked_to_leave
from .numbers import NumberChoice
from .registry.protocol import (
    KEY_WAIT_S,
    KeyRefused,
    Registry,
    RegistryMismatch,
    RegistryUnavailable,
)
from .state_folder import StateFolder
from .transfer.donors import Place
from .views import View, from_bytes

logger = logging.getLogger(__name__)

# A poll that comes this many periods after the last one says nothing about other processes.
_LATE = 3.0
# Part of a period between two looks of a process that waits to be let in.
_HASTE = 0.2
# Seconds between two looks while a change is under way, and the same as a part of its time so far:
# a change takes tenths of a second, but one that waits for a replica may take many.
_LOOK_S, _PATIENCE = 0.03, 0.1
# Seconds in which the end of the run is written again while the registry does not answer.
_LAST_SWAP_S = 5.0
# Seconds of silence after which a process is not heard any more to which there is no connection.
_LOST_S = 2.0
# The phase of a process that does not hear its registry.
_CUT_OFF = "cut off"
# Seconds after which the link is asked again for ways that it does not have.
_REACH_AGAIN_S = 3.0
# Seconds between two lines about those for whom this process waits.
_LINE_S = 60.0


class Signs:
    """The life of the other members, as the link of this process hears it.

    Args:
        own: The link of this process.
        service: Names what the link connects for this object, equal on all members.
        suspect_after_s: Seconds without a byte after which a process is not heard any more.

    Attributes:
        place: The place of the own link, for beats.
        is_cut_off: The registry does not answer here, so that this process cannot change its group.
    """

    def __init__(self, own: OwnLink, service: str, suspect_after_s: float) -> None:
        self._own, self._service, self._suspect_after_s = own, service, suspect_after_s
        self.is_cut_off = False
        ways = own.ways()
        self.place = Place(ways["link"], ways["address"], ways["link key"], ways["relay"])
        # By nonces of processes: their links, and what was heard at the last look.
        self._places: dict[str, Place] = {}
        self._lives: dict[str, _C.PeerLife] = {}
        self._ended: set[str] = set()
        self._mutex = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._news, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._reach, daemon=True, name="diloco_comm signs")

    def start(self) -> None:
        self._thread.start()

    def want(self, nonces: Iterable[str]) -> None:
        """Let the link connect to these processes, as far as their links are known."""
        wanted = frozenset(nonces)
        if wanted != self._wanted:
            self._wanted = wanted
            self._news.set()

    def _reach(self) -> None:
        """Let the link connect, on a thread of its own: a name server may take its time."""
        with contextlib.suppress(RuntimeError):  # The link was closed.
            while not self._is_closed:
                known = [(nonce, self._places.get(nonce)) for nonce in sorted(self._wanted)]
                ways = [at.way for _, at in known if at is not None and at != self.place]
                self._own.link.reach(self._service, ways)
                self._news.wait(_REACH_AGAIN_S)
                self._news.clear()
            self._own.link.reach(self._service, [])

    def close(self) -> None:
        """Let the link connect to nobody any more; idempotent."""
        self._is_closed = True
        self._news.set()

    def set_progress(self, inner_step: int, phase: str) -> None:
        """Say to the others how far this process is, see ``DiLoCo.doing``."""
        with self._mutex:
            self._own.link.set_progress(inner_step, _CUT_OFF if self.is_cut_off else phase)

    def look(self, beats: Sequence[Beat]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the nonces of processes that have ended, and of those that the link hears."""
        for beat in beats:
            place = Place.from_text(beat.link)
            if beat.stage in (GONE, FINISHED):
                # Its own word is enough.
                self._places.pop(beat.member.nonce, None)
            elif place is not None and place != self._places.get(beat.member.nonce):
                self._places[beat.member.nonce] = place
                self._news.set()
        # Processes come and go: those that neither beat nor are wanted are forgotten.
        kept = self._wanted | {beat.member.nonce for beat in beats}
        self._places = {nonce: at for nonce, at in self._places.items() if nonce in kept}
        lives, places = self._own.life(), self._places.items()
        self._lives = {nonce: lives[at.nonce] for nonce, at in places if at.nonce in lives}
        heard = tuple(nonce for nonce in self._lives if self._is_heard(nonce))
        # A process that has ended stays so when the link is not asked for it any more.
        self._ended |= {nonce for nonce, life in self._lives.items() if life.is_refused}
        self._ended -= set(heard)
        self._ended &= {beat.member.nonce for beat in beats}
        return tuple(sorted(self._ended)), heard

    def _is_heard(self, nonce: str) -> bool:
        life = self._lives[nonce]
        limit = self._suspect_after_s if life.is_connected else _LOST_S
        is_lost = life.is_refused or life.phase == _CUT_OFF
        return life.silent_s < limit and not is_lost

    def waited_for(self, view: View, silent: Collection[str], waited: float) -> list[str]:
        """Describe the members that live and take no part, if this process waits for them.

        Args:
            silent: Nonces of processes whose beats stand still.
            waited: Seconds for which the training thread has waited.
        """
        texts = []
        for member in view.members:
            life = self._lives.get(member.nonce)
            if life is None or not self._is_heard(member.nonce):
                continue
            # Others may wait for the same member.
            is_still = life.phase != "exchange" and life.still_s >= self._suspect_after_s
            is_still &= waited >= self._suspect_after_s
            if member.nonce in silent or is_still:
                at = f"inner step {life.inner_step}"
                phase = f", phase {life.phase}" if life.phase else ""
                texts.append(f"replica {member.id} ({at}{phase}, still for {life.still_s:.0f} s)")
        return texts


_open: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """Carry out the core's decisions for one process.

    Args:
        registry: Used by the driver's thread alone from now on.
        state: The core's first state.
        period_s: Seconds between two polls.
        say: Called with each action of the core, on the driver's thread.
        chooses_number: The number in ``state`` is a guess: take another if it is taken.
        folder: Of the launcher, in which this process notes its number and may be asked to leave.
        signs: The life of other processes.

    Attributes:
        state: The core's newest state.
        is_change_wanted: Headers shall ask for a boundary.
        is_broken: Another member has stopped: the training thread shall stop too.
        inner_step: That this process has reached, or of its checkpoint, for its beats.
        positions: For its beats, see there.
        waits_since: Since when the training thread may wait for the other members; 0: it does not.
        waiting_for: The reason for which the core waits; "" for nothing.
        loss: Why the last poll had no answer of this process's registry; None if it had one.
        serves, phase: For its beats, see there.
        beats: The last beat of every process; None before the first poll.
    """

    def __init__(
        self,
        registry: Registry,
        state: core.State,
        *,
        period_s: float,
        say: Callable[[ev.Action], None],
        signs: Signs,
        chooses_number: bool = False,
        folder: StateFolder | None = None,
    ) -> None:
        self._registry, self._period_s, self._say = registry, period_s, say
        self.state = state
        self._folder = folder
        before = None if folder is None else folder.last_process(state.settings.run)
        self._choice = NumberChoice(before) if chooses_number else None
        self.is_change_wanted = self.is_broken = False
        self.loss: Exception | None = None
        self.inner_step = 0
        self.positions: tuple[int, ...] = ()
        self.waiting_for = ""
        self.waits_since = 0.0
        self.serves, self.phase = False, ""
        self.beats: Sequence[Beat] | None = None
        self._break: Callable[[], None] = lambda: None
        self._events: queue.SimpleQueue[ev.Event | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._form: ev.Form | None = None
        self._entered: View | None = None
        self._abandoned = -1
        self._ended: Ended | None = None
        self._counter = 0
        self.signs = signs
        self._line_at = 0.0
        self._has_warned = False
        self._loss_since = 0.0
        self._last_poll = self._last_answer = self._stage_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="diloco_comm views")

    def start(self) -> None:
        self.signs.start()
        self._thread.start()
        _open.add(self)

    def close(self) -> None:
        """End the thread and the connection to the registry; idempotent.

        The others learn that this process takes no further part.
        """
        _open.discard(self)
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(2 * self._period_s + 5.0 + 2 * _LAST_SWAP_S)

    # --------------------------------------------------------------- for the training thread

    def tell(self, event: ev.Event) -> None:
        """Tell the core what has happened to the training thread."""
        if isinstance(event, ev.Broke | ev.Boundary):
            self.is_change_wanted = self.is_broken = False
        self._events.put(event)

    def on_break(self, function: Callable[[], None]) -> None:
        """Call ``function``, on the driver's thread, when a round under way is to fail."""
        self._break = function

    def next_form(self, timeout_s: float) -> ev.Form | Ended | None:
        """Return the newest attempt to take part in, once; None if there was none in time."""
        with self._news:
            self._news.wait_for(lambda: self._form or self._ended, timeout_s)
            form, self._form = self._form, None
            return form or self._ended

    @property
    def has_order(self) -> bool:
        """Whether ``next_form`` would return at once."""
        return self._form is not None or self._ended is not None

    def donors(self) -> dict[str, str]:
        """Return where the living members serve that hold the state, by id and nonce."""
        state = self.state
        view = state.recorded
        members = () if view is None else view.last_open[1]
        limit = state.settings.suspect_after
        silent = {peer.key for peer in state.peers if peer.silent_polls >= limit}
        return {
            name_of(beat.member.id, beat.member.nonce): beat.link
            for beat in self.beats or ()
            if beat.member.key in members
            and beat.member.key not in silent
            and beat.has_state
            and beat.serves
            and beat.stage not in (GONE, FINISHED)
            and beat.member.settings == state.member.settings
        }

    def wait_until_open(self, number: int, timeout_s: float) -> View | Ended | None:
        """Wait for a view to be open; None if the attempt is given up, or nothing was decided."""

        def is_decided() -> bool:
            is_open = self._entered is not None and self._entered.number >= number
            return is_open or self._abandoned >= number or self._ended is not None

        with self._news:
            self._news.wait_for(is_decided, timeout_s)
            if self._entered is not None and self._entered.number == number:
                return self._entered
            return self._ended

    def is_given_up(self, number: int) -> bool:
        """Whether an attempt is to fail."""
        return self._abandoned >= number or self._ended is not None

    @property
    def waits(self) -> str:
        """The reason for which this process waits; "" for nothing."""
        return self.waiting_for if self.loss is None else f"for the registry: {self.loss}"

    def warn_if_ended(self) -> None:
        """Log once that this replica's group cannot change any more."""
        if self._ended is not None and self._ended.kind == "failed" and not self._has_warned:
            self._has_warned = True
            logger.error("this replica trains on until its group changes: %s", self._ended.reason)

    # ------------------------------------------------------------------- the driver's thread

    def _run(self) -> None:
        try:
            while self._ended is None:
                if not self._take_turn():
                    break
        except Exception as error:
            logger.exception("membership of replica %d has failed", self.state.member.id)
            self._end("failed", f"{type(error).__name__}: {error}")
        finally:
            self._say_goodbye()
            self.signs.close()
            self._registry.close()

    def _take_turn(self) -> bool:
        """Handle one event, or poll; return False when the thread shall end."""
        due = self._last_poll + self._period_s - time.monotonic()
        pause = min(due, self._pause())
        try:
            event = self._events.get(timeout=max(0.0, pause))
        except queue.Empty:
            # Between two polls that measure time, one that waits for others looks more often.
            self._poll(is_extra=pause < due)
            return True
        if event is None:
            return False
        self._step(event)
        # The others shall learn of it at once.
        self._poll(is_extra=True)
        return True

    def _pause(self) -> float:
        """Return the seconds until the next look, which may be one between two that measure."""
        if self.loss is not None:
            return self._period_s
        if self.state.stage not in (READY, TRAINING):
            return max(_LOOK_S, _PATIENCE * (time.monotonic() - self._stage_since))
        return _HASTE * self._period_s if self.state.is_outside else self._period_s

    def _poll(self, *, is_extra: bool) -> None:
        now = time.monotonic()
        self._leave_if_asked()
        # A slow answer of the registry is no standstill of this process.
        is_late = is_extra or now - self._last_answer > _LATE * self._period_s
        if not is_extra:
            self._last_poll = now
        self._counter += 1
        member = self.state.member
        beat = core.beat_of(self.state, self._counter, self.inner_step, self.positions)
        link = self.signs.place.to_text()
        beat = replace(beat, link=link, serves=self.serves, phase=self.phase)
        try:
            texts = self._registry.beat(name_of(member.id, member.nonce), beat.to_bytes())
            record = self._registry.read()
        except (RegistryUnavailable, RegistryMismatch) as error:
            self._note_loss(error)
            self._last_answer = time.monotonic()
            return
        self._last_answer = time.monotonic()
        if self.loss is not None:
            self.loss = None
            self._say_whether_cut_off()
            logger.warning("the registry answers again")
        found = [Beat.from_bytes(text) for text in texts.values()]
        beats = sorted((one for one in found if one is not None), key=lambda one: one.member.key)
        if self._choice is not None and self._take_free_number(beats, record):
            return
        view = self._view_in(record)
        base = () if view is None else (*view.keys, *view.base_members)
        self.signs.want(nonce for _, nonce in base)
        ended, heard = self.signs.look(beats)
        self._step(ev.Polled(record, tuple(beats), is_late, ended, heard))
        self.beats = beats
        if not is_extra:
            self._break_off_silent_round()
            self._say_who_is_waited_for()

    def _leave_if_asked(self) -> None:
        is_asked = self._folder is not None and self._folder.is_asked_to_leave
        if (is_asked or is_asked_to_leave()) and not self.state.is_leaving:
            logger.warning("this replica was asked to leave, and leaves at its next boundary")
            self._step(ev.Leave())

    def _break_off_silent_round(self) -> None:
        """Let a round fail that waits for a member of which nothing is heard.

        The members' own connections do not tell where that member hosts the store of the view.
        """
        if self._waited < 2 * self._period_s or self.state.stage != TRAINING:
            return
        if self.is_broken or core.silent_members(self.state):
            self.is_broken = True
            self._break_off()

    @property
    def _waited(self) -> float:
        """Seconds for which the training thread has waited."""
        return time.monotonic() - self.waits_since if self.waits_since else 0.0

    def _say_who_is_waited_for(self) -> None:
        """Log once a minute for whom the group waits, though they live."""
        view, limit = self.state.recorded, self.state.settings.suspect_after
        if view is None or self.state.key not in view.keys:
            return
        silent = {peer.key[1] for peer in self.state.peers if peer.silent_polls >= limit}
        texts = self.signs.waited_for(view, silent, self._waited)
        now = time.monotonic()
        if texts and now - self._line_at >= _LINE_S:
            self._line_at = now
            logger.warning("waiting for %s: alive, and not taking part", ", ".join(texts))

    def _take_free_number(self, beats: Sequence[Beat], record: bytes) -> bool:
        """Take another number where an earlier process has this one; return whether it did."""
        assert self._choice is not None
        own = self.state.member
        if self.state.stage != READY:
            self._choice = None
            return False
        free = self._choice.instead_of(own, beats, self._view_in(record))
        if free is None:
            return False
        with contextlib.suppress(RegistryUnavailable, RegistryMismatch):
            self._registry.beat(name_of(own.id, own.nonce), b"")
        self.state = replace(self.state, member=replace(own, id=free))
        return True

    def _view_in(self, record: bytes) -> View | None:
        return from_bytes(record, self.state.settings.run) if record else None

    def _note_loss(self, error: Exception) -> None:
        if type(error) is not type(self.loss):
            is_other = isinstance(error, RegistryMismatch)
            level = logging.ERROR if is_other else logging.WARNING
            logger.log(level, "rounds go on, but nobody can come or go: %s", error)
            self._loss_since = time.monotonic()
        self.loss = error
        self._say_whether_cut_off()
        is_refused = isinstance(error, KeyRefused)
        if is_refused and time.monotonic() - self._loss_since > KEY_WAIT_S:
            self._end("refused", str(error))
            self.is_broken = True
            self._break_off()

    def _say_whether_cut_off(self) -> None:
        """Nobody waits for ``busy_after`` for a process that could not come to a new group."""
        self.signs.is_cut_off = self.loss is not None
        self.signs.set_progress(self.inner_step, self.phase)

    def _step(self, event: ev.Event) -> None:
        stage = self.state.stage
        self.state, actions = core.step(self.state, event)
        if self.state.stage != stage:
            self._stage_since = time.monotonic()
        for action in actions:
            self._say(action)
            self._carry_out(action)

    def _carry_out(self, action: ev.Action) -> None:
        if isinstance(action, ev.Swap):
            self._swap(action)
        elif isinstance(action, ev.Form):
            self._publish(_form=action)
        elif isinstance(action, ev.Enter):
            self._publish(_entered=action.view, is_change_wanted=False, is_broken=False)
            view, registry_id = action.view, self._registry.registry_id
            self._note(
                lambda folder: folder.remember(
                    view.run, self.state.key, registry_id=registry_id, view=view.number
                )
            )
        elif isinstance(action, ev.Abandon):
            self._abandon(action.number)
        elif isinstance(action, ev.Pend):
            self.is_change_wanted = True
        elif isinstance(action, ev.Break):
            self.is_broken = True
            self._break_off()
        elif isinstance(action, ev.Fence):
            self._end("fenced", action.reason)
        elif isinstance(action, ev.Refuse):
            self._end("refused", action.reason)
        elif isinstance(action, ev.Over):
            self._end("over", action.reason)
        elif isinstance(action, ev.Drained):
            is_finished = self.state.stage == FINISHED
            self._note(StateFolder.note_end if is_finished else StateFolder.note_leaving)
            self._end("drained", "this replica has left")
        elif isinstance(action, ev.Wait):
            self.waiting_for = action.reason

    def _note(self, write: Callable[[StateFolder], None]) -> None:
        """Write into the launcher's folder; a full disk there must not end the membership."""
        if self._folder is not None:
            try:
                write(self._folder)
            except (OSError, ValueError) as error:
                logger.warning("the launcher's state folder was not written: %s", error)

    def _swap(self, action: ev.Swap) -> None:
        is_done, until = self._try_swap(action), time.monotonic() + _LAST_SWAP_S
        while is_done is None and self.state.stage == FINISHED and time.monotonic() < until:
            # No poll repeats what a process writes at its end.
            time.sleep(self._period_s)
            is_done = self._try_swap(action)
        self._step(ev.Swapped(action.old, action.new, is_done))

    def _try_swap(self, action: ev.Swap) -> bool | None:
        """Return whether the record was replaced; None if that is unknown."""
        try:
            return self._registry.swap(action.old, action.new)
        except (RegistryUnavailable, RegistryMismatch) as error:
            self._note_loss(error)
            return None

    def _abandon(self, number: int) -> None:
        with self._news:
            waits = self._form is not None and self._form.view.number == number
            if waits:
                # The training thread has not heard of the attempt: it cannot fail there.
                self._form = None
                self._events.put(ev.Failed(number, (), has_voted=False))
        self._publish(_abandoned=number)
        if not waits:
            self._break_off()

    def _break_off(self) -> None:
        """Let what the training thread waits for fail."""
        try:
            self._break()
        except RuntimeError as error:
            logger.warning("a round could not be broken off: %s", error)

    def _publish(self, **values: object) -> None:
        with self._news:
            for name, value in values.items():
                setattr(self, name, value)
            self._news.notify_all()

    def _end(self, kind: str, reason: str) -> None:
        self._publish(_ended=Ended(kind, reason))

    def _say_goodbye(self) -> None:
        """Leave a last beat that says how this process ended; the others need not suspect it."""
        member = self.state.member
        beat = core.beat_of(self.state, self._counter + 1, self.inner_step)
        if beat.stage != FINISHED:
            beat = replace(beat, stage=GONE)
        if self.loss is not None:
            return
        with contextlib.suppress(RegistryUnavailable, RegistryMismatch, ValueError):
            self._registry.beat(name_of(member.id, member.nonce), beat.to_bytes())


@atexit.register
def _close_all() -> None:
    for driver in list(_open):
        driver.close()


def name_of(id: int, nonce: str) -> str:
    """Return the name under which a process beats."""
    return f"{id}.{nonce}"
