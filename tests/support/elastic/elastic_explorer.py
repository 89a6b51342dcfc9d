"""Go through every world that a model can come to, and look for what breaks an invariant."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from dataclasses import dataclass, field

from elastic_cores import key_of
from elastic_model import Model
from elastic_threads import IN_ATTEMPT
from elastic_world import Broken, EventName, Process, World

from diloco_comm.elastic import views


@dataclass
class Exploration:
    """What was found.

    Attributes:
        violation: The first invariant that was broken, or a world from which nobody comes to train,
            after the way there; "" for none.
        seen: How often each kind of event could happen.
    """

    num_states: int = 0
    violation: str = ""
    seen: dict[str, int] = field(default_factory=dict)
    num_settled: int = 0


def explore(model: Model, start: World, limit: int = 10_000_000) -> Exploration:
    """Go through all worlds, those with the fewest events first."""
    # Nothing of it is garbage, and all of it would be looked at again and again.
    gc.disable()
    try:
        return _explore(model, start, limit)
    finally:
        gc.enable()


def _explore(model: Model, start: World, limit: int) -> Exploration:
    found = Exploration()
    worlds: list[World | None] = [start]
    numbers = {start: 0}
    parents: list[tuple[int, EventName]] = [(-1, ())]
    # Edges without faults, from world to world, backwards.
    sources, targets = array("i"), array("i")
    goals: list[int] = []
    queue = deque([0])
    while queue:
        number = queue.popleft()
        world = worlds[number]
        assert world is not None
        found.num_states += 1
        if found.num_states > limit:
            raise RuntimeError(f"more than {limit} states")
        if model.is_settled(world) or model.is_excused(world):
            goals.append(number)
            found.num_settled += model.is_settled(world)
        try:
            for event, after in model.events(world):
                found.seen[event[0]] = found.seen.get(event[0], 0) + 1
                after = pruned(model, after)
                other = numbers.setdefault(after, len(worlds))
                if other == len(worlds):
                    worlds.append(after)
                    parents.append((number, event))
                    queue.append(other)
                if other != number and not event[0].startswith("!"):
                    sources.append(number)
                    targets.append(other)
        except Broken as broken:
            found.violation = "\n".join([*_way_to(number, parents), str(broken)])
            return found
    dead_end = _dead_end(len(worlds), sources, targets, goals)
    if dead_end >= 0:
        way = _way_to(dead_end, parents)
        found.violation = "\n".join(
            [*way, "L1: nobody comes to train", describe(model, worlds[dead_end])]
        )
    return found


def _dead_end(size: int, sources: array[int], targets: array[int], goals: list[int]) -> int:
    """Return the first world from which no goal can be reached without faults; -1 for none."""
    before: list[list[int]] = [[] for _ in range(size)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    is_good = bytearray(size)
    stack = list(goals)
    for goal in goals:
        is_good[goal] = 1
    while stack:
        for source in before[stack.pop()]:
            if not is_good[source]:
                is_good[source] = 1
                stack.append(source)
    return is_good.find(0)


def pruned(model: Model, world: World) -> World:
    """Forget what can make no difference to anybody any more."""
    threads = [one.thread for one in world.processes if isinstance(one, Process)]
    open_keys = {t.epoch for t in threads if not t.is_sealed or not model.keeps_promise}
    open_keys |= {t.attempt for t in threads}
    sessions = tuple([one for one in world.sessions if one.key in open_keys])
    tried = {t.attempt for t in threads if t.kind in IN_ATTEMPT}
    stray = world.stray
    if stray and stray[0] != world.record:
        stray = ()
    if stray:
        tried.add(key_of(views.from_bytes(stray[1], model.cores.settings.run)))
    attempts = tuple([one for one in world.attempts if one.key in tried])
    if sessions != world.sessions or attempts != world.attempts or stray != world.stray:
        return world._replace(sessions=sessions, attempts=attempts, stray=stray)
    return world


def _way_to(number: int, parents: list[tuple[int, EventName]]) -> list[str]:
    lines = []
    while number > 0:
        number, event = parents[number]
        lines.append(" ".join(map(str, event)))
    return [f"{place:3}. {line}" for place, line in enumerate(reversed(lines), 1)]


def describe(model: Model, world: World | None) -> str:
    assert world is not None
    lines = [f"record: {world.record!r}", f"line: {world.line}, ledger: {world.ledger}"]
    for p, process in enumerate(world.processes):
        if not isinstance(process, Process):
            lines.append(f"process {p}: {process}")
            continue
        core = model.cores[process.core]
        lines.append(
            f"process {p}: {core.stage} of {core.epoch}, attempt {core.attempt_number}, has state "
            f"{core.has_state}, waits {core.num_waits} {core.waits_for!r}; {process.thread}, "
            f"{process.outbox and 'swaps'}"
        )
    return "\n".join(lines)
