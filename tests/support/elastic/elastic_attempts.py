"""Attempts to form a view in the model: by the termination rule, and with the promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diloco_comm.elastic.core.events import (
    Broke,
    Failed,
    Formed,
    Started,
)
from diloco_comm.elastic.views import View
from elastic_cores import key_of
from elastic_rounds import Training
from elastic_threads import (
    ACKED,
    APPLIED,
    HOOK,
    IDLE,
    IN_ATTEMPT,
    JOIN,
    MEET,
    NONE,
    NOTED,
    TRAIN,
    Attempt,
    Rounds,
    Session,
    Thread,
    committed,
    lacking,
)
from elastic_world import (
    Broken,
    EventName,
    Process,
    World,
    find,
    spend,
    with_attempt,
    with_session,
    with_thread,
)


class Changing(Training):
    """What the training threads do to get into the next view."""

    def of_attempt(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
        process = world.processes[p]
        if not isinstance(process, Process):
            return
        thread = process.thread
        if thread.kind == JOIN:
            yield from self._joins(world, p, process)
        if thread.kind not in IN_ATTEMPT:
            return
        view = self.cores.views[thread.attempt]
        places = self.places(view)
        attempt = find(world.attempts, thread.attempt)
        noted = attempt.noted if attempt else 0
        everyone = sum(1 << q for q in places)
        if thread.kind == MEET:
            after = thread._replace(kind=ACKED, is_sealed=True)
            yield ("seals", p), with_thread(world, p, after)
        elif thread.kind == ACKED and all(self._has_acked(world, q, thread, noted) for q in places):
            yield ("agrees to enter", p), self._notes(world, p, view, attempt)
        elif thread.kind == NOTED and noted == everyone and attempt:
            formed = with_thread(world, p, thread._replace(kind=HOOK))
            event = Formed(view.number, len(attempt.applied))
            yield ("forms", p), self._tell(formed, p, event)
        elif thread.kind == HOOK and thread.order == "enter" and attempt:
            yield ("enters", p), self._enters(world, p, view, attempt)
        yield from self._fails(world, p, thread, view, noted)

    def _fails(
        self, world: World, p: int, thread: Thread, view: View, noted: int
    ) -> Iterator[tuple[EventName, World]]:
        stopped = thread._replace(kind=IDLE, order="")
        event = Failed(view.number, (), has_voted=thread.kind in (NOTED, HOOK))
        if thread.order == "abandon":
            yield ("gives up", p), self._tell(with_thread(world, p, stopped), p, event)
        elif thread.kind != HOOK:
            if any(self._is_missing(world, q, thread) for q in self.places(view)):
                yield ("fails", p), self._tell(with_thread(world, p, stopped), p, event)
            elif world.budget.failures:
                after = spend(with_thread(world, p, stopped), "failures")
                yield ("!fails", p), self._tell(after, p, event)
                for member in view.members if self.is_cut else ():
                    if member.id != self.slots[p].id:
                        missing = replace(event, missing=(member.id,))
                        yield ("!cannot reach", p, member.id), self._tell(after, p, missing)

    def _has_acked(self, world: World, q: int, thread: Thread, noted: int) -> bool:
        other = world.processes[q]
        if noted >> q & 1:
            return True
        is_here = isinstance(other, Process) and other.thread.attempt == thread.attempt
        return is_here and other.thread.kind in (ACKED, NOTED, HOOK)

    def _is_missing(self, world: World, q: int, thread: Thread) -> bool:
        """Whether a member has ended, or has given up this attempt."""
        other = world.processes[q]
        if not isinstance(other, Process):
            return True
        return other.thread.attempt == thread.attempt and other.thread.kind == IDLE

    def _notes(self, world: World, p: int, view: View, attempt: Attempt | None) -> World:
        """Agree to enter: the first has all acks, and with them the rounds that count."""
        if attempt is None:
            acks = [
                one.thread
                for q in self.places(view)
                if isinstance(one := world.processes[q], Process) and one.thread.role == "change"
            ]
            applied = committed(acks, self.commits_voted)
            attempt = Attempt(key_of(view), 0, applied)
        attempt = attempt._replace(noted=attempt.noted | 1 << p)
        thread = world.processes[p].thread._replace(kind=NOTED)
        return with_thread(with_attempt(world, attempt), p, thread)

    def _enters(self, world: World, p: int, view: View, attempt: Attempt) -> World:
        thread = world.processes[p].thread
        if key_of(view) not in world.line:
            raise Broken(f"I3: process {p} enters {key_of(view)}, which is not in {world.line}")
        if thread.role == "join":
            return with_thread(world, p, thread._replace(kind=JOIN, order=""))
        if thread.role == "change":
            lacks = lacking(thread, attempt.applied)
            if lacks:
                raise Broken(f"I2: process {p} enters {key_of(view)} without {lacks}")
        if world.ledger[: len(attempt.applied)] != attempt.applied:
            raise Broken(
                f"I1: process {p} enters {key_of(view)} with {attempt.applied}, and "
                f"{world.ledger} was applied"
            )
        return self._begins(world, p, view, attempt.applied)

    def _joins(self, world: World, p: int, process: Process) -> Iterator[tuple[EventName, World]]:
        session = find(world.sessions, process.thread.attempt)
        view = self.cores.views[process.thread.attempt]
        if session and any(self._has_state_of(world, q, view) for q in self.places(view)):
            yield ("takes the state", p), self._begins(world, p, view, session.applied)
        elif all(self._cannot_help(world, q, view) for q in self.places(view)):
            idle = process.thread._replace(kind=IDLE, order="")
            broke = Broke(self.cores[process.core].epoch)
            yield ("gets no state", p), self._tell(with_thread(world, p, idle), p, broke)

    def _has_state_of(self, world: World, q: int, view: View) -> bool:
        other = world.processes[q]
        return isinstance(other, Process) and other.thread.epoch == key_of(view)

    def _cannot_help(self, world: World, q: int, view: View) -> bool:
        other = world.processes[q]
        if not isinstance(other, Process) or other.thread.kind == JOIN:
            return True
        return other.thread.attempt != key_of(view) or other.thread.kind == IDLE

    def _begins(self, world: World, p: int, view: View, applied: Rounds) -> World:
        """Train in a view with these rounds applied."""
        process = world.processes[p]
        done = {number for _, number in applied}
        top = max(done, default=-1)
        codes = tuple(APPLIED if n <= top else NONE for n in range(self.num_rounds))
        thread = process.thread._replace(
            kind=TRAIN,
            epoch=key_of(view),
            codes=codes,
            applied=applied,
            is_sealed=False,
            order="",
        )
        nobody = (0,) * self.num_rounds
        session = find(world.sessions, key_of(view))
        session = session or Session(key_of(view), 0, applied, nobody, nobody, nobody)
        session = session._replace(entered=session.entered | 1 << p)
        world = with_thread(with_session(world, session), p, thread)
        return self._tell(world, p, Started(view.number))
