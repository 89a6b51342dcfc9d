"""Thousands of views of real drivers on a virtual clock lose no round, and leave nothing behind."""

from __future__ import annotations

import gc
import logging
import math
import sys
import tracemalloc
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from statistics import median
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from agreement_world import Broken
from driver_world import (
    FAULTS,
    SUSPECT_AFTER_S,
    TICK_S,
    Clock,
    DriverWorld,
    Storm,
    VirtualLink,
    VirtualTable,
    virtual_time,
)

from benchmarks.elastic.checks import check_chain
from diloco_comm.elastic.driver import Driver
from diloco_comm.group import agreement, streams
from diloco_comm.group.beats import Way
from diloco_comm.group.signs import Signs
from diloco_comm.group.streams import Positions

SIZE, STEADY = 4, 1
# No memory of other processes has more entries than that, when all that have ended are forgotten.
MOST_PROCESSES = 3 * SIZE
# The first count of all objects is taken for this number: caches with bounds take some more.
OWN_OBJECTS = 50_000
# By how much the middle of the last third of the looks may exceed the middle of the first third.
SLACK = 1.05
_ENDS = (type, ModuleType, FunctionType, BuiltinFunctionType, VirtualLink, VirtualTable, Clock)


def reachable(root: Any) -> tuple[int, int]:
    """Return the number of objects that an object refers to, and their bytes."""
    seen, found = {id(root)}, [root]
    for one in found:
        others = [o for o in gc.get_referents(one) if id(o) not in seen]
        for other in others:
            if id(other) not in seen and not isinstance(other, _ENDS):
                seen.add(id(other))
                found.append(other)
    return len(found), sum(map(sys.getsizeof, found))


def sizes_of(world: DriverWorld) -> dict[str, int]:
    """Return what the living processes, and their table, hold now."""
    drivers = [world.processes[node.key.nonce].driver for node in world.living]
    objects, contents = zip(*map(reachable, drivers), strict=True)
    texts = [text for text, _ in world.beats.values()]
    # A cache with a bound, which the first thousand processes fill.
    Way.from_text.cache_clear()
    gc.collect()
    found = {
        "objects of the program": len(gc.get_objects()),
        "objects of a driver": max(objects),
        "bytes of a driver": max(contents),
        "beats": len(texts),
        "bytes of the longest beat": max(map(len, texts)),
        "bytes of the record": len(world.record),
    }
    if tracemalloc.is_tracing():
        filters = [tracemalloc.Filter(True, "*/diloco_comm/*")]
        traces = tracemalloc.take_snapshot().filter_traces(filters).statistics("filename")
        found["traced bytes"] = sum(trace.size for trace in traces)
    return found


def run(
    seed: int, num_views: int, num_looks: int
) -> tuple[DriverWorld, Storm, list[dict[str, int]]]:
    """Let a group go through views; now and then all must come to train together."""
    clock = Clock()
    with virtual_time(clock):
        world = DriverWorld(seed, clock)
        storm = Storm(world, SIZE, STEADY)
        looks = []
        while len(world.chain) < num_views:
            until = len(world.chain) + num_views // num_looks
            while len(world.chain) < until:
                storm.step()
            storm.settle()
            world.forget()
            looks.append(sizes_of(world))
    begin = looks[0]["objects of the program"] - OWN_OBJECTS
    for look in looks:
        look["objects of the program"] -= begin
    return world, storm, looks


def growth(looks: list[dict[str, int]]) -> dict[str, float]:
    """Return by how much the later looks found more than the first ones, by name."""
    third = len(looks) // 3
    first, last = looks[:third], looks[-third:]
    return {
        name: median(look[name] for look in last) / median(look[name] for look in first)
        for name in looks[0]
    }


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log nothing, and let the collector look at no object of torch or of other tests."""
    caplog.set_level(logging.CRITICAL, "diloco_comm")
    gc.freeze()
    yield
    gc.unfreeze()


def leaks(looks: list[dict[str, int]], world: DriverWorld) -> dict[str, float]:
    """Return the names of what has grown, or holds more than the processes of some seconds."""
    sizes = {name: len(memory) for name, memory in memories(world).items()}
    return {
        **{name: by for name, by in growth(looks).items() if by > SLACK},
        **{name: size for name, size in sizes.items() if size > MOST_PROCESSES},
    }


def memories(world: DriverWorld) -> dict[str, Any]:
    """Return what a driver that has lived through all views keeps of other processes."""
    driver = world.processes[world.node(STEADY).key.nonce].driver
    found = {**vars(driver), **vars(driver.signs), **vars(driver.state)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Sized) and not isinstance(value, bytes | str)
    }


@pytest.mark.timeout(1800)
@pytest.mark.nightly("seven minutes; the first tier has fewer views", but=["first"])
@pytest.mark.parametrize(
    ("num_views", "num_looks", "is_traced"),
    [
        pytest.param(120, 6, False, id="first"),
        pytest.param(1000, 15, True, id="traced"),
        pytest.param(10_000, 60, False, id="all"),
    ],
)
def test_views_of_drivers_lose_no_round_and_leave_nothing_behind(
    num_views: int, num_looks: int, is_traced: bool
) -> None:
    if is_traced:
        tracemalloc.start()
    try:
        world, storm, looks = run(1, num_views, num_looks)
    finally:
        tracemalloc.stop()
    assert check_chain(world.chain)[1] == []
    assert len(world.chain) >= num_views and storm.num_faults.keys() == FAULTS.keys()
    # One process has lived through all views.
    assert world.starts[STEADY] == 1 and world.starts.total() > num_views // 4
    assert min(world.node(STEADY).thread.done) > num_views
    assert leaks(looks, world) == {}, looks


def test_a_memory_of_ended_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signs, "_forget", lambda signs, members: None)
    world, _, looks = run(1, 45, 3)
    assert "_sights" in leaks(looks, world)


def test_an_agreement_that_loses_a_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(sealed: Iterable[Positions]) -> Positions:
        return tuple([replace(one, bits=0) for one in streams.decide(sealed)])

    monkeypatch.setattr(agreement, "decide", decide)
    with pytest.raises(Broken, match="I1"):
        run(1, 80, 4)


def founded(seed: int, clock: Clock, **settings: Any) -> DriverWorld:
    """Return a world whose processes 0 and 1 serve their state, and have just made a record."""
    world = DriverWorld(seed, clock)
    world.settings = replace(world.settings, **settings)
    for number in (0, 1):
        world.processes[world.add(number).key.nonce].driver.serves = True
    while not world.chain:
        world.pass_time(TICK_S)
    return world


def newcomer_in(world: DriverWorld) -> Driver:
    """Start a process that never asks to be let in."""
    process = world.processes[world.add(2).key.nonce]
    process.ready_at = math.inf
    return process.driver


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_suspects_no_member_at_its_first_look(seed: int) -> None:
    clock = Clock()
    with virtual_time(clock):
        world = founded(seed, clock)
        world.pass_time(1.0)
        driver = newcomer_in(world)
        while driver.state.in_table is None:
            world.pass_time(TICK_S)
        assert len(driver.donors()) == 2 and not driver.awaits_beats


@pytest.mark.parametrize("has_beats", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_awaits_the_first_beats_of_members_in_a_new_record(
    seed: int, has_beats: bool
) -> None:
    clock = Clock()
    with virtual_time(clock):
        world = founded(seed, clock)
        world.off_table = frozenset(node.key.nonce for node in world.living)
        driver = newcomer_in(world)
        world.pass_time(1.0)
        # A newcomer that asked to be let in now would have copied nothing.
        assert driver.state.in_table is not None
        assert not driver.donors() and driver.awaits_beats
        if has_beats:
            world.off_table = frozenset()
        world.pass_time(2 * SUSPECT_AFTER_S)
        assert len(driver.donors()) == 2 * has_beats and not driver.awaits_beats


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_awaits_no_member_that_waits_for_a_state(seed: int) -> None:
    clock = Clock()
    with virtual_time(clock):
        world = founded(seed, clock, min_replicas=2)
        # No member has begun: the survivor holds no state, and cannot go on alone.
        world.kill(world.node(0).key.nonce)
        driver = newcomer_in(world)
        world.pass_time(1.0)
        assert not driver.donors() and driver.awaits_beats
        world.pass_time(2 * SUSPECT_AFTER_S)
        assert not driver.donors() and not driver.awaits_beats
        # The newcomer asks to be let in now; both train, and the survivor has a state.
        world.processes[driver.state.nonce].ready_at = clock.now
        world.pass_time(3 * SUSPECT_AFTER_S)
        assert len(driver.donors()) == 1
