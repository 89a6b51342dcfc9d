"""What the processes of the model say of themselves, what is decided of it, and what may be."""

from __future__ import annotations

from functools import cache

from termination_record import Code, ack_by
from termination_states import HELD, Process, Rounds, Snapshot, last_of, members_of

from diloco_comm.exchange.membership.termination import Ack


@cache
def decided(
    code: Code, num_under_way: int, acks: tuple[Snapshot | tuple[()], ...]
) -> tuple[int, tuple[Rounds, ...]]:
    """Return the lineage, -1 if refused, and what each process must apply."""
    given = {p: ack for p, ack in enumerate(acks) if ack and ack.process.epoch}
    decision = code.decide({p: ack_from(code, ack) for p, ack in given.items()}, num_under_way)
    adds: list[Rounds] = [()] * len(acks)
    for commit in decision.commits:
        for p in commit.lacking:
            process = given[p].process
            if process.votes[commit.round] in HELD:
                adds[p] += ((process.epoch, commit.round),)
    return decision.lineage if decision.refusal is None else -1, tuple(adds)


def ack_from(code: Code, snapshot: Snapshot) -> Ack:
    process = snapshot.process
    held = tuple([(n, process.epoch, HELD[s]) for n, s in enumerate(process.votes) if s in HELD])
    newest_group = snapshot.known, members_of(snapshot.members)
    group = process.epoch, members_of(snapshot.group)
    last = last_of(process.applied)
    return ack_by(code, process.record, held, last, process.lineage, newest_group, group)


def may_be_refused(acks: tuple[Snapshot | tuple[()], ...], num_old: int) -> bool:
    """Whether somebody was left out, and lacks a round of those that decide.

    Args:
        num_old: Processes from this number on came as newcomers. They do not know in which epoch
            the rounds were sent that they were given.
    """
    newest = max((ack for ack in acks if ack), key=lambda ack: ack.known)
    given = {p: ack.process for p, ack in enumerate(acks) if ack and ack.process.epoch}
    electors = {p: one for p, one in given.items() if newest.members >> p & 1}
    goal = max((one.applied for one in electors.values()), key=len)
    for held in zip(*(beyond(one, len(goal)) for one in electors.values()), strict=False):
        if len(set(held)) > 1:
            break
        goal = (*goal, held[0])
    told: set[tuple[int, int]] = set()
    for p, one in electors.items():
        named = beyond(one, len(one.applied))
        named += one.applied if p < num_old else tuple((e, n) for n, e, _ in one.record.ended)
        told.update(named)
    for one in (given[p] for p in given.keys() - electors.keys()):
        lacking = goal[len(one.applied) :]
        if not told.issuperset(lacking) or beyond(one, len(one.applied))[: len(lacking)] != lacking:
            return True
    return False


def beyond(process: Process, num_applied: int) -> Rounds:
    """What a process has applied or holds, but for the oldest rounds."""
    held = [(process.epoch, n) for n, s in enumerate(process.votes) if s in HELD]
    return (*process.applied, *held)[num_applied:]
