"""A model of votes, deaths and changes of the group, small enough to look at all of it.

Processes exchange rounds in epochs, and change the group in attempts that may fail at any point:
also when one member has entered, and others have only agreed to. Who was left out may come back.
What a process keeps of its rounds and says of them is the package's own doing, see
``termination_record``; what becomes of rounds that were broken off is ``termination.decide``
itself. Or one of these with a mistake. What must hold, whatever happens:

I1  what any process has applied, dead or alive, has been applied by all who enter a later group;
I2  those who enter a group have applied the same rounds;
I3  who was left out never applies what the others have not;
I4  the rule refuses only on account of a process that was left out, and that lacks a round which
    the others have applied or go on with.

What the model takes for granted is what engine and ``regroup`` see to: a process votes for a round
when it has all votes for the one before, and all members have sent it; it takes part in an attempt
when it has sealed, and agrees to enter when the acks of all members are there and the rule does not
refuse; it enters when all have agreed. (``regroup`` is stricter where a round is settled: a member
waits until all have connected, too.) A newcomer enters last, with what the others have. And there
is one line of groups: an attempt is agreed on only if one of its members knows of the newest group
that was agreed on before. Without that, what one part of a group has applied the other may lack,
and only I2 must hold.

A vote is told to all at once, and each may hear it at any time later, or never: that covers a death
or a seal in the middle of telling, and any order and loss of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from termination_decisions import decided, may_be_refused
from termination_record import (
    CODE,
    Code,
    Record,
    after_apply,
    after_change,
    after_rejection,
    after_start,
)
from termination_states import (
    AGREED,
    APPLIED,
    DONE,
    ENDED,
    NONE,
    REJECTED,
    VOTED,
    Group,
    Process,
    Rounds,
    Snapshot,
    State,
    group_of,
    last_of,
    listed,
    members_of,
    newest_known,
    put,
    with_group,
    with_process,
    with_vote,
)

Event = tuple[Any, ...]


class Broken(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Model:
    """What is explored.

    Attributes:
        size: Processes, newcomers among them.
        num_rounds: Numbers of rounds, all of one fragment.
        num_under_way: Rounds that may be agreed on and not yet applied.
        num_deaths, num_attempts: At most.
        num_newcomers: Processes that are in no group at first.
        votes_bad: A process may vote a round down.
        keeps_promise: No vote leaves and none is heard once a process has acked.
        may_refuse: I4 is not looked at.
        has_one_line: Else an attempt may be agreed on by any processes.
    """

    size: int
    num_rounds: int = 2
    num_under_way: int = 1
    num_deaths: int = 2
    num_attempts: int = 2
    num_newcomers: int = 0
    votes_bad: bool = False
    keeps_promise: bool = True
    may_refuse: bool = False
    has_one_line: bool = True
    code: Code = CODE

    @property
    def num_old(self) -> int:
        return self.size - self.num_newcomers

    def start(self) -> State:
        everyone = (1 << self.num_old) - 1
        process = Process(1, 1, 0, (), (NONE,) * self.num_rounds, Record())
        newcomer = process._replace(epoch=0, acked=0)
        first = self._new_group(everyone)._replace(known=everyone, entered=everyone, acks=())
        processes = (process,) * self.num_old + (newcomer,) * self.num_newcomers
        return State(self.num_deaths, (), 1, processes, (first,))

    def _new_group(self, members: int) -> Group:
        each, nobody = ((),) * self.size, (0,) * self.num_rounds
        return Group(members, 0, 0, 0, each, 0, 0, (), (), nobody, nobody)

    # ------------------------------------------------------------------------------- events

    def events(self, state: State) -> Iterator[tuple[Event, State]]:
        """Everything that may happen next.

        Raises:
            Broken: If that breaks an invariant.
        """
        for p, process in enumerate(state.processes):
            if not process:
                continue
            if process.epoch and (process.acked == process.epoch or not self.keeps_promise):
                yield from self._votes(state, p, process)
            yield from self._applies(state, p, process)
            yield from self._calls(state, p)
            yield from self._changes(state, p, process)
            if state.deaths_left:
                after = state._replace(deaths_left=state.deaths_left - 1)
                yield ("dies", p), after._replace(processes=put(state.processes, p, ()))

    def _votes(self, state: State, p: int, process: Process) -> Iterator[tuple[Event, State]]:
        """The oldest round that has not ended: vote for it, or hear the votes of the others."""
        group = group_of(state, process.epoch)
        n = next((n for n, s in enumerate(process.votes) if s in (NONE, VOTED, REJECTED)), None)
        if n is None:
            return
        if process.votes[n] != NONE:
            is_bad = bool(group.bad[n])
            if group.voted[n] == group.members:
                after = self._rejected(process, n) if is_bad else with_vote(process, n, AGREED)
                yield ("hears all", p, n), with_process(state, p, after)
            if is_bad and process.votes[n] == VOTED:
                yield ("hears bad", p, n), with_process(state, p, with_vote(process, n, REJECTED))
        elif group.entered == group.members and self._is_sent(state, process.epoch, n):
            # Everybody's part of the result is here.
            state = self._started(state, process.epoch, n)
            started = state.processes[p]
            assert started
            for is_bad in (False, True) if self.votes_bad else (False,):
                voted = group._replace(
                    voted=put(group.voted, n, group.voted[n] | 1 << p),
                    bad=put(group.bad, n, group.bad[n] | is_bad << p),
                )
                after = with_vote(started, n, REJECTED if is_bad else VOTED)
                kind = "votes bad" if is_bad else "votes"
                yield (kind, p, n), with_process(with_group(state, process.epoch, voted), p, after)

    def _is_sent(self, state: State, epoch: int, n: int) -> bool:
        """Whether all may have sent round ``n``; they do that before the oldest one is applied."""
        return all(
            all(s in DONE for s in one.votes[: max(0, n - self.num_under_way)])
            for one in state.processes
            if one and one.epoch == epoch
        )

    def _started(self, state: State, epoch: int, n: int) -> State:
        """All members have begun a round, and forget what they know of an older one so called."""
        processes = [
            one._replace(record=after_start(self.code, one.record, n))
            if one and one.epoch == epoch
            else one
            for one in state.processes
        ]
        return state._replace(processes=tuple(processes))

    def _rejected(self, process: Process, n: int) -> Process:
        record = after_rejection(self.code, process.record, n, process.epoch, self.num_under_way)
        return with_vote(process, n, ENDED)._replace(record=record)

    def _applies(self, state: State, p: int, process: Process) -> Iterator[tuple[Event, State]]:
        """Take the outer step of the oldest round that has all votes, now or later."""
        n = next((n for n, s in enumerate(process.votes) if s not in DONE), None)
        if n is not None and process.votes[n] == AGREED:
            rounds = ((process.epoch, n),)
            record = after_apply(self.code, process.record, n, process.epoch, self.num_under_way)
            after = with_vote(process, n, APPLIED)._replace(record=record)
            is_left_out = self.has_one_line and process.epoch < state.entered
            if is_left_out and rounds[0] not in state.ledger:
                raise Broken(
                    f"I3: process {p} is left out of group {state.entered} and applies "
                    f"{listed(rounds)}"
                )
            yield ("applies", p, n), self._applied(state, p, after, rounds)

    def _calls(self, state: State, p: int) -> Iterator[tuple[Event, State]]:
        """Begin a change, to any processes that live: the first of its members calls for it."""
        if len(state.groups) > self.num_attempts:
            return
        k = len(state.groups) + 1
        alive = sum(1 << q for q, process in enumerate(state.processes) if process)
        for members in range(1, alive + 1):
            if members & ~alive or not members >> p & 1:
                continue
            if not any((one := state.processes[q]) and one.epoch for q in members_of(members)):
                continue
            after = state._replace(groups=(*state.groups, self._new_group(members)))
            yield ("calls for", p, k, members_of(members)), self._sealed(after, p, k)

    def _changes(self, state: State, p: int, process: Process) -> Iterator[tuple[Event, State]]:
        for k in range(process.acked + 1, len(state.groups) + 1):
            group = state.groups[k - 1]
            if group and group.acks and group.members >> p & 1:
                yield ("seals for", p, k), self._sealed(state, p, k)
        k = process.acked
        if k == process.epoch or not (group := state.groups[k - 1]):
            return
        if not self.may_be_agreed(state, group):
            return
        survivors = group.members & ~group.newcomers
        if group.newcomers >> p & 1:
            if survivors & ~group.entered == 0:
                yield ("enters", p, k), self._joined(state, p, k)
        elif not group.known >> p & 1:
            after = group._replace(known=group.known | 1 << p)
            yield ("agrees to enter", p, k), with_group(state, k, after)
        elif survivors & ~group.known == 0:
            yield ("enters", p, k), self._entered(state, p, k)

    def may_be_agreed(self, state: State, group: Group) -> bool:
        """Whether its members have decided, and go on from the newest group that anybody knows."""
        if not self.has_one_line:
            return group.newest > 0
        return bool(group.known) or group.newest == newest_known(state)

    def _sealed(self, state: State, p: int, k: int) -> State:
        """Process ``p`` says in group ``k`` what it has; all members decide when all have."""
        process, group = state.processes[p], group_of(state, k)
        assert process
        for n, standing in enumerate(process.votes):
            process = self._rejected(process, n) if standing == REJECTED else process
        process = process._replace(acked=k)
        if process.epoch:
            known = max(i for i, one in enumerate(state.groups, 1) if one and one.known >> p & 1)
            own = group_of(state, process.epoch).members
            snapshot = Snapshot(known, group_of(state, known).members, own, process)
        else:
            group = group._replace(newcomers=group.newcomers | 1 << p)
            snapshot = Snapshot(0, 0, 0, process)
        # Nobody is told which attempt it was.
        acks = put(group.acks, p, snapshot._replace(process=process._replace(acked=0)))
        group = group._replace(acks=acks)
        if all(acks[q] for q in members_of(group.members)):
            lineage, adds = decided(self.code, self.num_under_way, acks)
            newest = max(ack.known for ack in acks if ack) if lineage >= 0 else 0
            if not (newest or self.may_refuse or may_be_refused(acks, self.num_old)):
                raise Broken(f"I4: the rule refuses group {k}, whose members lack nothing")
            group = group._replace(acks=(), newest=newest, lineage=max(0, lineage), adds=adds)
        return with_process(with_group(state, k, group), p, process)

    def _entered(self, state: State, p: int, k: int) -> State:
        process, group = state.processes[p], group_of(state, k)
        assert process
        # Who breaks its promise may have applied some of them meanwhile.
        adds = tuple(one for one in group.adds[p] if one not in process.applied)
        agreed = tuple([(n, epoch, "agreed") for epoch, n in adds])
        record = after_change(self.code, process.record, agreed, self.num_under_way)
        process = process._replace(epoch=k, acked=k, lineage=group.lineage, record=record)
        state = self._applied(state, p, process, adds)
        after = state.processes[p]
        assert after
        if group.entered and group.applied != after.applied:
            raise Broken(
                f"I2: process {p} enters group {k} with {listed(after.applied)}, others have "
                f"entered it with {listed(group.applied)}"
            )
        if self.has_one_line and k > state.entered and after.applied != state.ledger:
            raise Broken(
                f"I1: group {k} goes on from {listed(after.applied)}, but somebody has applied "
                f"{listed(state.ledger)}"
            )
        return self._present(state, p, k, after)

    def _joined(self, state: State, p: int, k: int) -> State:
        """A newcomer becomes a copy of the others."""
        newcomer, group = state.processes[p], group_of(state, k)
        assert newcomer
        newcomer = newcomer._replace(epoch=k, acked=k, lineage=group.lineage, applied=group.applied)
        return self._present(state, p, k, newcomer)

    def _present(self, state: State, p: int, k: int, process: Process) -> State:
        group = group_of(state, k)
        last = last_of(process.applied)
        votes = tuple(APPLIED if n <= last else NONE for n in range(self.num_rounds))
        group = group._replace(
            known=group.known | 1 << p,
            entered=group.entered | 1 << p,
            applied=process.applied,
        )
        state = with_group(state._replace(entered=max(k, state.entered)), k, group)
        return with_process(state, p, process._replace(votes=votes))

    def _applied(self, state: State, p: int, process: Process, rounds: Rounds) -> State:
        """Process ``p`` becomes ``process``, and then applies some rounds."""
        applied = (*process.applied, *rounds)
        state = with_process(state, p, process._replace(applied=applied))
        if not self.has_one_line:
            return state
        if applied[: len(state.ledger)] != state.ledger[: len(applied)]:
            raise Broken(
                f"I1: process {p} has applied {listed(applied)}, another {listed(state.ledger)}"
            )
        return state._replace(ledger=max(state.ledger, applied, key=len))
