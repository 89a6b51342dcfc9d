"""One real core for tests of single rules: it is told events, and its actions are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from agreement_world import nonce_of, settings_of

from diloco_comm.group import messages as ms
from diloco_comm.group import state as st
from diloco_comm.group.agreement import step
from diloco_comm.group.records import NO_HASH, NO_RECORD, Attempt, Key, Record
from diloco_comm.group.streams import Rounds

A = TypeVar("A")
TABLE = b"t" * 16
ONE_VOTE = (Rounds(0, 1, 1),)
NO_VOTE = (Rounds(0, 0, 0),)


def key(number: int, start: int = 0) -> Key:
    return Key(number, nonce_of(number, start))


def record_of(*numbers: int, **values: Any) -> Record:
    """Return a record of processes that have started once; the lowest is its source."""
    members = tuple(key(number) for number in numbers)
    one = Record(1, NO_HASH, TABLE, NO_HASH, Attempt(members[0].nonce, 1), members)
    return replace(one, **{"source": numbers[0], "joined": numbers, **values})


def after(record: Record, *numbers: int, **values: Any) -> Record:
    """Return a record that follows another."""
    members = tuple(key(number) for number in numbers)
    attempt = Attempt(members[0].nonce, 1)
    one = Record(record.number + 1, record.hash, TABLE, record.run_id, attempt, members)
    return replace(one, **values)


def place_of(number: int, start: int = 0, **values: Any) -> st.Place:
    return st.Place(key(number, start), b"s" * 16, **values)


def members_places(record: Record) -> tuple[st.Place, ...]:
    """Return the places of members that hold the state of their record."""
    return tuple(
        st.Place(one, b"s" * 16, entered=record.number, has_state=True) for one in record.members
    )


class Core:
    """One process.

    Attributes:
        said: The actions of the last event.
    """

    def __init__(self, number: int, **settings: Any) -> None:
        self.state = st.State(settings_of(**settings), key(number))
        self.said: list[st.Action] = []

    def tell(self, event: st.Event) -> list[st.Action]:
        self.state, actions = step(self.state, event)
        self.said = list(actions)
        return self.said

    def hear(self, number: int, message: ms.Message, start: int = 0) -> list[st.Action]:
        return self.tell(st.Heard(nonce_of(number, start), message))

    def look(self, record: Record | None, places: tuple[st.Place, ...] = (), **values: Any) -> Any:
        content = b"" if record is None else record.to_bytes()
        own = [] if any(p.key == self.state.key for p in places) else [st.place_of(self.state, 0)]
        return self.tell(st.Looked(content, values.pop("table", TABLE), (*places, *own), **values))

    def poll(self, times: int = 1) -> list[st.Action]:
        """Let polls pass; return all actions of them."""
        said = []
        for _ in range(times):
            said += self.tell(st.Passed())
        self.said = said
        return said

    def only(self, kind: type[A]) -> A:
        """Return the only action, or message that is sent, of a kind."""
        (one,) = self.all(kind)
        return one

    def all(self, kind: type[A]) -> list[A]:
        sent = [action.message for action in self.said if isinstance(action, st.Send)]
        return [one for one in (*self.said, *sent) if isinstance(one, kind)]

    @property
    def reason(self) -> str:
        return self.state.waits_for


def member(
    number: int, record: Record, places: tuple[st.Place, ...] | None = None, **settings: Any
) -> Core:
    """Return a process that trains in a record, and holds its state."""
    core = Core(number, **settings)
    core.look(record, members_places(record) if places is None else places)
    core.tell(st.Started(record.number))
    assert core.state.stage is st.Stage.TRAINING and core.state.has_state
    return core


def sealed(core: Core, positions: tuple[Rounds, ...] = ONE_VOTE, inner_step: int = 10) -> Core:
    """Let a round of a process fail, and its training thread stop."""
    core.tell(st.Broke(core.state.number))
    core.tell(st.Sealed(core.state.number, positions, inner_step))
    return core


def prepare(record: Record | None, *numbers: int, counter: int = 1, **values: Any) -> ms.Prepare:
    """Return the PREPARE of the lowest of some processes on a record."""
    one = ms.Prepare(
        Attempt(nonce_of(numbers[0]), counter),
        NO_RECORD if record is None else record.number,
        NO_HASH if record is None else record.hash,
        tuple(sorted(key(number) for number in numbers)),
        (),
        b"s" * 16,
        TABLE,
    )
    return replace(one, **values)


def leads(
    core: Core, dead: tuple[int, ...] = (), positions: tuple[Rounds, ...] = ONE_VOTE
) -> Attempt:
    """Let a process see deaths, and lead an attempt; return that attempt."""
    core.tell(st.Life(dead=frozenset(nonce_of(number) for number in dead)))
    core.tell(st.Sealed(core.state.number, positions, 10))
    assert core.state.proposal is not None
    attempt = core.state.proposal.draft.attempt
    core.tell(st.Connected(attempt))
    return attempt


def attempt_of(number: int, counter: int = 1) -> Attempt:
    return Attempt(nonce_of(number), counter)


def life(*dead: int, suspected: tuple[int, ...] = ()) -> st.Life:
    return st.Life(frozenset(map(nonce_of, suspected)), frozenset(map(nonce_of, dead)))


def swapped(core: Core, outcome: st.Outcome = st.Outcome.DONE) -> list[st.Action]:
    return core.tell(st.Swapped(core.only(st.Swap).new, outcome))


def at_boundary(core: Core, has_all_votes: bool = True) -> Core:
    core.tell(st.Boundary(core.state.number, ONE_VOTE, 12, has_all_votes))
    return core
