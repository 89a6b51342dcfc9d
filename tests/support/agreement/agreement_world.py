"""Real cores in a simulated world: a network that loses and reorders, a table, and faults.

All events have names; whoever runs the world chooses among them. The invariants are checked at the
event that breaks one, which raises ``Broken``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_comm.group import agreement
from diloco_comm.group import messages as ms
from diloco_comm.group import state as st
from diloco_comm.group.messages import decode, encode
from diloco_comm.group.records import NO_HASH, NO_RECORD, Attempt, Key, Record, record_hash
from diloco_comm.group.streams import Positions, Rounds

# ------- The training thread of a process, as small as it can be: it votes, hears votes and applies


# Rounds of one stream that may be under way.
WINDOW = 2


@dataclass(frozen=True)
class Thread:
    """The training thread of one process.

    Attributes:
        epoch: Hash of the record in which it trains; b"" for none.
        ends: By stream, the position of the round that it votes for next.
        done: By stream, the position up to which everything has ended here.
        history: By stream, a hash of all that was applied.
        recent: (stream, position) of the last applied rounds.
        heard: (stream, position, nonce) of votes of others.
        flagged: (stream, position) of rounds in whose headers somebody asks for a boundary.
        last: The round after which all members stop.
        first_step: Inner step of the checkpoint with which the run began.
    """

    epoch: bytes = b""
    members: tuple[Key, ...] = ()
    ends: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    recent: frozenset[tuple[int, int]] = frozenset()
    heard: frozenset[tuple[int, int, bytes]] = frozenset()
    flagged: frozenset[tuple[int, int]] = frozenset()
    has_state: bool = False
    is_pending: bool = False
    is_sealed: bool = False
    last: tuple[int, int] | None = None
    is_told: bool = False
    first_step: int = 0

    @property
    def trains(self) -> bool:
        return bool(self.epoch) and self.has_state and not self.is_sealed

    @property
    def can_vote(self) -> tuple[int, ...]:
        """The streams in which this thread may vote for another round."""
        if not self.trains or self.last is not None:
            return ()
        streams = range(len(self.ends))
        return tuple([s for s in streams if self.ends[s] < self.done[s] + WINDOW])

    def voted(self, stream: int) -> Thread:
        """Return the thread after its next vote in a stream."""
        flagged = self.flagged | {(stream, self.ends[stream])} if self.is_pending else self.flagged
        return replace(self, ends=put(self.ends, stream, self.ends[stream] + 1), flagged=flagged)

    def hears(self, stream: int, position: int, nonce: bytes, is_flagged: bool) -> Thread:
        flagged = self.flagged | {(stream, position)} if is_flagged else self.flagged
        return replace(self, heard=self.heard | {(stream, position, nonce)}, flagged=flagged)

    def can_apply(self, stream: int, nonce: bytes) -> bool:
        """Whether all members have voted for the next round of a stream."""
        position = self.done[stream]
        if not self.trains or position >= self.ends[stream]:
            return False
        others = [key.nonce for key in self.members if key.nonce != nonce]
        return all((stream, position, other) in self.heard for other in others)

    def applied(self, stream: int) -> Thread:
        """Return the thread after it has applied the next round of a stream."""
        position = self.done[stream]
        thread = self._with(stream, position, counts=True)
        if (stream, position) in self.flagged and self.last is None:
            thread = replace(thread, last=(stream, position))
        return thread

    def _with(self, stream: int, position: int, *, counts: bool) -> Thread:
        thread = replace(self, done=put(self.done, stream, position + 1))
        if not counts:
            return thread
        history = hash((self.history[stream], stream, position))
        oldest = position - 2 * WINDOW
        recent = {one for one in self.recent if one[0] != stream or one[1] > oldest}
        return replace(
            thread,
            history=put(self.history, stream, history),
            recent=frozenset(recent | {(stream, position)}),
        )

    @property
    def has_all_votes(self) -> bool:
        """Whether all rounds that this thread has sent have ended, and all count."""
        return self.done == self.ends

    @property
    def positions(self) -> Positions:
        """How far this thread is, as it says when it has sealed."""
        return tuple([self._rounds(stream) for stream in range(len(self.ends))])

    def _rounds(self, stream: int) -> Rounds:
        first = max(0, self.done[stream] - WINDOW)
        bits = sum(
            1 << position - first
            for position in range(first, self.ends[stream])
            if position >= self.done[stream] or (stream, position) in self.recent
        )
        return Rounds(first, self.ends[stream] - first, bits)

    def settled(self, record: Record) -> Thread:
        """Return the thread after it has done what a record decides."""
        thread = self
        for stream, rounds in enumerate(record.decision):
            while thread.done[stream] < rounds.end:
                position = thread.done[stream]
                thread = thread._with(stream, position, counts=rounds.holds(position))
        return thread

    def entered(self, record: Record) -> Thread:
        """Return the thread as it begins to train in a record, with its present state."""
        return Thread(
            epoch=record.hash,
            members=record.members,
            ends=self.done,
            done=self.done,
            history=self.history,
            recent=self.recent,
            has_state=self.has_state,
            first_step=self.first_step,
        )


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


# ---------------------------------------------------------------------------------------- the world


Name = tuple[Any, ...]
STREAMS = 2
# Attempts of one process that the invariants remember.
MOST_ATTEMPTS = 32


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True)
class Node:
    """One process that lives, or that has ended.

    Attributes:
        todo: Actions of the core that the driver or the training thread has yet to carry out.
        cut_polls: By nonce: polls for which it has heard nothing of a process.
        mistaken: Nonces that its detector suspects without a reason.
        end: The action with which the core has ended.
    """

    state: st.State
    thread: Thread = field(default_factory=Thread)
    todo: tuple[st.Action, ...] = ()
    cut_polls: tuple[tuple[bytes, int], ...] = ()
    mistaken: frozenset[bytes] = frozenset()
    is_alive: bool = True
    end: str = ""

    @property
    def key(self) -> Key:
        return self.state.key

    @property
    def takes_part(self) -> bool:
        return self.is_alive and not self.end


def nonce_of(number: int, start: int = 0) -> bytes:
    return bytes([number, start % 256, start // 256]) + bytes(13)


def _is_patient(action: st.Action) -> bool:
    return isinstance(action, st.Seal) and action.is_patient


def settings_of(**values: Any) -> st.Settings:
    chosen: dict[str, Any] = {"run": "run", "digest": b"s" * 16, "suspect_after": 2}
    return st.Settings(**{**chosen, **values})


class World:
    """Everything, and the events that may happen next.

    Args:
        settings: The settings of all processes.
        streams: Workers times fragments.
        step: The core, or one with a mistake.

    Attributes:
        keeps_promise: A training thread that has sealed votes and applies nothing any more.
        orders_again: A driver gives an order again that an interrupt may have lost.
        counts: Messages and requests so far, by kind.
        largest_state: Characters of the longest state of a core so far.
    """

    def __init__(
        self, settings: st.Settings, streams: int = STREAMS, step: Any = agreement.step
    ) -> None:
        self.settings, self.streams, self.step = settings, streams, step
        self.keeps_promise = self.orders_again = True
        self.nodes: dict[bytes, Node] = {}
        self.messages: tuple[tuple[bytes, bytes, Any], ...] = ()
        # Each with the id of the table that its process has read.
        self.swaps: tuple[tuple[bytes, bytes, bytes, bytes], ...] = ()
        self.replies: tuple[tuple[bytes, bytes, st.Outcome], ...] = ()
        self.record, self.num_losses = b"", 0
        self.places: dict[bytes, tuple[st.Place, int]] = {}
        self.evict: frozenset[int] = frozenset()
        self.cuts: frozenset[frozenset[bytes]] = frozenset()
        self.off_table: frozenset[bytes] = frozenset()
        self.failing: frozenset[tuple[bytes, bytes]] = frozenset()
        # Attempts for which a process has connected, and its core has yet to hear so.
        self.late: tuple[tuple[bytes, st.Connected], ...] = ()
        self.starts: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.largest_state = 0
        # The memory of the invariants, by the hash of the record in which rounds ran.
        self.applied: dict[bytes, frozenset[tuple[int, int]]] = {}
        self.children: dict[bytes, tuple[bytes, ...]] = {}
        self.entered: dict[bytes, bytes] = {}
        self.truth: dict[bytes, tuple[Any, ...]] = {}
        self.records: dict[bytes, Record] = {}
        self.was_in: dict[Key, tuple[int, bytes]] = {}
        self.asked: dict[bytes, tuple[Attempt, ...]] = {}
        self.connected: dict[bytes, tuple[Attempt, ...]] = {}

    def copy(self) -> World:
        """Return a world that goes on apart from this one."""
        other = object.__new__(World)
        other.__dict__ = {
            name: value.copy() if isinstance(value, dict) else value
            for name, value in self.__dict__.items()
        }
        return other

    @property
    def table(self) -> bytes:
        """The id of the table."""
        return hashlib.blake2b(bytes([self.num_losses % 256]), digest_size=16).digest()

    # ------------------------------------------------------------------------------ processes

    def add(self, number: int, **values: Any) -> Node:
        """Start a process with a new nonce; a former process of this number must have ended."""
        key = Key(number, nonce_of(number, self.starts[number]))
        self.starts[number] += 1
        self.nodes[key.nonce] = Node(st.State(self.settings, key, **values))
        self.beat(key.nonce)
        self.tell(key.nonce, self._looked())
        return self.nodes[key.nonce]

    def node(self, number: int) -> Node:
        """Return the newest process of a number."""
        return self.nodes[nonce_of(number, self.starts[number] - 1)]

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.takes_part]

    def put(self, nonce: bytes, **values: Any) -> Node:
        self.nodes[nonce] = replace(self.nodes[nonce], **values)
        return self.nodes[nonce]

    def tell(self, nonce: bytes, event: st.Event) -> None:
        """Give an event to a core, and take its actions."""
        node = self.nodes[nonce]
        if not node.takes_part:
            return
        if isinstance(event, st.Demanded | st.GivenUp):
            # The driver takes its orders of a former demand back.
            self._drop_connect(nonce)
        if isinstance(event, st.Broke | st.Demanded) and self.orders_again:
            self._order_again(nonce, event)
        state, actions = self.step(node.state, event)
        self.put(nonce, state=state)
        for action in actions:
            if isinstance(action, st.Fail):
                self._check_failure(node.state, event)
            self._take(nonce, action)

    def _take(self, nonce: bytes, action: st.Action) -> None:
        node = self.nodes[nonce]
        self.counts[type(action).__name__] += 1
        if isinstance(action, st.Send):
            self.counts[type(action.message).__name__] += 1
            self._check_answer(node.state, action.message)
            if isinstance(action.message, ms.Prepare):
                self._note(self.asked, nonce, action.message.attempt)
            self.send(nonce, action.nonce, encode(action.message))
        elif isinstance(action, st.Swap):
            if not (node.state.record or node.state.may_found):
                raise Broken("I6", f"{node.key.number} founds, and its caller waits to be let in")
            self.swaps = (*self.swaps, (nonce, action.old, action.new, node.state.table))
        elif isinstance(action, st.Enter):
            self.enter(nonce, action.record)
        elif isinstance(action, st.Pend):
            self.put(nonce, thread=replace(node.thread, is_pending=True))
        elif isinstance(action, st.End):
            self.put(nonce, end=type(action).__name__, todo=())
        elif isinstance(action, st.Seal | st.Connect | st.Read) and action not in node.todo:
            rest = [one for one in node.todo if type(one) is not type(action)]
            self.put(nonce, todo=(*rest, action))

    def _note(self, attempts: dict[bytes, tuple[Attempt, ...]], nonce: bytes, one: Attempt) -> None:
        """Note one of the last attempts of a process."""
        if one not in attempts.get(nonce, ()):
            attempts[nonce] = (*attempts.get(nonce, ()), one)[-MOST_ATTEMPTS:]

    def _order_again(self, nonce: bytes, event: st.Broke | st.Demanded) -> None:
        """Give the present order of a driver again."""
        state, joint = self.nodes[nonce].state, self.nodes[nonce].state.joint
        if state.stage is st.Stage.SEALING:
            self._take(nonce, st.Seal(state.number))
        elif isinstance(event, st.Broke) and joint is not None and not joint.is_connected:
            self._take(nonce, st.Connect(joint.attempt, joint.members))

    def _drop_connect(self, nonce: bytes) -> None:
        todo = self.nodes[nonce].todo
        self.put(nonce, todo=tuple([one for one in todo if not isinstance(one, st.Connect)]))

    def send(self, source: bytes, target: bytes, content: Any) -> None:
        other = self.nodes.get(target)
        if other is not None and other.takes_part and not self.is_cut(source, target):
            self.messages = (*self.messages, (source, target, content))
        else:
            self._fails(target, content)

    def is_cut(self, one: bytes, other: bytes) -> bool:
        return frozenset((one, other)) in self.cuts

    # --------------------------------------------------------------------------------- events

    def quiet(self) -> Iterator[Name]:
        """Yield the names of events that are no faults."""
        for place, (_, target, content) in enumerate(self.messages):
            if not self._is_early(target, content):
                yield "deliver", place
        for place in range(len(self.swaps)):
            yield "swap", place
        for place in range(len(self.replies)):
            yield "reply", place
        for place in range(len(self.late)):
            yield "late", place
        for nonce, node in self.nodes.items():
            if node.takes_part:
                for place, action in enumerate(node.todo):
                    if not _is_patient(action) and self._can_do(nonce, action):
                        yield "do", nonce, place
                yield from self._of_thread(nonce, node)
        # Rounds that do not end, because a vote is lost, fail some time.
        for nonce, node in self.nodes.items():
            for place, action in enumerate(node.todo):
                if node.takes_part and _is_patient(action):
                    yield "do", nonce, place

        for nonce, epoch in sorted(self.failing):
            node = self.nodes[nonce]
            if node.takes_part and node.thread.trains and node.thread.epoch == epoch:
                yield "break", nonce

    def _is_early(self, target: bytes, content: Any) -> bool:
        """Whether a vote is for a record that its receiver has yet to enter."""
        node = self.nodes[target]
        if isinstance(content, bytes) or not node.takes_part:
            return False
        epoch = content[0]
        return epoch in self.records and self.records[epoch].number > node.state.number

    def _can_do(self, nonce: bytes, action: st.Action) -> bool:
        return not isinstance(action, st.Read) or nonce not in self.off_table

    def _of_thread(self, nonce: bytes, node: Node) -> Iterator[Name]:
        thread = node.thread
        for stream in thread.can_vote:
            yield "vote", nonce, stream
        for stream in range(len(thread.ends)):
            if thread.can_apply(stream, nonce):
                yield "apply", nonce, stream
        if thread.trains and thread.last is not None and not thread.is_told:
            yield "boundary", nonce
        record = node.state.record
        if record is not None and not node.state.has_state and record.hash in self.truth:
            if self._has_donor(record, nonce) and not thread.is_sealed:
                yield "start", nonce

    def _has_donor(self, record: Record, nonce: bytes) -> bool:
        return any(
            other.thread.has_state and other.thread.epoch == record.hash
            for other in self.living
            if not self.is_cut(nonce, other.key.nonce)
        )

    def happen(self, name: Name) -> None:
        """Let an event happen.

        Raises:
            Broken: If it breaks an invariant.
        """
        getattr(self, "_" + name[0])(*name[1:])

    def _deliver(self, place: int) -> None:
        source, target, content = self.messages[place]
        self._remove(place)
        node = self.nodes[target]
        if not node.takes_part or self.is_cut(source, target):
            self._fails(target, content)
            return
        if isinstance(content, bytes):
            self.tell(target, st.Heard(source, decode(content)))
            return
        epoch, stream, position, is_flagged = content
        thread = node.thread
        if thread.epoch == epoch and not thread.is_sealed:
            self.put(target, thread=thread.hears(stream, position, source, is_flagged))

    def _lose(self, place: int) -> None:
        """Lose a message; the round of a lost vote fails some time."""
        _, target, content = self.messages[place]
        self._remove(place)
        self._fails(target, content)

    def _fails(self, target: bytes, content: Any) -> None:
        if not isinstance(content, bytes):
            self.failing |= {(target, content[0])}

    def _remove(self, place: int) -> None:
        self.messages = (*self.messages[:place], *self.messages[place + 1 :])

    def _swap(self, place: int) -> None:
        """Let a swap come to the table."""
        nonce, old, new, table = self.swaps[place]
        self.swaps = (*self.swaps[:place], *self.swaps[place + 1 :])
        is_there = nonce not in self.off_table and table == self.table
        is_done = self.record == old and is_there
        if is_done:
            self._is_recorded(nonce, new)
            self.record = new
        if self.nodes[nonce].takes_part and nonce not in self.off_table:
            outcome = st.Outcome.DONE if is_done else st.Outcome.REFUSED
            self.replies = (*self.replies, (nonce, new, outcome))
        elif self.nodes[nonce].takes_part:
            self.tell(nonce, st.Swapped(new, st.Outcome.UNKNOWN))

    def _reply(self, place: int, is_lost: bool = False) -> None:
        nonce, new, outcome = self.replies[place]
        self.replies = (*self.replies[:place], *self.replies[place + 1 :])
        self.tell(nonce, st.Swapped(new, st.Outcome.UNKNOWN if is_lost else outcome))

    def _despair(self, place: int) -> None:
        """A process waits no longer for the answer of a swap that is still under way."""
        nonce, _, new, _ = self.swaps[place]
        self.tell(nonce, st.Swapped(new, st.Outcome.UNKNOWN))

    def _do(self, nonce: bytes, place: int) -> None:
        node = self.nodes[nonce]
        action = node.todo[place]
        self.put(nonce, todo=(*node.todo[:place], *node.todo[place + 1 :]))
        if isinstance(action, st.Read):
            self.tell(nonce, self._looked())
        elif isinstance(action, st.Seal):
            self.put(nonce, thread=replace(node.thread, is_sealed=self.keeps_promise))
            positions = node.thread.positions
            self.tell(nonce, st.Sealed(action.number, positions, self._inner_step(node)))
        elif isinstance(action, st.Connect):
            self.tell(nonce, self._connected(nonce, action))

    def _connected(self, nonce: bytes, action: st.Connect) -> st.Connected:
        """Let a process connect, as far as there are ways."""
        others = [key.nonce for key in action.members if key.nonce != nonce]
        cut = tuple([one for one in others if self.is_cut(nonce, one)])
        if not cut:
            self._note(self.connected, nonce, action.attempt)
        return st.Connected(action.attempt, cut)

    def _late(self, place: int) -> None:
        """Let a core hear that its process has connected, which may be for a former attempt."""
        nonce, connected = self.late[place]
        self.late = (*self.late[:place], *self.late[place + 1 :])
        self.tell(nonce, connected)

    def _inner_step(self, node: Node) -> int:
        return node.thread.first_step + sum(node.thread.done)

    def _looked(self) -> st.Looked:
        limit = self.settings.suspect_after * max(1, len(self.living))
        places = [replace(place, is_fresh=age < limit) for place, age in self.places.values()]
        return st.Looked(
            self.record,
            self.table,
            tuple(sorted(places, key=lambda place: place.key)),
            self.evict,
        )

    def _vote(self, nonce: bytes, stream: int) -> None:
        node = self.nodes[nonce]
        position = node.thread.ends[stream]
        thread = self.put(nonce, thread=node.thread.voted(stream)).thread
        content = (thread.epoch, stream, position, (stream, position) in thread.flagged)
        for key in thread.members:
            if key.nonce != nonce:
                self.send(nonce, key.nonce, content)

    def _apply(self, nonce: bytes, stream: int) -> None:
        thread = self.nodes[nonce].thread
        round = (stream, thread.done[stream])
        self.applied[thread.epoch] = self.applied.get(thread.epoch, frozenset()) | {round}
        for child in self.children.get(thread.epoch, ()):
            self._check_round(self.records[child], round, "I2")
        self.put(nonce, thread=thread.applied(stream))

    def _boundary(self, nonce: bytes) -> None:
        node = self.put(nonce, thread=replace(self.nodes[nonce].thread, is_told=True))
        thread = node.thread
        step = self._inner_step(node)
        self.tell(
            nonce,
            st.Boundary(node.state.number, thread.positions, step, thread.has_all_votes),
        )

    def _start(self, nonce: bytes) -> None:
        """Let a newcomer take the state of the record that it has entered."""
        record = self.nodes[nonce].state.record
        assert record is not None
        done, history, recent, step = self.truth[record.hash]
        thread = Thread(done=done, history=history, recent=recent, has_state=True, first_step=step)
        before = self.nodes[nonce].thread
        thread = replace(
            thread.entered(record),
            is_pending=before.is_pending,
            heard=before.heard,
            flagged=before.flagged,
        )
        self.put(nonce, thread=thread)
        self.tell(nonce, st.Started(record.number))

    def beat(self, nonce: bytes) -> None:
        """Write the place of a process."""
        node = self.nodes[nonce]
        if node.takes_part and nonce not in self.off_table:
            has_begun = bool(node.thread.epoch)
            step = self._inner_step(node) if has_begun else node.state.inner_step
            self.places[nonce] = (st.place_of(node.state, step), 0)

    def _poll(self, nonce: bytes) -> None:
        """Let one poll of a process pass; its detector looks, and it writes its place."""
        node = self.nodes[nonce]
        if not node.takes_part:
            return
        limit = self.settings.suspect_after
        before = dict(node.cut_polls)
        polls = {
            other: min(limit, before.get(other, 0) + 1)
            for other in self.nodes
            if other != nonce and self.is_cut(nonce, other)
        }
        silent = {other for other, number in polls.items() if number >= limit}
        dead = frozenset(key for key, other in self.nodes.items() if not other.takes_part)
        node = self.put(nonce, cut_polls=tuple(sorted(polls.items())))
        life = st.Life(frozenset(silent | node.mistaken) - dead - {nonce}, dead)
        if life != node.state.life:
            self.tell(nonce, life)
        self.beat(nonce)
        self._age()
        if nonce not in self.off_table:
            self.tell(nonce, self._looked())
        if self.nodes[nonce].state.follows is not None:
            self.ready(nonce)
        self.tell(nonce, st.Passed())
        self.failing = frozenset([o for o in self.failing if self.nodes[o[0]].takes_part])
        self.largest_state = max(self.largest_state, len(repr(self.nodes[nonce].state)))

    def _age(self) -> None:
        """Let the places of processes that have ended, or are cut off, become old."""
        most = self.settings.suspect_after * max(1, len(self.living))
        for nonce, (place, age) in list(self.places.items()):
            if self.nodes[nonce].takes_part and nonce not in self.off_table:
                self.places[nonce] = (place, 0)
            elif age > 8 * most and not place.is_finished:
                del self.places[nonce]
            else:
                self.places[nonce] = (place, age + 1)

    def ready(self, nonce: bytes) -> None:
        """Let a newcomer follow the record that it has read, if it hears all members."""
        state = self.nodes[nonce].state
        record = state.in_table
        members = () if record is None else record.members
        follows = NO_RECORD if record is None else record.number
        hears = not any(self.is_cut(nonce, key.nonce) for key in members)
        if state.record is None and hears and follows != state.follows:
            self.tell(nonce, st.JoinerReady(follows))
            self.beat(nonce)

    # --------------------------------------------------------------------------------- faults

    def _crash(self, nonce: bytes) -> None:
        self.put(nonce, is_alive=False, todo=())

    def _devices(self, nonce: bytes) -> None:
        """Let the devices of a process not connect, if it is to connect."""
        for action in self._connects(nonce):
            self.tell(nonce, st.Connected(action.attempt, error="no devices"))

    def _delay(self, nonce: bytes) -> None:
        """Let a process connect, if it is to connect, and its core not hear so yet."""
        for action in self._connects(nonce):
            self.late = (*self.late, (nonce, self._connected(nonce, action)))

    def _connects(self, nonce: bytes) -> list[st.Connect]:
        """Take the order of a process to connect."""
        found = [one for one in self.nodes[nonce].todo if isinstance(one, st.Connect)]
        self._drop_connect(nonce)
        return found

    def _break(self, nonce: bytes) -> None:
        """Let the round under way of a process fail."""
        self.failing = frozenset([one for one in self.failing if one[0] != nonce])
        record = self.nodes[nonce].state.record
        others = () if record is None else record.members
        cut = tuple([key.nonce for key in others if self.is_cut(nonce, key.nonce)])
        self.tell(nonce, st.Broke(self.nodes[nonce].state.number, cut))

    def _interrupt(self, nonce: bytes) -> None:
        """Let the program of a training thread be interrupted: its orders are lost."""
        if not self.settings.is_fixed:
            self._devices(nonce)
        reads = [one for one in self.nodes[nonce].todo if isinstance(one, st.Read)]
        self.put(nonce, todo=tuple(reads))
        if self.settings.is_fixed:
            self.tell(nonce, st.GivenUp())
        else:
            self._break(nonce)

    def _demand(self, nonce: bytes, numbers: tuple[int, ...], may_found: bool = False) -> None:
        """Let the caller of a process demand a group."""
        self.tell(nonce, st.Demanded(numbers, may_found))

    def _give_up(self, nonce: bytes) -> None:
        self.tell(nonce, st.GivenUp())

    def _forget(self) -> None:
        """The table's process ends, and begins again with nothing; requests end with it."""
        self.record, self.num_losses, self.places = b"", self.num_losses + 1, {}
        lost = [(nonce, new) for nonce, _, new, _ in self.swaps if self.nodes[nonce].takes_part]
        lost += [(nonce, new) for nonce, new, _ in self.replies]
        self.swaps, self.replies = (), ()
        for nonce, new in lost:
            self.tell(nonce, st.Swapped(new, st.Outcome.UNKNOWN))

    # ----------------------------------------------------------------------------- invariants

    def _is_recorded(self, nonce: bytes, content: bytes) -> None:
        """Check a record that comes into the table for the first time."""
        record = Record.from_bytes(content)
        name = record_hash(content)
        if name in self.records:
            return
        self.records[name] = record
        known = self.children.get(record.parent, ())
        if known and not self.num_losses and record.parent != NO_HASH:
            raise Broken("I4", f"two records follow view {record.number - 1}")
        self.children[record.parent] = (*known, name)
        for round in self.applied.get(record.parent, frozenset()):
            self._check_round(record, round, "I1")
        if record.source is not None:
            self._check_founding(record)
        self._check_connections(record)

    def _check_connections(self, record: Record) -> None:
        """Check that the members of a record have connected, where they were asked to."""
        attempt = record.attempt
        if attempt in self.asked.get(attempt.proposer, ()):
            for key in record.members:
                if attempt not in self.connected.get(key.nonce, ()):
                    raise Broken("I8", f"{key.number} is in view {record.number} unconnected")

    def _check_answer(self, state: st.State, message: ms.Message) -> None:
        """Check that a process of a fixed group answers for the members of its caller alone."""
        if not state.settings.is_fixed or not isinstance(message, ms.Sealed | ms.Ready):
            return
        joint = state.joint
        numbers = () if joint is None else tuple([key.number for key in joint.members])
        if state.demand not in ((), numbers):
            raise Broken("I9", f"{state.key.number} answers {numbers}, and not {state.demand}")

    def _check_failure(self, before: st.State, event: st.Event) -> None:
        """Check that a demand fails only for a caller with other members, which meet these."""
        if not isinstance(event, st.Heard) or not isinstance(event.message, ms.Here | ms.No):
            return
        demand, other = before.demand or (), event.message.demand
        is_named = self.nodes[event.nonce].key.number in demand
        if demand == other or (isinstance(event.message, ms.Here) and not is_named):
            raise Broken("I9", f"{before.key.number} fails with {demand} for {other}")

    def _check_round(self, record: Record, round: tuple[int, int], invariant: str) -> None:
        stream, position = round
        if record.source is None and not record.decision[stream].holds(position):
            if position >= record.decision[stream].first:
                raise Broken(
                    invariant, f"round {round} is applied, and view {record.number} decides void"
                )

    def _check_founding(self, record: Record) -> None:
        for node in self.living:
            holds = node.state.record is not None and node.thread.has_state
            # Nobody can know of a process that is cut off from the table for long.
            holds = holds and any(p.key == node.key and p.is_fresh for p in self._looked().places)
            if holds and (record.parent == NO_HASH or node.thread.epoch == record.parent):
                raise Broken("I6", f"view {record.number} founds, and {node.key.number} has state")

    def enter(self, nonce: bytes, record: Record) -> None:
        """Let a training thread enter a record, and check what it does there."""
        node, name = self.nodes[nonce], record.hash
        number, before = self.was_in.get(node.key, (NO_RECORD, NO_HASH))
        if number >= record.number:
            raise Broken("I5", f"{node.key.number} enters view {record.number} after {number}")
        self.was_in[node.key] = (record.number, name)
        holds = node.thread.has_state and node.key.number not in record.joined
        other = self.entered.setdefault(record.parent, name) if record.source is None else name
        # The callers of a fixed group vouch that all others have ended.
        is_vouched = self.settings.is_fixed and self.num_losses > 0
        is_dead = all(one.thread.epoch != other for one in self.living)
        if other != name and record.parent != NO_HASH and not (is_vouched and is_dead):
            raise Broken("I4", f"two views {record.number} are entered on one base")
        thread = node.thread
        if thread.has_state and before not in (NO_HASH, record.parent):
            self._check_line(record, before)
        if record.source is not None:
            zeros = (0,) * self.streams
            holds, step = record.source == node.key.number, record.inner_step
            thread = Thread(done=zeros, history=zeros, has_state=holds, first_step=step)
            self.truth[name] = (zeros, zeros, frozenset(), step)
        elif node.key.number in record.joined:
            thread = Thread()
        elif thread.has_state:
            thread = self._settled(thread, record)
        self.put(nonce, thread=thread.entered(record), todo=self._kept(node))

    def _kept(self, node: Node) -> tuple[st.Action, ...]:
        """Return what is still to be done when a record is entered: what was asked for before."""
        return tuple([one for one in node.todo if isinstance(one, st.Read)])

    def _check_line(self, record: Record, before: bytes) -> None:
        """Check that a record follows from the record that a process was in."""
        parent = record.parent
        while parent in self.records and parent != before:
            parent = self.records[parent].parent
        if parent != before:
            raise Broken("I5", f"view {record.number} does not follow from the one before")

    def _settled(self, thread: Thread, record: Record) -> Thread:
        for stream, rounds in enumerate(record.decision):
            if rounds.end < thread.done[stream]:
                raise Broken("I1", f"round {stream, rounds.end} was applied, and is not decided")
            for position in range(rounds.first, rounds.end):
                is_applied = (stream, position) in thread.recent
                is_ended = position < thread.done[stream]
                if is_ended and is_applied and not rounds.holds(position):
                    raise Broken("I1", f"round {stream, position} was applied, and is void")
                has_voted = position < thread.ends[stream]
                if rounds.holds(position) and not is_ended and not has_voted:
                    raise Broken("I3", f"round {stream, position} counts, and is not held")
        settled = thread.settled(record)
        found = (settled.done, settled.history, settled.recent, settled.first_step)
        truth = self.truth.setdefault(record.hash, found)
        if truth[:2] != found[:2]:
            raise Broken("I3", f"members enter view {record.number} with other states")
        return settled
