"""The training thread of a process in the model, and the termination rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic_cores import Key

# How far a process is with a round of its view. From REJECTED on it has ended.
NONE, VOTED, AGREED, REJECTED, APPLIED = range(5)
# What a training thread does. IDLE: it waits to be let in, or has stopped. HOOK: all have agreed to
# enter. JOIN: it has entered, and has no state yet.
IDLE, MEET, ACKED, NOTED, HOOK, JOIN, TRAIN = range(7)
IN_ATTEMPT = (MEET, ACKED, NOTED, HOOK)

# (number of the view, number of the round).
Rounds = tuple[tuple[int, int], ...]
_NO_KEY: Key = ()  # type: ignore[assignment]


class Thread(NamedTuple):
    """Of one process.

    Attributes:
        epoch: The view whose rounds ``codes`` are, () for none.
        applied: What its outer parameters hold.
        attempt: The last that it took part in.
        role: There; see ``Form``.
        is_sealed: It has acked since it entered ``epoch``.
        order: "enter", "abandon" or "": what the core has asked for in its attempt.
        pends, breaks: What the core has asked for in the view that it enters or is in: a boundary,
            or to fail.
    """

    codes: tuple[int, ...]
    kind: int = IDLE
    epoch: Key = _NO_KEY
    applied: Rounds = ()
    attempt: Key = _NO_KEY
    role: str = ""
    is_sealed: bool = False
    order: str = ""
    pends: bool = False
    breaks: bool = False


class Session(NamedTuple):
    """The rounds of one view. Sets of processes are bit masks.

    Attributes:
        entered: Who takes part.
        applied: Rounds with which they began.
        voted, bad, flags: For each round: who has voted, who has voted bad, and whether its headers
            ask for a boundary.
        ends_pending: The members stop after the last round that is modelled.
    """

    key: Key
    entered: int
    applied: Rounds
    voted: tuple[int, ...]
    bad: tuple[int, ...]
    flags: tuple[int, ...]
    ends_pending: bool = False


class Attempt(NamedTuple):
    """Who has agreed to enter, and all rounds that count then."""

    key: Key
    noted: int
    applied: Rounds


def committed(acks: Sequence[Thread], commits_voted: bool = True) -> Rounds:
    """Return the rounds that count, by what all who hold the state have said.

    A round counts if all have voted for it; or, with a mistake, if somebody has applied it.
    """
    if not acks:
        return ()
    goal = max((ack.applied for ack in acks), key=len)
    held: set[tuple[int, int]] = set()
    for ack in acks:
        held |= _held(ack)
    for one in sorted(held - set(goal)):
        if not commits_voted or not all(one in _held(ack) for ack in acks):
            break
        goal = (*goal, one)
    return goal


def lacking(thread: Thread, applied: Rounds) -> Rounds:
    """Return the rounds that count and that a process can neither keep nor apply."""
    have = _held(thread) | set(thread.applied)
    extra = set(thread.applied) - set(applied)
    return (*[one for one in applied if one not in have], *sorted(extra))


def _held(thread: Thread) -> set[tuple[int, int]]:
    if not thread.epoch:
        return set()
    return {(thread.epoch[0], n) for n, code in enumerate(thread.codes) if code in (VOTED, AGREED)}
