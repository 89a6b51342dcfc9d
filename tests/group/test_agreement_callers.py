"""Callers of fixed groups, and members without state: a history and a mutant for each rule.

Each history ends in a quiet time, in which nobody gives a demand up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from agreement_mutants import Mutant
from agreement_walks import ABSENT, begin_again, demand, first_group, is_settled, quiet_round
from agreement_world import World, nonce_of, settings_of

from diloco_comm.group import agreement, plans
from diloco_comm.group import state as st
from diloco_comm.group.messages import NO_ATTEMPT, No, Why
from diloco_comm.group.records import Record

# Rounds of a quiet time.
ROUNDS = 30
# A late word about a demand that another caller has given up.
OTHER_DEMAND = No(NO_ATTEMPT, Why.MEMBERS, demand=(0, 1, 2))


def group(size: int, step: Any, *, is_fixed: bool = True) -> World:
    """Return a group that trains together, with no message under way."""
    world = World(settings_of(is_fixed=is_fixed, founding_wait=8), step=step)
    first_group(world, size)
    go(world)
    return world


def go(world: World, until: Callable[[], bool] = lambda: False) -> None:
    """Let all happen that is due, but for votes and for newcomers that take the state."""
    names = ("start", "vote")
    while not until() and (left := [name for name in world.quiet() if name[0] not in names]):
        world.happen(left[0])


def comes_together(world: World, numbers: tuple[int, ...]) -> bool:
    """Whether all that live come to train in a record of these numbers, in a quiet time."""
    for _ in range(ROUNDS):
        quiet_round(world)
    return is_settled(world) and Record.from_bytes(world.record).numbers == numbers


def failures(world: World) -> list[bytes]:
    """Return a list that takes the nonce of each process whose caller is told to fail."""
    failed: list[bytes] = []
    take = world._take

    def taken(nonce: bytes, action: st.Action) -> None:
        failed.extend([nonce] * isinstance(action, st.Fail))
        take(nonce, action)

    world._take = taken  # type: ignore[method-assign]
    return failed


def reads_why(world: World, words: str) -> bool:
    """Whether the core of a process comes to say some words to its caller, in a quiet time."""
    for _ in range(ROUNDS):
        quiet_round(world)
        if any(words in node.state.failure + node.state.waits_for for node in world.living):
            return True
    return False


# ------------------------------------------------------------------------------- the histories


def caller_calls_again(step: Any, event: st.Event) -> bool:
    """Process 1 has yet to connect when its demand ends; process 0 leads the same attempt."""
    world = group(2, step)
    one = world.node(1).key.nonce
    demand(world, [0, 1])
    go(world, lambda: any(isinstance(order, st.Connect) for order in world.node(1).todo))
    world.tell(one, event)
    world.tell(one, st.Demanded((0, 1)))
    return comes_together(world, (0, 1))


def source_dies_before_the_others_have_its_state(step: Any) -> bool:
    """Two members have entered the first record, and never come to hold its state."""
    world = World(settings_of(founding_wait=8), step=step)
    for number in range(3):
        world.add(number)
    begin_again(world)
    while not all(node.state.record for node in world.living):
        go(world)
        for node in world.living:
            world.happen(("poll", node.key.nonce))
    source = Record.from_bytes(world.record).source
    assert source == 0 and [node.state.has_state for node in world.living] == [True, False, False]
    world.happen(("crash", world.node(0).key.nonce))
    return comes_together(world, (1, 2))


def members_are_cut_off(step: Any, one: int) -> bool:
    """There is no way from a member to member 2: a caller learns why nothing begins."""
    world = group(3, step)
    nonces = [world.node(number).key.nonce for number in (one, 2)]
    demand(world, [0, 1, 2])
    go(world, lambda: all(node.state.joint for node in world.living))
    world.cuts = frozenset({frozenset(nonces)})
    return reads_why(world, f"replica {one} cannot reach replicas [2]")


def founder_comes_to_a_group_that_runs(step: Any) -> bool:
    """A newcomer is to found the group that trains; the members are to let it in as another."""
    world = group(2, step)
    world.add(2)
    world.tell(world.node(2).key.nonce, st.Demanded((0, 1, 2), may_found=True))
    demand(world, [0, 1])
    for number in (0, 1):
        world.tell(world.node(number).key.nonce, st.GivenUp())
        world.tell(world.node(number).key.nonce, st.Demanded((0, 1, 2)))
    return reads_why(world, "runs already") and world.node(2).state.record is None


def callers_contradict_each_other(step: Any) -> bool:
    """Both callers of a group fail, whatever they name, where one leads the other."""
    named = [(0, 1), (0, 1, ABSENT)]
    for pair in itertools.permutations(named):
        world = group(2, step)
        failed = failures(world)
        for node, numbers in zip(world.living, pair, strict=True):
            world.tell(node.key.nonce, st.Demanded(numbers))
        for _ in range(ROUNDS):
            quiet_round(world)
        if len(set(failed)) < 2:
            return False
    return True


def a_member_still_connects_in_vain(step: Any) -> bool:
    """An attempt of three has failed, and two are to go on: process 1 hears of that much later."""
    world = group(3, step)
    nonces = [world.node(number).key.nonce for number in range(3)]
    demand(world, [0, 1, 2])
    go(world, lambda: all(node.state.joint for node in world.living))
    joint = world.node(2).state.joint
    assert joint is not None
    for nonce in nonces:
        world._drop_connect(nonce)
    world.tell(nonces[2], st.Connected(joint.attempt, error="no way"))
    go(world)
    failed = failures(world)
    for number in (0, 2, 1):
        world.tell(nonces[number], st.GivenUp())
        if number != 2:
            world.tell(nonces[number], st.Demanded((0, 1)))
        for _ in range(ROUNDS):
            quiet_round(world)
    return not failed and comes_together(world, (0, 1))


# For each history, a part of the core without which it ends in another way.
HISTORIES: dict[str, tuple[Callable[[Any], bool], Any, str, str, str]] = {
    "gives-up": (
        lambda step: caller_calls_again(step, st.GivenUp()),
        agreement,
        "",
        "here=(), proposal=None, joint=None,",
        "here=(), proposal=None,",
    ),
    "fails": (
        lambda step: caller_calls_again(step, st.Heard(nonce_of(0), OTHER_DEMAND)),
        agreement,
        "",
        "here=(), proposal=None, joint=None,",
        "here=(), proposal=None,",
    ),
    "without-state": (
        source_dies_before_the_others_have_its_state,
        agreement,
        "",
        "    is_ready = state.record is not None or state.follows is not None\n",
        "    is_ready = state.follows is not None\n",
    ),
    "cut-leader": (
        lambda step: members_are_cut_off(step, 0),
        agreement,
        "",
        "    if turn.state.settings.is_fixed:\n        # Only the callers",
        "    if False:\n        # Only the callers",
    ),
    "cut-member": (
        lambda step: members_are_cut_off(step, 1),
        agreement,
        "",
        "    if turn.state.settings.is_fixed:\n        # Only the callers",
        "    if False:\n        # Only the callers",
    ),
    "founder": (
        founder_comes_to_a_group_that_runs,
        plans,
        "plan_of",
        "    if is_late or state.key not in group",
        "    if state.key not in group",
    ),
    "contradict": (
        callers_contradict_each_other,
        plans,
        "plan_of",
        '        return Plan(leader=leader, reason=f"until replicas {missing} come")\n',
        '        return Plan(reason=f"until replicas {missing} come")\n',
    ),
    "connects-in-vain": (
        a_member_still_connects_in_vain,
        agreement,
        "",
        "            self.withdraw()\n",
        "            pass\n",
    ),
}


@pytest.mark.parametrize("name", list(HISTORIES))
def test_callers_come_to_a_group_or_learn_why_not(name: str) -> None:
    history, module, function, old, new = HISTORIES[name]
    assert history(agreement.step)
    with Mutant(module, function, old, new, "fixed", ()).step() as step:
        assert not history(step)
