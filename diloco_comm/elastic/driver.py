"""The driver of an elastic replica: its number, its launcher's folder, and its happenings."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..group import driver as group
from ..group.beats import Beat, name_of
from ..group.records import Key, Record
from ..group.signs import Signs
from ..group.state import Action, Drained, Fence, Leave, Stage, State
from ..group.table import Look, Table, TableAway
from .exits import is_asked_to_leave
from .happenings import Fenced, Suspected, Waiting
from .numbers import NumberChoice
from .registry.client import RegistryClient
from .registry.protocol import KeyRefused, Registry, RegistryMismatch, RegistryUnavailable
from .state_folder import StateFolder

logger = logging.getLogger(__name__)

T = TypeVar("T")

_open: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver(group.Driver):
    """Carry out the decisions of the core for one replica.

    Args:
        say: Called with each ``Happening``, on the driver's thread.
        registry_id: Of the registry, for the launcher's folder.
        chooses_number: The number in ``state`` is a guess: take another if it is taken.
        folder: Of the launcher, in which this process notes its number and may be asked to leave.
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

    def start(self) -> None:
        super().start()
        _open.add(self)

    def close(self, patience_s: float = 15.0) -> None:
        _open.discard(self)
        super().close(patience_s)

    def donors(self) -> dict[str, str]:
        """Return where the living members serve that hold the state, by the name of each."""
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
            and beat.ways
            and beat.place.settings == state.settings.digest
        }

    # ------------------------------------------------------------------- the driver's thread

    def _poll(self) -> None:
        is_asked = self._folder is not None and self._folder.is_asked_to_leave
        if (is_asked or is_asked_to_leave()) and not self.state.is_leaving:
            logger.warning("this replica was asked to leave, and leaves at its next boundary")
            self._step(Leave())
        super()._poll()

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
        """Write into the launcher's folder; a full disk there must not end the membership."""
        if self._folder is not None:
            try:
                write(self._folder)
            except (OSError, ValueError) as error:
                logger.warning("the launcher's state folder was not written: %s", error)

    def _say_waiting(self, reason: str) -> None:
        self._say(Waiting(reason))

    def _say_suspected(self, numbers: tuple[int, ...]) -> None:
        self._say(Suspected(numbers))


@atexit.register
def _close_all() -> None:
    for driver in list(_open):
        driver.close()


class RegistryTable:
    """The table of one run: its record and beats at a registry; see ``group.table.Table``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def id(self) -> bytes:
        return bytes.fromhex(self._registry.registry_id)

    def swap(self, old: bytes, new: bytes) -> bool:
        return self._ask(lambda: self._registry.swap(old, new))

    def look(self, name: str, text: bytes) -> Look:
        registry = self._registry
        if isinstance(registry, RegistryClient):
            return Look(*self._ask(lambda: registry.look(name, text)))
        beats = self._ask(lambda: registry.beat(name, text))
        return Look(self._ask(registry.read), beats, {})

    def close(self) -> None:
        self._registry.close()

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RegistryMismatch as error:
            raise TableAway(str(error), is_other=True) from None
        except RegistryUnavailable as error:
            raise TableAway(str(error), is_refused=isinstance(error, KeyRefused)) from None
