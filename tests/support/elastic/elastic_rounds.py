"""Rounds in the model: votes, what is heard of them, and outer steps."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_comm.elastic.beats import TRAINING
from diloco_comm.elastic.core.events import (
    Boundary,
    Broke,
)
from diloco_comm.elastic.views import View
from elastic_cores import key_of
from elastic_registry import Polling
from elastic_threads import (
    AGREED,
    APPLIED,
    IDLE,
    NONE,
    REJECTED,
    TRAIN,
    VOTED,
    Session,
    Thread,
)
from elastic_world import (
    Broken,
    EventName,
    Process,
    World,
    find,
    put,
    spend,
    with_code,
    with_session,
    with_thread,
)


class Training(Polling):
    """What the training threads do in their views."""

    def of_rounds(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
        process = world.processes[p]
        thread = process.thread
        session = find(world.sessions, thread.epoch) if thread.epoch else None
        if session is None or (thread.is_sealed and self.keeps_promise):
            return
        view = self.cores.views[thread.epoch]
        yield from self._votes(world, p, thread, session, view)
        yield from self._applies(world, p, thread, session)
        if thread.kind != TRAIN:
            return
        places = self.places(view)
        is_lost = any(self._has_stopped(world, q, view) for q in places if q != p)
        if thread.breaks or is_lost:
            idle = thread._replace(kind=IDLE, order="")
            yield ("breaks", p), self._tell(with_thread(world, p, idle), p, Broke(view.number))
        elif world.budget.breaks:
            idle = with_thread(world, p, thread._replace(kind=IDLE, order=""))
            yield ("!breaks", p), self._tell(spend(idle, "breaks"), p, Broke(view.number))
        if session.ends_pending or (
            all(code >= REJECTED for code in thread.codes)
            and all(self._is_done(world, q, view) for q in places)
            and any(world.processes[q].thread.pends for q in places)
        ):
            world = with_session(world, session._replace(ends_pending=True))
            yield ("reaches a boundary", p), self._stops(world, p, view)

    def _is_done(self, world: World, q: int, view: View) -> bool:
        other = world.processes[q]
        if not isinstance(other, Process) or other.thread.epoch != key_of(view):
            return False
        return all(code >= REJECTED for code in other.thread.codes)

    def _has_stopped(self, world: World, q: int, view: View) -> bool:
        """Whether a member takes no part in the rounds of a view, now and later."""
        other = world.processes[q]
        if not isinstance(other, Process):
            return True
        thread = other.thread
        if thread.epoch == key_of(view):
            return thread.kind != TRAIN and self.cores[other.core].stage not in (
                TRAINING,
                "stopped",
            )
        return thread.attempt != key_of(view) or thread.kind == IDLE

    def _stops(self, world: World, p: int, view: View) -> World:
        thread = world.processes[p].thread._replace(kind=IDLE, order="")
        return self._tell(with_thread(world, p, thread), p, Boundary(view.number))

    def _votes(
        self, world: World, p: int, thread: Thread, session: Session, view: View
    ) -> Iterator[tuple[EventName, World]]:
        n = next((n for n, code in enumerate(thread.codes) if code in (NONE, VOTED)), None)
        places = self.places(view)
        everyone = sum(1 << q for q in places)
        if n is None:
            return
        if thread.codes[n] == VOTED:
            if session.voted[n] == everyone and (self.num_under_way > 1 or session.bad[n]):
                code = REJECTED if session.bad[n] else AGREED
                yield ("hears all", p, n), with_code(world, p, n, code)
        elif session.entered == everyone and self._is_sent(world, view, n):
            flags = session.flags
            if not session.voted[n]:
                is_pending = any(
                    isinstance(one := world.processes[q], Process) and one.thread.pends
                    for q in places
                )
                flags = put(flags, n, int(is_pending))
            for is_bad in (False, True) if self.votes_bad else (False,):
                after = session._replace(
                    voted=put(session.voted, n, session.voted[n] | 1 << p),
                    bad=put(session.bad, n, session.bad[n] | is_bad << p),
                    flags=flags,
                )
                name = "votes bad" if is_bad else "votes"
                yield (name, p, n), with_code(with_session(world, after), p, n, VOTED)

    def _is_sent(self, world: World, view: View, n: int) -> bool:
        """Whether all may have sent round ``n``; they do that before the oldest is applied."""
        oldest = max(0, n - self.num_under_way + 1)
        return all(
            code >= REJECTED
            for process in world.processes
            if isinstance(process, Process) and process.thread.epoch == key_of(view)
            for code in process.thread.codes[:oldest]
        )

    def _applies(
        self, world: World, p: int, thread: Thread, session: Session
    ) -> Iterator[tuple[EventName, World]]:
        n = next((n for n, code in enumerate(thread.codes) if code < REJECTED), None)
        if n is None or not self._may_apply(thread.codes[n], session, n):
            return
        applied = (*thread.applied, (thread.epoch[0], n))
        ledger = world.ledger
        if applied != ledger[: len(applied)]:
            if ledger != applied[:-1]:
                raise Broken(f"I2: process {p} has applied {applied}, another {ledger}")
            if world.line[-1] != thread.epoch:
                raise Broken(
                    f"I4: process {p} of {thread.epoch} applies round {n}, and {world.line[-1]} "
                    "goes on without it"
                )
            ledger = applied
        after = thread._replace(codes=put(thread.codes, n, APPLIED), applied=applied)
        world = with_thread(world._replace(ledger=ledger), p, after)
        if session.flags[n] and thread.kind == TRAIN:
            world = self._stops(world, p, self.cores.views[thread.epoch])
        yield ("applies", p, n), world

    def _may_apply(self, code: int, session: Session, n: int) -> bool:
        if self.num_under_way > 1:
            return code == AGREED
        everyone = sum(1 << q for q in self.places(self.cores.views[session.key]))
        return code == VOTED and session.voted[n] == everyone and not session.bad[n]
