"""How the processes stand towards the last open view: who goes on from it, and who may come."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..beats import BROKEN, FINISHED, PULLING, READY, STOPPED, Beat
from ..views import FORMING, NO_VIEW, Key, View
from .peers import Roster
from .state import IN_ATTEMPT, State


@dataclass
class Standing:
    """Processes by what they can do in the next view.

    Attributes:
        here: Members of the last open view that hold its state and have stopped.
        stateless: Members of it that never came to hold its state, and wait.
        busy: Ids of members that may live and have not stopped: they are waited for.
        leaving: Members that have stopped and do not come along. While nobody else has the state
            and newcomers wait for it, they do come along.
        finished: Ids of members that have taken all steps.
        newcomers: Other processes that are ready.
        pulling: Other processes that copy the state, and are not ready yet. While nobody else is to
            have the state, they count as ready.
        returned: Ids of members of which another process is ready: the old one has ended.
        is_planned: The members have stopped at a boundary.
    """

    here: list[Beat] = field(default_factory=list)
    stateless: list[Beat] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    leaving: list[Beat] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    newcomers: list[Beat] = field(default_factory=list)
    pulling: list[Beat] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    is_planned: bool = False


def standing_of(state: State, roster: Roster, view: View | None) -> Standing:
    """Return how all processes stand towards a recorded view, or towards none."""
    number, base = (NO_VIEW, ()) if view is None else view.last_open
    standing = Standing()
    for key in base:
        _place(standing, roster, key, view, number)
    _place_newcomers(standing, state, roster, view, base)
    if standing.leaving and not (standing.here or standing.busy):
        standing.newcomers += standing.pulling
    if not standing.here and (standing.newcomers or standing.stateless):
        standing.here, standing.leaving = standing.leaving, []
    standing.is_planned = any(beat.stage == STOPPED for beat in standing.here)
    return standing


def _place(standing: Standing, roster: Roster, key: Key, view: View | None, number: int) -> None:
    assert view is not None
    beat = roster.beats.get(key)
    if beat is not None and beat.stage == FINISHED:
        standing.finished.append(key[0])
    elif not roster.may_live(key):
        return
    elif beat is None or not roster.lives(key) or not has_stopped(beat, view, number):
        standing.busy.append(key[0])
    elif beat.is_leaving or key[0] in view.evicted:
        standing.leaving.append(beat)
    else:
        (standing.here if beat.has_state else standing.stateless).append(beat)


def has_stopped(beat: Beat, view: View, number: int) -> bool:
    """Whether a member of open view ``number`` takes no part in its rounds, now and later.

    A process that may have voted in an attempt of which the record knows nothing knows more.
    """
    if beat.voted > view.number:
        return False
    if not beat.has_state:
        # Its attempt at this view, or one after it, has failed.
        in_attempt = view.phase == FORMING and beat.stage in IN_ATTEMPT
        return beat.attempt >= number and (beat.stage == READY or in_attempt)
    if beat.view != number:
        return False
    in_attempt = view.phase == FORMING and beat.stage in IN_ATTEMPT
    return beat.stage in (BROKEN, STOPPED) or in_attempt


def _place_newcomers(
    standing: Standing, state: State, roster: Roster, view: View | None, base: tuple[Key, ...]
) -> None:
    # The id of a member that may live is not free.
    taken = {id for id, nonce in base if roster.may_live((id, nonce))}
    for beat in roster.alive():
        member = beat.member
        if member.key in base or beat.has_state or beat.is_leaving or member.id in taken:
            continue
        is_alike = (member.settings, member.workers) == (
            state.member.settings,
            state.member.workers,
        )
        if is_alike and (beat.stage == PULLING or _is_ready(beat, view)):
            taken.add(member.id)
            is_pulling = beat.stage == PULLING
            (standing.pulling if is_pulling else standing.newcomers).append(beat)
            standing.returned += [id for id, _ in base if id == member.id]


def _is_ready(beat: Beat, view: View | None) -> bool:
    in_attempt = view is not None and view.phase == FORMING and beat.attempt <= view.number
    return beat.stage == READY or (beat.stage in IN_ATTEMPT and in_attempt)
