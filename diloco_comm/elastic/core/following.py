"""What a process does because of a record: take part, enter, give up, or stop for good."""

from __future__ import annotations

from ..beats import BROKEN, FORMED, GONE, READY, TRAINING
from ..views import FORMING, OPEN, View, opened, to_bytes
from .state import IN_ATTEMPT, IN_VIEW, State
from .turn import Turn


def is_forgotten(state: State) -> bool:
    """Whether the registry knows less than this process: it has lost its memory.

    A process that knows of a view, or takes part in an attempt, has read its record before. It may
    have voted in an attempt whose record is gone, too: whether that view was opened is unknown.
    """
    if state.stage == READY:
        return False
    view = state.recorded
    least = state.epoch
    if state.stage in IN_ATTEMPT or state.has_voted:
        least = max(least, state.attempt_number)
    return view is None or view.number < least or view.last_open[0] < state.epoch


def follow(turn: Turn) -> None:
    """Act upon the record that was read last."""
    state = turn.state
    view = state.recorded
    if state.stage == GONE or view is None or is_forgotten(state):
        return
    if state.member.id in view.evicted and view.phase == OPEN and view.is_member(*state.key):
        turn.change(is_leaving=True)
    if state.stage in IN_ATTEMPT:
        _follow_in_attempt(turn, view)
    elif state.stage in IN_VIEW:
        _follow_in_view(turn, view)
    else:
        _follow_ready(turn, view)


def _follow_in_attempt(turn: Turn, view: View) -> None:
    state = turn.state
    attempt = state.attempt
    assert attempt is not None
    is_formed = state.stage == FORMED
    if view.attempt == attempt.attempt:
        if is_formed and view.phase == OPEN:
            turn.enter(view)
        elif is_formed:
            turn.swap(to_bytes(opened(view, state.agreed_step)))
    elif view.base == attempt.number and state.key in view.base_members and is_formed:
        if view.phase == FORMING:
            # It was opened, and the next attempt has begun.
            turn.enter(opened(attempt, state.agreed_step))
            _follow_in_view(turn, view)
        elif view.is_member(*state.key):
            turn.abandon()
        else:
            turn.fence(_left_out(view))
    elif view.phase == OPEN and not view.is_member(*state.key) and state.has_state:
        turn.fence(_left_out(view))
    else:
        turn.abandon()


def _follow_in_view(turn: Turn, view: View) -> None:
    state = turn.state
    is_base = state.key in view.base_members
    if view.phase == OPEN and not view.is_member(*state.key):
        turn.fence(_left_out(view))
    elif view.phase == OPEN and view.number > state.epoch:
        # Its own attempt at this view has failed, and another member has opened it.
        turn.change(epoch=view.number, view=state.record, stage=BROKEN, has_voted=False)
    elif view.phase == FORMING and not is_base:
        turn.fence(_left_out(view))
    elif view.phase == FORMING:
        _follow_change(turn, view)
    if turn.state.attempt_number < view.number:
        turn.change(has_voted=False)


def _follow_change(turn: Turn, view: View) -> None:
    """A change of the view that this process is in, or in which it failed to begin."""
    state = turn.state
    if view.base > state.epoch:
        turn.change(epoch=view.base, view=b"", stage=BROKEN, has_voted=False)
    if turn.state.stage == TRAINING:
        turn.break_off()
    else:
        _form_if_asked(turn, view)


def _follow_ready(turn: Turn, view: View) -> None:
    state = turn.state
    mine, theirs = state.member, view.members[0]
    if (mine.workers, mine.settings) != (theirs.workers, theirs.settings):
        cause = "has another model or other settings"
        if mine.workers != theirs.workers:
            cause = f"has {mine.workers} workers and not {theirs.workers}"
        turn.refuse(
            f"replica {mine.id} cannot join run {view.run!r}, as replica {mine.id} {cause}: start "
            f"replica {mine.id} with the model, settings and number of workers of the members"
        )
        return
    _form_if_asked(turn, view)


def _form_if_asked(turn: Turn, view: View) -> None:
    state = turn.state
    is_asked = view.phase == FORMING and view.is_member(*state.key)
    if is_asked and not state.has_tried(view):
        turn.form(view)


def _left_out(view: View) -> str:
    if view.phase == FORMING:
        return f"view {view.base} was opened without this process"
    return f"view {view.number} of replicas {list(view.ids)} was opened without this process"
