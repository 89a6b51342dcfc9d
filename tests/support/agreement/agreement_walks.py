"""Random histories of a simulated world, and the quiet time after them."""

from __future__ import annotations

import random
from collections.abc import Callable

from agreement_world import Broken, Name, Node, World

from diloco_comm.group import state as st

# Rounds of a quiet time within which all must train together.
MANY = 80
# Rounds of a quiet time for which callers wait in vain.
PATIENCE = 8
_MOST_EVENTS = 4000
# The number of a replica that callers name, and that never comes.
ABSENT = 99


def quiet_round(world: World) -> None:
    """Let everything happen that is due, one vote of each thread, and one poll of each process."""
    for _ in range(_MOST_EVENTS):
        name = next((name for name in world.quiet() if name[0] != "vote"), None)
        if name is None:
            break
        world.happen(name)
    else:
        raise Broken("L", "events follow each other without end\n" + describe(world))
    for node in world.living:
        for stream in world.nodes[node.key.nonce].thread.can_vote:
            world.happen(("vote", node.key.nonce, stream))
    for node in world.living:
        world.happen(("poll", node.key.nonce))


def calm(world: World) -> None:
    """Heal everything, and start again what has ended against its will."""
    world.cuts, world.off_table, world.evict = frozenset(), frozenset(), frozenset()
    for nonce in world.nodes:
        world.put(nonce, mistaken=frozenset(), cut_polls=())
    begin_again(world)


def begin_again(world: World) -> None:
    for number in list(world.starts):
        node = world.node(number)
        if not node.takes_part:
            step = world._inner_step(node) if node.thread.has_state else node.state.inner_step
            world.add(number, inner_step=step, has_checkpoint=True)
    for node in world.living:
        if node.state.follows is None and node.state.record is None:
            world.ready(node.key.nonce)


def demand(world: World, numbers: list[int]) -> None:
    """Let the callers of some processes, that have no demand yet, call ``change_group``."""
    # A process that comes to a group that trains waits to be let in, init="join".
    is_begin = not any(node.state.record for node in world.living)
    for number in numbers:
        node = None if number == ABSENT else world.node(number)
        if node is not None and node.takes_part and node.state.demand is None:
            demanded = st.Demanded(tuple(sorted(numbers)), may_found=is_begin)
            world.tell(node.key.nonce, demanded)


def waits_in_vain(world: World, node: Node) -> bool:
    """Whether a caller waits for ever: its group runs already, or has not begun, or never comes.

    Callers that contradict each other are told so where one of them leads the other, else not.
    """
    state, living = node.state, sorted(one.key.number for one in world.living)
    is_refused = "runs already" in state.waits_for or state.waits_for.endswith("trains")
    return state.demand is not None and (is_refused or state.demand != tuple(living))


def is_settled(world: World) -> bool:
    """Whether all living processes train in one record and hold its state.

    Nobody puts a record back that the table has forgotten.
    """
    last = world.record or max((n.state.entered for n in world.living), default=b"")
    return all(
        node.state.stage is st.Stage.TRAINING
        and node.state.entered == last
        and node.thread.has_state
        and node.thread.epoch == node.state.record.hash  # type: ignore[union-attr]
        for node in world.living
    )


def is_excused(world: World) -> bool:
    """Whether a table has lost its memory while a member of the last record had ended.

    Then the others can never know whether a later record was opened.
    """
    for node in world.living:
        record = node.state.record
        if record is not None and node.state.has_moved:
            if not all(world.nodes[key.nonce].takes_part for key in record.members):
                return True
    return False


def settle(world: World, is_enough: Callable[[World], bool] = is_settled) -> int:
    """Let quiet time pass until all train together; return the number of rounds of that.

    Raises:
        Broken: If that does not come.
    """
    calm(world)
    for number in range(MANY):
        if is_enough(world):
            return number
        for node in world.living:
            # All others are answered without that their callers give up.
            if number % PATIENCE == PATIENCE - 1 and waits_in_vain(world, node):
                world.tell(node.key.nonce, st.GivenUp())
        if world.settings.is_fixed:
            demand(world, [node.key.number for node in world.living])
        quiet_round(world)
        begin_again(world)
    if is_excused(world):
        return -1
    raise Broken("L", "the processes do not come to train together\n" + describe(world))


def describe(world: World) -> str:
    """Say where all are."""
    rows = [f"table: {len(world.record)} bytes, {len(world.messages)} messages under way"]
    for node in world.nodes.values():
        if node.takes_part:
            state = node.state
            joint = state.joint.attempt if state.joint else None
            rows.append(
                f"{state.key.number}.{state.nonce[1]}: {state.stage.name} in {state.number}, "
                f"{joint}, leads {state.proposal is not None}, demands {state.demand}, "
                f"waits {state.waits_for!r}"
            )
    return "\n".join(rows)


class Walk:
    """A random history.

    Args:
        faults: Weights of kinds of faults.
        haste: Part of the steps that are polls.
    """

    def __init__(
        self, world: World, seed: int, faults: dict[str, float], haste: float = 0.15
    ) -> None:
        self.world, self.random = world, random.Random(seed)
        self._faults, self._haste = faults, haste
        self._polls: dict[bytes, int] = {}

    def step(self) -> Name:
        """Let one event happen, and return its name."""
        world, choice = self.world, self.random.random()
        living = world.living
        if choice < self._haste and living:
            name: Name = ("poll", self._next_to_poll())
            world.happen(name)
            return name
        kind = self._fault()
        if kind is not None:
            return self._happens(kind)
        names = list(world.quiet())
        if not names:
            return ()
        # The event that waits longest is a little more likely, so that histories go on.
        name = names[0] if self.random.random() < 0.2 else self.random.choice(names)
        world.happen(name)
        return name

    def _next_to_poll(self) -> bytes:
        """Choose a process; none is more than two polls ahead of another."""
        living = [node.key.nonce for node in self.world.living]
        least = min((self._polls[one] for one in living if one in self._polls), default=0)
        self._polls = {one: self._polls.get(one, least) for one in living}
        chosen = self.random.choice([one for one in living if self._polls[one] <= least + 1])
        self._polls[chosen] += 1
        return chosen

    def _fault(self) -> str | None:
        choice = self.random.random()
        for kind, weight in self._faults.items():
            choice -= weight
            if choice < 0:
                return kind
        return None

    def _happens(self, kind: str) -> Name:
        world, living = self.world, self.world.living
        node = self.random.choice(living) if living else None
        if kind == "again":
            begin_again(world)
        elif kind == "ready":
            begin_again(world)
        elif kind == "lose" and world.messages:
            world._lose(self.random.randrange(len(world.messages)))
        elif kind == "repeat" and world.messages:
            world.messages = (*world.messages, self.random.choice(world.messages))
        elif kind == "no answer" and world.replies:
            world._reply(self.random.randrange(len(world.replies)), is_lost=True)
        elif kind == "despair" and world.swaps:
            world._despair(self.random.randrange(len(world.swaps)))
        elif kind == "forget":
            world._forget()
        elif kind == "heal":
            world.cuts, world.off_table = frozenset(), frozenset()
            for nonce in world.nodes:
                world.put(nonce, mistaken=frozenset())
        elif node is not None:
            self._on_node(kind, node)
        return (kind,)

    def _on_node(self, kind: str, node: Node) -> None:
        world, nonce = self.world, node.key.nonce
        other = self.random.choice(world.living).key.nonce
        if kind == "crash":
            world._crash(nonce)
        elif kind == "devices":
            world._devices(nonce)
        elif kind == "delay":
            world._delay(nonce)
        elif kind == "interrupt" and node.state.record is not None:
            world._interrupt(nonce)
        elif kind == "break" and node.state.record is not None:
            world._break(nonce)
        elif kind == "cut" and other != nonce:
            world.cuts |= {frozenset((nonce, other))}
        elif kind == "off table":
            world.off_table |= {nonce}
        elif kind == "mistake" and other != nonce:
            world.put(nonce, mistaken=node.mistaken | {other})
        elif kind == "leave":
            world.tell(nonce, st.Leave())
        elif kind == "evict":
            world.evict = frozenset({node.key.number}) if not world.evict else frozenset()
        elif kind == "demand":
            numbers = [one.key.number for one in world.living]
            chosen = self.random.sample(numbers, self.random.randint(1, len(numbers)))
            if world.num_losses:
                # At another store the callers vouch that nobody else lives.
                chosen = numbers
            demand(world, [*chosen, ABSENT] if self.random.random() < 0.1 else chosen)
        elif kind == "let in" and node.state.demand is None and node.state.record is None:
            numbers = sorted(one.key.number for one in world.living)
            world.tell(nonce, st.Demanded(tuple(numbers), may_found=False))
        elif kind == "survivors" and node.state.demand is None and node.state.record is not None:
            world.tell(nonce, st.Demanded())
        elif kind == "give up" and node.state.demand is not None:
            world.tell(nonce, st.GivenUp())


DURABLE_FAULTS: dict[str, float] = {
    "again": 0.01,
    "lose": 0.01,
    "repeat": 0.01,
    "no answer": 0.01,
    "despair": 0.005,
    "crash": 0.002,
    "break": 0.003,
    "cut": 0.002,
    "off table": 0.001,
    "mistake": 0.001,
    "leave": 0.001,
    "evict": 0.0005,
    "heal": 0.01,
    "devices": 0.01,
    "delay": 0.01,
    "interrupt": 0.004,
}
FIXED_FAULTS = {
    **{kind: weight for kind, weight in DURABLE_FAULTS.items() if kind not in ("leave", "evict")},
    "demand": 0.01,
    "survivors": 0.02,
    "give up": 0.004,
    "let in": 0.002,
}
# The callers of all processes name another store, and vouch for those that have ended.
_NOT_MOVING = ("cut", "mistake", "off table", "survivors")
MOVING_FAULTS = {
    **{kind: weight for kind, weight in FIXED_FAULTS.items() if kind not in _NOT_MOVING},
    "forget": 0.003,
}
FORGETTING_FAULTS = {**DURABLE_FAULTS, "forget": 0.002, "off table": 0.0}


def first_group(world: World, size: int) -> None:
    """Start processes, and let them found a group."""
    for number in range(size):
        world.add(number)
    settle(world)
