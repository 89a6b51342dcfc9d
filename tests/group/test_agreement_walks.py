"""Long random histories of real cores, and exact counts of the messages of a change."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from agreement_walks import (
    DURABLE_FAULTS,
    FIXED_FAULTS,
    FORGETTING_FAULTS,
    MOVING_FAULTS,
    Walk,
    demand,
    first_group,
    is_settled,
    quiet_round,
    settle,
)
from agreement_world import World, nonce_of, settings_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from diloco_comm.group import state as gs
from diloco_comm.group.records import Record

KINDS = {
    "durable": DURABLE_FAULTS,
    "forgetting": FORGETTING_FAULTS,
    "fixed": FIXED_FAULTS,
    "moving": MOVING_FAULTS,
}
SIZES = [2, 3, 4]


def world_of(kind: str) -> World:
    return World(settings_of(is_fixed=kind in ("fixed", "moving"), founding_wait=8))


def walk(kind: str, size: int, seed: int, num_steps: int) -> World:
    """Let a group go through random events; every 500 steps all must come to train together."""
    world = world_of(kind)
    first_group(world, size)
    steps = Walk(world, seed, KINDS[kind])
    for number in range(1, num_steps + 1):
        steps.step()
        if number % 500 == 0 and settle(world) < 0:
            break
    return world


@pytest.mark.nightly(
    "the first tier has fewer seeds",
    but=[f"{kind}-{size}-first" for kind in KINDS for size in SIZES],
)
@pytest.mark.parametrize(
    ("num_seeds", "num_steps"),
    [pytest.param(4, 1000, id="first"), pytest.param(60, 3000, id="all")],
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_random_history_breaks_no_invariant_and_ends_with_all_in_one_view(
    kind: str, size: int, num_seeds: int, num_steps: int
) -> None:
    worlds = [walk(kind, size, seed, num_steps) for seed in range(num_seeds)]
    assert sum(len(world.records) for world in worlds) > 2 * num_seeds


@pytest.mark.nightly("the first tier has fewer views", but=["first"])
@pytest.mark.parametrize("num_views", [pytest.param(150, id="first"), pytest.param(3000, id="all")])
def test_thousands_of_views_leave_nothing_behind_in_a_state(num_views: int) -> None:
    world = world_of("durable")
    first_group(world, 3)
    steps = Walk(world, 5, {**DURABLE_FAULTS, "break": 0.03})
    sizes = []
    while len(world.records) < num_views:
        world.largest_state = 0
        for _ in range(500):
            steps.step()
        assert settle(world) >= 0
        sizes.append(world.largest_state)
        forget_the_dead(world)
    first = max(sizes[: len(sizes) // 3])
    assert max(sizes) < 2 * first


def forget_the_dead(world: World) -> None:
    """Drop what only the bookkeeping of the world keeps of processes that have ended."""
    newest = {nonce_of(number, count - 1) for number, count in world.starts.items()}
    gone = [nonce for nonce in world.nodes if nonce not in newest]
    for nonce in gone:
        world.places.pop(nonce, None)
    world.nodes = {nonce: node for nonce, node in world.nodes.items() if nonce in newest}
    world.messages = tuple([one for one in world.messages if one[0] in newest and one[1] in newest])
    world.swaps = tuple([one for one in world.swaps if one[0] in newest])
    world.replies = tuple([one for one in world.replies if one[0] in newest])
    world.failing = frozenset([one for one in world.failing if one[0] in newest])
    world.late = tuple([one for one in world.late if one[0] in newest])
    for attempts in (world.asked, world.connected):
        for nonce in gone:
            attempts.pop(nonce, None)
    for node in world.living:
        world.put(node.key.nonce, mistaken=node.mistaken & newest)


class History(RuleBasedStateMachine):
    """Whatever may happen, in any order; in the end the faults are over."""

    @initialize(kind=st.sampled_from(list(KINDS)), size=st.integers(2, 4))
    def begin(self, kind: str, size: int) -> None:
        self.world = world_of(kind)
        first_group(self.world, size)
        self.faults = [*KINDS[kind], *("",) * 8]

    @rule(choices=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=40))
    def happens(self, choices: list[int]) -> None:
        for choice in choices:
            steps = Walk(self.world, choice, {})
            fault = self.faults[choice % len(self.faults)]
            if fault:
                steps._happens(fault)
            steps.step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            settle(self.world)


@pytest.mark.nightly("the first tier has fewer examples", but=["first"])
@pytest.mark.parametrize(
    ("examples", "steps"), [pytest.param(12, 15, id="first"), pytest.param(300, 50, id="all")]
)
def test_any_history_ends_with_all_in_one_view(examples: int, steps: int) -> None:
    bounds = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(History, settings=bounds)


def test_a_run_that_has_ended_takes_nobody() -> None:
    world = quiet_group(3)
    for node in world.living:
        positions = node.thread.positions
        world.tell(node.key.nonce, gs.Finished(True, positions, 7))
    assert not world.living
    hops_of(world)
    last = Record.from_bytes(world.record)
    assert last.is_finished and last.inner_step == 7 and last.numbers == (0, 1, 2)
    late = world.add(3).key.nonce
    assert world.nodes[late].end == "Over"


def test_an_evicted_member_ends_and_comes_back_as_another_process() -> None:
    world = quiet_group(3)
    evicted = world.node(1).key.nonce
    world.evict = frozenset([1])
    for _ in range(20):
        quiet_round(world)
    assert world.nodes[evicted].end == "Drained"
    assert Record.from_bytes(world.record).evicted == (1,)
    world.evict = frozenset()
    assert settle(world) >= 0 and Record.from_bytes(world.record).numbers == (0, 1, 2)


# --------------------------------------------------------------------- messages of a change


def hops_of(world: World) -> int:
    """Let everything happen that is due; return the number of steps one after the other.

    All that is under way at the begin of a step comes to its end, and what follows is under way in
    the next. A request to the table and its answer are one step.
    """
    hops = 0
    while True:
        while names := [name for name in world.quiet() if name[0] == "do"]:
            world.happen(names[0])
        waiting = [name for name in world.quiet() if name[0] in ("deliver", "swap")]
        if not waiting:
            return hops
        hops += 1
        num_messages, num_swaps = len(world.messages), len(world.swaps)
        for _ in range(num_messages):
            world.happen(("deliver", 0))
        for _ in range(num_swaps):
            world.happen(("swap", 0))
        while world.replies:
            world.happen(("reply", 0))


def quiet_group(size: int, **chosen: object) -> World:
    """Return a group without any message under way."""
    world = World(settings_of(**chosen))
    first_group(world, size)
    while world.messages:
        world.happen(("deliver", 0))
    for node in world.living:
        for action in node.todo:
            world.happen(("do", node.key.nonce, node.todo.index(action)))
    world.counts = Counter()
    return world


@pytest.mark.parametrize("size", [2, 8])
def test_an_unplanned_change_takes_four_steps_and_four_messages_a_member(size: int) -> None:
    world = quiet_group(size + 1)
    dead = world.node(size).key.nonce
    world.happen(("crash", dead))
    for node in world.living:
        world.tell(node.key.nonce, gs.Life(dead=frozenset([dead])))
    assert hops_of(world) == 4
    assert is_settled(world) and len(world.living) == size
    others = size - 1
    assert world.counts["Prepare"] == world.counts["Sealed"] == world.counts["Ready"] == others
    assert world.counts["Open"] == others and world.counts["Swap"] == 1
    assert world.counts["Send"] == 4 * others and world.counts["Read"] == 0


@pytest.mark.parametrize("size", [2, 8])
def test_a_planned_change_takes_two_steps(size: int) -> None:
    world = quiet_group(size + 1)
    before = world.node(0).state.number
    world.tell(world.node(size).key.nonce, gs.Leave())
    world.beat(world.node(size).key.nonce)
    for node in world.living:
        world.tell(node.key.nonce, world._looked())
    for node in world.living:
        positions = node.thread.positions
        world.tell(node.key.nonce, gs.Boundary(node.state.number, positions, 1, True))
    assert hops_of(world) == 2
    assert world.counts["Open"] == world.counts["Send"] == size - 1 and world.counts["Swap"] == 1
    numbers = {node.state.number for node in world.living if node.key.number < size}
    assert numbers == {before + 1}


@pytest.mark.parametrize("size", [2, 8])
def test_a_change_of_a_fixed_group_takes_one_step_more_for_the_demands(size: int) -> None:
    world = quiet_group(size, is_fixed=True)
    demand(world, list(range(size)))
    assert hops_of(world) == 5
    assert is_settled(world) and world.counts["Here"] == size - 1
    assert world.counts["Send"] == 5 * (size - 1) and world.counts["Swap"] == 1
    assert world.counts["Read"] == size


def test_the_order_of_events_of_one_step_does_not_matter_for_the_counts() -> None:
    world = quiet_group(4)
    order = random.Random(3)
    dead = world.node(3).key.nonce
    world.happen(("crash", dead))
    for node in sorted(world.living, key=lambda _: order.random()):
        world.tell(node.key.nonce, gs.Life(dead=frozenset([dead])))
    while names := [name for name in world.quiet() if name[0] not in ("vote", "apply")]:
        world.happen(order.choice(names))
    assert world.counts["Send"] == 4 * 2 and world.counts["Swap"] == 1 and is_settled(world)
