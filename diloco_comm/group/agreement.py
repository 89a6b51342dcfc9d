"""How a process goes from record to record: ``step(state, event)`` without threads and clocks.

An unplanned change takes five messages one after the other: PREPARE to all members, SEALED and
READY from each, one swap of the table's record, OPEN to all. In a planned change the members have
stopped at one boundary, and the swap and OPEN are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import messages as ms
from . import state as st
from .attempts import (
    advance,
    ask_again,
    fail,
    is_released,
    on_no,
    on_prepare,
    on_ready,
    on_sealed,
    on_swapped,
    on_withdraw,
    other_settings,
    propose,
    replaced,
    say_ready,
    say_sealed,
    succeed,
    swap_again,
    withdraw,
)
from .chain import Turn, follow, is_forgotten, recall
from .messages import NO_ATTEMPT, Why
from .plans import Plan, Roster, has_heard, plan_of
from .records import NO_RECORD, Attempt, Record
from .state import Bound, Stage, State


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


def _on_looked(turn: Turn, event: st.Looked) -> None:
    nonces = {place.key.nonce for place in event.places}
    ready = tuple([one for one in turn.state.ready if one[0] in nonces])
    here = tuple([one for one in turn.state.here if one[0] in nonces])
    turn.change(recorded=event.record, table=event.table, places=event.places)
    turn.change(evict=event.evict, is_blind=False, ready=ready, here=here)
    state, proposal = turn.state, turn.state.proposal
    if state.stage is Stage.FINISHING:
        if event.record != state.entered:
            turn.end(st.Drained())
        return
    if proposal is not None and proposal.new:
        if event.record == proposal.new:
            succeed(turn, proposal)
            return
        if event.record == replaced(state, Record.from_bytes(proposal.new)):
            swap_again(turn)
            return
    if state.record is None and proposal is not None:
        there = NO_RECORD if state.in_table is None else state.in_table.number
        if proposal.draft.number <= there:
            # Another founding was first.
            turn.change(proposal=replace(proposal, new=b""))
            withdraw(turn)
    if event.record:
        follow(turn, event.record)


def _on_open(turn: Turn, nonce: bytes, message: ms.Open) -> None:
    try:
        record = Record.from_bytes(message.record)
    except ValueError:
        return
    state = turn.state
    is_next = record.number == state.number + 1 and record.parent == state.entered_hash
    is_let_in = state.record is None and record.is_member(state.key)
    if is_next or is_let_in:
        turn.change(recorded=message.record)
        follow(turn, message.record)
    elif record.number > state.number:
        turn.look()


def _on_heard(turn: Turn, event: st.Heard) -> None:
    if event.nonce in turn.state.life.dead:
        # Rule 16: a late frame of a process that has ended.
        return
    _ON_MESSAGE[type(event.message)](turn, event.nonce, event.message)


def _on_here(turn: Turn, nonce: bytes, here: ms.Here) -> None:
    """Note that a member has stopped in the base, or demands a group."""
    state = turn.state
    if here.base != NO_RECORD and here.base_hash != state.entered_hash:
        if here.base < state.number:
            turn.act(st.Send(nonce, ms.No(NO_ATTEMPT, Why.HIGHER, state.number)))
        else:
            turn.look()
        return
    if state.settings.is_fixed and state.demand and here.demand not in ((), state.demand):
        turn.act(st.Send(nonce, ms.No(NO_ATTEMPT, Why.MEMBERS, state.number, demand=state.demand)))
        fail(turn, nonce, here.demand)
        return
    turn.note_cuts(nonce, here.cut)
    if state.settings.is_fixed:
        known = [one for one in state.here if one[0] != nonce]
        turn.change(here=tuple(sorted([*known, (nonce, here.demand)])))
    elif here.base == state.number != NO_RECORD:
        # That member votes no more: no round of this record can end.
        turn.seal()


def _on_passed(turn: Turn, _: st.Passed) -> None:
    state = turn.state
    limit = state.settings.suspect_after
    most = (8 + len(Roster(state).base)) * limit
    turn.change(
        num_waits=min(state.num_waits + 1, most),
        num_silent=min(state.num_silent + 1, most),
        num_polls=(state.num_polls + 1) % limit,
        num_cut_polls=min(state.num_cut_polls + 1, 3 * limit),
        pause=max(0, state.pause - 1),
        puts_back=False,
    )
    if turn.state.num_cut_polls >= 3 * limit and state.cuts:
        # What could not be reached once may be reached after a while.
        turn.change(cuts=frozenset(), unfit=frozenset())
    is_due = turn.state.num_polls == 0
    if state.stage is Stage.FINISHING:
        _finish(turn)
    elif state.proposal is not None:
        ask_again(turn, state.proposal, everybody=is_due)
    elif is_due:
        # Rule 8: a process that hears nothing reads the table, and says again where it is.
        turn.act(st.Read())
        turn.change(told=b"")
        say_sealed(turn)
        say_ready(turn)


def _on_life(turn: Turn, event: st.Life) -> None:
    state = turn.state
    turn.change(life=event)
    bound = state.bound
    if bound is not None and bound.attempt.proposer != state.nonce:
        newly_lost = (event.dead - state.life.dead) | (event.suspected - state.life.suspected)
        if bound.attempt.proposer in newly_lost:
            # Its proposer may have swapped before it ended.
            turn.look()


def _on_thread_sealed(turn: Turn, event: st.Sealed) -> None:
    state = turn.state
    if event.number == state.number and state.stage is Stage.SEALING:
        positions = event.positions if state.has_state else ()
        turn.change(stage=Stage.SEALED, positions=positions, inner_step=event.inner_step)
        say_sealed(turn)


def _on_connected(turn: Turn, event: st.Connected) -> None:
    bound = turn.state.bound
    if bound is None or bound.attempt != event.attempt:
        return
    if not event.cut:
        turn.change(bound=replace(bound, is_connected=True))
        say_ready(turn)
        return
    turn.note_cuts(turn.state.nonce, event.cut)
    if bound.attempt.proposer == turn.state.nonce:
        withdraw(turn)
    else:
        no = ms.No(event.attempt, Why.CUT, turn.state.number, cut=event.cut)
        turn.act(st.Send(bound.attempt.proposer, no))


def _on_broke(turn: Turn, event: st.Broke) -> None:
    if event.number == turn.state.number:
        turn.note_cuts(turn.state.nonce, event.cut)
        turn.seal()


def _on_boundary(turn: Turn, event: st.Boundary) -> None:
    if event.number == turn.state.number and turn.state.stage is Stage.TRAINING:
        turn.change(
            stage=Stage.STOPPED,
            positions=event.positions,
            inner_step=event.inner_step,
            has_all_votes=event.has_all_votes,
            num_waits=0,
        )


def _on_started(turn: Turn, event: st.Started) -> None:
    if event.number == turn.state.number:
        turn.change(has_state=True)


def _on_demanded(turn: Turn, event: st.Demanded) -> None:
    turn.change(demand=tuple(sorted(event.members)), is_ready=True, told=b"")
    # The group may have gone on already: then this process enters, or ends, first.
    turn.look()


def _on_given_up(turn: Turn, _: st.GivenUp) -> None:
    withdraw(turn)
    turn.change(demand=None, here=())
    turn.wait("")


def _on_joiner_ready(turn: Turn, event: st.JoinerReady) -> None:
    turn.change(is_ready=True, heard=event.heard, told=b"")


def _on_leave(turn: Turn, _: st.Leave) -> None:
    turn.change(is_leaving=True)
    if turn.state.record is None:
        turn.end(st.Drained())


def _on_finished(turn: Turn, event: st.Finished) -> None:
    """End; the last members say in the record that the run has ended (rule 14)."""
    state, record = turn.state, turn.state.record
    turn.change(is_finished=True)
    is_open = record is not None and not record.is_finished and not state.settings.is_fixed
    if event.has_all_steps and is_open and state.stage is Stage.TRAINING:
        turn.change(stage=Stage.FINISHING, num_waits=0)
        _finish(turn)
    else:
        turn.end(st.Drained())


def _finish(turn: Turn) -> None:
    state, record = turn.state, turn.state.record
    assert record is not None
    if state.num_waits > state.settings.suspect_after:
        turn.end(st.Drained())
        return
    last = replace(
        record,
        number=record.number + 1,
        parent=state.entered_hash,
        attempt=Attempt(state.nonce, state.counter + 1),
        joined=(),
        source=None,
        left_out=(),
        evicted=(),
        is_finished=True,
    )
    turn.act(st.Swap(state.entered, last.to_bytes()))


def _go_on(turn: Turn) -> None:
    """Do what follows from the state as it is now: advance, wait, leave or propose."""
    state = turn.state
    if state.stage is Stage.FINISHING:
        return
    is_lost = is_forgotten(state) and not state.settings.is_fixed
    if is_lost:
        recall(turn)
    if state.proposal is not None:
        advance(turn, state.proposal)
        return
    if is_lost or (state.record is not None and state.record.is_finished):
        return
    if state.stage is Stage.TRAINING and not state.settings.is_fixed:
        if not state.life.dead & {key.nonce for key in Roster(state).base}:
            _ask_for_boundary(turn)
            return
        turn.seal()
    if state.stage is Stage.NEWCOMER and _cannot_come(turn):
        return
    plan = plan_of(turn.state)
    if plan.is_over:
        turn.end(st.Over(plan.reason))
    elif not _has_left(turn):
        _wait_or_propose(turn, plan)


def _wait_or_propose(turn: Turn, plan: Plan) -> None:
    state, bound = turn.state, turn.state.bound
    if bound is not None:
        if not is_released(state, bound):
            turn.wait(_why_bound(state, bound))
            return
    _tell_leader(turn, plan)
    turn.wait(plan.reason)
    if plan.draft is None or state.is_blind or state.pause:
        return
    if state.num_waits >= plan.patience:
        propose(turn, plan)


def _why_bound(state: State, bound: Bound) -> str:
    leader = bound.proposer.number
    if bound.attempt.proposer in state.life.dead and state.table != bound.table:
        return (
            f"until it is known whether view {state.number + 1} was opened: replica {leader} led "
            "its opening and has ended, and the registry has lost its memory since; to begin anew, "
            "start all replicas again"
        )
    return f"until replica {leader} goes on, which leads the change"


def _tell_leader(turn: Turn, plan: Plan) -> None:
    """Say to the process that is to lead that this one has stopped, or is ready; once a while."""
    state, leader = turn.state, plan.leader
    if leader is None or leader == state.key or leader.nonce == state.told:
        return
    if state.settings.is_fixed or state.record is not None:
        if not state.settings.is_fixed and _will_hear(state):
            return
        cut = {other for pair in state.cuts if state.nonce in pair for other in pair}
        cut = (cut | state.life.cut) - {state.nonce}
        here = ms.Here(state.number, state.entered_hash, state.demand or (), tuple(sorted(cut)))
        turn.act(st.Send(leader.nonce, here))
    elif state.is_ready and state.in_table is not None:
        members = state.in_table.members
        heard = sum(1 << place for place, key in enumerate(members) if key.nonce in state.heard)
        turn.act(st.Send(leader.nonce, ms.Ready(NO_ATTEMPT, state.in_table.number, heard)))
    turn.change(told=leader.nonce)


def _will_hear(state: State) -> bool:
    """Whether the leader learns without HERE that it is to lead: at a boundary, or of a death."""
    members = () if state.record is None else state.record.members
    has_seen_death = bool(state.life.dead & {key.nonce for key in members})
    is_quiet = state.stage is Stage.STOPPED or has_seen_death
    return is_quiet and state.num_waits < state.settings.suspect_after


def _ask_for_boundary(turn: Turn) -> None:
    """Ask for a boundary when somebody is to come or to go (rule 9), once in a record."""
    state = turn.state
    roster = Roster(state)
    ready = [key for key in roster.newcomers if has_heard(state, key, roster.here)]
    goes = {key.number for key in roster.base} & state.evict
    if not state.is_pending and (roster.leaving or state.is_leaving or goes or ready):
        turn.change(is_pending=True)
        turn.act(st.Pend())


def _has_left(turn: Turn) -> bool:
    """Leave, if nobody is here to go on, or to be given the state (rule 15)."""
    state = turn.state
    if not state.is_leaving or not state.has_stopped:
        return False
    roster = Roster(state)
    others = [key for key in roster.base if roster.lives(key) and key in roster.here]
    if others or roster.newcomers or roster.coming:
        return False
    turn.end(st.Drained())
    return True


def _cannot_come(turn: Turn) -> bool:
    """Refuse to come to a group with other settings."""
    state = turn.state
    members = () if state.in_table is None else state.in_table.members
    for place in state.places:
        if place.key in members and place.is_fresh and place.settings != state.settings.digest:
            turn.end(st.Refuse(other_settings(state, place.key)))
            return True
    return False


_ON_MESSAGE: dict[type, Callable[[Turn, bytes, Any], None]] = {
    ms.Here: _on_here,
    ms.Prepare: on_prepare,
    ms.Sealed: on_sealed,
    ms.Ready: on_ready,
    ms.No: on_no,
    ms.Withdraw: on_withdraw,
    ms.Open: _on_open,
}


_ON_EVENT: dict[type, Callable[[Turn, Any], None]] = {
    st.Heard: _on_heard,
    st.Looked: _on_looked,
    st.Swapped: on_swapped,
    st.Passed: _on_passed,
    st.Life: _on_life,
    st.Sealed: _on_thread_sealed,
    st.Connected: _on_connected,
    st.Broke: _on_broke,
    st.Boundary: _on_boundary,
    st.Started: _on_started,
    st.Demanded: _on_demanded,
    st.GivenUp: _on_given_up,
    st.JoinerReady: _on_joiner_ready,
    st.Leave: _on_leave,
    st.Finished: _on_finished,
}
