"""Attempts to go from one record to the next: one at a time, led by one process.

Safety rests on three rules:

* SEALED is a promise: its process votes and applies nothing in this record any more, except as the
  next record says. Which rounds count is a function of the SEALED of all that were asked.
* The swap names the exact bytes of the record before, so one record follows each record.
* On a table that forgets, an attempt asks a majority of the base, and a process that has sealed for
  one attempt answers another only when the first can come to nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from . import messages as ms
from . import state as st
from .chain import Turn, enter
from .messages import NO_ATTEMPT, Why
from .plans import Plan, Roster, has_heard
from .records import Attempt, Key, Record
from .state import Answer, Bound, Proposal, Stage, State
from .streams import decide

# ---------------------------------------------------------------------------- being asked


def on_prepare(turn: Turn, nonce: bytes, prepare: ms.Prepare) -> None:
    """Answer a proposer; rule 4: only a process that has entered the base seals for it."""
    state = turn.state
    leaves = state.is_leaving or state.key.number in state.evict
    is_asked = state.key in prepare.members or (leaves and state.settings.may_forget)
    is_of_sender = nonce == prepare.attempt.proposer
    proposer = next((key for key in prepare.members if key.nonce == nonce), None)
    if not (is_asked and is_of_sender and proposer) or state.stage is Stage.FINISHING:
        return
    bound = state.bound
    if bound and prepare.attempt.proposer == bound.attempt.proposer:
        if prepare.attempt.counter < bound.attempt.counter:
            return
    no = _objection(turn, prepare)
    if no is not None:
        turn.act(st.Send(nonce, no))
        return
    state = turn.state
    turn.change(highest=max(state.highest, prepare.base))
    if state.bound is None or state.bound.attempt != prepare.attempt:
        withdraw(turn)
        turn.change(bound=Bound(prepare.attempt, prepare.members, state.table))
        turn.seal(is_patient=prepare.is_patient)
        if state.key in prepare.members:
            turn.act(st.Connect(prepare.attempt, prepare.members))
        if turn.state.stage is Stage.SEALED:
            say_sealed(turn)
    else:
        say_sealed(turn)
        say_ready(turn)
    turn.change(num_silent=0)


def _objection(turn: Turn, prepare: ms.Prepare) -> ms.No | None:
    """Say why this process does not take part in an attempt, or not yet (rules 4 and 5)."""
    state, attempt = turn.state, prepare.attempt
    if state.record is not None:
        if prepare.base < state.number:
            return ms.No(attempt, Why.HIGHER, state.number)
        if prepare.base_hash != state.entered_hash:
            turn.act(st.Read())
            return ms.No(attempt, Why.NOT_YET, state.number)
        if state.has_state and state.key.number in prepare.joined:
            # The proposer takes the state for lost, and this process holds it.
            return ms.No(attempt, Why.NOT_YET, state.number)
    elif state.key.number not in prepare.joined or not state.is_ready:
        # A member of the base that has not entered it yet enters first.
        turn.act(st.Read())
        return ms.No(attempt, Why.NOT_YET)
    if prepare.settings != state.settings.digest:
        text = other_settings(
            state, next(k for k in prepare.members if k.nonce == attempt.proposer)
        )
        if state.record is None:
            turn.end(st.Refuse(text))
        return ms.No(attempt, Why.SETTINGS, state.number, text=text)
    if state.settings.is_fixed:
        numbers = tuple([key.number for key in prepare.members])
        if state.demand is None:
            return ms.No(attempt, Why.NOT_YET, state.number)
        if state.demand not in ((), numbers):
            fail(turn, attempt.proposer, numbers)
            return ms.No(attempt, Why.MEMBERS, state.number, demand=state.demand)
    if not _is_free_for(state, prepare):
        return ms.No(attempt, Why.BOUND, state.number)
    return None


def _is_free_for(state: State, prepare: ms.Prepare) -> bool:
    """Whether an attempt may take the place of the one that binds this process (rule 2)."""
    bound, attempt = state.bound, prepare.attempt
    if bound is None or bound.attempt.proposer == attempt.proposer:
        return True
    if bound.attempt.proposer == state.nonce:
        proposer = next(key for key in prepare.members if key.nonce == attempt.proposer)
        is_stuck = state.proposal is not None and state.proposal.is_unsure
        return (proposer < state.key or is_stuck) and _may_withdraw(state)
    return is_released(state, bound)


def is_released(state: State, bound: Bound) -> bool:
    """Whether the attempt of another process binds this one no longer.

    A table that keeps its record takes one of several attempts, so there a suspicion is enough. On
    a table that forgets, the proposer may have swapped before it died: the table must say that it
    has not, and must not have lost its memory since this process sealed.
    """
    gone = state.life.dead
    if state.settings.may_forget and state.entered:
        has_kept = state.recorded == state.entered and state.table == bound.table
        return bound.attempt.proposer in gone and has_kept and not state.is_blind
    if state.nonce not in [key.nonce for key in bound.members]:
        return True
    rank = [key.nonce for key in bound.members].index(state.nonce)
    patience = (2 + rank) * state.settings.suspect_after
    is_lost = bound.attempt.proposer in gone | state.life.suspected
    return is_lost or state.num_silent >= patience


def _may_withdraw(state: State) -> bool:
    """Whether this process may give up its attempt: not while its swap may be done (rule 6).

    On a table that keeps its record, a swap that is done later is as good as the other attempt's.
    """
    proposal = state.proposal
    if proposal is None or not proposal.new:
        return True
    return proposal.is_unsure and not state.settings.may_forget


def say_sealed(turn: Turn) -> None:
    state, bound = turn.state, turn.state.bound
    if bound is None or state.stage is not Stage.SEALED:
        return
    sealed = ms.Sealed(bound.attempt, state.number, state.positions, state.inner_step)
    if bound.attempt.proposer == state.nonce:
        on_sealed(turn, state.nonce, sealed)
    else:
        turn.act(st.Send(bound.attempt.proposer, sealed))


def say_ready(turn: Turn) -> None:
    state, bound = turn.state, turn.state.bound
    if bound is None or not bound.is_connected:
        return
    ready = ms.Ready(bound.attempt, state.number, (1 << len(bound.members)) - 1)
    if bound.attempt.proposer == state.nonce:
        on_ready(turn, state.nonce, ready)
    else:
        turn.act(st.Send(bound.attempt.proposer, ready))


def on_sealed(turn: Turn, nonce: bytes, sealed: ms.Sealed) -> None:
    proposal = _own(turn, nonce, sealed.attempt)
    if proposal is None or proposal.draft.number != sealed.base + 1:
        return
    asked = {key.nonce: key for key in proposal.asked}
    known = {answer.key for answer in proposal.answers}
    if nonce in asked and asked[nonce] not in known:
        answer = Answer(asked[nonce], sealed.positions, sealed.inner_step)
        answers = tuple(sorted([*proposal.answers, answer], key=lambda one: one.key))
        turn.change(proposal=replace(proposal, answers=answers))


def on_ready(turn: Turn, nonce: bytes, ready: ms.Ready) -> None:
    if ready.attempt == NO_ATTEMPT:
        if ready.base != turn.state.number:
            return
        places = {place.key.nonce for place in turn.state.places}
        others = [(other, heard) for other, heard in turn.state.ready if other in places - {nonce}]
        turn.change(ready=tuple(sorted([*others, (nonce, ready.heard)])))
        return
    proposal = _own(turn, nonce, ready.attempt)
    if proposal is not None:
        members = proposal.draft.members
        unheard = [key.nonce for place, key in enumerate(members) if not ready.heard >> place & 1]
        if unheard:
            turn.note_cuts(nonce, unheard)
            withdraw(turn)
            return
        heard = {key for key in members if key.nonce == nonce}
        turn.change(proposal=replace(proposal, ready=proposal.ready | heard))


def _own(turn: Turn, nonce: bytes, attempt: Attempt) -> Proposal | None:
    """Return the own proposal if an answer is to it; else tell the sender what became of it."""
    state = turn.state
    if state.proposal is not None and state.proposal.draft.attempt == attempt:
        return None if state.proposal.new else state.proposal
    if attempt.proposer == state.nonce:
        record = state.record
        is_done = record is not None and record.attempt == attempt
        turn.act(st.Send(nonce, ms.Open(state.entered) if is_done else ms.Withdraw(attempt)))
    return None


def on_no(turn: Turn, nonce: bytes, no: ms.No) -> None:
    """Try again without whom there is no way to (rule 5); BOUND and NOT_YET are asked again."""
    state = turn.state
    is_own = state.proposal is not None and state.proposal.draft.attempt == no.attempt
    if no.why is Why.HIGHER and no.record > state.number:
        turn.look()
        if is_own:
            withdraw(turn)
    elif no.why is Why.MEMBERS and (is_own or no.attempt == NO_ATTEMPT):
        if state.demand is not None:
            fail(turn, nonce, no.demand)
    elif is_own and no.why is Why.CUT:
        turn.note_cuts(nonce, no.cut)
        withdraw(turn)
    elif is_own and no.why is Why.BOUND and state.num_waits >= state.settings.suspect_after:
        # Two attempts hold members that both need.
        withdraw(turn)
    elif is_own and no.why is Why.SETTINGS:
        turn.change(unfit=state.unfit | {nonce})
        withdraw(turn)


def fail(turn: Turn, nonce: bytes, demand: Iterable[int]) -> None:
    """End a demand that another caller contradicts (rule 10)."""
    state = turn.state
    mine, other = list(state.demand or ()), list(demand)
    numbers = [key.number for key in Roster(state).base if key.nonce == nonce]
    numbers += [place.key.number for place in state.places if place.key.nonce == nonce]
    who = f"replica {numbers[0]}" if numbers else "another replica"
    withdraw(turn)
    turn.change(demand=None, here=())
    turn.act(
        st.Fail(
            f"replica {state.key.number} was told to go on with replicas {mine}, and {who} with "
            f"replicas {other}: give the same members to change_group on all of them"
        )
    )


def withdraw(turn: Turn) -> None:
    """Give up the own attempt, and try again after a pause."""
    state = turn.state
    if state.proposal is None or not _may_withdraw(state):
        return
    attempt = state.proposal.draft.attempt
    turn.change(proposal=None, bound=None, pause=1, num_waits=0)
    turn.send(_all_asked(state.proposal), ms.Withdraw(attempt))
    turn.act(st.Abandon(attempt))


def _all_asked(proposal: Proposal) -> list[Key]:
    return sorted({*proposal.draft.members, *proposal.asked})


def on_withdraw(turn: Turn, nonce: bytes, withdraw: ms.Withdraw) -> None:
    bound = turn.state.bound
    if bound and bound.attempt == withdraw.attempt and nonce == withdraw.attempt.proposer:
        turn.change(bound=None, num_waits=0)
        turn.act(st.Abandon(withdraw.attempt))


def other_settings(state: State, other: Key) -> str:
    return (
        f"replica {state.key.number} cannot join run {state.settings.run!r}, as replica "
        f"{state.key.number} has another model or other settings than replica {other.number}: "
        f"start replica {state.key.number} with the model, settings and number of workers of the "
        "members"
    )


def propose(turn: Turn, plan: Plan) -> None:
    """Ask the members of a plan; this process seals, too (rule 1)."""
    state, draft = turn.state, plan.draft
    assert draft is not None
    if _is_planned(state, draft):
        # Rule 9: all rounds before the boundary count, as this process holds all their votes.
        proposal = Proposal(draft, plan.asked)
        turn.change(counter=draft.attempt.counter, proposal=proposal)
        turn.change(bound=Bound(draft.attempt, draft.members, state.table))
        _swap(turn, replace(draft, decision=state.positions, inner_step=state.inner_step))
        return
    is_at_work = state.stage in (Stage.TRAINING, Stage.STOPPED)
    is_patient = is_at_work and not draft.left_out
    proposal = Proposal(draft, plan.asked, is_patient, _cause(draft))
    turn.change(counter=draft.attempt.counter, proposal=proposal)
    turn.change(bound=Bound(draft.attempt, draft.members, state.table))
    turn.send(_all_asked(proposal), _prepare(state, proposal))
    turn.seal(is_patient=is_patient)
    turn.act(st.Connect(draft.attempt, draft.members))
    say_sealed(turn)


def _is_planned(state: State, draft: Record) -> bool:
    """Whether this process may swap without asking: it holds all votes before the boundary."""
    settings = state.settings
    has_votes = state.has_all_votes and state.has_state
    is_at_boundary = state.stage is Stage.STOPPED and has_votes
    joined = [key for key in draft.members if key.number in draft.joined]
    base = [key for key in draft.members if key.number not in draft.joined]
    are_ready = all(has_heard(state, key, base) for key in joined)
    # On a table that forgets, only the SEALED of a majority makes one decision.
    return is_at_boundary and are_ready and settings.is_durable and draft.source is None


def _prepare(state: State, proposal: Proposal) -> ms.Prepare:
    draft = proposal.draft
    joined = draft.joined
    return ms.Prepare(
        draft.attempt,
        draft.number - 1,
        draft.parent,
        draft.members,
        joined,
        state.settings.digest,
        is_patient=proposal.is_patient,
        cause=proposal.cause,
    )


def _cause(draft: Record) -> str:
    if draft.number == 0:
        return "the run begins"
    parts = [f"replicas {list(draft.left_out)} left"] if draft.left_out else []
    parts += [f"replicas {list(draft.joined)} join"] if draft.joined else []
    return ", ".join(parts) or "the members meet again"


def ask_again(turn: Turn, proposal: Proposal, *, everybody: bool) -> None:
    if proposal.new:
        if proposal.is_unsure:
            turn.act(st.Read())
            swap_again(turn)
        return
    asked = _all_asked(proposal) if everybody else _missing(proposal)
    turn.send(asked, _prepare(turn.state, proposal))


def advance(turn: Turn, proposal: Proposal) -> None:
    """Swap when all have answered (rules 1 and 3), or try again without whom has died."""
    state, draft = turn.state, proposal.draft
    if proposal.new:
        return
    asked = {key.nonce for key in _all_asked(proposal)}
    if asked & (state.life.dead | state.life.suspected):
        withdraw(turn)
        return
    if missing := _missing(proposal):
        numbers = [key.number for key in missing]
        turn.wait(f"until replicas {numbers} have stopped and are connected")
        return
    holders = [answer for answer in proposal.answers if answer.positions]
    if bool(holders) == (draft.source is not None):
        # Who holds the state is not as the plan took it to be.
        withdraw(turn)
        return
    try:
        decision = decide([answer.positions for answer in holders])
    except ValueError as error:
        _leave_behind(turn, holders, str(error))
        return
    new = replace(draft, decision=decision)
    if draft.source is None:
        stateless = {answer.key.number for answer in proposal.answers if not answer.positions}
        joined = tuple(sorted({*draft.joined, *stateless} & set(draft.numbers)))
        step = min(answer.inner_step for answer in holders)
        new = replace(new, joined=joined, inner_step=step)
    _swap(turn, new)


def _missing(proposal: Proposal) -> list[Key]:
    """Return the processes that have not given all answers."""
    unsealed = set(proposal.asked) - {answer.key for answer in proposal.answers}
    return sorted(unsealed | set(proposal.draft.members) - proposal.ready)


def _leave_behind(turn: Turn, holders: list[Answer], why: str) -> None:
    """Go on without the member that is furthest behind: what it lacks cannot be repaired."""
    last = min(holders, key=lambda one: (sum(rounds.end for rounds in one.positions), one.key))
    if last.key == turn.state.key:
        turn.end(st.Fence(f"replica {last.key.number} cannot go on with the others: {why}"))
    else:
        turn.change(unfit=turn.state.unfit | {last.key.nonce})
        turn.note_cuts(turn.state.nonce, [last.key.nonce])
        withdraw(turn)


def _swap(turn: Turn, new: Record) -> None:
    """Ask the table for the one swap of an attempt, again and again with the same bytes."""
    state, proposal = turn.state, turn.state.proposal
    assert proposal is not None
    content = new.to_bytes()
    turn.change(proposal=replace(proposal, new=content, is_unsure=False))
    turn.act(st.Swap(replaced(state, new), content))


def replaced(state: State, new: Record) -> bytes:
    """Return the bytes that a record takes the place of; of a fixed group also a new table."""
    if new.number == 0 or (state.settings.is_fixed and not state.recorded):
        return b""
    return state.entered or state.recorded


def on_swapped(turn: Turn, event: st.Swapped) -> None:
    """Take in the outcome of a swap (rule 6)."""
    state, is_done = turn.state, event.outcome is st.Outcome.DONE
    if state.stage is Stage.FINISHING:
        if event.outcome is not st.Outcome.UNKNOWN:
            turn.end(st.Drained())
    elif state.proposal is not None and state.proposal.new == event.new:
        if is_done:
            succeed(turn, state.proposal)
        else:
            turn.change(proposal=replace(state.proposal, is_unsure=True))
            turn.act(st.Read())
    elif is_done:
        # What was forgotten is there again.
        turn.change(recorded=event.new, puts_back=False)
        swap_again(turn)
    else:
        turn.change(puts_back=False)
        turn.look()


def succeed(turn: Turn, proposal: Proposal) -> None:
    others = [key for key in proposal.draft.members if key != turn.state.key]
    turn.change(recorded=proposal.new)
    enter(turn, proposal.new)
    turn.send(others, ms.Open(proposal.new))


def swap_again(turn: Turn) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.is_unsure:
        _swap(turn, Record.from_bytes(proposal.new))
