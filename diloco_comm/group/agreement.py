"""How a process goes from record to record: ``step(state, event)`` without threads and clocks.

An unplanned change takes five messages one after the other: PREPARE to all members, SEALED and
READY from each, one swap of the table's record, OPEN to all. Safety rests on three rules:

* SEALED is a promise: this process votes and applies nothing in this record any more, except as
  the next record says. Which rounds count is a function of the SEALED of all asked members.
* The swap names the exact bytes of the record before, so one record follows each record.
* On a table that forgets, each record is asked of a majority, and a member that has answered one
  attempt answers another only when the first can come to nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from . import messages as ms
from .messages import NO_ATTEMPT, Message, Why
from .plans import Plan, Roster, has_heard, plan_of
from .records import NO_RECORD, Attempt, Key, Record
from .state import (
    Abandon,
    Action,
    Answer,
    Bound,
    Boundary,
    Broke,
    Connect,
    Connected,
    Demanded,
    Drained,
    Enter,
    Event,
    Fail,
    Fence,
    Finished,
    GivenUp,
    Heard,
    JoinerReady,
    Leave,
    Life,
    Looked,
    Outcome,
    Over,
    Passed,
    Pend,
    Proposal,
    Read,
    Refuse,
    Seal,
    Sealed,
    Send,
    Stage,
    Started,
    State,
    Swap,
    Swapped,
    Wait,
)
from .streams import decide


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
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
    """Collects what one event leads to."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[Action] = []

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, keys: Iterable[Key], message: Message) -> None:
        for key in keys:
            if key != self.state.key:
                self.act(Send(key.nonce, message))

    def wait(self, reason: str) -> None:
        if reason != self.state.waits_for:
            self.change(waits_for=reason, num_waits=0)
            self.act(Wait(reason))

    def look(self) -> None:
        """Read the table before this process leads another attempt."""
        self.change(is_blind=True)
        self.act(Read())

    def seal(self, *, is_patient: bool = False) -> None:
        """Stop for good in the record, once."""
        if self.state.stage in (Stage.TRAINING, Stage.STOPPED):
            self.change(stage=Stage.SEALING, num_waits=0)
            self.act(Seal(self.state.number, is_patient))

    def end(self, action: Action) -> None:
        self.change(stage=Stage.GONE, proposal=None, bound=None)
        self.act(action)

    def note_cuts(self, nonce: bytes, cut: Iterable[bytes]) -> None:
        """Note that there is no way between a process and some others."""
        pairs = {(nonce, other) for other in cut if other != nonce}
        if pairs:
            self.change(cuts=self.state.cuts | pairs, num_cut_polls=0)


# ------------------------------------------------------------- one attempt at a time (rules 1-6)


def _on_prepare(turn: Turn, nonce: bytes, prepare: ms.Prepare) -> None:
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
        turn.act(Send(nonce, no))
        return
    state = turn.state
    turn.change(highest=max(state.highest, prepare.base))
    if state.bound is None or state.bound.attempt != prepare.attempt:
        _withdraw(turn)
        turn.change(bound=Bound(prepare.attempt, prepare.members, state.table))
        turn.seal(is_patient=prepare.is_patient)
        if state.key in prepare.members:
            turn.act(Connect(prepare.attempt, prepare.members))
        if turn.state.stage is Stage.SEALED:
            _say_sealed(turn)
    else:
        _say_sealed(turn)
        _say_ready(turn)
    turn.change(num_silent=0)


def _objection(turn: Turn, prepare: ms.Prepare) -> ms.No | None:
    """Say why this process does not take part in an attempt, or not yet (rules 4 and 5)."""
    state, attempt = turn.state, prepare.attempt
    if state.record is not None:
        if prepare.base < state.number:
            return ms.No(attempt, Why.HIGHER, state.number)
        if prepare.base_hash != state.entered_hash:
            turn.act(Read())
            return ms.No(attempt, Why.NOT_YET, state.number)
        if state.has_state and state.key.number in prepare.joined:
            # The proposer takes the state for lost, and this process holds it.
            return ms.No(attempt, Why.NOT_YET, state.number)
    elif state.key.number not in prepare.joined or not state.is_ready:
        # A member of the base that has not entered it yet enters first.
        turn.act(Read())
        return ms.No(attempt, Why.NOT_YET)
    if prepare.settings != state.settings.digest:
        text = _other_settings(
            state, next(k for k in prepare.members if k.nonce == attempt.proposer)
        )
        if state.record is None:
            turn.end(Refuse(text))
        return ms.No(attempt, Why.SETTINGS, state.number, text=text)
    if state.settings.is_fixed:
        numbers = tuple([key.number for key in prepare.members])
        if state.demand is None:
            return ms.No(attempt, Why.NOT_YET, state.number)
        if state.demand not in ((), numbers):
            _fail(turn, attempt.proposer, numbers)
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


def _say_sealed(turn: Turn) -> None:
    state, bound = turn.state, turn.state.bound
    if bound is None or state.stage is not Stage.SEALED:
        return
    sealed = ms.Sealed(bound.attempt, state.number, state.positions, state.inner_step)
    if bound.attempt.proposer == state.nonce:
        _on_sealed(turn, state.nonce, sealed)
    else:
        turn.act(Send(bound.attempt.proposer, sealed))


def _say_ready(turn: Turn) -> None:
    state, bound = turn.state, turn.state.bound
    if bound is None or not bound.is_connected:
        return
    ready = ms.Ready(bound.attempt, state.number, (1 << len(bound.members)) - 1)
    if bound.attempt.proposer == state.nonce:
        _on_ready(turn, state.nonce, ready)
    else:
        turn.act(Send(bound.attempt.proposer, ready))


def _on_sealed(turn: Turn, nonce: bytes, sealed: ms.Sealed) -> None:
    proposal = _own(turn, nonce, sealed.attempt)
    if proposal is None or proposal.draft.number != sealed.base + 1:
        return
    asked = {key.nonce: key for key in proposal.asked}
    known = {answer.key for answer in proposal.answers}
    if nonce in asked and asked[nonce] not in known:
        answer = Answer(asked[nonce], sealed.positions, sealed.inner_step)
        answers = tuple(sorted([*proposal.answers, answer], key=lambda one: one.key))
        turn.change(proposal=replace(proposal, answers=answers))


def _on_ready(turn: Turn, nonce: bytes, ready: ms.Ready) -> None:
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
            _withdraw(turn)
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
        turn.act(Send(nonce, ms.Open(state.entered) if is_done else ms.Withdraw(attempt)))
    return None


def _on_no(turn: Turn, nonce: bytes, no: ms.No) -> None:
    """Try again without whom there is no way to (rule 5); BOUND and NOT_YET are asked again."""
    state = turn.state
    is_own = state.proposal is not None and state.proposal.draft.attempt == no.attempt
    if no.why is Why.HIGHER and no.record > state.number:
        turn.look()
        if is_own:
            _withdraw(turn)
    elif no.why is Why.MEMBERS and (is_own or no.attempt == NO_ATTEMPT):
        if state.demand is not None:
            _fail(turn, nonce, no.demand)
    elif is_own and no.why is Why.CUT:
        turn.note_cuts(nonce, no.cut)
        _withdraw(turn)
    elif is_own and no.why is Why.SETTINGS:
        turn.change(unfit=state.unfit | {nonce})
        _withdraw(turn)


def _withdraw(turn: Turn) -> None:
    """Give up the own attempt, and try again after a pause."""
    state = turn.state
    if state.proposal is None or not _may_withdraw(state):
        return
    attempt = state.proposal.draft.attempt
    turn.change(proposal=None, bound=None, pause=1, num_waits=0)
    turn.send(_all_asked(state.proposal), ms.Withdraw(attempt))
    turn.act(Abandon(attempt))


def _all_asked(proposal: Proposal) -> list[Key]:
    return sorted({*proposal.draft.members, *proposal.asked})


def _on_withdraw(turn: Turn, nonce: bytes, withdraw: ms.Withdraw) -> None:
    bound = turn.state.bound
    if bound and bound.attempt == withdraw.attempt and nonce == withdraw.attempt.proposer:
        turn.change(bound=None, num_waits=0)
        turn.act(Abandon(withdraw.attempt))


def _propose(turn: Turn, plan: Plan) -> None:
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
    turn.act(Connect(draft.attempt, draft.members))
    _say_sealed(turn)


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


def _advance(turn: Turn, proposal: Proposal) -> None:
    """Swap when all have answered (rules 1 and 3), or try again without whom has died."""
    state, draft = turn.state, proposal.draft
    if proposal.new:
        return
    asked = {key.nonce for key in _all_asked(proposal)}
    if asked & (state.life.dead | state.life.suspected):
        _withdraw(turn)
        return
    if missing := _missing(proposal):
        numbers = [key.number for key in missing]
        turn.wait(f"until replicas {numbers} have stopped and are connected")
        return
    holders = [answer for answer in proposal.answers if answer.positions]
    if bool(holders) == (draft.source is not None):
        # Who holds the state is not as the plan took it to be.
        _withdraw(turn)
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
        turn.end(Fence(f"replica {last.key.number} cannot go on with the others: {why}"))
    else:
        turn.change(unfit=turn.state.unfit | {last.key.nonce})
        turn.note_cuts(turn.state.nonce, [last.key.nonce])
        _withdraw(turn)


def _swap(turn: Turn, new: Record) -> None:
    """Ask the table for the one swap of an attempt, again and again with the same bytes."""
    state, proposal = turn.state, turn.state.proposal
    assert proposal is not None
    content = new.to_bytes()
    turn.change(proposal=replace(proposal, new=content, is_unsure=False))
    turn.act(Swap(_replaced(state, new), content))


def _replaced(state: State, new: Record) -> bytes:
    """Return the bytes that a record takes the place of; of a fixed group also a new table."""
    if new.number == 0 or (state.settings.is_fixed and not state.recorded):
        return b""
    return state.entered or state.recorded


def _on_swapped(turn: Turn, event: Swapped) -> None:
    """Take in the outcome of a swap (rule 6)."""
    state, is_done = turn.state, event.outcome is Outcome.DONE
    if state.stage is Stage.FINISHING:
        if event.outcome is not Outcome.UNKNOWN:
            turn.end(Drained())
    elif state.proposal is not None and state.proposal.new == event.new:
        if is_done:
            _succeed(turn, state.proposal)
        else:
            turn.change(proposal=replace(state.proposal, is_unsure=True))
            turn.act(Read())
    elif is_done:
        # What was forgotten is there again.
        turn.change(recorded=event.new)
        _swap_again(turn)
    else:
        turn.act(Read())


def _succeed(turn: Turn, proposal: Proposal) -> None:
    others = [key for key in proposal.draft.members if key != turn.state.key]
    turn.change(recorded=proposal.new)
    _enter(turn, proposal.new)
    turn.send(others, ms.Open(proposal.new))


def _swap_again(turn: Turn) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.is_unsure:
        _swap(turn, Record.from_bytes(proposal.new))


# -------------------------------------------------------------------- following the chain (4, 13)


def _on_looked(turn: Turn, event: Looked) -> None:
    nonces = {place.key.nonce for place in event.places}
    ready = tuple([one for one in turn.state.ready if one[0] in nonces])
    here = tuple([one for one in turn.state.here if one[0] in nonces])
    turn.change(recorded=event.record, table=event.table, places=event.places)
    turn.change(evict=event.evict, is_blind=False, ready=ready, here=here)
    state, proposal = turn.state, turn.state.proposal
    if state.stage is Stage.FINISHING:
        if event.record != state.entered:
            turn.end(Drained())
        return
    if proposal is not None and proposal.new:
        if event.record == proposal.new:
            _succeed(turn, proposal)
            return
        if event.record == _replaced(state, Record.from_bytes(proposal.new)):
            _swap_again(turn)
            return
    if state.record is None and proposal is not None:
        there = NO_RECORD if state.in_table is None else state.in_table.number
        if proposal.draft.number <= there:
            # Another founding was first.
            turn.change(proposal=replace(proposal, new=b""))
            _withdraw(turn)
    if event.record:
        _follow(turn, event.record)


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
        _follow(turn, message.record)
    elif record.number > state.number:
        turn.look()


def _follow(turn: Turn, content: bytes) -> None:
    """Enter the record of the table, or end because it goes on without this process."""
    state, mine = turn.state, turn.state.record
    record = Record.from_bytes(content)
    if mine is None:
        # A newcomer drops records of this founding that are older than what it has seen.
        highest = state.highest if record.table == state.founding else NO_RECORD
        if record.is_member(state.key) and record.number >= highest:
            _enter(turn, content)
        turn.change(founding=record.table, highest=max(highest, record.number))
        return
    if record.number < mine.number or content == state.entered:
        return
    is_next = record.number == mine.number + 1
    is_other = record.table != mine.table
    if is_next and record.source is None:
        is_other = record.parent != state.entered_hash
    if is_other or record.number == mine.number:
        turn.end(
            Fence(
                f"the table holds view {record.number} of replicas {list(record.numbers)}, which "
                f"does not follow from view {mine.number} of replicas {list(mine.numbers)}"
            )
        )
    elif record.is_member(state.key):
        _enter(turn, content)
    elif state.is_leaving or state.key.number in record.evicted:
        turn.end(Drained())
    elif state.settings.is_fixed:
        turn.end(
            Fence(
                f"the group of replicas {list(record.numbers)} went on in epoch {record.number} "
                f"without replica {state.key.number}"
            )
        )
    else:
        turn.end(
            Fence(
                f"view {record.number} of replicas {list(record.numbers)} was opened without this "
                "process"
            )
        )


def _enter(turn: Turn, content: bytes) -> None:
    """Enter a record: the promise of SEALED ends, and rounds begin anew."""
    state, record = turn.state, Record.from_bytes(content)
    number = state.key.number
    if state.bound is not None and state.bound.attempt != record.attempt:
        turn.act(Abandon(state.bound.attempt))
    holds = state.has_state and number not in record.joined
    turn.change(
        stage=Stage.TRAINING,
        entered=content,
        has_state=number == record.source or (record.source is None and holds),
        positions=(),
        has_all_votes=False,
        is_pending=False,
        bound=None,
        proposal=None,
        is_blind=False,
        told=b"",
        here=(),
        ready=(),
        cuts=frozenset(),
        demand=None if state.demand in ((), record.numbers) else state.demand,
        num_waits=0,
        num_silent=0,
        pause=0,
    )
    turn.act(Enter(record))
    turn.wait("")


def is_forgotten(state: State) -> bool:
    """Whether the table knows less than this process."""
    mine, there = state.record, state.in_table
    return mine is not None and (there is None or there.number < mine.number)


def _recall(turn: Turn) -> None:
    """Put the record back that the table has forgotten, also over an older one (rule 13)."""
    state = turn.state
    if state.settings.may_forget:
        if not state.is_blind:
            turn.look()
            turn.act(Swap(state.recorded, state.entered))
    else:
        turn.wait(
            f"until the registry has its record again: it knew view {state.number}, and now it "
            "knows less"
        )


# ------------------------------------------------------------------------- from the other sources


def _on_heard(turn: Turn, event: Heard) -> None:
    if event.nonce in turn.state.life.dead:
        # Rule 16: a late frame of a process that has ended.
        return
    _ON_MESSAGE[type(event.message)](turn, event.nonce, event.message)


def _on_here(turn: Turn, nonce: bytes, here: ms.Here) -> None:
    """Note that a member has stopped in the base, or demands a group."""
    state = turn.state
    if here.base != NO_RECORD and here.base_hash != state.entered_hash:
        if here.base < state.number:
            turn.act(Send(nonce, ms.No(NO_ATTEMPT, Why.HIGHER, state.number)))
        else:
            turn.look()
        return
    if state.settings.is_fixed and state.demand and here.demand not in ((), state.demand):
        turn.act(Send(nonce, ms.No(NO_ATTEMPT, Why.MEMBERS, state.number, demand=state.demand)))
        _fail(turn, nonce, here.demand)
        return
    turn.note_cuts(nonce, here.cut)
    if state.settings.is_fixed:
        known = [one for one in state.here if one[0] != nonce]
        turn.change(here=tuple(sorted([*known, (nonce, here.demand)])))
    elif here.base == state.number != NO_RECORD:
        # That member votes no more: no round of this record can end.
        turn.seal()


def _fail(turn: Turn, nonce: bytes, demand: Iterable[int]) -> None:
    """End a demand that another caller contradicts (rule 10)."""
    state = turn.state
    mine, other = list(state.demand or ()), list(demand)
    numbers = [key.number for key in Roster(state).base if key.nonce == nonce]
    numbers += [place.key.number for place in state.places if place.key.nonce == nonce]
    who = f"replica {numbers[0]}" if numbers else "another replica"
    _withdraw(turn)
    turn.change(demand=None, here=())
    turn.act(
        Fail(
            f"replica {state.key.number} was told to go on with replicas {mine}, and {who} with "
            f"replicas {other}: give the same members to change_group on all of them"
        )
    )


def _on_passed(turn: Turn, _: Passed) -> None:
    state = turn.state
    limit = state.settings.suspect_after
    most = (8 + len(Roster(state).base)) * limit
    turn.change(
        num_waits=min(state.num_waits + 1, most),
        num_silent=min(state.num_silent + 1, most),
        num_polls=(state.num_polls + 1) % limit,
        num_cut_polls=min(state.num_cut_polls + 1, 3 * limit),
        pause=max(0, state.pause - 1),
    )
    if turn.state.num_cut_polls >= 3 * limit and state.cuts:
        # What could not be reached once may be reached after a while.
        turn.change(cuts=frozenset(), unfit=frozenset())
    is_due = turn.state.num_polls == 0
    if state.stage is Stage.FINISHING:
        _finish(turn)
    elif state.proposal is not None:
        _ask_again(turn, state.proposal, everybody=is_due)
    elif is_due:
        # Rule 8: a process that hears nothing reads the table, and says again where it is.
        turn.act(Read())
        turn.change(told=b"")
        _say_sealed(turn)
        _say_ready(turn)


def _ask_again(turn: Turn, proposal: Proposal, *, everybody: bool) -> None:
    if proposal.new:
        if proposal.is_unsure:
            turn.act(Read())
            _swap_again(turn)
        return
    asked = _all_asked(proposal) if everybody else _missing(proposal)
    turn.send(asked, _prepare(turn.state, proposal))


def _on_life(turn: Turn, event: Life) -> None:
    state = turn.state
    turn.change(life=event)
    bound = state.bound
    if bound is not None and bound.attempt.proposer != state.nonce:
        lost = event.dead | event.suspected
        was_lost = state.life.dead | state.life.suspected
        if bound.attempt.proposer in lost - was_lost:
            # Its proposer may have swapped before it ended.
            turn.look()


def _on_thread_sealed(turn: Turn, event: Sealed) -> None:
    state = turn.state
    if event.number == state.number and state.stage is Stage.SEALING:
        positions = event.positions if state.has_state else ()
        turn.change(stage=Stage.SEALED, positions=positions, inner_step=event.inner_step)
        _say_sealed(turn)


def _on_connected(turn: Turn, event: Connected) -> None:
    bound = turn.state.bound
    if bound is None or bound.attempt != event.attempt:
        return
    if not event.cut:
        turn.change(bound=replace(bound, is_connected=True))
        _say_ready(turn)
        return
    turn.note_cuts(turn.state.nonce, event.cut)
    if bound.attempt.proposer == turn.state.nonce:
        _withdraw(turn)
    else:
        no = ms.No(event.attempt, Why.CUT, turn.state.number, cut=event.cut)
        turn.act(Send(bound.attempt.proposer, no))


def _on_broke(turn: Turn, event: Broke) -> None:
    if event.number == turn.state.number:
        turn.note_cuts(turn.state.nonce, event.cut)
        turn.seal()


def _on_boundary(turn: Turn, event: Boundary) -> None:
    if event.number == turn.state.number and turn.state.stage is Stage.TRAINING:
        turn.change(
            stage=Stage.STOPPED,
            positions=event.positions,
            inner_step=event.inner_step,
            has_all_votes=event.has_all_votes,
            num_waits=0,
        )


def _on_started(turn: Turn, event: Started) -> None:
    if event.number == turn.state.number:
        turn.change(has_state=True)


def _on_demanded(turn: Turn, event: Demanded) -> None:
    turn.change(demand=tuple(sorted(event.members)), is_ready=True, told=b"")
    # The group may have gone on already: then this process enters, or ends, first.
    turn.look()


def _on_given_up(turn: Turn, _: GivenUp) -> None:
    _withdraw(turn)
    turn.change(demand=None, here=())
    turn.wait("")


def _on_joiner_ready(turn: Turn, event: JoinerReady) -> None:
    turn.change(is_ready=True, heard=event.heard, told=b"")


def _on_leave(turn: Turn, _: Leave) -> None:
    turn.change(is_leaving=True)
    if turn.state.record is None:
        turn.end(Drained())


def _on_finished(turn: Turn, event: Finished) -> None:
    """End; the last members say in the record that the run has ended (rule 14)."""
    state, record = turn.state, turn.state.record
    turn.change(is_finished=True)
    is_open = record is not None and not record.is_finished and not state.settings.is_fixed
    if event.has_all_steps and is_open and state.stage is Stage.TRAINING:
        turn.change(stage=Stage.FINISHING, num_waits=0)
        _finish(turn)
    else:
        turn.end(Drained())


def _finish(turn: Turn) -> None:
    state, record = turn.state, turn.state.record
    assert record is not None
    if state.num_waits > state.settings.suspect_after:
        turn.end(Drained())
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
    turn.act(Swap(state.entered, last.to_bytes()))


# --------------------------------------------------------------------------- after every event


def _go_on(turn: Turn) -> None:
    """Do what follows from the state as it is now: advance, wait, leave or propose."""
    state = turn.state
    if state.stage is Stage.FINISHING:
        return
    is_lost = is_forgotten(state) and not state.settings.is_fixed
    if is_lost:
        _recall(turn)
    if state.proposal is not None:
        _advance(turn, state.proposal)
        return
    if is_lost or (state.record is not None and state.record.is_finished):
        return
    if state.stage is Stage.TRAINING and not state.settings.is_fixed:
        if state.life.dead & {key.nonce for key in Roster(state).base}:
            turn.seal()
        else:
            _ask_for_boundary(turn)
        return
    if state.stage is Stage.NEWCOMER and _cannot_come(turn):
        return
    plan = plan_of(state)
    if plan.is_over:
        turn.end(Over(plan.reason))
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
        _propose(turn, plan)


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
        turn.act(Send(leader.nonce, here))
    elif state.is_ready and state.in_table is not None:
        members = state.in_table.members
        heard = sum(1 << place for place, key in enumerate(members) if key.nonce in state.heard)
        turn.act(Send(leader.nonce, ms.Ready(NO_ATTEMPT, state.in_table.number, heard)))
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
        turn.act(Pend())


def _has_left(turn: Turn) -> bool:
    """Leave, if nobody is here to go on, or to be given the state (rule 15)."""
    state = turn.state
    if not state.is_leaving or not state.has_stopped:
        return False
    roster = Roster(state)
    others = [key for key in roster.base if roster.lives(key) and key in roster.here]
    if others or roster.newcomers or roster.coming:
        return False
    turn.end(Drained())
    return True


def _cannot_come(turn: Turn) -> bool:
    """Refuse to come to a group with other settings."""
    state = turn.state
    members = () if state.in_table is None else state.in_table.members
    for place in state.places:
        if place.key in members and place.is_fresh and place.settings != state.settings.digest:
            turn.end(Refuse(_other_settings(state, place.key)))
            return True
    return False


def _other_settings(state: State, other: Key) -> str:
    return (
        f"replica {state.key.number} cannot join run {state.settings.run!r}, as replica "
        f"{state.key.number} has another model or other settings than replica {other.number}: "
        f"start replica {state.key.number} with the model, settings and number of workers of the "
        "members"
    )


_ON_MESSAGE: dict[type, Callable[[Turn, bytes, Any], None]] = {
    ms.Here: _on_here,
    ms.Prepare: _on_prepare,
    ms.Sealed: _on_sealed,
    ms.Ready: _on_ready,
    ms.No: _on_no,
    ms.Withdraw: _on_withdraw,
    ms.Open: _on_open,
}
_ON_EVENT: dict[type, Callable[[Turn, Any], None]] = {
    Heard: _on_heard,
    Looked: _on_looked,
    Swapped: _on_swapped,
    Passed: _on_passed,
    Life: _on_life,
    Sealed: _on_thread_sealed,
    Connected: _on_connected,
    Broke: _on_broke,
    Boundary: _on_boundary,
    Started: _on_started,
    Demanded: _on_demanded,
    GivenUp: _on_given_up,
    JoinerReady: _on_joiner_ready,
    Leave: _on_leave,
    Finished: _on_finished,
}
