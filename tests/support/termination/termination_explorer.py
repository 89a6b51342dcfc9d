"""Go through every state that a model of votes, deaths and changes can come to."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from termination_model import Broken, Event, Model
from termination_states import Group, Snapshot, State, members_of, newest_known


@dataclass
class Exploration:
    """What was found.

    Attributes:
        violation: The first invariant that was broken, after the way there; "" for none.
        seen: How often each kind of event could happen.
        ends: What processes may have applied: the ledger, and how far those are that live.
    """

    num_states: int = 0
    violation: str = ""
    seen: dict[str, int] = field(default_factory=dict)
    ends: set[tuple[Any, ...]] = field(default_factory=set)


def explore(model: Model, *, is_reduced: bool = True) -> Exploration:
    """Go through all states, those with the fewest events first.

    Args:
        is_reduced: Look at one state of those that come to the same.
    """
    found = Exploration()
    start = model.start()
    parents: dict[State, tuple[State, Event] | None] = {start: None}
    known = {canonical(start)}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        found.num_states += 1
        found.ends.add(_end(state))
        try:
            for event, after in model.events(state):
                found.seen[event[0]] = found.seen.get(event[0], 0) + 1
                after = pruned(model, after) if is_reduced else after
                if after in parents:
                    continue
                key = canonical(after) if is_reduced else ()
                if is_reduced and key in known:
                    continue
                known.add(key)
                parents[after] = state, event
                queue.append(after)
        except Broken as broken:
            found.violation = "\n".join([*_way_to(state, parents), str(broken)])
            return found
    return found


def _end(state: State) -> tuple[Any, ...]:
    alive = [(one.epoch, one.applied) for one in state.processes if one]
    return state.ledger, state.entered, tuple(sorted(alive))


def _way_to(state: State, parents: Mapping[State, tuple[State, Event] | None]) -> list[str]:
    lines = []
    step = parents[state]
    while step is not None:
        before, event = step
        lines.append(_sentence(event))
        step = parents[before]
    return [f"{number:3}. {line}" for number, line in enumerate(reversed(lines), 1)]


def _sentence(event: Event) -> str:
    kind, p, *more = event
    if kind == "dies":
        return f"process {p} dies"
    if kind == "calls for":
        return f"process {p} seals and calls for group {more[0]}, of {list(more[1])}"
    if kind in ("seals for", "agrees to enter", "enters"):
        return f"process {p} {kind} group {more[0]}"
    what = {"hears all": "has heard all votes of", "hears bad": "has heard a bad vote of"}
    return f"process {p} {what.get(kind, kind)} round {more[0]}"


# ------------------------------------------------------------- states that are the same one


def pruned(model: Model, state: State) -> State:
    """Forget what can make no difference to anybody any more."""
    newest = newest_known(state)
    groups = [
        group and _pruned(model, state, k, group, is_newest=k == newest)
        for k, group in enumerate(state.groups, 1)
    ]
    return state._replace(groups=tuple(groups))


def _pruned(
    model: Model, state: State, k: int, group: Group, *, is_newest: bool
) -> Group | tuple[()]:
    if _is_asked(state, k, group):
        return group
    is_decided = group.newest > 0 and model.may_be_agreed(state, group)
    if is_decided and any(one and one.acked == k > one.epoch for one in state.processes):
        return group
    # Nobody enters it any more. It counts for who is in it, and for whom it is the newest group.
    known = group.known
    if not is_newest:
        for newer in state.groups[k:]:
            known &= ~(newer.known if newer else 0)
    is_inhabited = any(one and one.epoch == k for one in state.processes)
    if not (known or is_inhabited):
        return ()
    is_open = is_inhabited and group.entered == group.members
    nobody = (0,) * len(group.voted)
    voted, bad = (group.voted, group.bad) if is_open else (nobody, nobody)
    entered = group.members * is_open
    return Group(group.members, known, entered, 0, (), 0, 0, (), (), voted, bad)


def _is_asked(state: State, k: int, group: Group) -> bool:
    """Whether some acks of a group have not come, and all of these may still come."""
    if not group.acks:
        return False
    waited_for = [p for p in members_of(group.members) if not group.acks[p]]
    return all((one := state.processes[p]) and one.acked < k for p in waited_for)


def canonical(state: State) -> tuple[Any, ...]:
    """Return the same for all states that differ in the numbers of the processes alone."""
    processes = state.processes
    numbers = sorted(range(len(processes)), key=processes.__getitem__)
    alike = [tuple(same) for _, same in itertools.groupby(numbers, processes.__getitem__)]
    best: tuple[Any, ...] = ()
    for parts in itertools.product(*map(itertools.permutations, alike)):
        order = tuple(itertools.chain.from_iterable(parts))
        masks = _masks(order)
        one = tuple([_renumbered(group, order, masks) if group else () for group in state.groups])
        best = one if not best or one < best else best
    whole = state.deaths_left, state.ledger, state.entered
    return whole, tuple([processes[p] for p in numbers]), best


@cache
def _masks(order: tuple[int, ...]) -> tuple[int, ...]:
    """What a permutation of the processes makes of each set of them."""
    place = [order.index(p) for p in range(len(order))]
    return tuple([sum(1 << place[p] for p in members_of(one)) for one in range(1 << len(order))])


def _renumbered(group: Group, order: tuple[int, ...], masks: tuple[int, ...]) -> tuple[Any, ...]:
    members, known, entered, newcomers, acks, newest, lineage, adds, applied, voted, bad = group
    if acks:
        acks = tuple([_renumbered_ack(one, masks) if (one := acks[p]) else () for p in order])
    if adds:
        adds = tuple([adds[p] for p in order])
    sets = [masks[one] for one in (members, known, entered, newcomers, *voted, *bad)]
    return (*sets, newest, lineage, applied, acks, adds)


def _renumbered_ack(ack: Snapshot, masks: tuple[int, ...]) -> Snapshot:
    return ack._replace(members=masks[ack.members], group=masks[ack.group])
