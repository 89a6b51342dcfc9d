"""The driver of an elastic replica: adds the replica's number, its state folder and its events."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from ..base.checks import logger_of
from ..group import driver as group
from ..group.beats import PULLING, READY, Beat, name_of
from ..group.records import NO_RECORD, Key, Record
from ..group.signs import Signs
from ..group.state import Action, Drained, Fence, Leave, Stage, State
from ..group.table import Seen, Table
from .events import Fenced, Suspected, Waiting
from .exits import is_asked_to_leave
from .state_folder import StateFolder

logger = logger_of(__name__)

_open: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver(group.Driver):
    """Carry out the decisions of the core for one replica of an elastic group.

    Args:
        table, state, signs, period_s, shown: As for ``group.driver.Driver``.
        say: Called with each ``Waiting``, ``Suspected`` and ``Fenced``, on the driver's thread.
        registry_id: The registry's id, to be noted in ``folder``.
        chooses_number: The replica number in ``state`` is a guess: if another process has it, take
            a free one.
        folder: The launcher's state folder, where this process notes its number, and where it may
            be asked to leave; None without a launcher.
    """

    def __init__(
        self,
        table: Table,
        state: State,
        signs: Signs,
        *,
        period_s: float,
        shown: str,
        say: Callable[[Any], None],
        registry_id: str = "",
        chooses_number: bool = False,
        folder: StateFolder | None = None,
    ) -> None:
        super().__init__(table, state, signs, period_s=period_s, shown=shown)
        self._say, self._folder, self._registry_id = say, folder, registry_id
        before = None if folder is None else folder.last_process(state.settings.run)
        self._choice = NumberChoice(before) if chooses_number else None
        self._told: set[str] = set()
        # Number of the newest record that this process has seen, and the time of its first look.
        self._newest = NO_RECORD, 0.0

    def start(self) -> None:
        super().start()
        _open.add(self)

    def close(self, patience_s: float = 15.0) -> None:
        _open.discard(self)
        super().close(patience_s)

    def donors(self) -> dict[str, str]:
        """Return the addresses of the living members that serve the outer state, by their names."""
        state = self.state
        record = state.record or state.in_table
        members = () if record is None else record.members
        gone = state.life.suspected | state.life.dead
        return {
            name_of(beat.key): beat.ways[0]
            for beat in (self.beats or {}).values()
            if beat.key in members
            and beat.key.nonce not in gone
            and beat.place.has_state
            and beat.serves
            and (way := self.signs.way_to(beat.key.nonce)) is not None
            and self.signs.is_alike(way)
            and beat.place.settings == state.settings.digest
        }

    @property
    def awaits_beats(self) -> bool:
        """Whether a living member has yet to beat that it has begun in the table's record.

        A member has begun when it has entered the record and holds the outer state: only from then
        on ``donors`` can name it. The wait ends ``suspect_after`` after this process has seen the
        record first: the member may itself wait for a state, which only a newcomer can bring.
        """
        record = self.state.in_table
        if record is None:
            return False
        # The driver's thread notes a record just after ``state`` has it.
        number, since = self._newest
        if number == record.number and time.monotonic() - since > self.signs.suspect_after_s:
            return False
        gone = self.state.life.suspected | self.state.life.dead
        places = [beat.place for key, beat in (self.beats or {}).items() if key in record.members]
        return any(
            one.key.nonce not in gone and not (one.entered >= record.number and one.has_state)
            for one in places
        )

    # ------------------------------------------------------------------- the driver's thread

    def _see(self, seen: Seen) -> None:
        super()._see(seen)
        record = self.state.in_table
        if record is not None and record.number != self._newest[0]:
            self._newest = record.number, time.monotonic()
        if self.state.stage is Stage.NEWCOMER:
            self._compare_keys()

    def _compare_keys(self) -> None:
        """End a newcomer whose link has no keys where a member's has them, or the reverse."""
        for number, nonce in self._base():
            if self.signs.differs(nonce):
                has, have = ("", "no ") if self.signs.way.key else ("no ", "")
                self._end(
                    "refused",
                    f"the link of replica {self.state.key.number} has {has}keys, and the "
                    f"link of replica {number} has {have}keys: give Link(keys=...) to all "
                    "replicas, or to none",
                )

    def _poll(self) -> None:
        is_asked = self._folder is not None and self._folder.is_asked_to_leave
        if (is_asked or is_asked_to_leave()) and self.state.stage is not Stage.GONE:
            words = self._way_out()
            if words not in self._told:
                self._told.add(words)
                logger.warning("this replica was asked to leave, and %s", words)
            if not self.state.is_leaving:
                self._step(Leave())
        super()._poll()

    def _way_out(self) -> str:
        """Return the end of the log line that says when this replica leaves, as it was asked to."""
        if self.loss is None:
            return "leaves at its next boundary"
        own = "its own" if self.loss.is_other else "the"
        words = f"cannot before {own} {self.state.settings.table_name} answers"
        return words + ": a second SIGTERM ends this process" * is_asked_to_leave()

    def _is_new_number_taken(self, beats: Sequence[Beat], record: bytes) -> bool:
        own = self.state.key
        if self._choice is None:
            return False
        if self.state.stage is not Stage.NEWCOMER or self.state.joint is not None:
            self._choice = None
            return False
        free = self._choice.instead_of(own, beats, Record.from_bytes(record) if record else None)
        if free is None:
            return False
        self._table.withdraw(name_of(own))
        self.state = replace(self.state, key=Key(free, own.nonce))
        return True

    def _carry_out(self, action: Action) -> None:
        super()._carry_out(action)
        if isinstance(action, Fence):
            self._say(Fenced(action.reason))
        elif isinstance(action, Drained):
            is_finished = self.state.is_finished
            self._note(StateFolder.note_end if is_finished else StateFolder.note_leaving)

    def _has_entered(self, record: Record) -> None:
        run, key = self.state.settings.run, self.state.key
        self._note(
            lambda folder: folder.remember(
                run, key, registry_id=self._registry_id, view=record.number
            )
        )

    def _note(self, write: Callable[[StateFolder], None]) -> None:
        """Write into the launcher's folder; an error there, as of a full disk, is only logged."""
        if self._folder is not None:
            try:
                write(self._folder)
            except (OSError, ValueError) as error:
                logger.warning("the launcher's state folder was not written: %s", error)

    def _say_waiting(self, reason: str) -> None:
        self._say(Waiting(reason))

    def _say_suspected(self, numbers: tuple[int, ...]) -> None:
        self._say(Suspected(numbers))


class NumberChoice:
    """Finds a replica number that no other process has.

    Args:
        before: The former process of this replica, as the state folder notes it. It has ended, so
            its number is free again. None if there was none.
    """

    def __init__(self, before: Key | None) -> None:
        self._before = before
        self._beat_before = -1

    def instead_of(self, own: Key, beats: Sequence[Beat], record: Record | None) -> int | None:
        """Return the number to take instead of ``own``'s; None to keep that one.

        Args:
            beats: The last beat of every process.
            record: The present record of the run; None before the first.
        """
        self._forget_before_if_alive(beats)
        members = () if record is None else record.members
        if own in members:
            return None
        taken = {key.number for key in members if key != self._before}
        others = [one for one in beats if one.key.nonce != own.nonce and one.key != self._before]
        clash = any(
            one.key.number == own.number
            and (one.stage not in (READY, PULLING) or one.key.nonce < own.nonce)
            for one in others
        )
        if not clash and own.number not in taken:
            return None
        return lowest_free({*taken, *(one.key.number for one in others)})

    def _forget_before_if_alive(self, beats: Sequence[Beat]) -> None:
        """Treat the former process as another replica if it still beats."""
        # A process that has ended beats no more, or its last beat says that it has gone.
        counters = [one.counter for one in beats if one.key == self._before and not one.is_gone]
        if self._before is not None and counters and 0 <= self._beat_before < counters[0]:
            logger.warning(
                "replica %d still runs elsewhere, so that the state folder of this process is a "
                "copy: this process takes another number",
                self._before.number,
            )
            self._before = None
        self._beat_before = counters[0] if counters else -1


def lowest_free(taken: Set[int]) -> int:
    """Return the lowest number that is not taken."""
    return next(number for number in range(len(taken) + 1) if number not in taken)


@atexit.register
def _close_all() -> None:
    for driver in list(_open):
        driver.close()
