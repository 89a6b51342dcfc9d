"""All that can happen to processes that come and go, and mistakes that must be found out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from elastic_cores import Cores
from elastic_explorer import Exploration, explore
from elastic_model import Budget, Model, Slot
from elastic_mutants import MUTANTS

from diloco_comm.elastic.core import Settings

IS_LARGE = bool(os.environ.get("DILOCO_TEST_LARGE_MODELS"))


def cores(founding_wait: int = 4, **settings: object) -> Cores:
    return Cores(Settings("run", suspect_after=1, **settings), founding_wait=founding_wait)  # type: ignore[arg-type]


def members(number: int) -> tuple[Slot, ...]:
    return tuple(Slot(id, "abc"[id]) for id in range(number))


AGAIN = (Slot(0, "a"), Slot(1, "b"), Slot(1, "c", "after 1"))
NEWCOMER = (Slot(0, "a"), Slot(1, "b", "later"))
SMALL = {"has_quick_beats": True, "num_under_way": 1, "num_rounds": 1}

Make = Callable[[], Model]
# From a view in which all train.
SETTLED: dict[str, Make] = {
    "two": lambda: Model(cores(), members(2), Budget(deaths=2, failures=1, unanswered=1)),
    "two-break": lambda: Model(cores(), members(2), Budget(breaks=1), highest=3, **SMALL),
    "two-fail": lambda: Model(cores(), members(2), Budget(breaks=1, failures=1), highest=3, **SMALL),
    "two-suspected": lambda: Model(
        cores(), members(2), Budget(breaks=1, suspicions=1), highest=2, **SMALL
    ),
    "two-bad-votes": lambda: Model(cores(), members(2), Budget(deaths=1), votes_bad=True),
    "two-again": lambda: Model(cores(), AGAIN, Budget(deaths=1), highest=4, **SMALL),
    "two-again-at-least-two": lambda: Model(
        cores(min_replicas=2), AGAIN, Budget(deaths=1), highest=4, **SMALL
    ),
    "two-forgetful": lambda: Model(
        cores(is_durable=False), members(2), Budget(restarts=1, breaks=1, suspicions=1), highest=2, **SMALL
    ),
}
FOUNDING: dict[str, Make] = {
    "two-alone": lambda: Model(
        cores(founding_wait=0), members(2), Budget(deaths=1, suspicions=1), highest=3, **SMALL
    ),
}
