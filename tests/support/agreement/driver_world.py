"""Real drivers of elastic replicas on a virtual clock; links, table and training are simulated.

Every driver, its core, its ``Signs`` and its ``TableThread`` are the product's own, and their
threads' work is done in turns. ``World`` checks the invariants.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

from agreement_walks import describe, is_settled
from agreement_world import Broken, Node, World, nonce_of, settings_of

from diloco_comm.elastic import driver as elastic_module
from diloco_comm.elastic.driver import Driver
from diloco_comm.group import driver as driver_module
from diloco_comm.group import signs as signs_module
from diloco_comm.group import state as st
from diloco_comm.group import table as table_module
from diloco_comm.group.beats import EVICT, Way, eviction_of
from diloco_comm.group.driver import Ended
from diloco_comm.group.records import NO_RECORD, Key, Record
from diloco_comm.group.signs import Signs
from diloco_comm.group.table import Look, TableAway

# Seconds of the virtual clock.
TICK_S, PERIOD_S, SUSPECT_AFTER_S = 0.04, 0.5, 2.0
_VOTE_S = 0.1
# A table drops the beat of a process that has ended.
_DROP_AFTER_S = 6.0
# A link notices so late that a cut connection is lost.
_LOST_S = 5.0
# Within so many seconds without faults all must train together.
_SETTLE_S = 120.0
# After half of the faults no other one begins for so long, while some have yet to come together.
_QUIET_S = 6.0
# How often each fault is drawn.
FAULTS = {
    "kill": 10,
    "leave": 4,
    "evict": 1,
    "round": 12,
    "cut": 3,
    "stop": 3,
    "lose": 3,
    "off_table": 2,
    "away": 2,
}


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (driver_module, elastic_module, signs_module, table_module):
            stack.enter_context(patch.object(module, "time", clock))
        yield


class Life(NamedTuple):
    """As ``_C.PeerLife``."""

    nonce: str
    silent_s: float
    still_s: float
    inner_step: int
    phase: str
    is_connected: bool
    is_refused: bool


class VirtualLink:
    """The link of one process."""

    def __init__(self, world: DriverWorld, nonce: bytes) -> None:
        self._world, self._nonce = world, nonce
        self.wanted: list[str] = []

    def reach(self, service: str, peers: Sequence[tuple[str, ...]]) -> None:
        self.wanted = [words[0] for words in peers]

    def life(self) -> list[Life]:
        return [self._world.life_of(self._nonce, bytes.fromhex(one)) for one in self.wanted]

    def tell(self, nonce: str, service: str, frame: bytes) -> bool:
        return self._world.carry(self._nonce, bytes.fromhex(nonce), frame)

    def set_progress(self, inner_step: int, phase: str) -> None:
        pass


class VirtualTable:
    """The connection of one process to the table of the world."""

    def __init__(self, world: DriverWorld, nonce: bytes) -> None:
        self._world, self._nonce = world, nonce

    @property
    def id(self) -> bytes:
        return self._world.table

    def swap(self, old: bytes, new: bytes) -> bool:
        world = self._world
        self._ask()
        is_done = world.record == old
        if is_done:
            world.put_record(self._nonce, new)
        if world.random.random() < world.loss:
            raise TableAway("the answer was lost")
        return is_done

    def look(self, name: str, text: bytes) -> Look:
        world = self._world
        self._ask()
        if text:
            world.beats[name] = text, world.clock.now
        else:
            world.beats.pop(name, None)
        return Look(world.record, {one: text for one, (text, _) in world.beats.items()}, {})

    def post(self, name: str, text: bytes) -> None:
        pass

    def _ask(self) -> None:
        world = self._world
        if world.clock.now < world.away_until or self._nonce in world.off_table:
            raise TableAway("does not answer")

    def close(self) -> None:
        pass


@dataclass
class Process:
    """The knowledge of one process beside its ``Node``.

    Attributes:
        record: That its training thread has entered.
        has_stopped: The training thread follows the orders of the driver.
        failing: Members without which a round fails, and when; None: no round fails.
        connecting: The attempt for which it connects, and when it has connected.
        ready_at: When a newcomer can begin to follow its group.
        stopped_until: The process stands still until then.
        host_has_gone: Nobody refuses connections to the place where it has ended.
    """

    driver: Driver
    link: VirtualLink
    record: Record | None = None
    has_stopped: bool = True
    failing: tuple[tuple[int, ...], float] | None = None
    connecting: tuple[st.Connect, float] | None = None
    ready_at: float = 0.0
    stopped_until: float = 0.0
    table_at: float = 0.0
    vote_at: float = 0.0
    patient_until: float = 0.0
    moved_at: float = 0.0
    died_at: float = 0.0
    host_has_gone: bool = False
    last_due: dict[bytes, float] = field(default_factory=dict)


class DriverWorld(World):
    """Processes with drivers, and the invariants of ``World``.

    Args:
        seed: All that is drawn depends on it.

    Attributes:
        beats: Text of each beat in the table, and when it was written.
        loss: The part of the messages and answers that get lost.
        chain: The bytes of all records, in order.
    """

    def __init__(self, seed: int, clock: Clock) -> None:
        polls = round(SUSPECT_AFTER_S / PERIOD_S)
        super().__init__(settings_of(suspect_after=polls, founding_wait=2))
        self.random, self.clock = random.Random(seed), clock
        self.processes: dict[bytes, Process] = {}
        self.beats: dict[str, tuple[bytes, float]] = {}
        self.loss = 0.0
        self.away_until = 0.0
        self.cut_since: dict[frozenset[bytes], float] = {}
        self.frames: list[tuple[float, bytes, bytes, Any]] = []
        self.chain: list[bytes] = []

    # ------------------------------------------------------------------------------ processes

    def add(self, number: int, **values: Any) -> Node:
        """Start a process with a new nonce; a former process of this number must have ended."""
        key = Key(number, nonce_of(number, self.starts[number]))
        self.starts[number] += 1
        state = st.State(self.settings, key, **values)
        link: Any = VirtualLink(self, key.nonce)
        way = Way(key.nonce.hex(), f"host:{number}", "", "")
        signs = Signs(key.nonce, link, way, "service", SUSPECT_AFTER_S, 2 * SUSPECT_AFTER_S)
        table = VirtualTable(self, key.nonce)
        driver = Driver(
            table, state, signs, period_s=PERIOD_S, shown="{}", say=lambda happening: None
        )
        one = Process(driver, link, ready_at=self.clock.now + self.random.uniform(0.1, 1.0))
        driver.on_break(lambda: self._breaks_off(key.nonce))
        self.processes[key.nonce] = one
        self.nodes[key.nonce] = Node(state)
        return self.nodes[key.nonce]

    def tell(self, nonce: bytes, event: st.Event) -> None:
        self.processes[nonce].driver.tell(event)

    def _breaks_off(self, nonce: bytes) -> None:
        one = self.processes[nonce]
        one.failing = one.failing or ((), self.clock.now)

    def kill(self, nonce: bytes, *, host_has_gone: bool = False) -> None:
        """Let a process end at once, and rounds with it fail."""
        self.put(nonce, is_alive=False)
        self._ends(nonce, host_has_gone=host_has_gone)
        if not host_has_gone:
            for other in self._mates(nonce):
                self.fail_round(other, (self.nodes[nonce].key.number,))

    def fail_round(self, nonce: bytes, without: tuple[int, ...] = ()) -> None:
        """Let the round under way of a process fail soon."""
        one = self.processes[nonce]
        one.failing = one.failing or (without, self.clock.now + self.random.uniform(0.05, 1.0))

    def _mates(self, nonce: bytes) -> list[bytes]:
        """Return the living processes that train in the record of a process."""
        epoch = self.nodes[nonce].thread.epoch
        return [n.key.nonce for n in self.living if n.thread.epoch == epoch and epoch]

    def _ends(self, nonce: bytes, *, host_has_gone: bool = False) -> None:
        one = self.processes[nonce]
        one.died_at, one.host_has_gone = self.clock.now, host_has_gone

    def _end_well(self, nonce: bytes, ended: Ended) -> None:
        """Let a process close its driver, as its program does at its end."""
        one = self.processes[nonce]
        one.driver._events.put(None)
        one.driver._run()
        one.driver._table._run()
        self.put(nonce, end=ended.kind)
        self._ends(nonce)

    # ------------------------------------------------------------------------- links and table

    def cut(self, one: bytes, other: bytes) -> None:
        pair = frozenset((one, other))
        self.cuts |= {pair}
        self.cut_since.setdefault(pair, self.clock.now)

    def heal(self, pair: frozenset[bytes]) -> None:
        self.cuts -= {pair}
        self.cut_since.pop(pair, None)

    def life_of(self, nonce: bytes, other: bytes) -> Life:
        """Return what the link of a process tells of another one."""
        now, peer = self.clock.now, self.processes.get(other)
        silent, is_refused = 0.0, False
        if peer is None:
            silent = 2 * _LOST_S
        elif not self.nodes[other].takes_part:
            silent = now - peer.died_at
            is_refused = silent > 1.0 and not peer.host_has_gone
        elif (pair := frozenset((nonce, other))) in self.cuts:
            silent = now - self.cut_since[pair]
        elif now < peer.stopped_until:
            silent = now - peer.died_at
        is_lost = peer is None or not self.nodes[other].takes_part or silent > _LOST_S
        still = now - peer.moved_at if peer is not None else silent
        step = 0 if peer is None else peer.driver.inner_step
        return Life(other.hex(), silent, still, step, "", not is_lost, is_refused)

    def carry(self, source: bytes, target: bytes, content: Any) -> bool:
        """Let a frame, or a vote, be under way; return whether there is a connection."""
        node = self.nodes.get(target)
        if node is None or not node.takes_part or self.is_cut(source, target):
            return False
        if self.random.random() >= self.loss:
            due = self.processes[source].last_due
            at = max(due.get(target, 0.0), self.clock.now + self.random.uniform(0.0, 0.05))
            due[target] = at
            self.frames.append((at, source, target, content))
        elif not isinstance(content, bytes):
            self.fail_round(target)
        return True

    def send(self, source: bytes, target: bytes, content: Any) -> None:
        """Send a vote; the round of a lost vote fails."""
        if not self.carry(source, target, content) and target in self.processes:
            self.fail_round(target)
            self.fail_round(source, (self.nodes[target].key.number,))

    def put_record(self, nonce: bytes, content: bytes) -> None:
        """Take the record of a swap."""
        self._is_recorded(nonce, content)
        self.record = content
        # A copy: only what the product keeps counts for the product in a trace of its memory.
        self.chain.append(bytes(bytearray(content)))

    def _looked(self) -> st.Looked:
        places = []
        # Nobody can know of a process that was stopped, or cut off from the table, for long.
        old = self.clock.now - SUSPECT_AFTER_S
        for one in self.processes.values():
            state = one.driver.state
            is_known = self.nodes[state.nonce].takes_part and state.nonce not in self.off_table
            if is_known and one.stopped_until < old:
                places.append(st.place_of(state, 0))
        return st.Looked(self.record, self.table, tuple(places))

    # ------------------------------------------------------------------------------- the time

    def pass_time(self, seconds: float) -> None:
        """Let everything happen that is due within some seconds.

        Raises:
            Broken: If that breaks an invariant.
        """
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += TICK_S
            self._deliver_all()
            living = [node.key.nonce for node in self.living]
            self.random.shuffle(living)
            for nonce in living:
                if self.clock.now >= self.processes[nonce].stopped_until:
                    self._take_turns(nonce)
        limit = self.clock.now - _DROP_AFTER_S
        self.beats = {name: beat for name, beat in self.beats.items() if beat[1] > limit}

    def _deliver_all(self) -> None:
        now, due = self.clock.now, []
        rest = []
        for frame in self.frames:
            (due if frame[0] <= now else rest).append(frame)
        self.frames = rest
        for frame in due:
            _, source, target, content = frame
            node = self.nodes.get(target)
            if node is None or not node.takes_part or self.is_cut(source, target):
                if not isinstance(content, bytes) and node is not None and node.takes_part:
                    self.fail_round(target)
            elif now < self.processes[target].stopped_until or self._is_early(target, content):
                self.frames.append(frame)
            elif isinstance(content, bytes):
                events = self.processes[target].driver._events
                events.put(driver_module._Frame(source.hex(), content))
            else:
                self._hear_vote(target, source, *content)

    def _is_early(self, target: bytes, content: Any) -> bool:
        if isinstance(content, bytes) or content[0] not in self.records:
            return False
        record = self.processes[target].record
        number = NO_RECORD if record is None else record.number
        return self.records[content[0]].number > number

    def _hear_vote(
        self, nonce: bytes, source: bytes, epoch: bytes, stream: int, position: int, flag: bool
    ) -> None:
        thread = self.nodes[nonce].thread
        if thread.epoch == epoch and not thread.is_sealed:
            self.put(nonce, thread=thread.hears(stream, position, source, flag))

    def _take_turns(self, nonce: bytes) -> None:
        """Do the work of all threads of a process that is due."""
        one, now = self.processes[nonce], self.clock.now
        driver, table, signs = one.driver, one.driver._table, one.driver.signs
        if signs._news.is_set():
            signs._news.clear()
            one.link.reach("service", signs._wanted)
        if table._news.is_set() or now >= one.table_at:
            table._news.clear()
            one.table_at = now + table.period_s
            while table._swaps:
                table._swap(*table._swaps.popleft(), is_last=False)
            table._look()
        while not driver._events.empty() or self._is_due(driver):
            driver._take_turn()
        if driver.state is not self.nodes[nonce].state:
            self.put(nonce, state=driver.state)
        self._train(nonce, one)

    def _is_due(self, driver: Driver) -> bool:
        now = self.clock.now
        is_hasty = driver._hastens and now >= driver._haste_at
        return is_hasty or now >= driver._last_poll + PERIOD_S

    # --------------------------------------------------------------------- the training thread

    def _train(self, nonce: bytes, one: Process) -> None:
        driver, thread = one.driver, self.nodes[nonce].thread
        waits = one.has_stopped or not thread.can_vote
        driver.waits_since = (driver.waits_since or self.clock.now) if waits else 0.0
        if one.record is None and driver.state.record is None:
            self._get_ready(nonce, one)
        if one.has_stopped:
            self._follow(nonce, one)
            return
        driver.inner_step = self._inner_step(self.nodes[nonce])
        has_failed = one.failing is not None and self.clock.now >= one.failing[1]
        if driver.is_broken or has_failed:
            self._stop_broken(nonce, one)
        elif thread.last is not None:
            self._stop_at_boundary(nonce, one)
        elif self.clock.now >= one.vote_at:
            self._take_step(nonce, one)

    def _get_ready(self, nonce: bytes, one: Process) -> None:
        """Let a newcomer follow the record that it has read, if it hears all members."""
        state = one.driver.state
        record = state.in_table
        members = () if record is None else record.members
        follows = NO_RECORD if record is None else record.number
        hears = not any(self.is_cut(nonce, key.nonce) for key in members)
        if self.clock.now >= one.ready_at and hears and follows != state.follows:
            one.driver.tell(st.JoinerReady(follows))

    def _stop_broken(self, nonce: bytes, one: Process) -> None:
        assert one.record is not None
        without = () if one.failing is None else one.failing[0]
        one.failing, one.has_stopped = None, True
        members = [key.nonce for key in one.record.members]
        cut = tuple([other for other in members if self.is_cut(nonce, other)])
        one.driver.lost(without)
        one.driver.tell(st.Broke(one.record.number, cut))

    def _stop_at_boundary(self, nonce: bytes, one: Process) -> None:
        """Let the rounds under way end, and stop."""
        assert one.record is not None
        one.patient_until = one.patient_until or self.clock.now + 0.5
        self._apply_all(nonce, one)
        thread = self.nodes[nonce].thread
        if not thread.has_all_votes and self.clock.now < one.patient_until:
            return
        one.has_stopped = True
        self.put(nonce, thread=replace(thread, is_sealed=True, is_told=True))
        step = self._inner_step(self.nodes[nonce])
        number, has_all = one.record.number, thread.has_all_votes
        one.driver.tell(st.Boundary(number, thread.positions, step, has_all))

    def _take_step(self, nonce: bytes, one: Process) -> None:
        one.vote_at = self.clock.now + self.random.uniform(0.5, 1.5) * _VOTE_S
        if one.driver.is_change_wanted:
            self.put(nonce, thread=replace(self.nodes[nonce].thread, is_pending=True))
        self._apply_all(nonce, one)
        thread = self.nodes[nonce].thread
        for stream in thread.can_vote:
            self._vote(nonce, stream)

    def _apply_all(self, nonce: bytes, one: Process) -> None:
        for stream in range(self.streams):
            while self.nodes[nonce].thread.can_apply(stream, nonce):
                self._apply(nonce, stream)
                one.moved_at = self.clock.now

    def _follow(self, nonce: bytes, one: Process) -> None:
        """Carry out the orders of the driver."""
        thread, now = self.nodes[nonce].thread, self.clock.now
        while (order := one.driver.next_order(0.0)) is not None:
            one.connecting = None
            if isinstance(order, Ended):
                self._end_well(nonce, order)
                return
            if isinstance(order, st.Enter):
                self._enter(nonce, one, order.record)
            elif isinstance(order, st.Connect):
                one.connecting = order, now + self.random.uniform(0.0, 0.1)
            elif isinstance(order, st.Seal):
                thread = replace(self.nodes[nonce].thread, is_sealed=True)
                node = self.put(nonce, thread=thread)
                step = self._inner_step(node)
                one.driver.tell(st.Sealed(order.number, thread.positions, step))
        if one.connecting is not None:
            self._connect(nonce, one)
        elif one.record is not None and not self.nodes[nonce].thread.is_sealed:
            self._begin(nonce, one)

    def _connect(self, nonce: bytes, one: Process) -> None:
        assert one.connecting is not None
        order, at = one.connecting
        others = [key.nonce for key in order.members if key.nonce != nonce]
        away = [n for n in others if not self.nodes[n].takes_part or self.is_cut(nonce, n)]
        if self.clock.now < at + (SUSPECT_AFTER_S if away else 0.0):
            return
        one.connecting = None
        cut = tuple([other for other in away if self.is_cut(nonce, other)])
        error = "" if cut or not away else "a member has gone"
        one.driver.tell(st.Connected(order.attempt, cut, error))

    def _enter(self, nonce: bytes, one: Process, record: Record) -> None:
        self.enter(nonce, record)
        one.record, one.failing, one.patient_until = record, None, 0.0
        one.moved_at = self.clock.now

    def _begin(self, nonce: bytes, one: Process) -> None:
        """Train in the record that was entered, as soon as its state is here."""
        record, node = one.record, self.nodes[nonce]
        assert record is not None
        if one.driver.is_broken:
            one.driver.tell(st.Broke(record.number))
            return
        if not node.thread.has_state:
            state = one.driver.state.record
            is_newest = state is not None and state.hash == record.hash
            if is_newest and record.hash in self.truth and self._has_donor(record, nonce):
                self._start(nonce)
        else:
            one.driver.tell(st.Started(record.number))
        if self.nodes[nonce].thread.has_state:
            one.has_stopped = False

    # ---------------------------------------------------------------------------------- memory

    def forget(self) -> None:
        """Drop all that is only the memory of the invariants; all must train in one record."""
        ended = [nonce for nonce, node in self.nodes.items() if not node.takes_part]
        for nonce in ended:
            del self.nodes[nonce], self.processes[nonce]
        self.was_in = {key: was for key, was in self.was_in.items() if key.nonce in self.nodes}
        for one in self.processes.values():
            one.last_due = {n: at for n, at in one.last_due.items() if n in self.nodes}
        kept = {node.thread.epoch for node in self.living}
        for memory in (self.records, self.applied, self.children, self.entered, self.truth):
            for name in memory.keys() - kept:
                del memory[name]  # type: ignore[attr-defined]


class Storm:
    """Random faults of a world, each with its end.

    Args:
        size: Processes that begin; each comes again after its end.
        steady: The number of a process to which nothing is done.
    """

    def __init__(self, world: DriverWorld, size: int, steady: int) -> None:
        self.world, self.random, self._steady = world, world.random, steady
        self.num_faults: Counter[str] = Counter()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._comes_at: dict[int, float] = {}
        for number in range(size):
            world.add(number)

    def step(self) -> None:
        """Let a fault begin, and some time pass: until all train together, if that is soon."""
        kind = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
        nodes = [one for one in self.world.living if one.key.number != self._steady]
        if nodes:
            self.num_faults[kind] += 1
            getattr(self, "_" + kind)(self.random.choice(nodes).key.nonce)
        self.pass_time(self.random.uniform(0.05, 0.8))
        until = self.world.clock.now + self.random.choice((0.0, _QUIET_S))
        while self.world.clock.now < until and not is_settled(self.world):
            self.pass_time(0.2)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; faults end, and processes that have ended come again."""
        until = self.world.clock.now + seconds
        while self.world.clock.now < until:
            self.world.pass_time(0.1)
            now = self.world.clock.now
            due, self._due = self._due, [one for one in self._due if one[0] > now]
            for at, end in due:
                if at <= now:
                    end()
            self._restart()

    def _restart(self) -> None:
        world, now = self.world, self.world.clock.now
        for number in list(world.starts):
            node = world.node(number)
            if not node.takes_part:
                at = self._comes_at.setdefault(number, now + self.random.uniform(0.1, 2.0))
                if now >= at:
                    del self._comes_at[number]
                    has_state = node.thread.has_state
                    step = world._inner_step(node) if has_state else node.state.inner_step
                    world.add(number, inner_step=step, has_checkpoint=True)

    def settle(self) -> float:
        """End all faults, and let time pass until all train together; return the seconds of that.

        Raises:
            Broken: If that does not come.
        """
        world, begin = self.world, self.world.clock.now
        for _, end in self._due:
            end()
        self._due = []
        while not is_settled(world):
            if world.clock.now - begin > _SETTLE_S:
                raise Broken("L", "the processes do not come to train together\n" + describe(world))
            self.pass_time(0.5)
        seconds = world.clock.now - begin
        # The table and all processes forget those that have ended.
        self.pass_time(_DROP_AFTER_S + 1.0)
        return seconds

    def _until(self, seconds: tuple[float, float], end: Callable[[], None]) -> None:
        self._due.append((self.world.clock.now + self.random.uniform(*seconds), end))

    def _kill(self, nonce: bytes) -> None:
        self.world.kill(nonce, host_has_gone=self.random.random() < 0.2)

    def _leave(self, nonce: bytes) -> None:
        self.world.tell(nonce, st.Leave())

    def _evict(self, nonce: bytes) -> None:
        world, name = self.world, eviction_of(self.world.nodes[nonce].key)
        world.beats[name] = EVICT, world.clock.now

    def _round(self, nonce: bytes) -> None:
        self.world.fail_round(nonce)

    def _cut(self, nonce: bytes) -> None:
        world = self.world
        others = [one.key.nonce for one in world.living if one.key.number != self._steady]
        other = self.random.choice(others)
        if other != nonce:
            world.cut(nonce, other)
            self._until((0.3, 8.0), lambda: world.heal(frozenset((nonce, other))))

    def _stop(self, nonce: bytes) -> None:
        world, one = self.world, self.world.processes[nonce]
        one.died_at, one.stopped_until = world.clock.now, world.clock.now + 10.0

        def go_on() -> None:
            one.stopped_until = world.clock.now

        self._until((0.2, 5.0), go_on)

    def _lose(self, nonce: bytes) -> None:
        world = self.world
        world.loss = 0.3

        def end() -> None:
            world.loss = 0.0

        self._until((0.2, 2.0), end)

    def _off_table(self, nonce: bytes) -> None:
        world = self.world
        world.off_table |= {nonce}

        def end() -> None:
            world.off_table -= {nonce}

        self._until((0.3, 4.0), end)

    def _away(self, nonce: bytes) -> None:
        world = self.world
        world.away_until = world.clock.now + 10.0

        def end() -> None:
            world.away_until = 0.0

        self._until((0.3, 4.0), end)
