"""All orders of events of two real cores with one round, few faults and two proposers."""

from __future__ import annotations

from typing import Any

import pytest
from agreement_explorer import Bounds, explore
from agreement_mutants import MUTANTS
from agreement_walks import first_group
from agreement_world import World, settings_of


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
