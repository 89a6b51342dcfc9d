"""Plans: the next record that a process would propose, as a function of its state.

The *base* is the record from which a process goes on: the record that it has entered or, for a
newcomer, the newest in the table. Processes may plan different records and propose all of them:
the table takes one. In quiet times all plan the same record, and the lowest member leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from .reach import largest_group
from .records import NO_HASH, NO_RECORD, Attempt, Key, Record
from .state import Place, Stage, State, place_of

# Polls for which a process waits that has stopped at a boundary and sees nobody join or leave: the
# member that asked for the boundary has seen somebody, of whom this process may read soon.
_NEWS_POLLS = 2
# With so many members, and a thousand streams, a record still fits into a table.
MOST_MEMBERS = 1000


@dataclass(frozen=True)
class Plan:
    """The record that a process would propose now, or the reason why it waits.

    Attributes:
        draft: The record to propose, without its decision; None to wait.
        leader: The process that is to lead, often another one; None where none is known.
        reason: The end of "waits ...", for people.
        patience: Polls for which this process waits before it proposes ``draft``.
        is_over: The run has ended, as ``reason`` says.
    """

    draft: Record | None = None
    leader: Key | None = None
    reason: str = ""
    patience: int = 0
    is_over: bool = False


def plan_of(state: State) -> Plan:
    """Return the plan of the process with this state."""
    roster = Roster(state)
    record = state.record
    if state.has_lost_record:
        # Nobody may go back to a former record: wait until the table has the entered one again.
        names = state.settings
        return Plan(
            reason=f"until the {names.table_name} has its record again: it knew "
            f"{names.record_name} {state.number}, and now it knows less"
        )
    if state.settings.is_fixed:
        plan = _demanded(state, roster)
    elif record is None:
        plan = _newcomer(state, roster)
    elif roster.holders:
        plan = _continue(state, roster, record)
    else:
        plan = _found(state, roster, record)
    away = set(roster.base) - set(plan.draft.members if plan.draft else roster.base)
    if away and state.has_moved and not state.settings.is_fixed:
        # The lost memory may have had a later record, so no member of the base can be left out.
        return Plan(
            reason=f"until replicas {_numbers(away)} answer, as the registry has lost its memory "
            "and they may have gone on; to begin anew, start all replicas again"
        )
    return plan


class Roster:
    """The other processes, as one process sees them now.

    Attributes:
        record: The base.
        base: Members of the base.
        here: Members of the base that live and stay.
        leaving: Members of the base that live and are to leave. Members that never held the outer
            state, and could not connect, are among them.
        holders: Members of the base that live and hold its outer state.
        newcomers: Processes outside the base that can join now.
        coming: Processes outside the base that still copy the outer state, or that must wait after
            a failed attempt to connect.
        is_given_away: Only members that are to leave hold the outer state, so that they stay until
            others have copied it.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._own = place_of(state, state.inner_step)
        self._places = {place.key.nonce: place for place in state.places}
        self.record = state.record or state.in_table
        self.base = () if self.record is None else self.record.members
        self._members = frozenset(self.base)
        self._joined = frozenset(() if self.record is None else self.record.joined)
        self._put_off = {nonce: polls for nonce, _, polls in state.put_off}
        living = [key for key in self.base if self.lives(key)]
        self.leaving = [key for key in living if self._leaves(key)]
        self.here = sorted(set(living) - set(self.leaving))
        self.holders = [key for key in living if self._holds(key)]
        self.newcomers, self.coming = self._newcomers({key.number for key in living})
        is_last = not set(self.here) & set(self.holders)
        self.is_given_away = is_last and bool(self.here or self.newcomers or self.coming)
        if self.is_given_away or (self.leaving and state.has_moved):
            self.here = sorted({*self.here, *(self.leaving if state.has_moved else self.holders)})
            self.leaving = [key for key in self.leaving if key not in self.here]

    def lives(self, key: Key) -> bool:
        """Whether a process may live: between members by the link, else by its beats."""
        state = self._state
        if key == state.key:
            return True
        if self.is_gone(key) or key.nonce in state.life.suspected:
            return False
        is_linked = bool(state.entered) and key in self._members
        return is_linked or self.place(key).is_fresh

    def is_gone(self, key: Key) -> bool:
        """Whether a process has certainly ended."""
        return key.nonce in self._state.life.dead or self.place(key).is_finished

    def is_fresh(self, key: Key) -> bool:
        """Whether a process has beaten lately, and has not ended."""
        return self.place(key).is_fresh and not self.is_gone(key)

    def place(self, key: Key) -> Place:
        """Return the place of a process; an empty one, not fresh, if the table has none."""
        if key == self._state.key:
            return self._own
        return self._places.get(key.nonce) or Place(key, b"", is_fresh=False)

    def may_hold(self) -> list[Key]:
        """Return the members of the base that have beaten lately and may hold its outer state."""
        return [key for key in self.base if self.is_fresh(key) and self._holds(key)]

    def _leaves(self, key: Key) -> bool:
        is_put_off = key.nonce in self._put_off and self.brings_nothing(key)
        return is_put_off or self.place(key).is_leaving or key.number in self._state.evict

    def brings_nothing(self, key: Key) -> bool:
        """Whether a process is outside the base, or in it without the outer state."""
        is_begun = self.record is not None and self.record.source is None
        return key not in self._members or (is_begun and not self._holds(key))

    def _holds(self, key: Key) -> bool:
        record, place = self.record, self.place(key)
        if key == self._state.key or record is None:
            return self._state.has_state
        # A member that brought the state, and the source, hold it though their places may not say
        # yet that they have entered. A member that joined holds it once its place says so.
        told = key.number not in self._joined or key.number == record.source
        return told or (place.entered == record.number and place.has_state)

    def _newcomers(self, taken: set[int]) -> tuple[list[Key], list[Key]]:
        """Return the living processes outside the base that may join, in two lists.

        Such a process has the settings of this group, and a replica number that is not in
        ``taken``, to which the numbers are added. The processes of the first list can join now;
        the processes of the second still copy the outer state, or must wait after a failed attempt.
        """
        ready: list[Key] = []
        coming: list[Key] = []
        is_short = len(taken) < self._state.settings.min_replicas
        for place in map(self.place, sorted([place.key for place in self._state.places])):
            key, is_in = place.key, place.entered != NO_RECORD or place.key in self._members
            is_alike = place.settings == self._state.settings.digest
            if is_alike and not (is_in or place.is_leaving or key.number in taken):
                if self.lives(key):
                    taken.add(key.number)
                    waits = self._put_off.get(key.nonce, 0) > 0 and not is_short
                    (coming if place.follows is None or waits else ready).append(key)
        # First come the newcomers that were in no failed attempt to connect. Newcomers of failed
        # attempts come one at a time: one of them may have made the attempt fail for all.
        first = [key for key in ready if key.nonce not in self._put_off] or ready[:1]
        return first, sorted({*coming, *ready} - {*first})

    def connected(self, keys: Iterable[Key]) -> list[Key]:
        """Return the largest set of processes that reach each other."""
        by_nonce = {key.nonce: key for key in sorted(keys)}
        return [by_nonce[nonce] for nonce in largest_group(list(by_nonce), self.cuts())]

    def reaching(self, group: Sequence[Key], others: Iterable[Key]) -> list[Key]:
        """Return the ``others`` that reach all of ``group`` and each other, the lowest first."""
        cuts, taken = {frozenset(pair) for pair in self.cuts()}, list(group)
        for key in sorted(others):
            if not any(frozenset((key.nonce, one.nonce)) in cuts for one in taken):
                taken.append(key)
        return taken[len(group) :]

    def cuts(self) -> set[tuple[bytes, bytes]]:
        """Return pairs of nonces: one of the two processes says that it cannot reach the other."""
        state = self._state
        cuts = set(state.cuts) | {(state.nonce, nonce) for nonce in state.life.cut}
        for place in state.places:
            if place.is_fresh and place.key != state.key:
                cuts |= {(place.key.nonce, nonce) for nonce in place.cut}
        return cuts


# ------------------------------------------------------------------------ going on from a record


def _continue(state: State, roster: Roster, record: Record) -> Plan:
    """Plan the next record of the living members of the base (rules 1, 7, 9 and 15)."""
    others = _numbers(roster.here)
    if state.key not in roster.here:
        return Plan(leader=min(roster.here, default=None), reason=f"until replicas {others} go on")
    limit, group = state.settings.suspect_after, roster.connected(roster.here)
    patience, reason = _patience(state, roster, record, group)
    if state.key not in group:
        # Let the largest group propose first.
        patience += 2 * limit
        group = sorted([state.key, *roster.reaching([state.key], set(roster.here) - {state.key})])
    if not set(group) & set(roster.holders):
        away = _numbers(roster.holders)
        return Plan(reason=f"until there is a way to replicas {away}, which have the state")
    num_finished = sum(roster.place(key).is_finished for key in roster.base)
    is_short = len(group) + num_finished < state.settings.min_replicas
    is_time = state.stage is Stage.STOPPED or is_short or roster.is_given_away
    joiners = roster.reaching(group, roster.newcomers) if is_time else []
    joiners = joiners[: max(0, MOST_MEMBERS - len(group))]
    draft = draft_of(state, record, [*group, *joiners], joiners)
    if roster.is_given_away and not draft.joined:
        return Plan(reason=f"until replicas {_numbers(roster.coming)} have copied the state")
    if len(draft.members) + num_finished < state.settings.min_replicas:
        return Plan(reason=_too_few(state.settings.min_replicas, draft.members))
    if state.stage is Stage.STOPPED and not (draft.joined or draft.left_out):
        # Another member asked for this boundary for a process that this one has yet to read of.
        patience += _NEWS_POLLS
    return Plan(draft, group[0], reason, group.index(state.key) * limit + patience)


def _patience(
    state: State, roster: Roster, record: Record, group: Sequence[Key]
) -> tuple[int, str]:
    """Return how long ``group`` waits before it goes on without the rest, and why (rule 7).

    Without this wait, a process that reaches the table but not the other members would leave
    out all of them.

    Returns:
        Polls, and the reason for people: 0 and "" if the rest is a minority that does not beat.
    """
    rest = sorted(set(record.members) - {*group, *roster.leaving})
    rest = [key for key in rest if not roster.is_gone(key)]
    fresh = [key.number for key in rest if roster.is_fresh(key)]
    if not fresh and len(group) > len(rest):
        return 0, ""
    reason = f"for replicas {fresh or _numbers(rest)}, as they may train on without it"
    return 2 * state.settings.suspect_after, reason


def _too_few(least: int, keys: Iterable[Key]) -> str:
    return f"until at least {least} replicas are here: replicas {_numbers(keys)} are"


def _numbers(keys: Iterable[Key]) -> list[int]:
    return sorted(key.number for key in keys)


# ------------------------------------------------------------------------------------ founding


def _newcomer(state: State, roster: Roster) -> Plan:
    """Plan for a process in no record: wait to be let in, or found the run."""
    record, own = state.in_table, state.key.number
    if record is not None and record.is_finished and not state.settings.allows_rollback:
        return _end_of_run(state, record)
    if state.follows is None:
        return Plan(reason="until this replica has copied the outer state, if its group has one")
    if record is not None and record.is_member(state.key):
        return Plan(reason=f"until a member of the group has entered view {record.number}")
    living = [key for key in roster.base if roster.lives(key)]
    if own in _numbers(living):
        return Plan(
            reason=f"until the other process with replica number {own} has gone; if it is to train "
            "on, give this one another number"
        )
    if living:
        cut = _numbers(set(living) - set(roster.reaching([state.key], living)))
        why = f": it has no way to replicas {cut}" if cut else ""
        return Plan(reason=f"until the members let this replica in{why}")
    return _found(state, roster, record)


def _found(state: State, roster: Roster, record: Record | None) -> Plan:
    """Plan a record that begins anew, as no living member of the base holds its outer state.

    One member brings a checkpoint, or fresh parameters, for all (rules 11 and 12).
    """
    settings = state.settings
    inside = [place.key for place in state.places if place.entered != NO_RECORD]
    if away := _numbers(key for key in inside if roster.is_fresh(key) and key not in roster.base):
        return Plan(reason=f"until replicas {away} tell the registry of the view that they are in")
    if holders := roster.may_hold():
        return Plan(reason=f"until replicas {_numbers(holders)} answer, which may have the state")
    # Members of the base lead before newcomers: a newcomer may enter only after the process that
    # leads, see ``agreement._may_come``.
    known = roster.connected({*roster.here, *roster.newcomers})
    group = sorted(known, key=lambda key: (key not in roster.base, key))
    if state.key not in group:
        return Plan(reason="until the members let this replica in")
    places = map(roster.place, group)
    best = min(places, key=lambda p: (not p.has_checkpoint, -p.inner_step, p.key.number))
    if record is not None and not settings.allows_rollback:
        if all(roster.place(key).is_finished for key in record.members):
            return _end_of_run(state, record)
        if missing := _missing_state(roster, record, best):
            return Plan(reason=missing)
    if len(group) < settings.min_replicas:
        return Plan(reason=_too_few(settings.min_replicas, group))
    draft = draft_of(state, record, group, joined=group)
    draft = replace(draft, source=best.key.number, inner_step=best.inner_step)
    wait, reason = settings.founding_wait, ""
    absent = [key.number for key in roster.base if key.number not in draft.numbers]
    if absent and not settings.allows_rollback:
        wait = max(wait, settings.suspect_after)
        reason = f"for replicas {absent}, as one of them may have a newer checkpoint"
    patience = wait + group.index(state.key) * settings.suspect_after
    return Plan(draft, group[0], reason, patience)


def _end_of_run(state: State, record: Record) -> Plan:
    return Plan(
        reason=f"run {state.settings.run!r} has ended: replicas {list(record.numbers)} have taken "
        "all their steps; to train on, give the run another name, or rollback=True",
        is_over=True,
    )


def _missing_state(roster: Roster, record: Record, best: Place) -> str:
    """Say what is missing to go on from a record whose members all seem to have died (rule 12).

    Others may go on only once these members can no longer train. That is certain when one of them
    has started again, or lives without the outer state: without it, no round can count.

    Returns:
        The end of "waits ..."; "" if nothing is missing.
    """
    members, least = list(record.numbers), record.inner_step
    has_returned = any(key.number in members for key in roster.newcomers)
    if not (has_returned or roster.here):
        return (
            f"until one of replicas {members} starts again, as none of them is heard of; to begin "
            "anew, give the run another name, or rollback=True"
        )
    # A member lives that never held the outer state: the others cannot have trained without it.
    is_untrained = bool(roster.here) and not least
    if not is_untrained and not (best.has_checkpoint and best.inner_step >= least):
        return (
            f"until a replica brings a checkpoint of inner step {least} or later, as no process "
            f"of replicas {members} lives that has the state; to begin anew, give the run another "
            "name, or rollback=True"
        )
    return ""


# ---------------------------------------------------------------------------------- fixed groups


def _demanded(state: State, roster: Roster) -> Plan:
    """Plan the record with the members that the caller of ``change_group`` demands (rule 10)."""
    demand = state.demand
    if demand is None:
        return Plan()
    living = [key for key in roster.base if roster.lives(key)]
    known = {key.number: key for key in (*roster.newcomers, *living)}
    if state.record is None and not state.may_found:
        # This process takes over a number: only the members know whether the former process lives.
        known[state.key.number] = state.key
    group = [known[number] for number in demand if number in known] or roster.connected(living)
    missing = [number for number in demand if number not in known]
    holders = [key for key in group if key in roster.holders]
    if state.record is None and not (state.may_found or holders):
        # The members have changed to a new store: it has their places, and no record yet.
        inside = [p.key for p in state.places if p.entered != NO_RECORD and p.key.number in demand]
        leader = min(filter(roster.is_fresh, inside), default=None)
        return Plan(leader=leader, reason=f"until the group of replicas {list(demand)} trains")
    is_founder = state.record is None and state.may_found and state.key not in roster.base
    is_late = is_founder and bool(holders)
    epoch = "" if roster.record is None else f", in epoch {roster.record.number}"
    if is_late or state.key not in group or (roster.may_hold() and not (holders or missing)):
        return Plan(
            reason=f"until the group of replicas {_numbers(roster.base)} has ended, which runs "
            f"already{epoch}: "
            'a newcomer, also a replica that was started again, attaches with init="join", while '
            f"the others call change_group with replica {state.key.number} among the members"
        )
    leader = min(holders or set(group) & set(roster.base) or group)
    if missing:
        # Name the leader all the same: it finds out if another caller demands other members.
        return Plan(leader=leader, reason=f"until replicas {missing} come")
    if leader != state.key:
        return Plan(leader=leader, reason=f"until replica {leader.number} leads the change")
    here = dict(state.here)
    silent = [key.number for key in group if key != state.key and key.nonce not in here]
    if silent:
        return Plan(reason=f"until replicas {silent} call change_group, too")
    joined = [key for key in group if key not in roster.base]
    draft = draft_of(state, state.record or state.in_table, group, joined if holders else group)
    return Plan(draft if holders else replace(draft, source=leader.number), leader)


# ---------------------------------------------------------------------------------- the record


def draft_of(
    state: State, record: Record | None, group: Iterable[Key], joined: Collection[Key]
) -> Record:
    """Return the record of the members ``group`` that would follow ``record``, without decision."""
    members = tuple(sorted(group))
    left_out = set(() if record is None else record.numbers) - {key.number for key in members}
    return Record(
        number=1 + (NO_RECORD if record is None else record.number),
        parent=NO_HASH if record is None else record.hash,
        table=state.table,
        founding=NO_HASH if record is None else record.run_id,
        attempt=Attempt(state.nonce, state.counter + 1),
        members=members,
        joined=tuple(_numbers(joined)),
        inner_step=0 if record is None else record.inner_step,
        left_out=tuple(sorted(left_out)),
        evicted=tuple(sorted(state.evict & left_out)),
    )
