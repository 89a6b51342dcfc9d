"""States of the model of votes, deaths and changes of the group."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from termination_record import Record

# How far a process is with a round of its epoch. REJECTED: it knows of a bad vote. ENDED: voted
# down, and it has all votes.
NONE, VOTED, REJECTED, AGREED, ENDED, APPLIED = range(6)
HELD = {VOTED: "voted", AGREED: "agreed"}
DONE = (ENDED, APPLIED)

# (epoch, number) of rounds.
Rounds = tuple[tuple[int, int], ...]


class Process(NamedTuple):
    """A replica that lives.

    Attributes:
        epoch: Whose rounds it takes part in, from 1; 0 for a newcomer.
        acked: The last attempt that it has sealed for: above ``epoch`` while it is sealed.
        lineage: Of the decision with which it has entered its epoch.
        applied: All rounds that its outer parameters hold, the oldest first.
        votes: Its standing in each round of its epoch, by number.
        record: What it remembers of rounds that have ended.
    """

    epoch: int
    acked: int
    lineage: int
    applied: Rounds
    votes: tuple[int, ...]
    record: Record


class Snapshot(NamedTuple):
    """What a process has when it seals; all 0 and () for a newcomer.

    Attributes:
        known, members: The newest group that it has agreed to enter. Sets are bit masks.
        group: The members of its epoch.
    """

    known: int
    members: int
    group: int
    process: Process


class Group(NamedTuple):
    """An attempt to form a group, and the epoch that it becomes. Sets of processes are bit masks.

    Attributes:
        known, entered: Who has agreed to enter, and who has.
        newcomers: Members that have nothing to say; they need not agree.
        acks: What each process has said to the others, until all members have.
        newest: The newest group that a member knows of; 0 until all are there, or if refused.
        lineage: Of the decision.
        adds: For each process: the rounds that it applies when it enters.
        applied: What those have applied who entered, once somebody has.
        voted, bad: For each number: who has voted, and who has voted bad.
    """

    members: int
    known: int
    entered: int
    newcomers: int
    acks: tuple[Snapshot | tuple[()], ...]
    newest: int
    lineage: int
    adds: tuple[Rounds, ...]
    applied: Rounds
    voted: tuple[int, ...]
    bad: tuple[int, ...]


class State(NamedTuple):
    """Where everybody is.

    Attributes:
        ledger: The longest sequence of rounds that any process has applied, dead or alive.
        entered: The newest group that any process has entered.
        processes: () for those that are dead.
        groups: By number, from 1; () for those that cannot matter any more.
    """

    deaths_left: int
    ledger: Rounds
    entered: int
    processes: tuple[Process | tuple[()], ...]
    groups: tuple[Group | tuple[()], ...]


def newest_known(state: State) -> int:
    """The newest group that any process has agreed to enter."""
    return max(k for k, group in enumerate(state.groups, 1) if group and group.known)


def listed(rounds: Rounds) -> str:
    return "[" + ", ".join(f"round {n} of epoch {epoch}" for epoch, n in rounds) + "]"


def last_of(rounds: Rounds) -> int:
    return max((n for _, n in rounds), default=-1)


def group_of(state: State, k: int) -> Group:
    group = state.groups[k - 1]
    assert group
    return group


def put(items: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def with_process(state: State, p: int, process: Process) -> State:
    return state._replace(processes=put(state.processes, p, process))


def with_group(state: State, k: int, group: Group) -> State:
    return state._replace(groups=put(state.groups, k - 1, group))


def with_vote(process: Process, n: int, standing: int) -> Process:
    return process._replace(votes=put(process.votes, n, standing))


@cache
def members_of(mask: int) -> tuple[int, ...]:
    return tuple(p for p in range(mask.bit_length()) if mask >> p & 1)
