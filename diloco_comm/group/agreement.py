"""How a process goes from record to record: ``step(state, event)`` without threads and clocks.

An unplanned change takes these steps: PREPARE to all members of the next record; SEALED from each
that is in the present record, and READY from each; one swap of the table's record; OPEN to all. In
a planned change the members have stopped at one boundary, and the swap and OPEN are enough. Safety
rests on three rules:

* SEALED is a promise: its process votes and applies nothing in this record any more, except as a
  later record says. Which rounds count is a function of the SEALED of the members that go on.
* The swap names the exact bytes of the record before, so one record follows each record.
* A table that has lost its memory takes the next record only with the SEALED of all members.

Comments and tests name the rules by number:

1. The lowest member that lives leads, asks all members of the next record, and stops, too.
2. SEALED is a promise.
3. A round counts if all members that go on, and hold the outer state, have its result.
4. A process takes part in attempts from its own record alone; one that is behind is sent OPEN.
5. A member that refuses to take part may answer NO; the proposer pauses before its next attempt.
6. An attempt makes one swap; if no answer comes, its proposer reads the table.
7. A part of the group waits before it goes on without members that may still train.
8. A process that waits reads the table, and says again where it is.
9. A planned change happens at a boundary.
10. A fixed group changes as its callers demand.
11. A newcomer founds the run only where no member with the outer state lives.
12. Where all have died, the run goes on from a checkpoint that is new enough.
13. A table that lost its memory gets its next record as said above.
14. The members that take the last step say so in a last record.
15. A process that leaves goes once others can go on, or have the outer state.
16. Late messages of processes that have ended, and of former attempts, change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from . import messages as ms
from . import state as st
from .messages import NO_ATTEMPT, Why
from .plans import Plan, Roster, draft_of, plan_of
from .records import NO_HASH, NO_RECORD, Key, Record, cause_of
from .state import Joint, Proposal, Stage, State
from .streams import decide

# After a failed attempt to connect, a newcomer waits suspect_after polls; each further failure
# doubles the wait, at most so many times.
_MOST_DOUBLINGS = 6
# Polls after which a process of a fixed group says again what its caller demands.
_SAY_AGAIN = 2


def step(state: State, event: st.Event) -> tuple[State, tuple[st.Action, ...]]:
    """Return the state after an event, and the actions that it leads to, in order.

    Raises:
        ValueError: If the table holds a record that this process cannot read.
    """
    turn = Turn(state)
    if state.stage is not Stage.GONE:
        _ON_EVENT[type(event)](turn, event)
    if turn.state.stage is not Stage.GONE:
        _go_on(turn)
    return turn.state, tuple(turn.actions)


class Turn:
    """The changes of the state, and the actions, that one event leads to."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[st.Action] = []

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def act(self, action: st.Action) -> None:
        self.actions.append(action)

    def send(self, keys: Iterable[Key], message: ms.Message) -> None:
        for key in keys:
            if key != self.state.key:
                self.act(st.Send(key.nonce, message))

    def wait(self, reason: str) -> None:
        if self.state.failure:
            reason = f"{reason or 'a while'}; the last attempt failed: {self.state.failure}"
        if reason != self.state.waits_for:
            self.change(waits_for=reason, num_waits=min(0, self.state.num_waits))
            self.act(st.Wait(reason))

    def look(self) -> None:
        """Read the table; until it is read, this process leads no further attempt."""
        self.change(is_blind=True)
        self.act(st.Read())

    def seal(self, *, is_patient: bool = False) -> None:
        """Let the training thread stop for good in the present record, unless it was told to."""
        if self.state.stage in (Stage.TRAINING, Stage.STOPPED):
            self.change(stage=Stage.SEALING, num_waits=0)
            self.act(st.Seal(self.state.number, is_patient))

    def note(self, nonce: bytes, cut: Iterable[bytes]) -> None:
        """Note that the process ``nonce`` cannot reach the processes in ``cut``."""
        cuts = self.state.cuts | {(nonce, other) for other in cut if other != nonce}
        if cuts != self.state.cuts:
            self.change(cuts=cuts, num_cut_polls=0)

    def drop(self) -> None:
        """Give up the attempt that this process leads, and pause before another (rule 5)."""
        self.change(proposal=None, num_waits=-1)

    def withdraw(self) -> None:
        """End the demand of this process's caller, and take part in no attempt any more."""
        self.change(demand=None, here=(), proposal=None, joint=None, failure="")

    def forget(self, joint: Joint, failure: str) -> None:
        """Give up an attempt in which a member could not connect its link or its devices.

        The pause before the next attempt grows with each failure. A device's connections need all
        members: the proposer reports the failure to all of them, a member reports it to the
        proposer.
        """
        state, proposal = self.state, self.state.proposal
        is_own = joint.proposer == state.key
        if is_own and (proposal is None or proposal.is_swapping):
            return
        asked = joint.members if is_own else [joint.proposer]
        self.send(asked, ms.No(joint.attempt, Why.FAILED, text=failure))
        number = min(state.num_failures + 1, 10)
        pause = min(1 << number, max(1, state.settings.suspect_after // 2))
        if state.settings.is_fixed:
            # A fixed group does not try again by itself: its caller gets the failure as an
            # error, at once or when its own attempt to connect ends.
            self.withdraw()
        self.change(proposal=None, joint=None, failure=failure)
        self.change(num_failures=number, num_waits=-pause)
        self._put_off(joint, failure)

    def _put_off(self, joint: Joint, failure: str) -> None:
        """Let members of a failed attempt wait that bring no outer state; longer each time."""
        state, roster = self.state, Roster(self.state)
        if state.settings.is_fixed or not set(roster.holders) & set(joint.members):
            return
        found = {nonce: (doublings, polls) for nonce, doublings, polls in state.put_off}
        for key in filter(roster.brings_nothing, joint.members):
            doublings = min(found.get(key.nonce, (-1, 0))[0] + 1, _MOST_DOUBLINGS)
            found[key.nonce] = doublings, state.settings.suspect_after << doublings
            self.act(st.PutOff(key.number, failure, found[key.nonce][1]))
        self.change(put_off=tuple(sorted((nonce, *each) for nonce, each in found.items())))

    def end(self, action: st.End) -> None:
        self.change(stage=Stage.GONE, proposal=None, joint=None)
        self.act(action)


# ---------------------------------------------------------------------------- being asked


def _on_prepare(turn: Turn, nonce: bytes, prepare: ms.Prepare) -> None:
    """Stop, connect and answer, if this process is in the proposed record (rules 1, 2 and 4)."""
    state, attempt = turn.state, prepare.attempt
    proposer = next((key for key in prepare.members if key.nonce == nonce), None)
    if nonce != attempt.proposer or proposer is None or state.key not in prepare.members:
        return
    if state.record is not None and prepare.base < state.number:
        turn.act(st.Send(nonce, ms.Open(state.entered)))
    elif (_leader(state) or proposer) >= proposer and _may_answer(turn, proposer, prepare):
        turn.change(proposal=None, num_waits=0, num_silent=0)
        _take_part(turn, prepare)


def _take_part(turn: Turn, asked: ms.Prepare) -> None:
    """Stop and connect for an attempt; send SEALED and READY again if these are done already."""
    joint, attempt = turn.state.joint, asked.attempt
    turn.seal(is_patient=asked.is_patient)
    if joint is None or joint.attempt != attempt:
        turn.change(joint=Joint(attempt, asked.members))
        turn.act(st.Connect(attempt, asked.members))
    _say_sealed(turn)
    _say_ready(turn)


def _leader(state: State) -> Key | None:
    """Return the living proposer of the attempt in which this process takes part; None if none.

    While that proposer lives, attempts of proposers with higher keys get no answer.
    """
    if state.proposal is not None or state.joint is None:
        return state.key if state.proposal is not None else None
    proposer = state.joint.proposer
    is_lost = proposer.nonce in state.life.dead | state.life.suspected
    is_quiet = state.num_silent >= state.settings.suspect_after
    return None if is_lost or is_quiet or proposer == state.key else proposer


def _may_answer(turn: Turn, proposer: Key, prepare: ms.Prepare) -> bool:
    """Whether this process takes part in an attempt; for some refusals it sends NO (rule 5)."""
    state, attempt, is_joiner = turn.state, prepare.attempt, turn.state.key.number in prepare.joined
    is_here = is_joiner if state.record is None else prepare.base_hash == state.entered_hash
    if not is_here or prepare.table != state.table:
        # This process has yet to enter the record from which the proposer goes on, or to read the
        # proposer's table: both come with the table's next answer, or with an OPEN.
        turn.act(st.Read())
        turn.act(st.Send(proposer.nonce, ms.Here(state.number, state.entered_hash)))
        return False
    is_ready = state.record is not None or state.follows is not None
    if is_joiner and (state.has_state or not is_ready):
        # A member with state must not be counted as one without, and a newcomer joins when ready.
        return False
    if prepare.settings != state.settings.digest:
        if not state.settings.is_fixed:
            refuse = _refuse(state, proposer)
            _answer(turn, ms.No(attempt, Why.SETTINGS, text=refuse.reason))
            turn.end(refuse)
        return False
    if state.settings.is_fixed and state.demand != ():
        numbers = tuple([key.number for key in prepare.members])
        if state.demand is not None and state.demand != numbers:
            _answer(turn, ms.No(attempt, Why.MEMBERS, demand=state.demand))
            _fail(turn, proposer.nonce, numbers)
        return state.demand == numbers
    return True


def _say_sealed(turn: Turn) -> None:
    state, joint = turn.state, turn.state.joint
    if joint is not None and state.stage is Stage.SEALED:
        turn.change(bound=joint.members if state.has_moved else ())
        _answer(turn, ms.Sealed(joint.attempt, state.number, state.positions, state.inner_step))


def _say_ready(turn: Turn) -> None:
    joint = turn.state.joint
    if joint is not None and joint.is_connected:
        _answer(turn, ms.Ready(joint.attempt))


def _answer(turn: Turn, answer: ms.Sealed | ms.Ready | ms.No) -> None:
    """Answer the proposer of an attempt, which may be this process."""
    proposer = answer.attempt.proposer
    if proposer == turn.state.nonce:
        _ON_MESSAGE[type(answer)](turn, proposer, answer)
    else:
        turn.act(st.Send(proposer, answer))


# -------------------------------------------------------------------------------- leading


def _propose(turn: Turn, draft: Record) -> None:
    """Lead an attempt to make ``draft`` the next record; this process stops, too (rule 1)."""
    state, attempt = turn.state, draft.attempt
    is_planned = _is_planned(state, draft)
    is_at_work = state.stage in (Stage.TRAINING, Stage.STOPPED)
    asked = ms.Prepare(
        attempt,
        draft.number - 1,
        draft.parent,
        draft.members,
        draft.joined,
        state.settings.digest,
        draft.table,
        is_patient=is_at_work and not draft.left_out,
        cause=cause_of(draft),
    )
    base = () if state.record is None else state.record.members
    base = tuple([key for key in base if key in draft.members])
    turn.change(counter=attempt.counter, proposal=Proposal(draft, asked, base))
    if is_planned:
        # Rule 9: all rounds before the boundary count, as this process holds all their votes.
        _swap(turn, replace(draft, decision=state.positions, inner_step=state.inner_step))
        return
    turn.send(draft.members, asked)
    _take_part(turn, asked)


def _is_planned(state: State, draft: Record) -> bool:
    """Whether this process may swap without PREPARE.

    It may if it holds all votes before the boundary, and all newcomers follow its record.
    """
    follows = {place.key: place.follows for place in state.places}
    joined = [key for key in draft.members if key.number in draft.joined]
    are_ready = all(follows.get(key) == state.number for key in joined)
    holds_all = state.stage is Stage.STOPPED and state.has_all_votes and state.has_state
    return holds_all and are_ready and draft.source is None and not state.has_moved


def _on_answer(turn: Turn, nonce: bytes, answer: ms.Sealed | ms.Ready) -> None:
    """Note a SEALED or a READY for the attempt that this process leads (rule 16)."""
    state, proposal, record = turn.state, turn.state.proposal, turn.state.record
    if proposal is None or proposal.draft.attempt != answer.attempt:
        if record is not None and record.attempt == answer.attempt and nonce != state.nonce:
            turn.act(st.Send(nonce, ms.Open(state.entered)))
    elif isinstance(answer, ms.Sealed):
        if nonce in [key.nonce for key in proposal.base] and answer.base == state.number:
            answers = {**dict(proposal.answers), nonce: answer}
            turn.change(proposal=replace(proposal, answers=tuple(sorted(answers.items()))))
    elif nonce in [key.nonce for key in proposal.draft.members]:
        turn.change(proposal=replace(proposal, ready=proposal.ready | {nonce}))


def _on_no(turn: Turn, nonce: bytes, no: ms.No) -> None:
    """Give up an attempt that was refused (rule 5), or a demand that was contradicted (rule 10)."""
    proposal, joint = turn.state.proposal, turn.state.joint
    is_own = proposal is not None and proposal.draft.attempt == no.attempt
    if no.why is Why.MEMBERS and (is_own or no.attempt == NO_ATTEMPT):
        _fail(turn, nonce, no.demand)
    if no.why is Why.FAILED and no.attempt == NO_ATTEMPT:
        # The caller of the sending process waits no longer.
        turn.change(here=tuple([one for one in turn.state.here if one[0] != nonce]))
    if no.why is Why.MEMBERS or joint is None or joint.attempt != no.attempt:
        return
    numbers = {key.nonce: key.number for key in joint.members}
    is_proposer = nonce == joint.attempt.proposer
    if no.why is Why.FAILED:
        if nonce in numbers and (is_own or is_proposer):
            turn.forget(joint, f"replica {numbers[nonce]}: {no.text}" if is_own else no.text)
    elif is_own and no.cut:
        _leave_cut_off(turn, joint, nonce, no)
    elif is_own:
        turn.note(nonce, (turn.state.nonce,))
        turn.drop()
    elif no.why is Why.KEY and is_proposer and turn.state.nonce in no.cut:
        # Members refuse this newcomer's key: it ends, as each attempt with it stops the members.
        if turn.state.record is None:
            turn.end(st.Refuse(no.text))


def _leave_cut_off(turn: Turn, joint: Joint, nonce: bytes, no: ms.No) -> None:
    """Give up this process's attempt, as a member cannot reach others, or refuses their keys."""
    turn.note(nonce, no.cut)
    if turn.state.settings.is_fixed:
        # Only the callers of a fixed group can choose other members.
        numbers = {key.nonce: key.number for key in joint.members}
        away = sorted(numbers[other] for other in no.cut if other in numbers)
        is_own = no.why is Why.KEY or nonce == turn.state.nonce
        text = no.text if is_own or not no.text else f"replica {numbers[nonce]}: {no.text}"
        turn.forget(joint, text or f"replica {numbers[nonce]} cannot reach replicas {away}")
        return
    if no.why is Why.KEY:
        refused = [key for key in joint.members if key.nonce in no.cut]
        turn.send(refused, ms.No(joint.attempt, Why.KEY, no.cut, text=no.text))
    turn.drop()


def _missing(proposal: Proposal) -> list[Key]:
    """Return the processes whose SEALED or READY for this attempt has not come."""
    sealed = dict(proposal.answers)
    unsealed = {key for key in proposal.base if key.nonce not in sealed}
    unready = {key for key in proposal.draft.members if key.nonce not in proposal.ready}
    return sorted(unsealed | unready)


def _advance(turn: Turn, proposal: Proposal) -> None:
    """Swap when all have answered (rules 1 and 3); give the attempt up if a member has died."""
    state, draft = turn.state, proposal.draft
    if proposal.is_swapping:
        return
    is_lost = {key.nonce for key in draft.members} & (state.life.dead | state.life.suspected)
    named = {place.key.nonce: place.key for place in state.places}
    # A newcomer that chose its replica number itself may have changed the number since.
    is_lost |= {k.nonce for k in draft.members if named.get(k.nonce, k) != k}
    if is_lost or draft.table != state.table or draft.parent != state.base_hash:
        turn.drop()
        return
    if missing := _missing(proposal):
        numbers = [key.number for key in missing]
        turn.wait(f"until replicas {numbers} have stopped and are connected")
        return
    holders = {nonce: one for nonce, one in proposal.answers if one.positions}
    if bool(holders) == (draft.source is not None):
        # The draft was wrong: a member holds the outer state unexpectedly, or none does.
        turn.drop()
        return
    try:
        decision = decide([one.positions for one in holders.values()])
    except ValueError as error:
        _leave_behind(turn, holders, str(error))
        return
    new = replace(draft, decision=decision)
    if draft.source is None:
        stateless = {key.number for key in proposal.base if key.nonce not in holders}
        step = min(one.inner_step for one in holders.values())
        new = replace(new, joined=tuple(sorted({*draft.joined, *stateless})), inner_step=step)
    _swap(turn, new)


def _leave_behind(turn: Turn, holders: dict[bytes, ms.Sealed], why: str) -> None:
    """Go on without the member that is furthest behind: nobody can send it the rounds it lacks."""
    ends = {nonce: sum(one.end for one in sealed.positions) for nonce, sealed in holders.items()}
    last = min(ends, key=lambda nonce: (ends[nonce], nonce))
    if last == turn.state.nonce:
        turn.end(st.Fence(f"replica {turn.state.key.number} cannot go on with the others: {why}"))
    elif turn.state.settings.is_fixed and turn.state.joint is not None:
        # Only the callers of a fixed group can choose other members.
        turn.forget(turn.state.joint, why)
    else:
        turn.note(turn.state.nonce, [last])
        turn.drop()


def _swap(turn: Turn, new: Record) -> None:
    """Ask the table for the one swap of an attempt (rule 6)."""
    state, proposal = turn.state, turn.state.proposal
    assert proposal is not None
    turn.change(proposal=replace(proposal, is_swapping=True))
    turn.act(st.Swap(b"" if state.has_moved else state.entered or state.recorded, new.to_bytes()))


def _on_swapped(turn: Turn, event: st.Swapped) -> None:
    """Enter the new record, or read which one the table has (rule 6); a newcomer always reads."""
    state, is_done = turn.state, event.outcome is st.Outcome.DONE
    # If the table has lost its memory since, the swap that it has made is lost, too.
    if is_done and state.record is not None and Record.from_bytes(event.new).table == state.table:
        _follow(turn, event.new)
    else:
        turn.drop()
        turn.look()


# --------------------------------------------------------------------- following the chain


def _on_looked(turn: Turn, event: st.Looked) -> None:
    mine = turn.state.record
    is_former = mine is not None and event.table == mine.table
    if turn.state.bound and is_former and event.record != turn.state.entered:
        # This process has sealed for a newer table: a late answer of the former one is void.
        return
    nonces = {place.key.nonce for place in event.places}
    here = tuple([one for one in turn.state.here if one[0] in nonces])
    put_off = tuple([one for one in turn.state.put_off if one[0] in nonces])
    if event.table != turn.state.table:
        # Processes have yet to write their places into this table: wait for them anew.
        turn.change(num_waits=0)
    turn.change(recorded=event.record, table=event.table, places=event.places)
    turn.change(evict=event.evict, is_blind=False, here=here, put_off=put_off)
    if event.record:
        _follow(turn, event.record)


def _on_open(turn: Turn, nonce: bytes, message: ms.Open) -> None:
    """Enter the record that an OPEN of a member brings, without a look at the table.

    The OPEN of a process outside the record only makes this process read the table. A newcomer
    reads, too, as a late message must not lead it into an old record; it believes the OPEN only
    where the table, which has lost its memory, has no record.
    """
    try:
        record = Record.from_bytes(message.record)
    except ValueError:
        return
    state, mine = turn.state, turn.state.record
    if mine is None:
        is_member = record.is_member(state.key)
        turn.change(opened=message.record if is_member else state.opened)
        if is_member and not state.recorded:
            _enter(turn, message.record)
        else:
            turn.act(st.Read())
    elif record.run_id == mine.run_id and record.number > mine.number:
        # After SEALED for a new table, an OPEN for the former table counts only from a member of
        # that attempt: its sender has entered the record, so the attempt cannot succeed.
        asked = [key.nonce for key in state.bound] or [nonce]
        if (nonce in asked or record.table != mine.table) and _is_believed(state, nonce):
            _follow(turn, message.record)
        else:
            turn.act(st.Read())


def _is_believed(state: State, nonce: bytes) -> bool:
    """Whether this process believes the OPEN of another without a look at the table.

    The sender is a member of this process's record. Where the table has lost its memory, it may
    also be any process whose place tells of a later record: no member of this one may live.
    """
    members = () if state.record is None else state.record.members
    ahead = [p.key for p in state.places if state.has_moved and p.entered > state.number]
    return nonce in [key.nonce for key in (*members, *ahead)]


def _may_come(state: State, content: bytes) -> bool:
    """Whether a newcomer may enter the table's record: a member of the record before goes first.

    If the newcomer went first and the table then lost that record, the members of the record
    before would go on in another one.
    """
    record = Record.from_bytes(content)
    proposer = record.attempt.proposer
    first = [k for k in record.members if k.number not in record.joined or k.nonce == proposer]
    is_told = state.key in first or content == state.opened
    return record.parent == NO_HASH or is_told or not any(map(Roster(state).lives, first))


def _follow(turn: Turn, content: bytes) -> None:
    """Enter a later record, or end because the others go on without this process (rule 4)."""
    state, mine, record = turn.state, turn.state.record, Record.from_bytes(content)
    numbers, name = list(record.numbers), state.settings.record_name
    if mine is None:
        if record.is_member(state.key) and _may_come(state, content):
            _enter(turn, content)
    elif record.run_id != mine.run_id:
        turn.end(
            st.Fence(
                f"the table holds {name} {record.number} of replicas {numbers}, which does not "
                f"follow from {name} {mine.number} of replicas {list(mine.numbers)}"
            )
        )
    elif record.number < mine.number or content == state.entered:
        return
    elif record.number == mine.number:
        # Same number, other record: the table lost the entered record before a member with the
        # outer state had entered that record.
        turn.end(st.Fence(f"{name} {record.number} was opened anew without this process"))
    elif record.is_member(state.key) and record.is_finished:
        # The run is finished, and this member has all its steps.
        turn.change(is_finished=True)
        turn.end(st.Drained("the run has ended"))
    elif record.is_member(state.key):
        _enter(turn, content)
    elif state.is_leaving or state.key.number in record.evicted:
        turn.end(st.Drained("this replica has left"))
    else:
        reason = f"{name} {record.number} of replicas {numbers} was opened without this process"
        reason += f"; the last attempt failed: {state.failure}" if state.failure else ""
        if state.settings.is_fixed:
            reason = f"the group of replicas {numbers} went on in epoch {record.number}"
            reason += f" without replica {state.key.number}"
        turn.change(recorded=content)
        turn.end(st.Fence(reason))


def _enter(turn: Turn, content: bytes) -> None:
    """Enter a record: the promise of SEALED ends, and this process trains again."""
    state, record = turn.state, Record.from_bytes(content)
    number, members = state.key.number, {key.nonce for key in record.members}
    holds = state.has_state and number not in record.joined
    turn.change(
        **{name: getattr(st.State, name) for name in st.OF_ONE_RECORD},
        stage=Stage.TRAINING,
        entered=content,
        recorded=content,
        table=record.table,
        has_state=number == record.source or (record.source is None and holds),
        is_blind=False,
        demand=None if state.demand in ((), record.numbers) else state.demand,
        put_off=tuple([one for one in state.put_off if one[0] not in members]),
    )
    turn.act(st.Enter(record))
    if record.attempt.proposer == state.nonce:
        turn.send(record.members, ms.Open(content))
    turn.wait("")


# --------------------------------------------------------------------------- other events


def _on_heard(turn: Turn, event: st.Heard) -> None:
    if event.nonce not in turn.state.life.dead:
        # Rule 16: a late frame of a process that has ended changes nothing.
        _ON_MESSAGE[type(event.message)](turn, event.nonce, event.message)


def _on_here(turn: Turn, nonce: bytes, here: ms.Here) -> None:
    """Handle a HERE: its sender has stopped in its record, or its caller demands a group."""
    state = turn.state
    is_behind = state.record is not None and here.base < state.number
    is_member = state.record is not None and nonce in [key.nonce for key in state.record.members]
    if is_behind and (is_member or here.base != NO_RECORD):
        turn.act(st.Send(nonce, ms.Open(state.entered)))
    elif here.base != NO_RECORD and here.base_hash != state.entered_hash:
        turn.look()
    elif not state.settings.is_fixed and here.base != NO_RECORD:
        # The sender votes no more, so no round of this record can end: stop, too.
        turn.note(nonce, here.cut)
        turn.seal()
    elif state.demand and here.demand not in ((), state.demand):
        # Tell only processes that this demand names; the others will hear of the next record.
        if set(_numbers_of(state, nonce)) & set(state.demand):
            turn.act(st.Send(nonce, ms.No(NO_ATTEMPT, Why.MEMBERS, demand=state.demand)))
            _fail(turn, nonce, here.demand)
    elif state.settings.is_fixed:
        turn.change(here=tuple(sorted({**dict(state.here), nonce: here.demand}.items())))


def _numbers_of(state: State, nonce: bytes) -> list[int]:
    keys = [place.key for place in state.places]
    return [key.number for key in (*Roster(state).base, *keys) if key.nonce == nonce]


def _fail(turn: Turn, nonce: bytes, demand: Iterable[int]) -> None:
    """End a demand that another caller contradicts (rule 10)."""
    state = turn.state
    if state.demand in (None, tuple(demand)):
        # There is no contradiction: this may be a late answer to a former demand.
        return
    numbers = _numbers_of(state, nonce)
    who = f"replica {numbers[0]}" if numbers else "another replica"
    turn.withdraw()
    turn.act(
        st.Fail(
            f"replica {state.key.number} was told to go on with {_named(state.demand)}, and {who} "
            f"with {_named(demand)}: give the same members to change_group on all of them"
        )
    )


def _named(demand: Iterable[int]) -> str:
    return f"replicas {numbers}" if (numbers := list(demand)) else "all members that live"


def _on_passed(turn: Turn, _: st.Passed) -> None:
    state, limit = turn.state, turn.state.settings.suspect_after
    most = (8 + len(Roster(state).base)) * limit
    turn.change(num_waits=min(state.num_waits + 1, most))
    turn.change(num_cut_polls=min(state.num_cut_polls + 1, 3 * limit))
    turn.change(num_silent=min(state.num_silent + 1, limit))
    turn.change(put_off=tuple([(*each, max(0, polls - 1)) for *each, polls in state.put_off]))
    if turn.state.num_cut_polls == 3 * limit:
        # Forget the cuts: a process that could not be reached may be reachable by now.
        turn.change(cuts=frozenset())
    # Send a demand again soon: when it was sent first, the leader's caller may not have called yet.
    often = _SAY_AGAIN if state.settings.is_fixed and state.demand is not None else limit // 2
    is_due = turn.state.num_waits % max(1, often) == 0
    proposal = state.proposal
    if proposal is not None and not proposal.is_swapping:
        members = proposal.draft.members if is_due else _missing(proposal)
        turn.send(members, proposal.asked)
    elif is_due:
        # Rule 8: a process that hears nothing reads the table, and says again where it is.
        turn.change(told=b"")
        turn.act(st.Read())
        _open_again(turn)


def _open_again(turn: Turn) -> None:
    """Send OPEN again to the members whose places show that they have not entered the record.

    If the table has lost its memory, a newcomer cannot read the record there.
    """
    state, record = turn.state, turn.state.record
    if record is not None:
        members = set(record.members)
        places = [place for place in state.places if place.key in members]
        inside = [place.key for place in places if place.entered == record.number]
        late = []
        if state.key == min(inside, default=None):
            late += [place.key for place in places if place.entered < record.number]
        if state.demand is not None and state.has_moved:
            # Replicas that this record leaves out cannot read it in a new, still empty store.
            out = [place for place in state.places if place.key not in members]
            late += [p.key for p in out if NO_RECORD < p.entered < record.number]
        turn.send(late, ms.Open(state.entered))


def _on_sealed(turn: Turn, event: st.Sealed) -> None:
    state = turn.state
    if event.number == state.number and state.stage is Stage.SEALING:
        positions = event.positions if state.has_state else ()
        turn.change(stage=Stage.SEALED, positions=positions, inner_step=event.inner_step)
        _say_sealed(turn)


def _on_connected(turn: Turn, event: st.Connected) -> None:
    state, joint = turn.state, turn.state.joint
    if joint is None or joint.attempt != event.attempt:
        return
    if event.cut:
        turn.note(state.nonce, event.cut)
        why, text = Why.KEY if event.refusal else Why.CUT, event.refusal or event.error
        _answer(turn, ms.No(event.attempt, why, cut=event.cut, text=text))
        turn.change(joint=None)
    elif event.error:
        turn.forget(joint, event.error)
    else:
        turn.change(joint=replace(joint, is_connected=True))
        _say_ready(turn)


def _on_broke(turn: Turn, event: st.Broke) -> None:
    if event.number == turn.state.number:
        turn.note(turn.state.nonce, event.cut)
        turn.seal()


def _on_boundary(turn: Turn, event: st.Boundary) -> None:
    if event.number == turn.state.number and turn.state.stage is Stage.TRAINING:
        turn.change(stage=Stage.STOPPED, positions=event.positions, num_waits=0)
        turn.change(inner_step=event.inner_step, has_all_votes=event.has_all_votes)


def _on_started(turn: Turn, event: st.Started) -> None:
    if event.number == turn.state.number and turn.state.stage is not Stage.SEALED:
        # A process that has answered SEALED without state gives that same answer to all.
        turn.change(has_state=True)


def _on_demanded(turn: Turn, event: st.Demanded) -> None:
    turn.change(demand=tuple(sorted(set(event.members))), may_found=event.may_found, told=b"")
    turn.change(failure="", num_failures=0, num_waits=0)
    if event.members:
        # The caller may have repaired the connections.
        turn.change(cuts=frozenset())
    if turn.state.record is None:
        turn.change(follows=NO_RECORD)
    # The group may have a later record already: this process enters it, or ends, first.
    turn.look()


def _on_given_up(turn: Turn, _: st.GivenUp) -> None:
    if turn.state.told:
        # The leader has heard that this caller waits, and must not count on it any more.
        turn.act(st.Send(turn.state.told, ms.No(NO_ATTEMPT, Why.FAILED)))
        turn.change(told=b"")
    turn.withdraw()


def _on_leave(turn: Turn, _: st.Leave) -> None:
    turn.change(is_leaving=True)
    if turn.state.record is None:
        turn.end(st.Drained("this replica has left"))


def _on_finished(turn: Turn, event: st.Finished) -> None:
    """End this process; if all steps are taken, write so into a last record (rule 14)."""
    state, record = turn.state, turn.state.record
    is_open = record is not None and not record.is_finished and not state.settings.is_fixed
    turn.change(is_finished=True)
    if record is not None and event.has_all_steps and is_open and not state.has_moved:
        last = replace(
            draft_of(state, record, record.members, ()),
            decision=event.positions,
            inner_step=event.inner_step,
            is_finished=True,
        )
        turn.act(st.Swap(state.entered, last.to_bytes()))
    turn.end(st.Drained("this replica has taken its last step"))


# --------------------------------------------------------------------------- after every event


def _go_on(turn: Turn) -> None:
    """Do what the new state calls for: advance an attempt, wait, leave or propose a record."""
    state, record = turn.state, turn.state.record
    if state.proposal is not None:
        _advance(turn, state.proposal)
        return
    if record is not None and record.is_finished:
        return
    if state.stage is Stage.TRAINING and not state.settings.is_fixed:
        finished = {place.key.nonce for place in state.places if place.is_finished}
        dead = state.life.dead - finished
        if not (record and dead & {key.nonce for key in record.members}):
            _ask_for_boundary(turn)
            return
        turn.seal()
    is_new = state.stage is Stage.NEWCOMER and not state.settings.is_fixed
    if (is_new or state.demand is not None) and _differs(turn):
        return
    plan = plan_of(turn.state)
    if plan.is_over:
        turn.end(st.Over(plan.reason))
    elif not _has_left(turn):
        _wait_or_propose(turn, plan)


def _wait_or_propose(turn: Turn, plan: Plan) -> None:
    leader = _leader(turn.state)
    if leader is not None:
        turn.wait(f"until replica {leader.number} goes on, which leads the change")
        return
    _tell_leader(turn, plan.leader)
    turn.wait(plan.reason)
    state = turn.state
    if plan.draft is not None and not state.is_blind and state.num_waits >= plan.patience:
        _propose(turn, plan.draft)


def _tell_leader(turn: Turn, leader: Key | None) -> None:
    """Send HERE to the process that is to lead, unless it was told already or learns by itself."""
    state, is_fixed = turn.state, turn.state.settings.is_fixed
    leads = leader in (None, state.key)
    if leads and state.record is not None and not is_fixed:
        # This process would lead, and waits: ask another one, which may know a later record
        # (rule 8).
        roster = Roster(state)
        ahead = [p.key for p in state.places if p.entered > state.number and p.is_fresh]
        living = [key for key in roster.base if roster.lives(key) and key != state.key]
        leader = min(ahead or living, default=None)
    if leader in (None, state.key) or leader.nonce == state.told:
        return
    # The leader of an elastic group learns by itself that a member has died or has stopped.
    members = () if state.record is None else state.record.members
    will_hear = bool(state.life.dead & {key.nonce for key in members})
    will_hear |= state.stage in (Stage.STOPPED, Stage.NEWCOMER) or leads
    if is_fixed or not will_hear or state.num_waits >= state.settings.suspect_after:
        cut = st.place_of(state, 0).cut
        here = ms.Here(state.number, state.entered_hash, state.demand or (), cut)
        turn.act(st.Send(leader.nonce, here))
        turn.change(told=leader.nonce)


def _ask_for_boundary(turn: Turn) -> None:
    """Ask, once in a record, for a boundary when a process is to join or to leave (rule 9)."""
    # Where the table has lost the entered record, no swap succeeds: nobody can join or leave.
    if turn.state.is_pending or turn.state.has_lost_record:
        return
    roster = Roster(turn.state)
    # Only the lowest member asks for newcomers: others may not know which newcomers it lets wait
    # after failed attempts.
    fresh = [key for key in roster.here if key == turn.state.key or roster.is_fresh(key)]
    leads = turn.state.key == min(fresh, default=None)
    wanted = leads and roster.reaching(roster.here, roster.newcomers)
    if wanted or roster.leaving or turn.state.is_leaving:
        turn.change(is_pending=True)
        turn.act(st.Pend())


def _has_left(turn: Turn) -> bool:
    """End a process that is to leave, if no other needs it; return whether it has ended (rule 15).

    Others need it where a member goes on, or a newcomer takes the outer state from it.
    """
    state = turn.state
    if state.is_leaving and state.stage in (Stage.STOPPED, Stage.SEALED):
        roster = Roster(state)
        takers = state.has_state and (roster.newcomers or roster.coming)
        if not (set(roster.here) - {state.key} or takers):
            turn.end(st.Drained("this replica has left"))
    return turn.state.stage is Stage.GONE


def _differs(turn: Turn) -> bool:
    """End, or fail the demand, if settings differ; return whether they do (rule 5).

    A newcomer of an elastic group compares its settings with the members, and a process of a
    fixed group with the replicas that its caller demands.
    """
    state, roster = turn.state, Roster(turn.state)
    is_fixed, base = state.settings.is_fixed, set(roster.base)
    for place in state.places:
        key = place.key
        is_named = key.number in (state.demand or ()) and not (state.entered and key in base)
        is_meant = is_named if is_fixed else key in base
        if is_meant and place.settings != state.settings.digest and roster.lives(key):
            refuse = _refuse(state, key)
            if is_fixed:
                turn.withdraw()
                turn.act(st.Fail(refuse.reason, key))
            else:
                turn.end(refuse)
            return True
    return False


def _refuse(state: State, other: Key) -> st.Refuse:
    text = ms.other_settings(state.settings.run, state.key.number, other.number)
    return st.Refuse(text, other)


_ON_MESSAGE: dict[type, Callable[[Turn, bytes, Any], None]] = {
    ms.Here: _on_here,
    ms.Prepare: _on_prepare,
    ms.Sealed: _on_answer,
    ms.Ready: _on_answer,
    ms.No: _on_no,
    ms.Open: _on_open,
}
_ON_EVENT: dict[type, Callable[[Turn, Any], None]] = {
    st.Heard: _on_heard,
    st.Looked: _on_looked,
    st.Swapped: _on_swapped,
    st.Passed: _on_passed,
    st.Life: lambda turn, event: turn.change(life=event),
    st.Sealed: _on_sealed,
    st.Connected: _on_connected,
    st.Broke: _on_broke,
    st.Boundary: _on_boundary,
    st.Started: _on_started,
    st.Demanded: _on_demanded,
    st.GivenUp: _on_given_up,
    st.JoinerReady: lambda turn, event: turn.change(follows=event.follows),
    st.Leave: _on_leave,
    st.Finished: _on_finished,
}
