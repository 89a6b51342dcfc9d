"""States of the model of processes that come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_comm.elastic.views import View
from elastic_cores import Cores
from elastic_threads import (
    Attempt,
    Key,
    Rounds,
    Session,
    Thread,
)

BEFORE, DEAD = "before", "dead"
EventName = tuple[Any, ...]


class Broken(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Slot:
    """One process that there may be.

    Attributes:
        begins: "first": trains or founds from the start; "later": at any time; "after 0": once the
            process of that slot has ended.
    """

    id: int
    nonce: str
    begins: str = "first"


class Process(NamedTuple):
    """A process that lives: its core, by number, its thread, and a swap that is under way."""

    core: int
    thread: Thread
    outbox: tuple[bytes, bytes] | tuple[()] = ()


class Budget(NamedTuple):
    """How often there may be each fault."""

    deaths: int = 0
    breaks: int = 0
    failures: int = 0
    restarts: int = 0
    unanswered: int = 0
    suspicions: int = 0


NO_FAULTS = Budget()


class World(NamedTuple):
    """Where everything is.

    Attributes:
        record: In the registry.
        processes: By slot: a Process, BEFORE or DEAD.
        beats: By slot: the number of the last in the registry, or None.
        unread: By slot: the slots of which it has not read the last beat; where beats may be late.
        sessions: Views in which somebody trains.
        attempts: In which somebody takes part.
        ledger: The longest sequence of rounds that any process has applied.
        line: The last view that was entered, and those before it that may be entered late.
        stray: A swap whose process has died or has given it up; it may still arrive.
        is_bounded: A process would have proposed a view beyond the model's last.
    """

    record: bytes
    processes: tuple[Any, ...]
    beats: tuple[int | None, ...]
    unread: tuple[int, ...]
    sessions: tuple[Session, ...]
    attempts: tuple[Attempt, ...]
    ledger: Rounds
    line: tuple[Key, ...]
    stray: tuple[bytes, bytes] | tuple[()]
    budget: Budget
    num_dead: int = 0
    is_bounded: bool = False


@dataclass(frozen=True)
class Bounds:
    """What is explored.

    Attributes:
        num_rounds: Positions in the sequence of rounds; two fragments take turns.
        num_under_way: Rounds that may be agreed on and not yet applied.
        highest: Number of the last view that may be proposed.
        has_late_beats: A process may be so slow that others suspect it, at any time. Else this
            takes ``budget.suspicions``.
        has_quick_beats: What others see of a process is what it is now, and a process seals at
            once when it takes part in an attempt. With one round under way, it is applied at once.
        tells_ended: Hosts say that the dead have ended, and those that were not heard.
        tells_busy: Links hear everybody, also the dead.
        votes_bad: A process may vote a round down.
        keeps_promise, commits_voted, compares: What the mutants lack: no vote leaves and none is
            heard after an ack; a round counts if all survivors have voted; the registry compares.
    """

    cores: Cores
    slots: tuple[Slot, ...]
    budget: Budget = NO_FAULTS
    num_rounds: int = 2
    num_under_way: int = 2
    highest: int = 3
    has_late_beats: bool = False
    has_quick_beats: bool = False
    tells_ended: bool = False
    tells_busy: bool = False
    votes_bad: bool = False
    is_cut: bool = False
    keeps_promise: bool = True
    commits_voted: bool = True
    compares: bool = True

    def places(self, view: View) -> tuple[int, ...]:
        return self.cores.places(view, self.slots)


def find(items: tuple[Any, ...], key: Key) -> Any:
    return next((item for item in items if item.key == key), None)


def put(items: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def with_process(world: World, p: int, process: Any) -> World:
    return world._replace(processes=put(world.processes, p, process))


def with_thread(world: World, p: int, thread: Thread) -> World:
    return with_process(world, p, world.processes[p]._replace(thread=thread))


def with_code(world: World, p: int, n: int, code: int) -> World:
    thread = world.processes[p].thread
    return with_thread(world, p, thread._replace(codes=put(thread.codes, n, code)))


def with_session(world: World, session: Session) -> World:
    others = [one for one in world.sessions if one.key != session.key]
    return world._replace(sessions=tuple(sorted([*others, session])))


def with_attempt(world: World, attempt: Attempt) -> World:
    others = [one for one in world.attempts if one.key != attempt.key]
    return world._replace(attempts=tuple(sorted([*others, attempt])))


def spend(world: World, fault: str) -> World:
    return replace_budget(world, world.budget._replace(**{fault: getattr(world.budget, fault) - 1}))


def replace_budget(world: World, budget: Budget) -> World:
    return world._replace(budget=budget)
