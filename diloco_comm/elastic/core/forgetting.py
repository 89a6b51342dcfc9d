"""What the members do when the registry has lost its memory.

The members of an open view hold its record and put it back. A member that may have voted in an
attempt, and does not know what came of it, first makes sure that nobody has entered that view.
"""

from __future__ import annotations

from ..beats import TRAINING
from .peers import Roster
from .state import IN_ATTEMPT, State
from .turn import Turn


def recall(turn: Turn, roster: Roster) -> None:
    """Put back what the registry has forgotten, if it is known."""
    state = turn.state
    if state.settings.is_durable:
        turn.wait(
            f"until the registry has its record again: it knew view {state.epoch}, and now it "
            "knows less"
        )
        return
    if state.stage in IN_ATTEMPT and not state.has_state:
        # Whoever entered that view has committed nothing without this process.
        turn.abandon()
        return
    if state.has_voted:
        unknown = _unknown(state, roster)
        if unknown:
            turn.wait(
                f"until replicas {unknown} say whether view {state.attempt_number} was opened, as "
                "the registry has forgotten it"
            )
            return
        turn.change(has_voted=False)
        if state.stage in IN_ATTEMPT:
            turn.abandon()
            return
    if state.stage not in IN_ATTEMPT and state.view:
        turn.swap(state.view)


def _unknown(state: State, roster: Roster) -> list[int]:
    """Return the members of the last attempt that may have entered its view."""
    attempt = state.attempt
    assert attempt is not None
    unknown = []
    for key in attempt.keys:
        beat = roster.beats.get(key)
        if key == state.key:
            continue
        is_outside = beat is not None and beat.view < attempt.number <= beat.attempt
        if beat is None or not (roster.lives(key) and is_outside and beat.stage != TRAINING):
            unknown.append(key[0])
    return unknown
