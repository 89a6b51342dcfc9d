"""All that can happen to processes that come and go, and mistakes that must be found out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from diloco_comm.elastic.core import Settings
from elastic_cores import Cores
from elastic_explorer import explore
from elastic_model import Model
from elastic_mutants import MUTANTS
from elastic_world import Budget, Slot, World

needs_time = pytest.mark.skipif(
    not os.environ.get("DILOCO_COMM_LARGE_MODELS"),
    reason="takes many minutes: set DILOCO_COMM_LARGE_MODELS=1",
)
Make = Callable[[], Model]


def cores(founding_wait: int = 4, **settings: Any) -> Cores:
    return Cores(Settings("run", suspect_after=1, **settings), founding_wait=founding_wait)


def members(number: int) -> tuple[Slot, ...]:
    return tuple(Slot(id, "abc"[id]) for id in range(number))


AGAIN = (Slot(0, "a"), Slot(1, "b"), Slot(1, "c", "after 1"))
NEWCOMER = (Slot(0, "a"), Slot(1, "b", "later"))
# One round, and beats that are never old; without a round it is about the chain alone.
ONE_ROUND = {"has_quick_beats": True, "num_under_way": 1, "num_rounds": 1}
NO_ROUND = ONE_ROUND | {"num_rounds": 0}

# From a view in which all train. Two rounds are of two fragments, and both are under way at once.
SETTLED: dict[str, Make] = {
    "two": lambda: Model(cores(), members(2), Budget(deaths=2, failures=1, unanswered=1)),
    "two-bad-votes": lambda: Model(cores(), members(2), Budget(deaths=1), votes_bad=True),
    "two-late-beats": lambda: Model(
        cores(), members(2), Budget(deaths=1, failures=1), has_late_beats=True
    ),
    "two-break": lambda: Model(cores(), members(2), Budget(breaks=1), **ONE_ROUND),
    "two-fail": lambda: Model(
        cores(), members(2), Budget(breaks=1, failures=1), highest=2, **ONE_ROUND
    ),
    "two-suspected": lambda: Model(
        cores(), members(2), Budget(breaks=1, suspicions=1), highest=2, **ONE_ROUND
    ),
    "two-suspect-each-other": lambda: Model(
        cores(), members(2), Budget(breaks=1, suspicions=2), highest=2, **NO_ROUND
    ),
    "two-ended": lambda: Model(
        cores(ended_after=1), members(2), Budget(deaths=1, failures=1), tells_ended=True
    ),
    "two-ended-by-mistake": lambda: Model(
        cores(ended_after=1),
        members(2),
        Budget(breaks=1, suspicions=1),
        highest=2,
        tells_ended=True,
        **ONE_ROUND,
    ),
    "two-busy-by-mistake": lambda: Model(
        cores(busy_after=2),
        members(2),
        Budget(deaths=1, breaks=1, suspicions=1),
        highest=2,
        tells_busy=True,
        **NO_ROUND,
    ),
    "two-again": lambda: Model(cores(), AGAIN, Budget(deaths=1), highest=4, **ONE_ROUND),
    "two-again-at-least-two": lambda: Model(
        cores(min_replicas=2), AGAIN, Budget(deaths=1), highest=4, **ONE_ROUND
    ),
    "two-forgetful": lambda: Model(
        cores(is_durable=False),
        members(2),
        Budget(restarts=1, breaks=1),
        highest=2,
        **NO_ROUND,
    ),
    "three": lambda: Model(cores(), members(3), Budget(deaths=1), highest=2, **ONE_ROUND),
}
# From processes that have just begun.
FOUNDING: dict[str, Make] = {
    "found-together": lambda: Model(
        cores(0, min_replicas=2), members(2), Budget(failures=1), highest=2, **ONE_ROUND
    ),
    "found-alone": lambda: Model(cores(0), members(2), Budget(suspicions=1), **ONE_ROUND),
    "newcomer": lambda: Model(cores(0), NEWCOMER, Budget(deaths=1), **ONE_ROUND),
}
LARGE: dict[str, Make] = {
    "three-two-deaths": lambda: Model(cores(), members(3), Budget(deaths=2), **NO_ROUND),
    "two-three-views": lambda: Model(
        cores(), members(2), Budget(deaths=1, breaks=1, failures=1), highest=3, **ONE_ROUND
    ),
    "two-late-and-broken": lambda: Model(
        cores(),
        members(2),
        Budget(breaks=1, failures=1, unanswered=1),
        highest=2,
        has_late_beats=True,
        **ONE_ROUND,
    ),
    "two-forgetful-three-views": lambda: Model(
        cores(is_durable=False), members(2), Budget(restarts=1, breaks=1, deaths=1), **NO_ROUND
    ),
    "two-forgetful-and-late": lambda: Model(
        cores(is_durable=False),
        members(2),
        Budget(restarts=1, breaks=1),
        highest=2,
        has_late_beats=True,
        **NO_ROUND,
    ),
    "three-forgetful": lambda: Model(
        cores(is_durable=False), members(3), Budget(restarts=1, deaths=1), highest=2, **NO_ROUND
    ),
    "three-suspected": lambda: Model(
        cores(), members(3), Budget(deaths=1, suspicions=1), highest=2, **NO_ROUND
    ),
    "three-ended-by-mistake": lambda: Model(
        cores(ended_after=1),
        members(3),
        Budget(deaths=1, suspicions=1),
        highest=2,
        tells_ended=True,
        **NO_ROUND,
    ),
    "three-newcomer": lambda: Model(
        cores(), (*members(2), Slot(2, "c", "later")), Budget(), highest=2, **ONE_ROUND
    ),
}
ALL = SETTLED | FOUNDING | LARGE


def world_of(name: str, model: Model) -> World:
    return model.start() if name in FOUNDING else model.settled()


@pytest.mark.nightly(
    "up to 40 s each; deaths, refused votes, late beats, broken rounds and another run stay",
    but=["two", "two-bad-votes", "two-late-beats", "two-break", "two-again"],
)
@pytest.mark.parametrize("name", SETTLED | FOUNDING)
@pytest.mark.timeout(300)
def test_no_step_is_lost_and_all_that_live_come_to_train(name: str) -> None:
    check(name)


@needs_time
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.timeout(7200)
def test_no_step_is_lost_in_a_large_model(name: str) -> None:
    check(name)


def check(name: str) -> None:
    model = ALL[name]()
    found = explore(model, world_of(name, model))
    print(f"{found.num_states} states, in {found.num_settled} of them all train")
    assert not found.violation, f"after {found.num_states} states\n{found.violation}"
    expected = {"polls", "swaps", "agrees to enter", "forms", "enters"}
    expected |= {"votes", "applies"} if model.num_rounds else set()
    expected |= {"hears all"} if model.num_under_way > 1 else set()
    expected |= {"!dies"} if model.budget.deaths else set()
    expected |= {"!breaks"} if model.budget.breaks else set()
    expected |= {"!fails"} if model.budget.failures else set()
    expected |= {"!registry restarts"} if model.budget.restarts else set()
    expected |= {"!swap is not answered", "stray swap"} if model.budget.unanswered else set()
    expected |= {"!polls, and has not heard"} if model.budget.suspicions else set()
    assert expected <= found.seen.keys(), found.seen
    assert found.num_settled


# ------------------------------------------------------------------------ what is wrong


@pytest.mark.nightly(
    "up to 6 s each; the first tier has mistakes of each promise that are found in a second",
    but=[
        "who-is-left-out-stays",
        "found-on-suspicion",
        "enter-without-open",
        "no-majority",
        "doubts-are-forgotten",
    ],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[needs_time] * (one.model in LARGE)) for n, one in MUTANTS.items()],
)
@pytest.mark.timeout(300)
def test_a_mistake_in_the_core_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    model = ALL[mutant.model]()
    start = world_of(mutant.model, model)
    monkeypatch.setattr(mutant.module, mutant.function, mutant.changed())
    why = violation_of(model, start)
    assert why.startswith(mutant.breaks), why


@pytest.mark.nightly(
    "5 s; the others are smaller models", but=["two-commits_voted-I1", "two-keeps_promise-I4"]
)
@pytest.mark.parametrize(
    ("name", "lacks", "breaks"),
    [
        ("two", "keeps_promise", "I4"),
        ("two", "commits_voted", "I1"),
        ("two-suspect-each-other", "compares", "I3"),
    ],
)
def test_what_safety_rests_on_cannot_be_left_out(name: str, lacks: str, breaks: str) -> None:
    model = replace(ALL[name](), **{lacks: False})
    why = violation_of(model, world_of(name, model))
    assert why.startswith(breaks), why


def violation_of(model: Model, start: World) -> str:
    """Return the invariant that is broken, after the way there."""
    found = explore(model, start)
    print(f"{found.num_states} states\n{found.violation}")
    lines = found.violation.splitlines()
    return next((line for line in lines if line[:2] in ("I1", "I2", "I3", "I4", "I5", "L1")), "")
