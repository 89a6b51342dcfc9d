"""The memory of a server: bounded whatever the number of workers, and taken back from the idle."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from async_helpers import (
    HELLO,
    PLAIN,
    PUSH,
    Peer,
    attach,
    encode,
    payload,
    push_by_hand,
    serving,
    start_by_hand,
    status,
    wait_until,
)
from cli_helpers import run_cli

from diloco_comm import Adam, HeavyBall
from diloco_comm.asynchronous import transfer
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.model import RUN_ELEMENTS, SharedModel, layout_of
from diloco_comm.asynchronous.payloads import PayloadFile, payload_files, read_back
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.sessions import Session
from diloco_comm.asynchronous.transfer import STALL_S, Receiver
from diloco_comm.methods.outer import make_outer
from diloco_comm.ops.wire import WireFormat


def test_memory_is_bounded_by_credit_not_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve updates of a whole model each, one in memory at a time."""
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    size = 300_000
    with serving(parameters=[torch.zeros(size)], model_sizes=2.0) as server:
        peak = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, server.state.memory.used_bytes)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()

        def work(index: int) -> None:
            model, worker = attach(server.address, str(index), size=size)
            for _ in range(2):
                model.descend(torch.full((size,), 0.5))
                worker.step()
            worker.close()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        assert status(server)["updates"] == 12
    # Two run lengths of 2^18 elements hold 300,000.
    assert 0 < peak <= 2 * (1 << 20)
    assert torch.equal(server.parameters()[0], torch.full((size,), -6.0))


def test_a_reader_that_asks_for_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "state.MAX_READERS": 1,
        "transfer.PAUSE_S": 0.1,
        "transfer.STALL_S": 1e6,
    }.items():
        monkeypatch.setattr(f"diloco_comm.asynchronous.{name}", value)
    with (
        serving(parameters=[torch.ones(7)]) as server,
        Peer(server.address) as first,
        Peer(server.address) as second,
    ):
        start_by_hand(first)
        first.say(Message(Kind.PULL))
        assert first.hear().kind == Kind.READY
        second.say(Message(Kind.HELLO, meta={**HELLO, "worker": "second"}))
        second.say(Message(Kind.PULL))
        assert [second.hear().kind for _ in range(3)] == [Kind.WELCOME, Kind.WAIT, Kind.READY]
        first.say(Message(Kind.GET, 0, 0, 0, 0))
        assert first.hear().kind == Kind.GONE


@pytest.mark.nightly("runs that are asked for again are the same promise, without real time")
def test_a_question_without_end_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for the reader of an older version, and compute all newer ones anew."""
    monkeypatch.setattr(transfer, "TURN_S", 0.0)
    with (
        serving(parameters=[torch.zeros(7)]) as server,
        Peer(server.address) as endless,
        Peer(server.address) as honest,
    ):
        start_by_hand(endless)
        start_by_hand(honest, "honest")
        ended, number = threading.Event(), 0

        def ask() -> None:
            while not ended.wait(0.02):
                endless.say(Message(Kind.PULL))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            session = server.state.sessions.of("peer")
            wait_until(lambda: session.held == 0)
            begin = time.monotonic()
            while session.held == 0:
                assert time.monotonic() < begin + 15.0
                answer = push_by_hand(honest, payload([1.0] * 7), number + 1, number)
                assert answer.kind in (Kind.OUTCOME, Kind.WAIT)
                number += answer.kind == Kind.OUTCOME
            # The reader begins anew, with a newer version, after a multiple of that time only.
            kept_s, begin = time.monotonic() - begin, time.monotonic()
            assert session.held is None
            wait_until(lambda: session.held is not None, 60.0)
            assert time.monotonic() - begin > 2.0 * kept_s
        finally:
            ended.set()
            thread.join()


def test_runs_that_are_asked_for_again_and_again_are_no_reading() -> None:
    with (
        serving(parameters=[torch.zeros(7)]) as server,
        Peer(server.address) as endless,
    ):
        start_by_hand(endless)
        endless.say(Message(Kind.PULL))
        assert endless.hear().kind == Kind.READY
        session = server.state.sessions.of("peer")
        read_at = [session.read_at]
        for _ in range(8):
            endless.say(Message(Kind.GET, 0, 0, 0, 0, count=1))
            assert endless.hear().kind == Kind.DATA
            endless.say(Message(Kind.STATUS))
            assert endless.hear().kind == Kind.REPORT
            read_at.append(session.read_at)
        assert read_at[0] < read_at[1] == read_at[-1]


def test_an_update_that_stalls_again_and_again_leaves_room_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    monkeypatch.setattr("diloco_comm.asynchronous.transfer.STALL_S", 1.0)
    size = 4 * RUN_ELEMENTS
    hello, push = {**HELLO, "sizes": [size]}, Message(Kind.PUSH, 1, 0, meta=PUSH)
    with (
        serving(parameters=[torch.zeros(size)], model_sizes=2.0) as server,
        Peer(server.address) as endless,
        Peer(server.address) as honest,
    ):
        for peer, name in ((endless, "endless"), (honest, "honest")):
            peer.say(Message(Kind.HELLO, meta={**hello, "worker": name}))
            assert peer.hear().kind == Kind.WELCOME
        endless.say(push)
        assert endless.hear().kind == Kind.WANT
        honest.say(push)
        assert honest.hear().kind == Kind.WAIT
        # The endless one sends no run, and asks on without end; the other one gets its turn.
        begin = time.monotonic()
        while (answer := honest.hear(0.05)) is None:
            endless.say(push)
            assert time.monotonic() < begin + 15.0
        assert answer.kind == Kind.WANT
        honest.say(Message(Kind.LEAVE))
        # There is room again, and it is not the endless one's at once.
        while endless.hear(0.2) is not None:
            pass
        endless.say(push)
        assert endless.hear().kind == Kind.WAIT


def test_an_update_that_waits_for_the_end_of_a_bar_is_in_want_of_no_memory() -> None:
    server, said = AsyncServer(PLAIN, parameters=[torch.zeros(7)]), []
    receiver = Receiver(server.state, lambda peer, message: said.append(message.kind) or True)
    barred, stalled = [Session(bytes([i]), i, str(i), [7], 0, 0.0) for i in (1, 2)]
    for session in (barred, stalled):
        session.barred_until = 1e12 if session is barred else 0.0
        server.state.sessions.add(session)
        receiver.push(session, Message(Kind.PUSH, 1, 0, meta=PUSH))
    assert said == [Kind.WAIT, Kind.WANT]
    # Downloads need not make way, and a worker whose update stalls may send the update again.
    assert not receiver.is_anyone_waiting
    receiver.drop_stalled(time.monotonic() + STALL_S + 1.0)
    assert stalled.barred_until == 0.0
    barred.barred_until = 0.0
    assert receiver.is_anyone_waiting
    server.stop()


@pytest.mark.parametrize("turn_s", [1e6, 0.2])
def test_a_newer_version_is_begun_when_older_ones_are_read_or_take_too_long(
    monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    monkeypatch.setattr(transfer, "TURN_S", 1e6)
    zeros = torch.zeros(7)
    with (
        serving(parameters=[zeros]) as server,
        Peer(server.address) as slow,
        Peer(server.address) as quick,
    ):
        start_by_hand(slow)
        slow.say(Message(Kind.PULL))
        assert slow.hear().kind == Kind.READY
        start_by_hand(quick, "quick")
        assert push_by_hand(quick, payload([1.0] * 7)).kind == Kind.OUTCOME
        quick.say(Message(Kind.PULL))
        assert quick.hear(skip=(Kind.READY,)).kind == Kind.WAIT
        monkeypatch.setattr(transfer, "TURN_S", turn_s)
        if turn_s > 1e3:
            assert quick.hear(0.5) is None
            slow.say(Message(Kind.DONE, 0, 0))
            assert slow.hear().kind == Kind.KEPT
        ready = quick.hear()
        assert (ready.kind, ready.version) == (Kind.READY, 1)
        for peer, version, value in ((slow, 0, 0.0), (quick, 1, -1.0)):
            if peer is slow and turn_s > 1e3:
                continue
            peer.say(Message(Kind.GET, 0, version, 0, 0, count=1))
            body = peer.hear().body
            assert torch.frombuffer(bytearray(body), dtype=torch.float32).eq(value).all()


# Two whole runs and a short one.
SIZE = 2 * RUN_ELEMENTS + 1001
RULES = {
    "delayed": DelayedNesterov(lr=0.5, period=3, activation=0.2),
    "heavy ball": Immediate(outer=HeavyBall(0.5, 0.9)),
    "buffer": Buffered(period=2),
    "Adam": Immediate(outer=Adam(0.1)),
    "buffered Adam": Buffered(period=2, outer=Adam(0.1)),
    "torch": Immediate(outer=make_outer(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))),
}


@pytest.mark.parametrize("name", RULES)
def test_updates_in_a_file_do_what_those_in_memory_do(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(SIZE, generator=generator)
    models = [SharedModel([SIZE], RULES[name]) for _ in range(2)]
    for model in models:
        model.initialise([start])
    for wire in ("fp32", "int8", "fp32", "bf16"):
        layout = layout_of(SIZE, WireFormat(wire))
        payload = encode(torch.randn(SIZE, generator=generator), layout)
        (file,) = payload_files(None, [layout.payload_bytes])
        file.write(0, payload[:5].numpy().data)
        file.write(5, payload[5:].numpy().data)
        assert torch.equal(file[:], payload) and torch.equal(file[7:99], payload[7:99])
        models[0].apply([payload], [layout], 0.7)
        models[1].apply([file], [layout], 0.7)
        assert torch.equal(models[0].read_all()[0], models[1].read_all()[0])
    saved = [model.tensors() for model in models]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_payloads_are_written_out_before_they_are_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk reports a write error at fsync, not while the pages are in memory."""
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def run(*arguments: object) -> object:
            calls.append(name)
            return real(*arguments)

        return run

    files = [*payload_files(None, [1 << 20] * 4), *payload_files(None, [1 << 20])]
    for file in files:
        file.write(0, bytes(file.nbytes))
    for name in ("fsync", "posix_fadvise", "preadv"):
        place = f"diloco_comm.asynchronous.payloads.os.{name}"
        monkeypatch.setattr(place, recorded(name))
    read_back([*files, torch.zeros(7, dtype=torch.uint8)])
    # Once for each file, however many payloads lie in the file.
    assert calls == ["fsync", "posix_fadvise"] * 2 + ["preadv"] * 5


def test_updates_larger_than_the_budget_go_through_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two workers on the fp32 wire with no memory for their updates, snapshot and journal too."""
    rule, start = DelayedNesterov(lr=0.5, period=3), torch.linspace(-1, 1, SIZE)

    def run(folder: Path, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        with serving(rule, parameters=[start], snapshot=folder, **options) as server:
            pair = [attach(server.address, name, size=SIZE) for name in "ab"]
            for index in range(4):
                model, worker = pair[index % 2]
                model.descend(torch.full((SIZE,), 0.1 * (index + 1)))
                worker.step()
            for path in folder.iterdir():
                (tmp_path / "copy").mkdir(exist_ok=True)
                (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
            for _, worker in pair:
                worker.close()
        back = AsyncServer(rule, snapshot=tmp_path / "copy")
        back.stop()
        return server.parameters()[0], back.parameters()[0]

    roomy = run(tmp_path / "roomy")
    shutil.rmtree(tmp_path / "copy")
    made = []
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    monkeypatch.setattr(
        "diloco_comm.asynchronous.state.payload_files",
        lambda folder, sizes: made.append(sizes) or payload_files(folder, sizes),
    )
    tight = run(tmp_path / "tight")
    assert len(made) == 4
    assert torch.equal(tight[0], roomy[0]) and torch.equal(tight[1], roomy[0])


class Spool:
    """Files for updates on a disk that takes none while ``error`` is set."""

    error: int | None = None

    def __call__(self, folder: Path | None, sizes: list[int]) -> list[PayloadFile]:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return payload_files(folder, sizes)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Spool:
    """No memory for updates: each goes to a file."""
    made = Spool()
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    monkeypatch.setattr("diloco_comm.asynchronous.state.payload_files", made)
    return made


def test_no_file_for_an_update_is_said_and_no_end(files: Spool) -> None:
    files.error = errno.EACCES
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer)
        answer = push_by_hand(peer, payload([1.0]))
        assert answer.kind == Kind.REFUSED and "no file for an update of 4096" in str(answer.meta)
        assert status(server)["refused"] == {"no room": 1, "garbage": 1}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errno.ENOSPC, "room in .*: No space left on device"),
        (errno.EMFILE, "a free descriptor for its file: Too many open files"),
        (errno.EACCES, ""),
    ],
)
def test_what_hinders_an_update_that_waits_is_its_own(files: Spool, error: int, why: str) -> None:
    """The update's turn comes when another update is complete, and then no file can be made."""
    with (
        serving(parameters=[torch.ones(7)]) as server,
        Peer(server.address) as one,
        Peer(server.address) as two,
    ):
        for peer, name, kind in ((one, "one", Kind.WANT), (two, "two", Kind.WAIT)):
            start_by_hand(peer, name)
            peer.say(Message(Kind.PUSH, 1, 0, meta=PUSH))
            assert peer.hear().kind == kind
        files.error = error
        one.say(Message(Kind.RUN, 1, 0, 0, 0, body=payload([1.0])))
        assert one.hear(skip=(Kind.READY,)).kind == Kind.OUTCOME
        if not why:
            assert two.hear().kind == Kind.REFUSED
            assert status(server)["refused"] == {"no room": 1}
        else:
            wait_until(lambda: status(server)["problem"] != "")
            problem = status(server)["problem"]
            assert re.fullmatch(f"an update of 4,096 bytes waits for {why}", problem)
            shown = run_cli("serve", "status", server.address).out
            assert "an update of 4,096 bytes waits for " in " ".join(shown.split())
            files.error = None
            assert two.hear().kind == Kind.WANT
            two.say(Message(Kind.RUN, 1, 0, 0, 0, body=payload([1.0])))
            assert two.hear().kind == Kind.OUTCOME
            assert status(server)["updates"] == 2 and status(server)["refused"] == {}
        assert status(server)["problem"] == ""


def test_an_update_that_waits_for_a_disk_is_forgotten_with_its_worker(files: Spool) -> None:
    files.error = errno.ENOSPC
    with serving(parameters=[torch.ones(7)]) as server:
        with Peer(server.address) as peer:
            start_by_hand(peer)
            assert push_by_hand(peer, payload([1.0])).kind == Kind.WAIT
            assert status(server)["problem"] != ""
        wait_until(lambda: status(server)["problem"] == "")


@pytest.mark.parametrize(
    ("rule", "sizes", "least"),
    [(RULES["buffered Adam"], 4.0, "4.5"), (RULES["delayed"], 3.0, "3.5")],
)
def test_rules_that_leave_no_room_are_refused(rule: ServerRule, sizes: float, least: str) -> None:
    with pytest.raises(ValueError, match=f"must be at least {least}"):
        AsyncServer(rule, model_sizes=sizes)
    AsyncServer(rule, model_sizes=float(least)).stop()
