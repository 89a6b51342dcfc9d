"""A replica that waits says so in the log, at growing intervals."""

from __future__ import annotations

import logging
import socket

import pytest
import torch
import torch.distributed as dist
from fault_replicas import (
    HALF_AN_HOUR,
    Address,
    Fresh,
    Replica,
    connect,
    finish,
    listen_to_the_log,
)

from diloco_comm.exchange import waits
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import WireFormat
from diloco_comm.rounds import handshake

H = 4

# ------------------------------------------------------------------------------- the log


def wait_and_tell(rank: int, world: int, address: Address) -> list[str]:
    lines = listen_to_the_log()
    other = connect(address)
    if rank == 1:
        other.wait(["told/meeting"])
    logging.getLogger("diloco_comm").addHandler(_Setter(other, "the rendezvous", "told/meeting"))
    logging.getLogger("diloco_comm").addHandler(_Setter(other, "to begin sync", "told/header"))
    replica = Replica(address, rank, range(2), HALF_AN_HOUR)
    if rank == 1:
        other.wait(["told/header"])
    finish(replica, H)
    return lines


def send_slowly(rank: int, world: int) -> list[str]:
    """Both have begun; their payloads need two seconds."""
    ex, params = Exchange.from_group(), [torch.zeros(50_000)]
    ex.exchange_objects(b"")
    ex.emulate_link(gbps=0.0002, rtt_ms=0.0)
    lines = listen_to_the_log()
    with ex:
        buffers = ex.buffers(50_000, WireFormat("int8"))
        ex.start(buffers, outer=None, params=params, header=Header(fragment=0, round=7)).wait()
    return lines


def test_a_wait_for_payloads_is_told_to_the_log(fresh_workers: Fresh) -> None:
    for lines in fresh_workers(2).run(send_slowly, timeout=60):
        assert lines[0].startswith("waiting for the payloads and votes of sync of fragment 0, rou")


class _Setter(logging.Handler):
    """Sets a key when a line with some words comes."""

    def __init__(self, store: dist.Store, words: str, key: str) -> None:
        super().__init__()
        self.store, self.words, self.key = store, words, key

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.store.set(self.key, "")


def test_waits_are_told_to_the_log(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    results = pool.run(wait_and_tell, pool.store, timeout=30)
    meeting, header = results[0][0], results[0][-1]
    place = f"tcp://127.0.0.1:{pool.store[1]}"
    assert meeting.startswith("waiting for replica 1 (never heard of) at the rendezvous of"), (
        meeting
    )
    assert f"replicas [0, 1] on {place}, for 1 s now" in meeting, meeting
    assert header.startswith("waiting for replica 1 to begin sync of fragment 0, round 0")


@pytest.mark.nightly("2 s; the first tier has other waits that are told")
def test_a_store_that_does_not_come_is_told_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{place.getsockname()[1]}"
    with pytest.raises(dist.DistError):
        handshake.connected_store(address, 1.0)
    assert f"waiting for the store at {address}, for 0 s now" in caplog.text


def test_the_log_is_told_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    log = waits.WaitLog()
    for second in range(1200):
        now[0] = float(second)
        log.tick(lambda: "replica 1")
    seconds = [int(record.getMessage().split()[5]) for record in caplog.records]
    assert seconds == [10, 20, 40, 80, 160, 320, 620, 920]
    assert caplog.records[0].getMessage() == "waiting for replica 1, for 10 s now"
