"""The chain of records: enter the next one, end where the others go on without this process.

A process enters a record in which it stands, from the record before or, where the run was founded
anew, from any. What a table has forgotten is put back by those who have entered it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from . import state as st
from .messages import Message
from .records import NO_RECORD, Key, Record
from .state import Stage, State


class Turn:
    """Collects what one event leads to."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[st.Action] = []

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def act(self, action: st.Action) -> None:
        self.actions.append(action)

    def send(self, keys: Iterable[Key], message: Message) -> None:
        for key in keys:
            if key != self.state.key:
                self.act(st.Send(key.nonce, message))

    def wait(self, reason: str) -> None:
        if reason != self.state.waits_for:
            self.change(waits_for=reason, num_waits=0)
            self.act(st.Wait(reason))

    def look(self) -> None:
        """Read the table before this process leads another attempt."""
        self.change(is_blind=True)
        self.act(st.Read())

    def seal(self, *, is_patient: bool = False) -> None:
        """Stop for good in the record, once."""
        if self.state.stage in (Stage.TRAINING, Stage.STOPPED):
            self.change(stage=Stage.SEALING, num_waits=0)
            self.act(st.Seal(self.state.number, is_patient))

    def end(self, action: st.Action) -> None:
        self.change(stage=Stage.GONE, proposal=None, bound=None)
        self.act(action)

    def note_cuts(self, nonce: bytes, cut: Iterable[bytes]) -> None:
        """Note that there is no way between a process and some others."""
        pairs = {(nonce, other) for other in cut if other != nonce}
        if pairs:
            self.change(cuts=self.state.cuts | pairs, num_cut_polls=0)


def follow(turn: Turn, content: bytes) -> None:
    """Enter the record of the table, or end because it goes on without this process."""
    state, mine = turn.state, turn.state.record
    record = Record.from_bytes(content)
    if mine is None:
        # A newcomer drops records of this founding that are older than what it has seen.
        highest = state.highest if record.table == state.founding else NO_RECORD
        if record.is_member(state.key) and record.number >= highest:
            enter(turn, content)
        turn.change(founding=record.table, highest=max(highest, record.number))
        return
    if record.number < mine.number or content == state.entered:
        return
    is_next = record.number == mine.number + 1
    is_other = record.table != mine.table
    if is_next and record.source is None:
        is_other = record.parent != state.entered_hash
    if is_other or record.number == mine.number:
        turn.end(
            st.Fence(
                f"the table holds view {record.number} of replicas {list(record.numbers)}, which "
                f"does not follow from view {mine.number} of replicas {list(mine.numbers)}"
            )
        )
    elif record.is_member(state.key):
        enter(turn, content)
    elif state.is_leaving or state.key.number in record.evicted:
        turn.end(st.Drained())
    elif state.settings.is_fixed:
        turn.end(
            st.Fence(
                f"the group of replicas {list(record.numbers)} went on in epoch {record.number} "
                f"without replica {state.key.number}"
            )
        )
    else:
        turn.end(
            st.Fence(
                f"view {record.number} of replicas {list(record.numbers)} was opened without this "
                "process"
            )
        )


def enter(turn: Turn, content: bytes) -> None:
    """Enter a record: the promise of SEALED ends, and rounds begin anew."""
    state, record = turn.state, Record.from_bytes(content)
    number = state.key.number
    if state.bound is not None and state.bound.attempt != record.attempt:
        turn.act(st.Abandon(state.bound.attempt))
    holds = state.has_state and number not in record.joined
    turn.change(
        stage=Stage.TRAINING,
        entered=content,
        has_state=number == record.source or (record.source is None and holds),
        positions=(),
        has_all_votes=False,
        is_pending=False,
        bound=None,
        proposal=None,
        is_blind=False,
        told=b"",
        here=(),
        ready=(),
        cuts=frozenset(),
        demand=None if state.demand in ((), record.numbers) else state.demand,
        num_waits=0,
        num_silent=0,
        pause=0,
    )
    turn.act(st.Enter(record))
    turn.wait("")


def is_forgotten(state: State) -> bool:
    """Whether the table knows less than this process."""
    mine, there = state.record, state.in_table
    return mine is not None and (there is None or there.number < mine.number)


def recall(turn: Turn) -> None:
    """Put the record back that the table has forgotten, also over an older one (rule 13)."""
    state = turn.state
    if state.settings.may_forget:
        if not (state.puts_back or state.is_blind):
            turn.change(puts_back=True)
            turn.act(st.Swap(state.recorded, state.entered))
    else:
        turn.wait(
            f"until the registry has its record again: it knew view {state.number}, and now it "
            "knows less"
        )
