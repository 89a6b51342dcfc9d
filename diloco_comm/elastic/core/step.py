"""The next state of a process, and what it asks for."""

from __future__ import annotations

from collections.abc import Sequence

from ..beats import BROKEN, FINISHED, FORMED, GONE, READY, STOPPED, TRAINING, Beat
from ..views import NO_VIEW, OPEN, Key, View, finished, to_bytes
from .events import (
    Action,
    Boundary,
    Broke,
    Drained,
    Event,
    Failed,
    Finished,
    Formed,
    Leave,
    Polled,
    Pulled,
    Started,
    Suspect,
    Swapped,
)
from .following import follow, is_forgotten
from .forgetting import recall
from .peers import Roster, look, newly_suspected
from .proposals import plan_of
from .reach import as_many_as_reach
from .standing import standing_of
from .state import IN_ATTEMPT, State, own_beat
from .turn import Turn


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after an event, and the actions that it leads to, in order.

    Raises:
        ValueError: If the registry holds a record that this process cannot read.
    """
    if state.stage in (GONE, FINISHED):
        return state, ()
    turn = Turn(state)
    if isinstance(event, Polled):
        _polled(turn, event)
    elif isinstance(event, Swapped):
        _swapped(turn, event)
    else:
        _told(turn, event)
    return turn.state, tuple(turn.actions)


# ----------------------------------------------------------------- from the training thread


def _told(turn: Turn, event: Event) -> None:
    state = turn.state
    if isinstance(event, Formed) and event.number == state.attempt_number:
        turn.change(
            stage=FORMED,
            agreed_step=event.inner_step,
            has_voted=state.has_state,
            is_abandoned=False,
        )
        follow(turn)
    elif isinstance(event, Failed) and event.number == state.attempt_number:
        if state.stage in IN_ATTEMPT:
            _failed(turn, event)
        else:
            _broke(turn, Broke(event.number, event.missing))
    elif isinstance(event, Started) and event.number == state.epoch:
        turn.change(has_state=True)
    elif isinstance(event, Broke) and event.number == state.epoch:
        _broke(turn, event)
    elif isinstance(event, Boundary) and event.number == state.epoch:
        if state.stage == TRAINING:
            turn.change(stage=STOPPED)
            follow(turn)
    elif isinstance(event, Pulled):
        turn.change(is_pulling=False)
    elif isinstance(event, Leave):
        turn.change(is_leaving=True)
        if state.stage == READY:
            turn.drain()
        elif state.stage == TRAINING:
            turn.pend()
    elif isinstance(event, Finished):
        turn.change(stage=FINISHED)
        view = state.recorded
        is_in = view is not None and view.phase == OPEN and view.number == state.epoch
        if event.has_all_steps and view is not None and is_in and not view.is_finished:
            turn.swap(to_bytes(finished(view)))
        turn.act(Drained())


def _nonces(keys: Sequence[Key], ids: Sequence[int]) -> list[str]:
    return [nonce for id, nonce in keys if id in ids]


def _failed(turn: Turn, event: Failed) -> None:
    state = turn.state
    view = state.attempt
    assert view is not None
    turn.change(
        stage=BROKEN if state.has_state else READY,
        has_voted=state.has_state and event.has_voted,
        is_abandoned=False,
    )
    turn.cut_off(_nonces(view.keys, event.missing), _nonces(view.keys, event.unheard))
    follow(turn)


def _broke(turn: Turn, event: Broke) -> None:
    state = turn.state
    if state.stage != TRAINING:
        return
    view = state.recorded
    members = () if view is None else (*view.keys, *view.base_members)
    turn.cut_off(_nonces(members, event.missing), _nonces(members, event.unheard))
    if state.has_state:
        turn.change(stage=BROKEN)
    else:
        # It never came to hold the state.
        turn.change(stage=READY, epoch=NO_VIEW, view=b"")
    follow(turn)


# ----------------------------------------------------------------------- from the registry


def _swapped(turn: Turn, event: Swapped) -> None:
    # Without a clear answer the next poll tells: no two records are equal.
    if event.ok:
        _note(turn, event.new)
        follow(turn)


def _note(turn: Turn, record: bytes) -> None:
    if record != turn.state.record:
        turn.change(record=record, num_waits=0)
    view = turn.state.recorded
    if view is not None and view.number > turn.state.highest:
        turn.change(highest=view.number)


def _polled(turn: Turn, event: Polled) -> None:
    _note(turn, event.record)
    peers = look(turn.state, event)
    suspected = newly_suspected(turn.state, peers)
    turn.change(peers=peers)
    if suspected:
        turn.act(Suspect(suspected))
    if not event.is_late:
        _age(turn)
    num_actions = len(turn.actions)
    follow(turn)
    if turn.state.stage in (GONE, FINISHED) or len(turn.actions) > num_actions:
        return
    own = own_beat(turn.state, event.beats)
    roster = Roster(turn.state, own, event.beats)
    if is_forgotten(turn.state):
        recall(turn, roster)
    elif turn.state.stage == TRAINING:
        _watch(turn, roster)
    elif not _has_left(turn, roster):
        _propose(turn, roster, event.is_late)


def _age(turn: Turn) -> None:
    """What could not be reached once may be reached after a while."""
    state = turn.state
    if not state.unreachable:
        return
    if state.num_cut_polls < 3 * state.settings.suspect_after:
        turn.change(num_cut_polls=state.num_cut_polls + 1)
    else:
        turn.cut_off(())


def _watch(turn: Turn, roster: Roster) -> None:
    """While this process trains: see who has stopped, and who wants to come or go."""
    state = turn.state
    view = state.recorded
    if view is None or view.phase != OPEN:
        return
    others = [key for key in view.keys if key != state.key]
    if any(_has_broken(roster.beats.get(key), view) or roster.has_died(key) for key in others):
        turn.break_off()
        return
    alive = [roster.beats[key] for key in view.keys if roster.lives(key)]
    wants_out = bool(view.evicted) or any(beat.is_leaving for beat in alive)
    if wants_out or as_many_as_reach(alive, standing_of(state, roster, view).newcomers):
        turn.pend()
    turn.wait("")


def _has_broken(beat: Beat | None, view: View) -> bool:
    """Whether a member of an open view has stopped in it, and not at a boundary."""
    if beat is None:
        return False
    if not beat.has_state:
        return beat.stage == READY and beat.attempt == view.number
    is_here = beat.view == view.number or beat.attempt == view.number
    return beat.stage in (BROKEN, GONE) and is_here


def _has_left(turn: Turn, roster: Roster) -> bool:
    """Leave, if this process is to leave and the others can do without it."""
    state = turn.state
    if not state.is_leaving or state.stage in IN_ATTEMPT:
        return False
    standing = standing_of(state, roster, state.recorded)
    if any(beat.member.key == state.key for beat in standing.here):
        # The only one that has the state: it gives it to a newcomer first.
        return False
    if standing.busy:
        turn.wait(f"until replicas {standing.busy} have stopped, too")
    elif state.settings.is_durable or not (standing.here and state.has_state):
        turn.drain()
    return True


def _propose(turn: Turn, roster: Roster, is_late: bool) -> None:
    if turn.state.is_pulling:
        turn.wait("until this replica has copied the outer state, if its group has one")
        return
    plan = plan_of(turn.state, roster)
    if plan is None:
        turn.wait("")
        turn.change(num_waits=0)
        return
    if plan.is_over:
        turn.over(plan.reason)
        return
    turn.wait(plan.reason)
    state = turn.state
    num_waits = state.num_waits
    if plan.view is not None and num_waits >= plan.patience:
        turn.propose(plan.view)
        return
    if plan.view is not None and not is_late:
        most = 2 * state.settings.suspect_after + state.settings.founding_wait
        turn.change(num_waits=min(num_waits + 1, max(most, plan.patience)))
