"""Long random histories: lost and late swaps, old beats, slow processes, deaths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from diloco_comm.elastic.core import Settings
from elastic_cores import Cores
from elastic_explorer import describe, pruned
from elastic_model import Model
from elastic_world import NO_FAULTS, Budget, EventName, Process, Slot, World, replace_budget
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

MANY = 150
FAULTS = Budget(deaths=2, breaks=3, failures=3, restarts=1, unanswered=3)
SLOTS = (
    Slot(0, "a"),
    Slot(1, "b"),
    Slot(2, "c"),
    Slot(3, "d", "later"),
    Slot(0, "e", "after 0"),
    Slot(1, "f", "after 1"),
)


class History(RuleBasedStateMachine):
    """Whatever may happen, in any order; in the end the faults are over."""

    @initialize(
        is_durable=st.booleans(),
        min_replicas=st.integers(1, 2),
        suspect_after=st.integers(1, 3),
        votes_bad=st.booleans(),
    )
    def begin(
        self, is_durable: bool, min_replicas: int, suspect_after: int, votes_bad: bool
    ) -> None:
        chosen = Settings("run", min_replicas, suspect_after, 2, is_durable)
        # Founders that do not know of each other make two lines, where a registry forgets.
        slots = SLOTS if is_durable else SLOTS[:3]
        self.model = Model(
            Cores(chosen, founding_wait=4),
            slots,
            FAULTS,
            num_rounds=6,
            highest=1000,
            has_late_beats=True,
            votes_bad=votes_bad,
            is_cut=True,
        )
        self.world = self.model.settled()

    @rule(choices=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=30))
    def happens(self, choices: list[int]) -> None:
        for choice in choices:
            events = list(self.model.events(self.world))
            self.world = pruned(self.model, events[choice % len(events)][1])

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = replace_budget(self.world, NO_FAULTS)
        for _ in range(MANY):
            if self.model.is_settled(world) or self.model.is_excused(world):
                return
            for place in range(len(self.model.slots)):
                world = self._fair(world, place)
        pytest.fail("nobody comes to train\n" + describe(self.model, world))

    def _fair(self, world: World, place: int) -> World:
        """Let a process do one thing of each kind."""
        for kind in (self.model.of_registry, self.model.of_attempt, self.model.of_rounds):
            if isinstance(world.processes[place], Process):
                events: Iterator[tuple[EventName, World]] = kind(world, place)
                world = pruned(self.model, next(events, ((), world))[1])
        return world


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=16, stateful_step_count=12, deadline=None, derandomize=True, database=None
)


@pytest.mark.nightly("30 s; TestHistory is the same with fewer examples")
class TestManyHistories(History.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(TestHistory.settings, max_examples=80)
