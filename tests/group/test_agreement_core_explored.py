"""All orders of events of two real cores with one round, few faults and two proposers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from agreement_mutants import FAULTS, FIXED, MUTANTS
from agreement_walks import Walk, describe, first_group, is_excused, settle
from agreement_world import Broken, Name, World, settings_of

from diloco_comm.group import agreement
from diloco_comm.group import state as st

# --------------------------- Every order of events of a small world, breadth first, with real cores


@dataclass(frozen=True)
class Bounds:
    """The bounds of an exploration.

    Attributes:
        votes: Each stream grows by so many at each process.
        faults: Kinds of faults, and how many of each.
        polls: Each process has so many.
        is_quick: A driver carries out at once what its core asks for, but for swaps.
        most: States; the exploration ends there.
    """

    votes: int = 1
    faults: tuple[tuple[str, int], ...] = (("crash", 1), ("break", 1))
    polls: int = 3
    is_quick: bool = True
    most: int = 1_000_000


@dataclass
class Found:
    """The result.

    Attributes:
        num_states: That were seen.
        is_exhaustive: There are no others.
        ends: States without a next event: how many.
        broken: The first invariant that breaks, with the events before.
    """

    num_states: int = 0
    is_exhaustive: bool = False
    ends: int = 0
    broken: str = ""
    trail: list[Name] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A world, and what may still happen in it."""

    world: World
    faults: tuple[tuple[str, int], ...]
    polls: tuple[tuple[bytes, int], ...]
    ends: tuple[int, ...]


def explore(world: World, bounds: Bounds) -> Found:
    """Explore all that may happen; the worlds without a next event must come to train together."""
    found = Found()
    first = Place(
        world,
        bounds.faults,
        tuple((nonce, bounds.polls) for nonce in world.nodes),
        tuple(world.living[0].thread.ends),
    )
    parents: dict[Any, tuple[Any, Name] | None] = {key_of(first): None}
    todo = deque([first])
    while todo and len(parents) < bounds.most:
        place = todo.popleft()
        has_next = False
        for name, call in _events(place, bounds):
            has_next = True
            try:
                after = call()
            except Broken as error:
                found.broken, found.trail = str(error), [*_trail(parents, key_of(place)), name]
                found.num_states = len(parents)
                return found
            key = key_of(after)
            if key not in parents:
                parents[key] = (key_of(place), name)
                todo.append(after)
        if not has_next:
            found.ends += 1
            try:
                settle(place.world.copy())
            except Broken as error:
                found.broken, found.trail = str(error), _trail(parents, key_of(place))
                break
    found.num_states, found.is_exhaustive = len(parents), not todo and not found.broken
    return found


def _trail(parents: dict[Any, Any], key: Any) -> list[Name]:
    names: list[Name] = []
    while parents[key] is not None:
        key, name = parents[key]
        names.append(name)
    return names[::-1]


def _events(place: Place, bounds: Bounds) -> Iterator[tuple[Name, Any]]:
    world = place.world
    for name in world.quiet():
        if name[0] == "vote" and not _may_vote(place, bounds, name):
            continue
        if name[0] == "break" and not dict(place.faults).get("break", 0):
            continue
        yield name, lambda name=name: _after(place, bounds, name)
    for nonce, left in place.polls:
        if left and world.nodes[nonce].takes_part:
            yield ("poll", nonce), lambda nonce=nonce: _after(place, bounds, ("poll", nonce))
    for kind, left in place.faults:
        for name in _faults(world, kind) if left else ():
            yield name, lambda name=name, kind=kind: _after(place, bounds, name, kind)


def _may_vote(place: Place, bounds: Bounds, name: Name) -> bool:
    _, nonce, stream = name
    return place.world.nodes[nonce].thread.ends[stream] < place.ends[stream] + bounds.votes


def _faults(world: World, kind: str) -> Iterator[Name]:
    if kind == "lose":
        for place, (_, _, content) in enumerate(world.messages):
            if isinstance(content, bytes):
                yield "lose", place
    elif kind == "no answer":
        for place in range(len(world.replies)):
            yield "reply", place, True
    elif kind == "forget":
        yield ("forget",)
    elif kind == "demand":
        numbers = tuple(sorted(node.key.number for node in world.living))
        for node in world.living:
            if node.state.demand is None:
                yield "demand", node.key.nonce, numbers
    elif kind == "give up":
        for node in world.living:
            if node.state.demand is not None:
                yield "give_up", node.key.nonce
    elif kind == "delay":
        for node in world.living:
            if any(isinstance(action, st.Connect) for action in node.todo):
                yield "delay", node.key.nonce
    else:
        for node in world.living:
            if kind == "crash" or (node.state.stage is st.Stage.TRAINING):
                yield kind, node.key.nonce


def _after(place: Place, bounds: Bounds, name: Name, kind: str = "") -> Place:
    world = place.world.copy()
    world.happen(name)
    if bounds.is_quick:
        _carry_out(world)
    polls = place.polls
    if name[0] == "poll":
        polls = tuple((nonce, left - (nonce == name[1])) for nonce, left in polls)
    faults = tuple((one, left - (one == kind)) for one, left in place.faults)
    return Place(world, faults, polls, place.ends)


def _carry_out(world: World) -> None:
    while names := [name for name in world.quiet() if name[0] == "do"]:
        world.happen(names[0])


def key_of(place: Place) -> Any:
    """Return what tells worlds apart: two places with one key have the same future."""
    world = place.world
    nodes = tuple([(n.state, n.thread, n.todo, n.is_alive, n.end) for n in world.nodes.values()])
    return hash(
        (
            nodes,
            tuple(sorted(map(repr, world.messages))),
            world.swaps,
            world.replies,
            world.late,
            world.record,
            tuple(world.places.items()),
            world.failing,
            world.num_losses,
            place.faults,
            place.polls,
        )
    )


__all__ = ["Bounds", "Found", "describe", "explore", "is_excused", "replace"]


# --------------------------------------------------------------------------------- the explorations


def two(streams: int, **values: Any) -> World:
    world = World(settings_of(founding_wait=8, **values), streams)
    first_group(world, 2)
    world.messages = ()
    return world


# Streams, polls of each process, and how many of each fault.
EXPLORED = {
    "break": (1, 0, {"break": 1}),
    "two-streams": (2, 0, {"break": 1}),
    "crash": (1, 1, {"crash": 1}),
    "no-answer": (1, 0, {"break": 2, "no answer": 1}),
    "forgets": (1, 0, {"break": 1, "forget": 1}),
    "forgets-twice": (1, 0, {"break": 2, "forget": 2}),
    "lost-message": (1, 1, {"break": 1, "lose": 1}),
    "crash-and-break": (1, 1, {"crash": 1, "break": 1}),
    "crash-and-forgets": (1, 1, {"crash": 1, "forget": 1}),
}

# The same for fixed groups: whether a driver carries out at once what its core asks for, polls,
# and faults.
CALLERS = {
    "give-up": (True, 0, {"demand": 3, "give up": 1}),
    "break": (True, 0, {"demand": 3, "give up": 1, "break": 1}),
    "forgets": (True, 0, {"demand": 2, "give up": 1, "forget": 1}),
    "no-answer": (True, 0, {"demand": 2, "give up": 1, "no answer": 1}),
    "slow-drivers": (False, 0, {"demand": 3, "give up": 1}),
    "late-devices": (False, 0, {"demand": 3, "give up": 1, "delay": 1}),
    "crash": (True, 1, {"demand": 2, "crash": 1}),
    "polls": (True, 1, {"demand": 3, "give up": 1}),
}


@pytest.mark.nightly(
    "these have most states", but=["break", "two-streams", "crash", "no-answer", "forgets"]
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(EXPLORED))
def test_every_order_of_events_of_two_processes_keeps_the_invariants(name: str) -> None:
    streams, polls, faults = EXPLORED[name]
    world = two(streams, suspect_after=3)
    found = explore(world, Bounds(faults=tuple(faults.items()), polls=polls))
    assert found.broken == "", found.trail
    assert found.is_exhaustive and found.ends > 0


@pytest.mark.nightly("these have most states", but=["give-up", "break", "forgets", "no-answer"])
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(CALLERS))
def test_every_order_of_events_of_two_callers_keeps_the_invariants(name: str) -> None:
    is_quick, polls, faults = CALLERS[name]
    bounds = Bounds(faults=tuple(faults.items()), polls=polls, is_quick=is_quick)
    found = explore(two(1, suspect_after=3, is_fixed=True), bounds)
    assert found.broken == "", found.trail
    assert found.is_exhaustive and found.ends > 0


def test_the_explorer_finds_a_caller_that_gives_up_and_is_taken_along() -> None:
    mutant = MUTANTS["who-gives-up-stays-in-the-attempt"]
    bounds = Bounds(faults=(("demand", 2), ("give up", 1)), polls=0, is_quick=False)
    with mutant.step() as step:
        world = two(1, is_fixed=True)
        world.step = step
        found = explore(world, bounds)
    assert found.broken.startswith("I9") and found.trail


def test_the_explorer_finds_a_decision_that_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_comm.group import agreement
    from diloco_comm.group.streams import decide

    monkeypatch.setattr(agreement, "decide", lambda sealed: decide(list(sealed)[:1]))
    found = explore(two(1), Bounds(faults=(("break", 1),), polls=0))
    assert found.broken.startswith(("I1", "I2", "I3")) and found.trail


# ----------------------------------------------------- each mistake in the core breaks an invariant


SEEDS = range(60)


def broken_in(kind: str, seed: int, step: Any, size: int = 3, **promises: bool) -> str:
    """Return the invariant that a history breaks first; "" for none.

    Args:
        promises: Drivers and training threads keep them, see ``World``.
    """
    world = World(settings_of(is_fixed=kind in FIXED, founding_wait=8), step=step)
    vars(world).update(promises)
    try:
        first_group(world, size)
        walk = Walk(world, seed, FAULTS[kind])
        for number in range(1, 1501):
            walk.step()
            if number % 500 == 0 and settle(world) < 0:
                break
    except Broken as broken:
        return broken.invariant
    return ""


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mistake_breaks_an_invariant(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.step() as step:
        all_found = (
            broken_in(mutant.kind, seed, step, mutant.size) for seed in (mutant.seed, *SEEDS)
        )
        found = next(filter(None, all_found), "")
    assert found in mutant.breaks


def test_a_training_thread_that_breaks_its_promise_breaks_an_invariant() -> None:
    found = (broken_in("durable", seed, agreement.step, keeps_promise=False) for seed in SEEDS)
    assert next(filter(None, found), "") in ("I1", "I2", "I3")


@pytest.mark.parametrize("kind", ["durable", "callers"])
def test_a_driver_that_gives_no_order_again_lets_its_process_stop_for_ever(kind: str) -> None:
    found = (broken_in(kind, seed, agreement.step, orders_again=False) for seed in SEEDS)
    assert next(filter(None, found), "") == "L"


@pytest.mark.nightly("the walks have other seeds", but=[f"{kind}-0" for kind in FAULTS])
@pytest.mark.parametrize("first", [0, 10, 20, 30])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_without_a_mistake_the_same_histories_break_nothing(kind: str, first: int) -> None:
    for seed in range(first, first + 10):
        assert broken_in(kind, seed, agreement.step) == ""
