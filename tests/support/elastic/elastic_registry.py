"""What the registry and the core of a process do in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diloco_comm.elastic.core.events import (
    Abandon,
    Action,
    Break,
    Drained,
    Enter,
    Fence,
    Form,
    Pend,
    Refuse,
    Swap,
    Swapped,
)
from diloco_comm.elastic.views import NO_VIEW, View
from elastic_cores import key_of
from elastic_threads import (
    ACKED,
    MEET,
)
from elastic_world import (
    DEAD,
    Bounds,
    Broken,
    EventName,
    Process,
    World,
    find,
    put,
    spend,
    with_process,
)

from diloco_comm.elastic import views


class Polling(Bounds):
    """Polls, swaps, and the actions of the core."""

    def of_registry(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
        process = world.processes[p]
        if process.outbox:
            yield from self._swaps(world, p, process)
            return
        yield ("polls", p), self._polled(world, p, 0)
        if world.budget.suspicions:
            for q, other in enumerate(world.processes):
                if q != p and isinstance(other, Process) and self._beat(world, q, is_new=False):
                    after = self._polled(spend(world, "suspicions"), p, 1 << q)
                    yield ("!polls, and has not heard", p, q), after

    def _swaps(self, world: World, p: int, process: Process) -> Iterator[tuple[EventName, World]]:
        old, new = process.outbox
        ok = world.record == old
        idle = with_process(world, p, process._replace(outbox=()))
        after = self._swap_arrives(idle, old, new)
        yield ("swaps", p, ok), self._tell(after, p, Swapped(old, new, ok or not self.compares))
        if world.budget.unanswered and ok:
            unanswered = spend(idle, "unanswered")._replace(stray=(old, new))
            yield ("!swap is not answered", p), self._tell(unanswered, p, Swapped(old, new, None))

    def _swap_arrives(self, world: World, old: bytes, new: bytes) -> World:
        if world.record != old and self.compares:
            return world
        view = views.from_bytes(new, self.cores.settings.run)
        world = world._replace(record=new)
        return self._opened(world, view) if view.phase == views.OPEN else world

    def _opened(self, world: World, view: View) -> World:
        """The chain goes on with a view, and the rounds that its members have agreed on count."""
        if key_of(view) in world.line:
            return world
        last = world.line[-1][0] if world.line else NO_VIEW
        if view.base != last:
            raise Broken(f"I3: {key_of(view)} follows view {view.base} and not {world.line}")
        applied = find(world.attempts, key_of(view)).applied
        if applied[: len(world.ledger)] != world.ledger:
            raise Broken(
                f"I1: {key_of(view)} goes on from {applied}, and {world.ledger} was applied"
            )
        return world._replace(line=(*world.line, key_of(view)), ledger=applied)

    def _polled(self, world: World, p: int, unheard: int) -> World:
        beats = tuple([self._beat(world, q, is_new=q == p) for q in range(len(self.slots))])
        bit = 1 << p
        heard = []
        for q, beat in enumerate(beats):
            if beat is not None:
                is_fresh = isinstance(world.processes[q], Process) and not unheard >> q & 1
                if self.has_late_beats:
                    is_fresh = bool(world.unread[p] >> q & 1)
                heard.append((beat, is_fresh))
        if not self.has_quick_beats:
            world = world._replace(beats=beats)
        if self.has_late_beats:
            unread = [0 if q == p else mask | bit for q, mask in enumerate(world.unread)]
            world = world._replace(unread=tuple(unread))
        ended = [
            slot.nonce
            for q, slot in enumerate(self.slots)
            if self.tells_ended and (world.processes[q] == DEAD or unheard >> q & 1)
        ]
        linked = [slot.nonce for q, slot in enumerate(self.slots) if self.tells_busy and q != p]
        signs = tuple(ended), tuple(linked)
        core, actions = self.cores.poll(world.processes[p].core, world.record, tuple(heard), signs)
        return self._moved(world, p, core, actions)

    def _beat(self, world: World, q: int, is_new: bool) -> int | None:
        process = world.processes[q]
        if not isinstance(process, Process) or not (is_new or self.has_quick_beats):
            return world.beats[q]
        return self.cores.beat(process.core)

    def _tell(self, world: World, p: int, event: Any) -> World:
        """Give an event to the core of a process, and carry out its actions."""
        return self._moved(world, p, *self.cores.step(world.processes[p].core, event))

    def _moved(self, world: World, p: int, core: int, actions: Sequence[Action]) -> World:
        process = world.processes[p]
        if not actions:
            return with_process(world, p, process._replace(core=core))
        thread = process.thread
        outbox: tuple[bytes, bytes] | tuple[()] = process.outbox
        is_over = False
        for action in actions:
            if isinstance(action, Swap):
                if views.from_bytes(action.new, self.cores.settings.run).number > self.highest:
                    return world._replace(is_bounded=True)
                outbox = action.old, action.new
            elif isinstance(action, Form):
                self.cores.know(action.view)
                key, role = key_of(action.view), action.role
                thread = thread._replace(
                    kind=ACKED if self.has_quick_beats else MEET,
                    is_sealed=self.has_quick_beats or thread.is_sealed,
                    attempt=key,
                    role=role,
                    order="",
                    pends=False,
                    breaks=False,
                )
            elif isinstance(action, Enter):
                self.cores.know(action.view)
                thread = thread._replace(order="enter")
            elif isinstance(action, Abandon):
                thread = thread._replace(order="abandon")
            elif isinstance(action, Pend):
                thread = thread._replace(pends=True)
            elif isinstance(action, Break):
                thread = thread._replace(breaks=True)
            is_over |= isinstance(action, (Fence, Refuse, Drained))
        world = with_process(world, p, Process(core, thread, outbox))
        if is_over:
            last = self.cores.last_beat(core)
            beats = put(world.beats, p, last)
            world = self._ended(world._replace(beats=beats), p, is_clean=True)
            self._check_state_is_held(world)
        return world

    def _ended(self, world: World, p: int, is_clean: bool = False) -> World:
        process = world.processes[p]
        if process.outbox:
            world = world._replace(stray=process.outbox)
        if not is_clean:
            world = world._replace(num_dead=world.num_dead + 1)
            if self.has_quick_beats:
                world = world._replace(beats=put(world.beats, p, self.cores.beat(process.core)))
        return with_process(world, p, DEAD)

    def _check_state_is_held(self, world: World) -> None:
        if world.num_dead or not world.line:
            return
        living = [one for one in world.processes if isinstance(one, Process)]
        if not any(self.cores[one.core].has_state for one in living):
            raise Broken("I5: nobody holds the state, though no process has died")
