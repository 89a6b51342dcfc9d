"""Which view comes next, as one process sees it.

Several processes may propose: the registry takes one. A proposal is safe if it is a function of the
record that it replaces and if enough members of the base take part, who have all stopped there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...group.reach import is_majority
from ..beats import BROKEN, READY, Beat
from ..views import (
    FORMING,
    MAX_RECORD_BYTES,
    NO_VIEW,
    OPEN,
    Key,
    View,
    encoded_bytes,
    record_hash,
)
from .peers import Roster
from .reach import as_many_as_reach, largest_group
from .standing import Standing, standing_of
from .state import IN_ATTEMPT, State


@dataclass(frozen=True)
class Plan:
    """What a process would do next.

    Attributes:
        view: To propose; None to wait.
        reason: For what it waits.
        patience: Polls to wait before the proposal.
        is_over: The run has ended, as ``reason`` says.
    """

    view: View | None = None
    reason: str = ""
    patience: int = 0
    is_over: bool = False


def plan_of(state: State, roster: Roster) -> Plan | None:
    """Return what this process would do about the record that it has read; None for nothing."""
    view = state.recorded
    if view is not None and view.phase == FORMING and not _has_failed(view, roster):
        return None
    has_come_late = not (state.has_state or state.settings.allows_rollback)
    if view is not None and view.is_finished and has_come_late:
        return _end_of_run(view)
    standing = standing_of(state, roster, view)
    number, base = (NO_VIEW, ()) if view is None else view.last_open
    if state.key not in base and (standing.here or standing.busy):
        if state.stage in IN_ATTEMPT:
            return None
        return Plan(reason=_why_outside(state, roster, base))
    if standing.busy:
        return Plan(reason=f"until replicas {standing.busy} have stopped in view {number}")
    if standing.here:
        return _continue(state, standing, view, base_ids=[id for id, _ in base])
    return _found(state, standing, roster, view)


def _why_outside(state: State, roster: Roster, base: Sequence[Key]) -> str:
    own = state.member.id
    for key in base:
        if key[0] == own and roster.may_live(key):
            beat = roster.beats.get(key)
            place = "" if beat is None else f" at {beat.member.address}"
            return (
                f"until the other process{place} with replica number {own} has gone; if it is to "
                "train on, give this one another number"
            )
    return "until the members let this replica in"


def _has_failed(view: View, roster: Roster) -> bool:
    """Whether an attempt comes to nothing: a member has ended, is suspected or says so."""
    for key in view.keys:
        beat = roster.beats.get(key)
        if not roster.may_live(key):
            return True
        is_back = beat is not None and beat.stage in (READY, BROKEN)
        if is_back and beat is not None and beat.attempt == view.number:
            return True
    return False


# ------------------------------------------------------------------------ going on from a view


def _continue(state: State, standing: Standing, view: View | None, base_ids: list[int]) -> Plan:
    """Go on with the members of the last open view that have stopped there."""
    assert view is not None
    settings = state.settings
    group = _group_with(state, standing.here)
    joiners = as_many_as_reach(group, standing.stateless)
    num_finished = len(standing.finished)
    is_short = len(group) + len(joiners) + num_finished < settings.min_replicas
    if standing.is_planned or is_short:
        joiners += as_many_as_reach([*group, *joiners], standing.newcomers)
    joiners = _as_many_as_fit(state, view, group, joiners)
    ids = [beat.member.id for beat in (*group, *joiners)]
    consent = {*ids, *(beat.member.id for beat in standing.leaving), *standing.finished}
    if not settings.is_durable and not is_majority(consent, base_ids):
        return Plan(
            reason=f"until more than half of replicas {base_ids} are here, as the registry does "
            f"not outlive its process: replicas {sorted(consent)} are"
        )
    if len(ids) + num_finished < settings.min_replicas:
        return Plan(reason=_too_few(settings.min_replicas, ids))
    proposal = _view(state, view, [*group, *joiners], joined=joiners)
    return Plan(proposal, patience=_patience(state, standing.here, ids))


def _as_many_as_fit(state: State, view: View, group: list[Beat], joiners: list[Beat]) -> list[Beat]:
    """Return so many of the joiners that a registry can hold this record and the next."""
    for number in range(len(joiners), 0, -1):
        proposal = _view(state, view, [*group, *joiners[:number]], joined=joiners[:number])
        # The next record names these members once more, as its base.
        names = json.dumps(proposal.keys)
        if encoded_bytes(proposal) + len(names) <= MAX_RECORD_BYTES:
            return joiners[:number]
    return []


def _group_with(state: State, here: Sequence[Beat]) -> list[Beat]:
    """Return the largest group; after a long wait, that of this process."""
    group = largest_group(here)
    is_in = any(beat.member.key == state.key for beat in group)
    if is_in or state.num_waits < 2 * state.settings.suspect_after:
        return group
    own = [beat for beat in here if beat.member.key == state.key]
    return largest_group(as_many_as_reach(own, [b for b in here if b not in own]) + own)


def _patience(state: State, here: Sequence[Beat], ids: Sequence[int]) -> int:
    """The lowest that can propose does so at once; the others wait in case it does not."""
    able = [beat.member.id for beat in here if beat.member.id in ids] or list(ids)
    if state.member.id == min(able):
        return 0
    return state.settings.suspect_after * (1 if state.member.id in ids else 2)


def _too_few(least: int, ids: Sequence[int]) -> str:
    return f"until at least {least} replicas are here: replicas {sorted(ids)} are"


# ------------------------------------------------------------------------------------ founding


def _found(state: State, standing: Standing, roster: Roster, view: View | None) -> Plan | None:
    """Begin where no member of a last view holds its state."""
    if (other := _in_a_later_view(state, roster, view)) is not None:
        return Plan(reason=f"until replica {other} tells the registry of the view that it is in")
    if state.key not in {b.member.key for b in (*standing.stateless, *standing.newcomers)}:
        if state.has_state or state.is_leaving:
            return None
        return Plan(reason=f"until the former process of replica {state.member.id} has gone")
    group = largest_group([*standing.stateless, *standing.newcomers])
    ids = [beat.member.id for beat in group]
    best = min(group, key=lambda b: (not b.positions, -b.inner_step, b.member.id))
    if view is not None and view.last_open[0] != NO_VIEW and not state.settings.allows_rollback:
        if set(standing.finished) == {id for id, _ in view.last_open[1]}:
            return _end_of_run(view)
        missing = _missing_state(standing, view, best)
        if missing:
            return Plan(reason=missing)
    if len(ids) < state.settings.min_replicas:
        return Plan(reason=_too_few(state.settings.min_replicas, ids))
    proposal = _view(state, view, group, joined=group, source=best.member.id)
    settings, reason, wait = state.settings, "", state.settings.founding_wait
    absent = [] if view is None else _absent(view, ids, standing.finished)
    if absent and best.positions and not settings.allows_rollback:
        # One of them may bring a newer checkpoint.
        wait = max(wait, settings.suspect_after)
        reason = f"a while for replicas {absent}, as one of them may have a newer checkpoint"
    return Plan(proposal, reason, patience=_patience(state, group, ids) + wait)


def _absent(view: View, ids: Sequence[int], finished: Sequence[int]) -> list[int]:
    """Return the members of the last open view that have not come again."""
    return [id for id, _ in view.last_open[1] if id not in ids and id not in finished]


def _in_a_later_view(state: State, roster: Roster, view: View | None) -> int | None:
    """Return a replica that belongs to a view of which the registry knows nothing."""
    known = NO_VIEW if view is None else view.number
    for key, beat in sorted(roster.beats.items()):
        if beat.has_state and beat.view > known and key != state.key and roster.may_live(key):
            return beat.member.id
    return None


def _end_of_run(view: View) -> Plan:
    ids = [id for id, _ in view.last_open[1]]
    return Plan(
        reason=f"run {view.run!r} has ended: replicas {ids} have taken all their steps; to train "
        "on, give the run another name, or rollback=True",
        is_over=True,
    )


def _missing_state(standing: Standing, view: View, best: Beat) -> str:
    """Say what is missing to go on from a view whose members all seem to have died; "" for nothing.

    Nobody may go on alone while they might still train. Where one of them has started again, or
    never came to train, no round of theirs can count any more.
    """
    members = [id for id, _ in view.last_open[1]]
    if not (standing.returned or standing.stateless):
        return (
            f"until one of replicas {members} starts again, as none of them is heard of; to begin "
            "anew, give the run another name, or rollback=True"
        )
    is_fresh = bool(standing.stateless) and view.inner_step == 0
    if not is_fresh and not (best.positions and best.inner_step >= view.inner_step):
        return (
            f"until a replica brings a checkpoint of inner step {view.inner_step} or later, as no "
            f"process of replicas {members} lives that has the state; to begin anew, give the run "
            "another name, or rollback=True"
        )
    return ""


# ---------------------------------------------------------------------------------- the record


def _view(
    state: State,
    view: View | None,
    group: Sequence[Beat],
    joined: Sequence[Beat],
    source: int = NO_VIEW,
) -> View:
    members = tuple(sorted(beat.member for beat in group))
    number, base = (NO_VIEW, ()) if view is None else view.last_open
    keys = {member.key for member in members}
    joined_ids = tuple(sorted(beat.member.id for beat in joined))
    left = tuple(sorted(id for id, nonce in base if (id, nonce) not in keys))
    return View(
        run=state.settings.run,
        number=1 + max(state.highest, 0 if view is None else view.number),
        parent=record_hash(state.record) if state.record else "",
        phase=FORMING,
        members=members,
        base=number,
        base_members=base,
        inner_step=0 if view is None else view.inner_step,
        proposer=state.member.nonce,
        reason=_reason(view, joined_ids, left, number),
        joined=joined_ids,
        left=left,
        source=source,
        evicted=() if view is None else view.evicted,
    )


def _reason(view: View | None, joined: Sequence[int], left: Sequence[int], base: int) -> str:
    if base == NO_VIEW:
        return "the run begins"
    parts = [f"replicas {list(left)} left"] if left else []
    parts += [f"replicas {list(joined)} join"] if joined else []
    again = view is not None and view.phase != OPEN and "another attempt"
    return ", ".join(parts) or again or "the members meet again"
