"""What the members do when the registry has lost its memory.

The members of an open view hold its record and put it back. A member that may have voted in an
attempt, and does not know what came of it, first makes sure that nobody has entered that view.
"""

from __future__ import annotations

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
    unknown = _unknown(state, roster) if state.has_voted else []
    if unknown:
        turn.wait(
            f"until replicas {unknown} say whether view {state.attempt_number} was opened, as the "
            "registry has forgotten it"
        )
    elif state.stage in IN_ATTEMPT:
        # Without a state nothing depends on it: nobody commits anything without this process.
        turn.abandon()
    else:
        turn.change(has_voted=False)
        turn.swap(state.view or state.record)


def _unknown(state: State, roster: Roster) -> list[int]:
    """Return the members of the last attempt that may have entered its view."""
    attempt = state.attempt
    assert attempt is not None
    unknown = []
    for key in attempt.keys:
        beat = roster.beats.get(key)
        if key == state.key:
            continue
        if beat is None or not roster.lives(key) or beat.view >= attempt.number:
            unknown.append(key[0])
    return unknown
