"""The memory of a server: bounded whatever the number of workers, and taken back from the idle."""

from __future__ import annotations

import threading

import pytest
import torch
from async_helpers import (
    HELLO,
    Peer,
    attach,
    serving,
    start_by_hand,
    status,
)

from diloco_comm.asynchronous.messages import Kind, Message


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
        "sending.PAUSE_S": 0.1,
        "sending.STALL_S": 1e6,
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
