"""Words of a table that has lost its memory, and newcomers: a history and a mutant for each.

The histories hold up a word of the former table until a process has sealed for the new table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from agreement_mutants import with_change
from agreement_walks import demand, first_group, settle
from agreement_world import Broken, Name, World, settings_of

from diloco_comm.group import agreement
from diloco_comm.group import state as st
from diloco_comm.group.messages import Open, decode
from diloco_comm.group.records import Record
from diloco_comm.group.state import Outcome


def group(size: int, step: Any, **settings: Any) -> World:
    """Return a group that trains together, with no message under way."""
    world = World(settings_of(founding_wait=8, **settings), step=step)
    first_group(world, size)
    go(world, range(size))
    return world


def go(world: World, numbers: Any, until: Callable[[], bool] = lambda: False) -> None:
    """Let all happen that is due for the newest processes of some numbers, but for votes."""
    nonces = {world.node(number).key.nonce for number in numbers}
    for _ in range(1000):
        names = (name for name in world.quiet() if is_of(world, name) in nonces)
        name = None if until() else next(names, None)
        if name is None:
            return
        world.happen(name)
    raise AssertionError("events follow each other without end")


def is_of(world: World, name: Name) -> bytes:
    """Return the process to which an event happens, b"" for a vote."""
    kind, place = name[:2]
    if kind == "deliver":
        return world.messages[place][1]
    if kind in ("swap", "reply"):
        return (world.swaps if kind == "swap" else world.replies)[place][0]
    return b"" if kind == "vote" else name[1]


def lead(world: World, number: int, others: list[int]) -> None:
    """Let a process lead an attempt up to the swap, the others answer; the table makes the swap."""
    node = world.node(number).key.nonce
    world.happen(("break", node))
    for _ in range(20):
        go(world, [number, *others], lambda: bool(world.swaps))
        if world.swaps:
            break
        world.happen(("poll", node))
    world.happen(("swap", 0))


def go_on_in_the_new_table(world: World, numbers: list[int]) -> None:
    for _ in range(20):
        go(world, numbers)
        for number in numbers:
            world.happen(("poll", world.node(number).key.nonce))


def stop_at_boundary(world: World, numbers: list[int]) -> None:
    for number in numbers:
        node = world.node(number)
        boundary = st.Boundary(node.state.number, node.thread.positions, 1, True)
        world.tell(node.key.nonce, boundary)


# ------------------------------------------------------------------------------- the histories


def newcomer_reads_a_record_that_is_lost(step: Any) -> World:
    """The table makes a swap and loses the record; a newcomer has read that record before."""
    world = group(2, step)
    newcomer = world.add(2).key.nonce
    world.ready(newcomer)
    for number in (2, 0, 1):
        world.happen(("poll", world.node(number).key.nonce))
    stop_at_boundary(world, [0])
    world.happen(("swap", 0))
    assert Record.from_bytes(world.record).numbers == (0, 1, 2)
    world.tell(newcomer, world._looked())
    world._forget()
    go_on_in_the_new_table(world, [0, 1])
    return world


def late_word_of_the_former_table(step: Any, word: str) -> World:
    """Process 1 seals for the new table; then process 1 learns of its swap in the former one."""
    world = group(2, step)
    one = world.node(1).key.nonce
    world.put(one, mistaken=frozenset([world.node(0).key.nonce]))
    lead(world, 1, [])
    assert Record.from_bytes(world.record).numbers == (1,)
    world.put(one, mistaken=frozenset())
    new, looked = world.record, world._looked()
    world.replies = ()
    world._forget()
    for number in (0, 1):
        world.tell(world.node(number).key.nonce, world._looked())
    world.tell(one, st.Swapped(new, Outcome.UNKNOWN))
    go(world, [0, 1], lambda: bool(world.swaps))
    assert world.node(1).state.bound and world.node(0).state.proposal is not None
    world.tell(one, st.Swapped(new, Outcome.DONE) if word == "answer" else looked)
    go_on_in_the_new_table(world, [0, 1])
    return world


def late_open_of_one_that_has_died(step: Any, *, reads_first: bool) -> World:
    """Process 2 seals for another store; then process 2 hears OPEN of the dead member 0."""
    world = group(3, step, is_fixed=True)
    demand(world, [0, 1, 2])
    go(world, [0, 1, 2], lambda: bool(world.swaps))
    world.happen(("swap", 0))
    world.happen(("reply", 0))
    assert world.node(0).state.number == world.node(2).state.number + 1
    (late,) = [one for one in world.messages if one[1] == world.node(2).key.nonce]
    assert isinstance(decode(late[2]), Open)
    world.messages = ()
    world.happen(("crash", world.node(0).key.nonce))
    world._forget()
    two = world.node(2)
    for number in (1, 2):
        # Process 0 is silent, and nobody has seen it end.
        for event in (st.GivenUp(), st.Passed(), st.Passed()):
            world.tell(world.node(number).key.nonce, event)
        world.beat(world.node(number).key.nonce)
        world.put(world.node(number).key.nonce, todo=())
    demand(world, [1, 2])
    if not reads_first:
        world.put(two.key.nonce, todo=())
    for _ in range(2 if reads_first else 1):
        go(world, [1, 2], lambda: bool(world.swaps))
        if not world.swaps:
            world.tell(world.node(1).key.nonce, st.Passed())
    world.tell(two.key.nonce, st.Heard(late[0], decode(late[2])))
    for _ in range(4):
        go_on_in_the_new_table(world, [1, 2])
    return world


# For each history, a part of the core without which it ends in two records after one.
HISTORIES: dict[str, tuple[Callable[[Any], World], str, str]] = {
    "newcomer": (
        newcomer_reads_a_record_that_is_lost,
        "or is_told or not any(map(Roster(state).lives, first))",
        "or True",
    ),
    "answer": (
        partial(late_word_of_the_former_table, word="answer"),
        " and Record.from_bytes(event.new).table == state.table:",
        ":",
    ),
    "read": (
        partial(late_word_of_the_former_table, word="read"),
        "    if turn.state.bound and is_former and",
        "    if False and",
    ),
    "open": (
        partial(late_open_of_one_that_has_died, reads_first=True),
        "        if (nonce in asked or",
        "        if (True or",
    ),
    "open-unread": (
        partial(late_open_of_one_that_has_died, reads_first=False),
        "    if not is_here or prepare.table != state.table:",
        "    if not is_here:",
    ),
}


@pytest.mark.parametrize("name", list(HISTORIES))
def test_words_of_a_former_table_lead_nobody_away(name: str) -> None:
    history, old, new = HISTORIES[name]
    assert settle(history(agreement.step)) >= 0
    with pytest.raises(Broken, match="I4: two views"):
        history(with_change(agreement, old, new)["step"])
