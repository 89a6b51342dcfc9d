"""With whom a process would go on, as it sees the others now: a function of its state.

Several processes may lead attempts: the table takes one. So plans need not agree to be safe; they
are made so that in quiet times all agree, and the lowest member leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from .reach import is_majority, largest_connected
from .records import NO_HASH, NO_RECORD, Attempt, Key, Record, record_hash
from .state import Place, Stage, State


@dataclass(frozen=True)
class Plan:
    """What a process would do next.

    Attributes:
        draft: The record to propose, without decision; None to wait.
        asked: Members of the base that must seal for it.
        leader: Another process that is to lead.
        reason: For what this process waits.
        patience: Polls to wait before the proposal.
        is_over: The run has ended, as ``reason`` says.
    """

    draft: Record | None = None
    asked: tuple[Key, ...] = ()
    leader: Key | None = None
    reason: str = ""
    patience: int = 0
    is_over: bool = False


def plan_of(state: State) -> Plan:
    """Return what this process would do if no attempt binds it."""
    roster = Roster(state)
    if state.settings.is_fixed:
        return _demanded(state, roster)
    if state.record is None:
        return _newcomer(state, roster)
    if not roster.holders:
        return _found(state, roster, state.record)
    return _continue(state, roster, state.record)


class Roster:
    """The other processes, as one process sees them now.

    Attributes:
        base: Members of the record that is entered or, for a newcomer, in the table.
        here: Members of the base that live and stay.
        leaving: Members of the base that live and are to leave.
        holders: Members of the base that live and hold its state.
        newcomers: Processes that are ready to come.
        coming: Processes that are not ready yet.
        is_given_away: The members that leave are the only ones with state: others take it first.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.places = {place.key.nonce: place for place in state.places}
        record = state.record or state.in_table
        self.base = () if record is None else record.members
        self._joined = () if record is None else record.joined
        self._source = None if record is None else record.source
        living = [key for key in self.base if self.lives(key)]
        self.leaving = [key for key in living if self._leaves(key)]
        self.here = [key for key in living if key not in self.leaving]
        self.holders = [key for key in living if self._holds(key)]
        self.newcomers, self.coming = self._newcomers({key.number for key in living})
        is_last = not set(self.here) & set(self.holders)
        self.is_given_away = is_last and bool(self.here or self.newcomers or self.coming)
        if self.is_given_away:
            # Nobody else has the state: who is to leave stays until somebody has it.
            self.here = sorted({*self.here, *self.holders})
            self.leaving = [key for key in self.leaving if key not in self.here]

    def lives(self, key: Key) -> bool:
        """Whether a process may live; a member is heard on the link, others by their places."""
        state, place = self._state, self.places.get(key.nonce)
        if key == state.key:
            return True
        if key.nonce in state.life.dead | state.life.suspected or (place and place.is_finished):
            return False
        is_linked = state.record is not None and state.record.is_member(key)
        return is_linked or (place is not None and place.is_fresh)

    def is_gone(self, key: Key) -> bool:
        """Whether a process has certainly ended."""
        place = self.places.get(key.nonce)
        return key.nonce in self._state.life.dead or (place is not None and place.is_finished)

    def is_fresh(self, key: Key) -> bool:
        """Whether the table hears of a process."""
        place = self.places.get(key.nonce)
        return place is not None and place.is_fresh and not self.is_gone(key)

    def finished(self) -> list[Key]:
        places = [self.places.get(key.nonce) for key in self.base]
        return [place.key for place in places if place is not None and place.is_finished]

    def _leaves(self, key: Key) -> bool:
        if key == self._state.key:
            return self._state.is_leaving or key.number in self._state.evict
        place = self.places.get(key.nonce)
        return key.number in self._state.evict or (place is not None and place.is_leaving)

    def _holds(self, key: Key) -> bool:
        if key == self._state.key:
            return self._state.has_state
        place = self.places.get(key.nonce)
        if self._source is not None and key.number == self._source:
            # Its place may not say yet that it has entered.
            return True
        return key.number not in self._joined if place is None else place.has_state

    def may_hold(self) -> list[Key]:
        """Return members of the base that the table hears of and that may hold its state."""
        return [key for key in self.base if self.is_fresh(key) and self._holds(key)]

    def _newcomers(self, taken: set[int]) -> tuple[list[Key], list[Key]]:
        """Return processes that are alike and have a free number: the ready ones, and the rest."""
        state = self._state
        ready: list[Key] = []
        coming: list[Key] = []
        for place in sorted(state.places, key=lambda one: one.key):
            key, is_own = place.key, place.key == state.key
            is_new = key not in self.base and place.entered == NO_RECORD and not place.is_leaving
            is_alike = place.settings == state.settings.digest and key.nonce not in state.unfit
            if is_new and is_alike and self.lives(key) and key.number not in taken:
                taken.add(key.number)
                is_ready = state.is_ready if is_own else place.is_ready
                (ready if is_ready else coming).append(key)
        return ready, coming

    def connected(self, keys: Iterable[Key]) -> list[Key]:
        """Return the largest set of processes that reach each other."""
        keys = sorted(keys)
        place = {key.nonce: index for index, key in enumerate(keys)}
        cuts = [(place[a], place[b]) for a, b in self._cuts() if a in place and b in place]
        return [keys[index] for index in largest_connected(len(keys), cuts)]

    def reaching(self, group: Sequence[Key], others: Iterable[Key]) -> list[Key]:
        """Return the others that reach all of a group and each other, the lowest first."""
        cuts, taken = {frozenset(pair) for pair in self._cuts()}, list(group)
        for key in others:
            if not any(frozenset((key.nonce, one.nonce)) in cuts for one in taken):
                taken.append(key)
        return taken[len(group) :]

    def _cuts(self) -> set[tuple[bytes, bytes]]:
        state = self._state
        cuts = set(state.cuts) | {(state.nonce, nonce) for nonce in state.life.cut}
        for place in state.places:
            if place.is_fresh and place.key != state.key:
                cuts |= {(place.key.nonce, nonce) for nonce in place.cut}
        return cuts


# ------------------------------------------------------------------------ going on from a record


def _continue(state: State, roster: Roster, record: Record) -> Plan:
    """Go on with the members of the base that live."""
    if state.key not in roster.here:
        others = [key.number for key in roster.here]
        return Plan(leader=min(roster.here, default=None), reason=f"until replicas {others} go on")
    settings, base = state.settings, [key.number for key in record.members]
    group, num_more = _group_of(state, roster)
    if not set(group) & set(roster.holders):
        away = _numbers(roster.holders)
        return Plan(reason=f"until there is a way to replicas {away}, which have the state")
    finished = {key.number for key in roster.finished()}
    is_short = len(group) + len(finished) < settings.min_replicas
    comers = roster.newcomers
    if state.stage is Stage.STOPPED:
        comers = [key for key in comers if has_heard(state, key, group)]
    is_time = is_short or state.stage is Stage.STOPPED or roster.is_given_away
    joiners = roster.reaching(group, comers) if is_time else []
    draft = _fitting(state, record, group, joiners)
    if roster.is_given_away and not draft.joined:
        return Plan(reason=f"until replicas {_numbers(roster.coming)} have copied the state")
    # On a table that forgets, also members that leave promise to go on with no other record.
    leaving = [key for key in roster.leaving if key != state.key]
    asked = tuple(sorted([*group, *(leaving if settings.may_forget else [])]))
    if settings.may_forget and not is_majority({*_numbers(asked), *finished}, base):
        return Plan(
            reason=f"until more than half of replicas {base} are here, as the registry does not "
            f"outlive its process: replicas {_numbers(asked)} are"
        )
    if len(draft.members) + len(finished) < settings.min_replicas:
        return Plan(reason=_too_few(settings.min_replicas, draft.members))
    rank = group.index(state.key)
    patience, reason = _patience(state, roster, record, group)
    return Plan(
        draft,
        asked,
        leader=group[0],
        reason=reason,
        patience=rank * settings.suspect_after + patience + num_more,
    )


def _group_of(state: State, roster: Roster) -> tuple[list[Key], int]:
    """Return the largest group or, for a process outside it, its own group, later."""
    group = roster.connected(roster.here)
    if state.key in group:
        return group, 0
    reached = roster.reaching([state.key], [key for key in roster.here if key != state.key])
    group = sorted([state.key, *reached])
    return group, 2 * state.settings.suspect_after


def _patience(
    state: State, roster: Roster, record: Record, group: Sequence[Key]
) -> tuple[int, str]:
    """Wait before a part of the base goes on without members that may train on.

    A process that is cut off from the rest, but not from the table, must not fence the rest.
    """
    rest = [key for key in record.members if key not in (*group, *roster.leaving)]
    rest = [key for key in rest if not roster.is_gone(key)]
    is_half = 2 * len(group) <= len(group) + len(rest)
    fresh = [key.number for key in rest if roster.is_fresh(key)]
    if not (is_half and rest) and not fresh:
        return 0, ""
    reason = f"a while for replicas {fresh or _numbers(rest)}, as they may train on without it"
    return 2 * state.settings.suspect_after, reason


def has_heard(state: State, newcomer: Key, group: Iterable[Key]) -> bool:
    """Whether a newcomer has said READY for all of a group, in this record."""
    heard = dict(state.ready).get(newcomer.nonce, 0)
    members = () if state.record is None else state.record.members
    return all(heard >> members.index(key) & 1 for key in group)


def _too_few(least: int, keys: Iterable[Key]) -> str:
    return f"until at least {least} replicas are here: replicas {_numbers(keys)} are"


def _numbers(keys: Iterable[Key]) -> list[int]:
    return sorted(key.number for key in keys)


# ------------------------------------------------------------------------------------ founding


def _newcomer(state: State, roster: Roster) -> Plan:
    """Wait to be let in, or found the run where nobody holds its state."""
    record = state.in_table
    has_come_late = not (state.settings.allows_rollback or state.has_state)
    if record is not None and record.is_finished and has_come_late:
        return _end_of_run(state, record)
    if not state.is_ready:
        return Plan(reason="until this replica has copied the outer state, if its group has one")
    if living := [key for key in roster.base if roster.lives(key)]:
        return Plan(leader=living[0], reason=_why_outside(state, roster, living))
    return _found(state, roster, record)


def _why_outside(state: State, roster: Roster, living: Sequence[Key]) -> str:
    own = state.key.number
    if own in _numbers(living):
        return (
            f"until the other process with replica number {own} has gone; if it is to train on, "
            "give this one another number"
        )
    reason = "until the members let this replica in"
    cut = [key.number for key in living if not roster.reaching([state.key], [key])]
    return f"{reason}: it has no way to replicas {cut}" if cut else reason


def _found(state: State, roster: Roster, record: Record | None) -> Plan:
    """Begin where no living member of the base holds its state."""
    settings, known = state.settings, NO_RECORD if record is None else record.number
    for place in sorted(state.places, key=lambda one: one.key):
        if place.entered > known and place.has_state and roster.lives(place.key):
            return Plan(
                reason=f"until replica {place.key.number} tells the registry of the view that it "
                "is in"
            )
    if holders := roster.may_hold():
        return Plan(reason=f"until replicas {_numbers(holders)} answer, which may have the state")
    stateless = [key for key in roster.here if key not in roster.holders]
    group = roster.connected({*stateless, *roster.newcomers})
    if state.key not in group:
        return Plan(reason="until the members let this replica in")
    own = _own_place(state)
    places = [own if key == state.key else roster.places[key.nonce] for key in group]
    best = min(places, key=lambda p: (not p.has_checkpoint, -p.inner_step, p.key.number))
    if record is not None and not settings.allows_rollback:
        if record.members == tuple(roster.finished()):
            return _end_of_run(state, record)
        if missing := _missing_state(state, roster, record, stateless, best):
            return Plan(reason=missing)
    if len(group) < settings.min_replicas:
        return Plan(reason=_too_few(settings.min_replicas, group))
    draft = _draft(state, record, group, joined=group)
    draft = replace(draft, source=best.key.number, inner_step=best.inner_step)
    # A table that has just lost its memory may not have heard of the members again.
    wait, reason = settings.founding_wait + settings.may_forget * settings.suspect_after, ""
    absent = [key.number for key in roster.base if key.number not in draft.numbers]
    if absent and not settings.allows_rollback:
        wait = max(wait, settings.suspect_after)
        reason = f"a while for replicas {absent}, as one of them may have a newer checkpoint"
    rank = group.index(state.key)
    return Plan(
        draft,
        tuple(sorted(stateless)),
        leader=group[0],
        reason=reason,
        patience=wait + rank * settings.suspect_after,
    )


def _own_place(state: State) -> Place:
    digest, inner_step = state.settings.digest, state.inner_step
    return Place(state.key, digest, inner_step=inner_step, has_checkpoint=state.has_checkpoint)


def _end_of_run(state: State, record: Record) -> Plan:
    return Plan(
        reason=f"run {state.settings.run!r} has ended: replicas {list(record.numbers)} have taken "
        "all their steps; to train on, give the run another name, or rollback=True",
        is_over=True,
    )


def _missing_state(
    state: State, roster: Roster, record: Record, stateless: Collection[Key], best: Place
) -> str:
    """Say what is missing to go on from a record whose members all seem to have died.

    Nobody may go on alone while they might still train. Where one of them has started again, or
    never came to train, no round of the members can count any more.
    """
    members, least = list(record.numbers), record.inner_step
    has_returned = any(key.number in members for key in roster.newcomers)
    if not (has_returned or stateless):
        return (
            f"until one of replicas {members} starts again, as none of them is heard of; to begin "
            "anew, give the run another name, or rollback=True"
        )
    if least and not (best.has_checkpoint and best.inner_step >= least):
        return (
            f"until a replica brings a checkpoint of inner step {least} or later, as no process "
            f"of replicas {members} lives that has the state; to begin anew, give the run another "
            "name, or rollback=True"
        )
    return ""


# ---------------------------------------------------------------------------------- fixed groups


def _demanded(state: State, roster: Roster) -> Plan:
    """Go on with the members that the caller has demanded."""
    demand = state.demand
    if demand is None:
        return Plan()
    living = [key for key in roster.base if roster.lives(key)]
    if not demand:
        group = roster.connected(living)
        missing: list[int] = []
    else:
        known = {key.number: key for key in (*roster.newcomers, *living)}
        group = [known[number] for number in demand if number in known]
        missing = [number for number in demand if number not in known]
    holders = [key for key in group if key in roster.holders]
    if state.key not in group or (roster.may_hold() and not holders and not missing):
        others = _numbers(living)
        return Plan(
            reason=f"until the group of replicas {others} has ended, which runs already: a "
            'newcomer, also a replica that was started again, attaches with init="join", while '
            f"the others call change_group with replica {state.key.number} among the members"
        )
    if missing:
        return Plan(reason=f"until replicas {missing} come")
    leader = min(holders or group)
    if leader != state.key:
        return Plan(leader=leader, reason=f"until replica {leader.number} leads the change")
    here = dict(state.here)
    silent = [key.number for key in group if key != state.key and key.nonce not in here]
    if silent:
        return Plan(leader=leader, reason=f"until replicas {silent} call change_group, too")
    record = state.record or state.in_table
    joined = [key for key in group if key not in roster.base]
    draft = _draft(state, record, group, joined)
    if not holders:
        draft = replace(draft, joined=draft.numbers, source=leader.number)
    asked = tuple(sorted(key for key in group if key in roster.base))
    return Plan(draft, asked, leader=leader)


# ---------------------------------------------------------------------------------- the record


def _fitting(state: State, record: Record, group: Sequence[Key], joiners: Sequence[Key]) -> Record:
    """Return the record with as many joiners as a table can hold."""
    for num_joiners in range(len(joiners), -1, -1):
        taken = joiners[:num_joiners]
        draft = _draft(state, record, [*group, *taken], taken)
        try:
            replace(draft, decision=state.positions).to_bytes()
        except ValueError:
            if num_joiners:
                continue
            raise
        return draft
    raise AssertionError


def _draft(
    state: State, record: Record | None, group: Iterable[Key], joined: Iterable[Key]
) -> Record:
    members = tuple(sorted(group))
    base = () if record is None else record.numbers
    numbers = {key.number for key in members}
    is_in_table = record is not None and not (state.settings.is_fixed and not state.recorded)
    return Record(
        number=1 + (NO_RECORD if record is None else record.number),
        parent=NO_HASH if record is None else record_hash(record.to_bytes()),
        table=record.table if record is not None and is_in_table else state.table,
        attempt=Attempt(state.nonce, state.counter + 1),
        members=members,
        joined=tuple(_numbers(joined)),
        inner_step=0 if record is None else record.inner_step,
        left_out=tuple(sorted(set(base) - numbers)),
        evicted=tuple(sorted(state.evict & (set(base) - numbers))),
    )
