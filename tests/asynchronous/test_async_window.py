"""Windows of runs: which runs are asked for and when; downloads that were ended, or are slow."""

from __future__ import annotations

import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from async_helpers import PLAIN

from diloco_comm.asynchronous import downloads, link, sessions, transfer
from diloco_comm.asynchronous.downloads import Download, Follower
from diloco_comm.asynchronous.messages import MAX_BATCH, MAX_BODY, Kind, Message
from diloco_comm.asynchronous.model import RUN_ELEMENTS, layout_of
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.sessions import Session
from diloco_comm.asynchronous.window import WINDOW_FRAGMENTS, Position, Window, bodies, is_within
from diloco_comm.ops.wire import WireFormat


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (40, 100), (100, 100), (1000, 1000)])
def test_everything_is_asked_for_once_and_never_too_much(batch: int, window: int) -> None:
    sizes, counts = [30, 7, 90], [5, 1, 4]
    wanted = [Position(n, f, r) for n in (0, 3) for f, c in enumerate(counts) for r in range(c)]
    runs = Window(wanted, lambda p: sizes[p.fragment], batch_bytes=batch, window_bytes=window)
    rng, asked = random.Random(batch), []
    while not runs.is_empty:
        for first, count in runs.ask():
            asked += [first._replace(run=first.run + i) for i in range(count)]
        on_their_way = sum(sizes[p.fragment] for p in runs.asked)
        assert on_their_way <= window or len(runs.asked) == 1
        assert {p for p, count in runs.ask_again() if count == 1} == set(runs.asked)
        runs.received(rng.choice(list(runs.asked)))
    assert asked == wanted


def test_the_runs_of_few_small_fragments_are_on_their_way() -> None:
    wanted = [Position(0, f, r) for f in range(3 * WINDOW_FRAGMENTS) for r in range(2)]
    runs = Window(wanted, lambda position: 4)
    rng, asked, num_asked = random.Random(0), [], []
    while not runs.is_empty:
        for first, count in runs.ask():
            asked += [first._replace(run=first.run + i) for i in range(count)]
        num_asked.append(len({position.fragment for position in runs.asked}))
        runs.received(rng.choice(list(runs.asked)))
    assert asked == wanted and max(num_asked) == WINDOW_FRAGMENTS


@pytest.mark.parametrize("wire", ["fp32", "int8", "int4"])
def test_bodies_cover_what_may_be_asked_for(wire: str) -> None:
    layout = layout_of(40 * RUN_ELEMENTS - 5, WireFormat(wire))
    most = MAX_BATCH // layout.run_bytes
    assert is_within(layout, 0, min(most, 40)) and not is_within(layout, 0, most + 1)
    assert is_within(layout, 39, 1) and not is_within(layout, 39, 2) and not is_within(layout, 0, 0)
    parts = list(bodies(layout, 3, 11))
    assert [run for first, n in parts for run in range(first, first + n)] == list(range(3, 14))
    assert all(n * layout.run_bytes <= MAX_BODY for _, n in parts)


def test_what_was_not_kept_until_the_end_is_fetched_again() -> None:
    """The server may have changed runs while it sent them; it says so when the worker asks."""
    size, said = RUN_ELEMENTS + 9, []
    follower = Follower([torch.zeros(size)], follows=False)
    download = Download(lambda message: said.append(message) or True, follower)
    download.ask()

    def send(version: int, value: float) -> None:
        download.receive(Message(Kind.READY, 0, version, meta={"steps": 5}))
        for run, count in ((0, RUN_ELEMENTS), (1, 9)):
            # A KEPT that comes before the last run does not count.
            download.receive(Message(Kind.KEPT, 0, version))
            body = torch.full((count,), value).numpy().tobytes()
            download.receive(Message(Kind.DATA, 0, version, 0, run, body=body))
        assert said[-1] == Message(Kind.DONE, 0, version)

    send(3, 1.0)
    assert not download.is_complete
    download.receive(Message(Kind.GONE, 0, 3))
    assert said[-1] == Message(Kind.PULL) and not download.is_complete
    send(4, 2.0)
    download.receive(Message(Kind.KEPT, 0, 3))
    assert not download.is_complete
    # An answer that was lost is asked for again.
    download.ask()
    assert said[-2:] == [Message(Kind.DONE, 0, 4)] * 2
    download.receive(Message(Kind.KEPT, 0, 4))
    assert download.is_complete and (download.version, download.steps) == (4, 5)
    assert torch.equal(follower.outer[0], torch.full((size,), 2.0))


class SlowLink:
    """A worker's link on which each DATA takes ``data_s`` seconds of a clock of its own.

    Attributes:
        most: Messages that wait on the link at most.
        kinds: Messages that were delivered, by kind.
    """

    most = 128

    def __init__(self, server: AsyncServer, size: int, data_s: float) -> None:
        self.now, self.data_s, self.kinds = 0.0, data_s, Counter[Kind]()
        self._server, self._on_way = server, deque[Message]()
        self._arrives_at = 0.0
        self.sender = transfer.Sender(server.state, self._answer, lambda: None)
        self.session = Session(b"peer", 1, "peer", [size], 0, 0.0)
        server.state.sessions.add(self.session)
        self.link = link.Link("tcp://127.0.0.1:1", "peer", [size], 0, timeout=1e4)
        self.link.send, self.link.next_message = self.say, self._next

    def monotonic(self) -> float:
        return self.now

    def _answer(self, peer: bytes, message: Message) -> bool:
        if len(self._on_way) >= self.most:
            return False
        if not self._on_way:
            self._arrives_at = self.now + self._seconds_of(message)
        self._on_way.append(message)
        return True

    def _seconds_of(self, message: Message) -> float:
        return self.data_s if message.kind == Kind.DATA else 0.01

    def say(self, message: Message) -> bool:
        self.session.seen_at = self.now
        sender = self.sender
        handle = {Kind.GET: sender.get, Kind.DONE: sender.done}
        handle.get(message.kind, sender.pull)(self.session, message)
        return True

    def _next(self, seconds: float) -> Message | None:
        end = self.now + seconds
        while not self._on_way or self._arrives_at > self.now:
            if self.now >= end:
                return None
            self.now += 0.05
            self.sender.evict(self.now, is_memory_short=False)
        message = self._on_way.popleft()
        if self._on_way:
            self._arrives_at = self.now + self._seconds_of(self._on_way[0])
        self.kinds[message.kind] += 1
        assert self.kinds[message.kind] < 500, "the download does not end"
        return message


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch):
    """``slow_link(num_runs, data_s)``: a link to a server with a model of so many runs."""
    servers = []

    def make(num_runs: int, data_s: float) -> SlowLink:
        size = num_runs * RUN_ELEMENTS
        servers.append(AsyncServer(PLAIN, parameters=[torch.ones(size)]))
        made = SlowLink(servers[-1], size, data_s)
        clock = SimpleNamespace(monotonic=made.monotonic)
        for module in (transfer, sessions, downloads, link):
            monkeypatch.setattr(module, "time", clock)
        return made

    yield make
    for server in servers:
        server.stop()


@pytest.mark.parametrize("data_s", [0.1, 1.5, 4.0, 15.0])
def test_a_worker_on_a_slow_link_gets_a_version(slow_link, data_s: float) -> None:
    """A message takes longer than the time after which a worker asks again, up to ``STALL_S``."""
    num_runs = 12
    slow = slow_link(num_runs, data_s)
    outer = torch.zeros(num_runs * RUN_ELEMENTS)
    download = Download(slow.link.send, Follower([outer], follows=False))
    assert slow.link.fetch(download)[0] == 0 and outer.eq(1.0).all()
    slow.link.close()
    # The worker does not know the link yet when it waits for the first run.
    assert slow.kinds[Kind.DATA] <= num_runs + data_s + 1
    assert slow.kinds[Kind.GONE] == (data_s == 15.0)


def test_a_new_place_is_progress_of_a_reader_whose_queue_is_full(slow_link) -> None:
    slow = slow_link(3, 1.0)
    slow.say(Message(Kind.PULL))
    slow.most = 1
    read_at = []
    for run in (0, 0, 1, 0, 1, 2):
        slow.now += 1.0
        slow.say(Message(Kind.GET, 0, 0, 0, run, count=1))
        read_at.append(slow.session.read_at)
    assert read_at == [1.0, 1.0, 3.0, 3.0, 3.0, 6.0]
    slow.link.close()


def test_questions_of_two_kinds_in_turn_are_no_progress_of_a_reader(slow_link) -> None:
    slow = slow_link(3, 1.0)
    session = slow.session
    for number in range(10):
        slow.now += 1.0
        slow.say(Message(Kind.FOLLOW if number % 2 else Kind.PULL))
        # The first run of each kind that the worker asks for is progress once.
        slow.say(Message(Kind.GET, int(session.answer == Kind.STATE), 0, 0, 0, count=1))
    assert session.is_reading and session.held_at == 1.0 and session.read_at <= 2.0
    slow.now += transfer.STALL_S
    slow.sender.evict(slow.now, is_memory_short=False)
    assert session.held is None
    slow.link.close()


def test_a_bar_counts_the_reading_and_not_the_time_in_line(slow_link) -> None:
    slow = slow_link(1, 1.0)
    session, state = slow.session, slow.sender.state
    state.max_readers = 0
    slow.say(Message(Kind.PULL))
    slow.now, state.max_readers = 10.0, 1
    slow.sender.after_reading()
    assert session.is_reading
    layouts = session.layouts(transfer._FP32)
    state.model.apply([torch.zeros(layouts[0].payload_bytes, dtype=torch.uint8)], layouts, 1.0)
    slow.now += 3.0
    slow.sender.evict(slow.now, is_memory_short=False)
    assert session.held is None and session.barred_until == slow.now + 4.0 * 3.0
    slow.link.close()
