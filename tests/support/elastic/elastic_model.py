"""A model of processes that train, change their view and die, around the real core.

Each process is a real ``State`` of the core, moved by the real ``step``, and a training thread that
is modelled: it votes for rounds of its view, takes part in attempts, and settles rounds by the
termination rule. The registry is one record and the last beat of each process. Whatever may happen
next is an event: in any order, any process slower than any other.

What must hold, whatever happens:

I1  who enters a view has applied what anybody has applied before, dead or alive, and nothing else;
I2  a round is committed in one view only, and its members agree on it;
I3  the views that are entered form one chain;
I4  no process applies a round that the chain discards;
I5  while no process dies, somebody holds the state.

A vote is told to all at once, and each may hear it at any time later, or never: that covers a death
or a seal in the middle of telling.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_attempts import Changing
from elastic_cores import key_of
from elastic_threads import (
    NONE,
    TRAIN,
    Thread,
)
from elastic_world import (
    BEFORE,
    DEAD,
    Budget,
    EventName,
    Process,
    World,
    replace_budget,
    spend,
    with_process,
)

from diloco_comm.elastic import views


class Model(Changing):
    """What is explored; see ``Bounds``."""

    # ------------------------------------------------------------------------------- start

    def start(self) -> World:
        n = len(self.slots)
        processes = tuple(
            self._begun(place) if slot.begins == "first" else BEFORE
            for place, slot in enumerate(self.slots)
        )
        return World(b"", processes, (None,) * n, (0,) * n, (), (), (), (), (), self.budget)

    def _begun(self, place: int) -> Process:
        slot = self.slots[place]
        return Process(self.cores.start(slot.id, slot.nonce), Thread((NONE,) * self.num_rounds))

    def settled(self) -> World:
        """Return the world when the first view is open, all train, and nothing has happened."""
        world = replace_budget(self.start(), Budget())
        for _ in range(100):
            if self.is_settled(world):
                break
            for place in range(len(self.slots)):
                world = self._fair(world, place)
        assert self.is_settled(world), world
        processes = tuple(
            one._replace(core=self.cores.with_settings(one.core)) if one != BEFORE else one
            for one in world.processes
        )
        return replace_budget(world._replace(processes=processes), self.budget)

    def _fair(self, world: World, place: int) -> World:
        """Let a process do what it can, but take part in no round."""
        if world.processes[place] in (BEFORE, DEAD):
            return world
        world = next(self.of_registry(world, place))[1]
        return next((after for _, after in self.of_attempt(world, place)), world)

    # ------------------------------------------------------------------------------- events

    def events(self, world: World) -> Iterator[tuple[EventName, World]]:
        """Everything that may happen next; the names of faults begin with "!".

        Raises:
            Broken: If that breaks an invariant.
        """
        if world.stray:
            yield ("stray swap",), self._swap_arrives(world, *world.stray)._replace(stray=())
        if world.budget.restarts:
            yield ("!registry restarts",), self._restarted(world)
        for p, process in enumerate(world.processes):
            if process == BEFORE:
                if self._may_begin(world, p):
                    yield ("begins", p), with_process(world, p, self._begun(p))
                continue
            if process == DEAD:
                continue
            if world.budget.deaths:
                yield ("!dies", p), self._ended(spend(world, "deaths"), p)
            yield from self.of_registry(world, p)
            yield from self.of_attempt(world, p)
            yield from self.of_rounds(world, p)

    def _may_begin(self, world: World, p: int) -> bool:
        begins = self.slots[p].begins
        return begins == "later" or world.processes[int(begins.split()[1])] == DEAD

    def _restarted(self, world: World) -> World:
        world = spend(world, "restarts")._replace(beats=(None,) * len(self.slots))
        return world if self.cores.settings.is_durable else world._replace(record=b"", stray=())

    def is_settled(self, world: World) -> bool:
        """Whether all that live train in the view that is recorded."""
        living = [p for p, one in enumerate(world.processes) if isinstance(one, Process)]
        if not world.record or not living:
            return not living
        view = views.from_bytes(world.record, self.cores.settings.run)
        return (
            view.phase == views.OPEN
            and all(
                one.thread.kind == TRAIN and one.thread.epoch == key_of(view)
                for one in (world.processes[p] for p in living)
            )
            and set(living) == set(self.places(view))
        )

    def is_excused(self, world: World) -> bool:
        """Whether there are reasons to wait: too few processes, or the model's own bounds."""
        living = [one for one in world.processes if isinstance(one, Process)]
        if world.is_bounded or len(living) < self.cores.settings.min_replicas:
            return True
        if world.line and not any(
            isinstance(world.processes[p], Process)
            for p in self.places(self.cores.views[world.line[-1]])
        ):
            # Nobody is left of the last view.
            return True
        if world.ledger and not any(self.cores[one.core].has_state for one in living):
            return True
        return self.cores.is_excused(living)
