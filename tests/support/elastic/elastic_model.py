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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastic_cores import Cores, key_of
from elastic_threads import (
    ACKED,
    AGREED,
    APPLIED,
    HOOK,
    IDLE,
    IN_ATTEMPT,
    JOIN,
    MEET,
    NONE,
    NOTED,
    REJECTED,
    TRAIN,
    VOTED,
    Attempt,
    Key,
    Rounds,
    Session,
    Thread,
    committed,
    lacking,
)

from diloco_comm.elastic import views
from diloco_comm.elastic.beats import GONE, TRAINING, Beat
from diloco_comm.elastic.core import State, beat_of
from diloco_comm.elastic.core.events import (
    Abandon,
    Boundary,
    Break,
    Broke,
    Drained,
    Enter,
    Failed,
    Fence,
    Form,
    Formed,
    Pend,
    Polled,
    Refuse,
    Started,
    Swap,
    Swapped,
)
from diloco_comm.elastic.views import NO_VIEW, View

BEFORE, DEAD = "before", "dead"
_MANY = 100
EventName = tuple[Any, ...]


class Broken(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Slot:
    """One process that there may be.

    Attributes:
        begins: "first": trains or founds from the start; "later": at any time; "after 0": once the
            process of that slot has ended.
    """

    id: int
    nonce: str
    begins: str = "first"


class Process(NamedTuple):
    """A process that lives: its core, by number, its thread, and a swap that is under way."""

    core: int
    thread: Thread
    outbox: tuple[bytes, bytes] | tuple[()] = ()


class Budget(NamedTuple):
    """How often there may be each fault."""

    deaths: int = 0
    failures: int = 0
    restarts: int = 0
    unanswered: int = 0
    suspicions: int = 0


NO_FAULTS = Budget()


class World(NamedTuple):
    """Where everything is.

    Attributes:
        record: In the registry.
        processes: By slot: a Process, BEFORE or DEAD.
        beats: By slot: the last in the registry, or None; the core is given another counter.
        unread: By slot: the slots of which it has not read the last beat; where beats may be late.
        sessions: Views in which somebody trains.
        attempts: In which somebody takes part.
        ledger: The longest sequence of rounds that any process has applied.
        line: The last view that was entered, and those before it that may be entered late.
        stray: A swap whose process has died or has given it up; it may still arrive.
    """

    record: bytes
    processes: tuple[Any, ...]
    beats: tuple[Beat | None, ...]
    unread: tuple[int, ...]
    sessions: tuple[Session, ...]
    attempts: tuple[Attempt, ...]
    ledger: Rounds
    line: tuple[Key, ...]
    stray: tuple[bytes, bytes] | tuple[()]
    budget: Budget
    num_dead: int = 0


@dataclass(frozen=True)
class Model:
    """What is explored.

    Attributes:
        num_rounds: Positions in the sequence of rounds; two fragments take turns.
        num_under_way: Rounds that may be agreed on and not yet applied.
        highest: Number of the last view that may be proposed.
        has_late_beats: A process may be so slow that others suspect it, at any time. Else this
            takes ``budget.suspicions``.
        votes_bad: A process may vote a round down.
        keeps_promise, commits_voted, compares: What the mutants lack: no vote leaves and none is
            heard after an ack; a round counts if all survivors have voted; the registry compares.
    """

    cores: Cores
    slots: tuple[Slot, ...]
    budget: Budget = NO_FAULTS
    num_rounds: int = 2
    num_under_way: int = 2
    highest: int = 3
    has_late_beats: bool = False
    votes_bad: bool = False
    is_cut: bool = False
    keeps_promise: bool = True
    commits_voted: bool = True
    compares: bool = True

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
        for _ in range(_MANY):
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
        world = next(self._registry(world, place))[1]
        return next((after for _, after in self._attempt(world, place)), world)

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
            yield from self._registry(world, p)
            yield from self._attempt(world, p)
            yield from self._rounds(world, p)

    def _may_begin(self, world: World, p: int) -> bool:
        begins = self.slots[p].begins
        return begins == "later" or world.processes[int(begins.split()[1])] == DEAD

    def _ended(self, world: World, p: int, is_clean: bool = False) -> World:
        process = world.processes[p]
        if process.outbox:
            world = world._replace(stray=process.outbox)
        if not is_clean:
            world = world._replace(num_dead=world.num_dead + 1)
        return with_process(world, p, DEAD)

    def _restarted(self, world: World) -> World:
        world = spend(world, "restarts")._replace(beats=(None,) * len(self.slots))
        return world if self.cores.settings.is_durable else world._replace(record=b"", stray=())

    # ------------------------------------------------------------------- beats, polls and swaps

    def _registry(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
        process = world.processes[p]
        if process.outbox:
            yield from self._swaps(world, p, process)
            return
        yield ("polls", p), self._polled(world, p, 0)
        if world.budget.suspicions:
            for q, other in enumerate(world.processes):
                if q != p and isinstance(other, Process) and world.beats[q]:
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
        process = world.processes[p]
        state: State = self.cores[process.core]
        own = beat_of(state, 0)
        beats = tuple(own if q == p else beat for q, beat in enumerate(world.beats))
        bit = 1 << p
        unread = tuple(
            0 if q == p else (mask | bit if self.has_late_beats else 0)
            for q, mask in enumerate(world.unread)
        )
        counters = {peer.key: peer.counter for peer in state.peers}
        heard = []
        for q, beat in enumerate(beats):
            if beat is None:
                continue
            last = counters.get(beat.member.key, -1)
            is_fresh = isinstance(world.processes[q], Process) and not unheard >> q & 1
            if self.has_late_beats:
                is_fresh = bool(world.unread[p] >> q & 1)
            counter = max(0, last) if not is_fresh else (1 - last if last >= 0 else 0)
            heard.append(replace(beat, counter=counter))
        world = world._replace(beats=beats, unread=unread)
        return self._tell(world, p, Polled(world.record, tuple(heard)))

    def _tell(self, world: World, p: int, event: Any) -> World:
        """Give an event to the core of a process, and carry out its actions."""
        process = world.processes[p]
        core, actions = self.cores.step(process.core, event)
        thread = process.thread
        outbox: tuple[bytes, bytes] | tuple[()] = process.outbox
        is_over = False
        for action in actions:
            if isinstance(action, Swap):
                if views.from_bytes(action.new, self.cores.settings.run).number <= self.highest:
                    outbox = action.old, action.new
            elif isinstance(action, Form):
                self.cores.know(action.view)
                key, role = key_of(action.view), action.role
                thread = thread._replace(kind=MEET, attempt=key, role=role, orders="")
            elif isinstance(action, Enter):
                self.cores.know(action.view)
                thread = thread._replace(orders="enter")
            elif isinstance(action, Abandon):
                thread = thread._replace(orders="abandon")
            elif isinstance(action, Pend):
                thread = thread._replace(pends=True)
            elif isinstance(action, Break):
                thread = thread._replace(orders="break")
            is_over |= isinstance(action, (Fence, Refuse, Drained))
        world = with_process(world, p, Process(core, thread, outbox))
        if is_over:
            last = replace(beat_of(self.cores[core], 0), stage=GONE)
            beats = put(world.beats, p, last)
            world = self._ended(world._replace(beats=beats), p, is_clean=True)
            self._check_state_is_held(world)
        return world

    # ------------------------------------------------------------------------------- attempts

    def _attempt(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
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
        elif thread.kind == HOOK and thread.orders == "enter" and attempt:
            yield ("enters", p), self._enters(world, p, view, attempt)
        yield from self._fails(world, p, thread, view, noted)

    def _fails(
        self, world: World, p: int, thread: Thread, view: View, noted: int
    ) -> Iterator[tuple[EventName, World]]:
        stopped = thread._replace(kind=IDLE, orders="")
        event = Failed(view.number, (), has_voted=thread.kind in (NOTED, HOOK))
        if thread.orders == "abandon":
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
            return with_thread(world, p, thread._replace(kind=JOIN, orders=""))
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
            idle = process.thread._replace(kind=IDLE, orders="")
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
            orders="",
            pends=False,
        )
        nobody = (0,) * self.num_rounds
        session = find(world.sessions, key_of(view))
        session = session or Session(key_of(view), 0, applied, nobody, nobody, nobody)
        session = session._replace(entered=session.entered | 1 << p)
        world = with_thread(with_session(world, session), p, thread)
        return self._tell(world, p, Started(view.number))

    # ------------------------------------------------------------------------------- rounds

    def _rounds(self, world: World, p: int) -> Iterator[tuple[EventName, World]]:
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
        if thread.orders == "break" or is_lost:
            idle = thread._replace(kind=IDLE, orders="")
            yield ("breaks", p), self._tell(with_thread(world, p, idle), p, Broke(view.number))
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
        thread = world.processes[p].thread._replace(kind=IDLE, orders="")
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
            if session.voted[n] == everyone:
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
        if n is None or thread.codes[n] != AGREED:
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

    # ------------------------------------------------------------------------------- the end

    def places(self, view: View) -> tuple[int, ...]:
        return self.cores.places(view, self.slots)

    def _check_state_is_held(self, world: World) -> None:
        if world.num_dead or not world.line:
            return
        living = [one for one in world.processes if isinstance(one, Process)]
        if not any(self.cores[one.core].has_state for one in living):
            raise Broken("I5: nobody holds the state, though no process has died")

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
        if len(living) < self.cores.settings.min_replicas:
            return True
        if not any(self.cores[one.core].has_state for one in living) and world.ledger:
            return True
        if any(self.cores[one.core].highest >= self.highest for one in living):
            return True
        return self.cores.is_excused(living)


# ------------------------------------------------------------------------------- small changes


def find(items: tuple[Any, ...], key: Key) -> Any:
    return next((item for item in items if item.key == key), None)


def put(items: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def with_process(world: World, p: int, process: Any) -> World:
    return world._replace(processes=put(world.processes, p, process))


def with_thread(world: World, p: int, thread: Thread) -> World:
    return with_process(world, p, world.processes[p]._replace(thread=thread))


def with_code(world: World, p: int, n: int, code: int) -> World:
    thread = world.processes[p].thread
    return with_thread(world, p, thread._replace(codes=put(thread.codes, n, code)))


def with_session(world: World, session: Session) -> World:
    others = [one for one in world.sessions if one.key != session.key]
    return world._replace(sessions=tuple(sorted([*others, session])))


def with_attempt(world: World, attempt: Attempt) -> World:
    others = [one for one in world.attempts if one.key != attempt.key]
    return world._replace(attempts=tuple(sorted([*others, attempt])))


def spend(world: World, fault: str) -> World:
    return replace_budget(world, world.budget._replace(**{fault: getattr(world.budget, fault) - 1}))


def replace_budget(world: World, budget: Budget) -> World:
    return world._replace(budget=budget)
