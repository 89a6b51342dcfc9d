"""The registry's own server: crashes, full disks, garbage, beats."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from async_helpers import wait_until
from registries import Host, in_threads, increment, serving
from test_registry_journal import disk_of

from diloco_comm.base.log import DoubtfulWrite
from diloco_comm.base.service.sockets import receive
from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable, connect
from diloco_comm.elastic.registry import journal as journal_module
from diloco_comm.elastic.registry import server as server_module
from diloco_comm.elastic.registry.client import RegistryClient
from diloco_comm.elastic.registry.messages import (
    HEADER,
    MAGIC,
    MAX_FRAME,
    PROTOCOL,
    Kind,
    Message,
    ProtocolError,
    pack,
    parse,
)
from diloco_comm.elastic.registry.server import RegistryServer
from diloco_comm.elastic.registry.state import Beats, LimitReached, Records


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(0)


def test_sigkill_in_mid_traffic_loses_no_acknowledged_swap(tmp_path: Path) -> None:
    """The record counts each client's swaps; a client adds to its own count only."""
    host = Host(journal=tmp_path)
    ends_at = threading.Event()
    told: dict[int, tuple[int, int]] = {}

    def work(client: int) -> None:
        registry = connect(host.address, run="r", timeout_s=0.3)
        acknowledged = doubtful = 0
        while not ends_at.is_set():
            try:
                old = registry.read()
                counts = json.loads(old or b"[0, 0, 0, 0]")
                assert acknowledged <= counts[client] <= acknowledged + doubtful
                doubtful -= counts[client] - acknowledged
                acknowledged = counts[client]
                counts[client] += 1
                if registry.swap(old, json.dumps(counts).encode()):
                    acknowledged += 1
            except RegistryUnavailable:
                doubtful += 1
            told[client] = acknowledged, doubtful
            time.sleep(0.001)
        registry.close()

    def num_acknowledged() -> int:
        return sum(acknowledged for acknowledged, _ in list(told.values()))

    def kill() -> None:
        try:
            for pause in (0.03, 0.1, 0.05, 0.2, 0.01, 0.07):
                time.sleep(pause)
                host.kill()
                host.start()
            before = num_acknowledged()
            wait_until(lambda: num_acknowledged() > before + 20, 60)
        finally:
            ends_at.set()

    in_threads(lambda i: work(i) if i < 4 else kill(), 5)
    host.kill()
    host.start()
    counts = json.loads(connect(host.address, run="r").read())
    host.kill()
    assert len(told) == len(counts)
    for client, (acknowledged, doubtful) in told.items():
        assert acknowledged <= counts[client] <= acknowledged + doubtful


def test_a_restart_keeps_the_records_and_forgets_the_beats(tmp_path: Path) -> None:
    host = Host(journal=tmp_path)
    registry = RegistryClient(host.address, "r", 20.0)
    assert registry.swap(b"", b"x") and registry.beat("0", b"alive") == {"0": b"alive"}
    nonce, registry_id = registry.server_nonce, registry.registry_id
    host.send_signal(signal.SIGINT)
    host.kill()
    host.start()
    assert registry.read() == b"x" and registry.beat("", b"") == {}
    assert registry.server_nonce != nonce and registry.registry_id == registry_id
    host.kill()


def test_another_journal_folder_is_another_registry(tmp_path: Path) -> None:
    with serving(journal=tmp_path / "one") as server:
        registry = connect(server.address, run="r", timeout_s=20)
        assert registry.swap(b"", b"x") and registry.is_durable
    with serving(listen=server.address, journal=tmp_path / "two") as other:
        assert other.registry_id != server.registry_id
        for call in (
            lambda: registry.swap(b"", b"second line"),
            registry.read,
            lambda: registry.beat("0", b""),
        ):
            with pytest.raises(RegistryMismatch, match=f"is {other.registry_id}, and the run 'r'"):
                call()
        assert connect(server.address, run="r").read() == b""
    with serving(listen=server.address, journal=tmp_path / "one"):
        assert registry.read() == b"x"
    # A server without a journal is another registry with each start.
    with serving(listen=server.address) as volatile:
        registry = connect(server.address, run="r", timeout_s=20)
        assert not registry.is_durable and registry.registry_id == volatile.registry_id
    with serving(listen=server.address), pytest.raises(RegistryMismatch):
        registry.read()


def test_a_full_disk_refuses_swaps_and_nothing_else(tmp_path: Path) -> None:
    with serving(journal=tmp_path) as server:
        registry = connect(server.address, run="r", timeout_s=20)
        assert registry.swap(b"", b"x")
        with disk_of((tmp_path / "journal").stat().st_size + 5):
            for _ in range(2):
                with pytest.raises(
                    RegistryUnavailable, match="journal cannot be written: File too large"
                ):
                    registry.swap(b"x", b"y")
            assert registry.read() == b"x" and registry.beat("0", b"b") == {"0": b"b"}
            assert not registry.swap(b"wrong", b"y")
        assert registry.swap(b"x", b"z")
    with serving(journal=tmp_path) as server:
        assert connect(server.address, run="r").read() == b"z"


def test_swaps_share_one_fsync_and_beats_do_not_wait_for_it(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RegistryServer(journal=tmp_path)
    known = bytes.fromhex(server.registry_id)
    peers = []
    for i in range(5):
        peers.append(context.socket(zmq.DEALER))
        peers[i].connect(server.address)
        run = f"run-{i % 4}".encode()
        peers[i].send_multipart(pack(Message(Kind.SWAP, i, known, parts=(run, b"", b"%d" % i))))
    beating = context.socket(zmq.DEALER)
    beating.connect(server.address)
    beating.send_multipart(pack(Message(Kind.BEAT, 9, parts=(b"run-0", b"m", b"text"))))
    beating.send_multipart(pack(Message(Kind.READ, 10, parts=(b"run-0",))))
    during: list[list[Message | None]] = []

    def answer(peer: zmq.Socket, wait_ms: int) -> Message | None:
        frames = receive(peer, wait_ms)
        return None if frames is None else parse([frame.buffer for frame in frames])

    def fsync(file: int) -> None:
        during.append([answer(beating, 5000), answer(beating, 5000), answer(peers[0], 50)])

    monkeypatch.setattr(journal_module.os, "fsync", fsync)
    arrived = [receive(server._socket, 20_000) for _ in range(7)]
    try:
        # One turn handles all messages that have arrived.
        monkeypatch.setattr(
            server_module, "receive", lambda *_: arrived.pop(0) if arrived else None
        )
        server.turn(5000)
        monkeypatch.undo()
        told = [answer(peer, 5000) for peer in peers]
    finally:
        server.close()
    assert len(during) == 1
    beat, read, swapped = during[0]
    assert beat.parts == (b"m", b"text") and swapped is None
    assert read.parts == (b"",), "a read must not see what a crash may take back"
    # The first and the fifth swap compete for one run.
    outcomes = [message.parts for message in told]
    assert outcomes[1:4] == [(b"\1",)] * 3 and {*outcomes[::4]} == {(b"\1",), (b"\0",)}


def test_a_doubtful_swap_is_told_apart_from_a_certain_one() -> None:
    class Disk:
        registry_id, records = bytes(16), {"a": b"1"}

        def append(self, changes: object) -> None:
            raise DoubtfulWrite(5, "Input/output error", "journal")

    records = Records(Disk())  # type: ignore[arg-type]
    told: list[tuple[str, Kind, bytes]] = []

    def note(name: str) -> Callable[[object], None]:
        return lambda outcome: told.append((name, outcome.kind, outcome.part))

    records.swap("a", b"0", b"2", note("certain"))
    records.swap("a", b"1", b"2", note("doubtful"))
    records.swap("a", b"1", b"3", note("depends"))
    assert records.read("a") == b"1" and told == []
    records.commit()
    reason = b"journal cannot be written: Input/output error"
    assert told == [
        ("certain", Kind.SWAPPED, b"\0"),
        ("doubtful", Kind.DOUBTFUL, reason),
        ("depends", Kind.DOUBTFUL, reason),
    ]
    assert records.read("a") == b"1"


def test_garbage_on_the_port_changes_nothing(context: zmq.Context) -> None:
    with serving() as server:
        registry = connect(server.address, run="r", timeout_s=20)
        assert registry.swap(b"", b"x")
        host, port = server.address.removeprefix("tcp://").split(":")
        known = bytes.fromhex(server.registry_id)
        for text in (
            b"GET / HTTP/1.0\r\n\r\n",
            secrets.token_bytes(500),
            b"\xff\0\0\0\0\0\0\0\1\x7f",
        ):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(text)
        header = HEADER.pack(MAGIC, PROTOCOL, Kind.SWAP, 7, known, bytes(16), 0)
        refused = [
            ([header], "SWAP has 3 frames after the header, got 0"),
            ([header, b"r", b"x", bytes(8193)], "a frame of SWAP has 8193 bytes"),
            ([header, b"a b", b"x", b"y"], "run must have 1 to 100 printable characters"),
            ([header, b"\xff", b"x", b"y"], "can't decode byte 0xff"),
            (
                [HEADER.pack(MAGIC, 9, Kind.SWAP, 7, known, bytes(16), 0), b"r", b"x", b"y"],
                "protocol version 9 was given, 1 is spoken here",
            ),
            ([HEADER.pack(MAGIC, PROTOCOL, 77, 7, known, bytes(16), 0)], "no kind of message 77"),
            (
                pack(Message(Kind.RECORD, 7, known, parts=(b"z",))),
                "RECORD is not for a server",
            ),
            (
                pack(Message(Kind.SWAP, 7, parts=(b"r", b"x", b"y"))),
                "a swap names the registry that it is for",
            ),
            (pack(Message(Kind.BEAT, 7, known, parts=(b"r", b"a b", b"y"))), "member must have"),
        ]
        silent = [[b""], [b"x"], [b"", b""], [secrets.token_bytes(HEADER.size)], [header[:-1]]]
        peer = context.socket(zmq.DEALER)
        peer.connect(server.address)
        for frames in silent:
            peer.send_multipart(frames)
        for frames, sentence in refused:
            peer.send_multipart(frames)
            found = receive(peer, 20_000)
            assert found is not None
            answer = parse([frame.buffer for frame in found])
            assert (answer.kind, answer.number) == (Kind.REFUSED, 7) and sentence in answer.sentence
        # ZeroMQ ends the connection of this peer.
        huge = context.socket(zmq.DEALER)
        huge.connect(server.address)
        huge.send_multipart([header, b"r", b"x", bytes(MAX_FRAME + 1)])
        assert receive(huge, 200) is None
        assert registry.read() == b"x" and registry.swap(b"x", b"y")


def test_any_bytes_are_a_message_or_a_protocol_error() -> None:
    message = pack(Message(Kind.BEATS, 3, b"i" * 16, b"n" * 16, True, (b"m", b"t")))
    assert parse(message) == Message(Kind.BEATS, 3, b"i" * 16, b"n" * 16, True, (b"m", b"t"))
    for place in range(HEADER.size):
        for value in (0, 1, 127, 255):
            header = message[0][:place] + bytes([value]) + message[0][place + 1 :]
            for frames in ([header], [header, b"m"], [header, b"m", b"t"]):
                try:
                    parse(frames)
                except ProtocolError as error:
                    assert error.number is not None or place < 4
    for frames in ([], [b""], [b"DCRG"]):
        with pytest.raises(ProtocolError):
            parse(frames)


def test_beats_are_dropped_after_time_in_which_the_server_ran() -> None:
    beats = Beats(drop_after=10.0)

    def run_for(seconds: float, now: list[float] = [1000.0]) -> None:  # noqa: B006
        for _ in range(int(seconds * 2)):
            now[0] += 0.5
            beats.pass_time(now[0])

    beats.pass_time(1000.0)
    beats.beat("r", "old", b"1")
    run_for(8)
    assert beats.beat("r", "new", b"2") == {"old": b"1", "new": b"2"}
    # An hour in which the process stood still counts as a second.
    beats.pass_time(1008.0 + 3600.0)
    assert set(beats.beat("r", "", b"")) == {"old", "new"}
    for now in range(4609, 4611):
        beats.pass_time(float(now))
    assert beats.beat("r", "", b"") == {"new": b"2"}
    run_for(0)
    assert beats.beat("other", "", b"") == {}


def test_beats_and_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_comm.elastic.registry.state.MAX_MEMBERS", 3)
    monkeypatch.setattr("diloco_comm.elastic.registry.state.MAX_BEATS", 4)
    monkeypatch.setattr("diloco_comm.elastic.registry.state.MAX_RUNS", 2)
    beats = Beats(drop_after=10.0)
    for name in "abcabc":
        beats.beat("r", name, b"1")
    with pytest.raises(LimitReached, match="holds the beats of 3 members, no more fit"):
        beats.beat("r", "d", b"1")
    beats.beat("s", "a", b"1")
    with pytest.raises(LimitReached, match="holds the beats of 4 members"):
        beats.beat("t", "a", b"1")
    beats.beat("s", "a", b"")
    assert beats.beat("t", "a", b"1") == {"a": b"1"}
    # Members that are gone make room.
    for now in range(1, 20):
        beats.pass_time(float(now))
    assert beats.beat("r", "d", b"1") == {"d": b"1"}
    records = Records(None)
    told: list[object] = []
    records.swap("a", b"", b"1", told.append)
    records.swap("b", b"", b"1", told.append)
    with pytest.raises(LimitReached, match="holds 2 runs"):
        records.swap("c", b"", b"1", told.append)
    records.commit()
    records.swap("a", b"1", b"", told.append)
    records.commit()
    records.swap("c", b"", b"1", told.append)
    records.commit()
    assert len(told) == 4 and records.read("c") == b"1" and records.read("a") == b""


def test_two_clients_increment_while_their_server_hangs_now_and_then(tmp_path: Path) -> None:
    host = Host(journal=tmp_path)

    def work(client: int) -> None:
        if client == 2:
            for _ in range(3):
                time.sleep(0.03)
                host.send_signal(signal.SIGSTOP)
                time.sleep(0.1)
                host.send_signal(signal.SIGCONT)
            return
        registry = connect(host.address, run="r", timeout_s=20)
        for i in range(30):
            increment(registry, f"{client}-{i}")

    in_threads(work, 3)
    assert connect(host.address, run="r").read().split()[0] == b"60"
    host.kill()
