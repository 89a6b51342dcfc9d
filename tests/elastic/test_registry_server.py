"""The registry's own server: crashes, full disks, garbage, keys, beats."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from registries import Host, in_threads, increment, serving
from test_registry_journal import disk_of
from torch.distributed import HashStore

from diloco_comm.base.service.curve import make_keys
from diloco_comm.base.service.sockets import receive
from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable, connect
from diloco_comm.elastic.registry import journal as journal_module
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

    def work(client: int) -> tuple[int, int]:
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
            time.sleep(0.001)
        registry.close()
        return acknowledged, doubtful

    def kill(_: int) -> None:
        try:
            for pause in (0.03, 0.1, 0.05, 0.2, 0.01, 0.07):
                time.sleep(pause)
                host.kill()
                host.start()
            # Clients whose request was lost wait for their timeout.
            time.sleep(0.5)
        finally:
            ends_at.set()

    told = in_threads(lambda i: work(i) if i < 4 else kill(i), 5)[:4]
    host.kill()
    host.start()
    counts = json.loads(connect(host.address, run="r").read())
    host.kill()
    for count, (acknowledged, doubtful) in zip(counts, told, strict=True):
        assert acknowledged <= count <= acknowledged + doubtful
    assert sum(counts) > 20


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
    with serving(address=server.address, journal=tmp_path / "two") as other:
        assert other.registry_id != server.registry_id
        for call in (
            lambda: registry.swap(b"", b"second line"),
            registry.read,
            lambda: registry.beat("0", b""),
        ):
            with pytest.raises(RegistryMismatch, match=f"is {other.registry_id}, and the run 'r'"):
                call()
        assert connect(server.address, run="r").read() == b""
    with serving(address=server.address, journal=tmp_path / "one"):
        assert registry.read() == b"x"
    # A server without a journal is another registry with each start.
    with serving(address=server.address) as volatile:
        registry = connect(server.address, run="r", timeout_s=20)
        assert not registry.is_durable and registry.registry_id == volatile.registry_id
    with serving(address=server.address), pytest.raises(RegistryMismatch):
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
    # One turn handles all messages that have arrived.
    time.sleep(0.3)
    try:
        server.turn(5000)
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
            raise journal_module.DoubtfulWrite(5, "Input/output error", "journal")

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
                "protocol 9 was given, 1 is spoken here",
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


def test_a_client_drops_what_is_not_its_answer(context: zmq.Context) -> None:
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    registry = connect(f"tcp://127.0.0.1:{port}", run="r", timeout_s=20)

    def serve(_: int) -> None:
        for given in (b"first", b"second"):
            peer, header, run = server.recv_multipart()
            number = parse([header, run]).number
            late = Message(Kind.RECORD, number - 1, b"i" * 16, parts=(b"late",))
            own = Message(Kind.RECORD, number, b"i" * 16, parts=(given,))
            for frames in ([b"garbage"], pack(late), pack(own)):
                server.send_multipart([peer, *frames])
        peer, header, _ = server.recv_multipart()
        server.send_multipart([peer, header[:4] + b"\x09\0" + header[6:], b"x"])

    serving = threading.Thread(target=serve, args=(0,))
    serving.start()
    assert registry.read() == b"first" and registry.read() == b"second"
    with pytest.raises(RegistryMismatch, match="protocol 9 was given, 1 is spoken here"):
        registry.read()
    serving.join()


def test_a_swap_is_sent_once_and_a_read_again(context: zmq.Context) -> None:
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    registry = RegistryClient(f"tcp://127.0.0.1:{port}", "r", 0.7, registry_id="ab" * 16)
    for call, least, most in (
        (lambda: registry.swap(b"", b"x"), 1, 1),
        (registry.read, 2, 9),
    ):
        with pytest.raises(RegistryUnavailable, match=r"has not answered for 0.7 s: is it running"):
            call()
        count = 0
        while receive(server) is not None:
            count += 1
        assert least <= count <= most


def test_keys_let_in_the_allowed_and_nobody_else(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["worker", "one", "two"])
    (keys / "allowed" / "two.key").unlink()
    make_keys(tmp_path / "other")
    os.replace(tmp_path / "other" / "server.key", keys / "wrong.key")
    with serving(keys=keys) as server:

        def allowed(key: Path | None) -> bool:
            registry = connect(server.address, run="r", timeout_s=0.5, key=key)
            try:
                registry.read()
                return True
            except RegistryUnavailable as error:
                asked = "want keys" if key is None else "know the key"
                assert asked in str(error)
                return False
            finally:
                registry.close()

        assert connect(server.address, run="r", timeout_s=20, key=keys).swap(b"", b"x")
        assert allowed(keys / "one.key_secret")
        assert not allowed(None) and not allowed(keys / "two.key_secret")
        # A client talks to the server whose key it knows, and to no other.
        os.replace(keys / "wrong.key", keys / "server.key")
        assert not allowed(keys)
    with pytest.raises(ValueError, match="there is no key"):
        connect(server.address, run="r", key=keys / "three.key_secret")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:5", "tcp://a.example:5"])
def test_an_open_address_needs_keys_or_a_word(address: str) -> None:
    with pytest.raises(ValueError, match="reached from other machines: give keys="):
        RegistryServer(address)
    with pytest.raises(ValueError, match="is another machine: give key="):
        connect(address, run="r")
    connect(address, run="r", insecure=True).close()
    store = address.replace("tcp", "store")
    with pytest.raises(ValueError, match="TCPStore has no keys: give insecure=True"):
        connect(store, run="r")
    with pytest.raises(ValueError, match="messages are not encrypted: use etcds"):
        connect(address.replace("tcp", "etcd"), run="r")
    connect(store, run="r", insecure=True).close()


def test_a_process_ends_well_whose_registry_does_not_answer() -> None:
    program = """
from diloco_comm.elastic.registry import RegistryUnavailable, connect
for address in ("tcp://127.0.0.1:1", "store://127.0.0.1:1"):
    registry = connect(address, run="r", timeout_s=0.1)
    registry.itself = registry
    try:
        registry.read()
    except RegistryUnavailable:
        print("unavailable")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [b"unavailable"] * 2)


def test_what_is_dropped_without_close_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in range(3):
        registry = connect(HashStore(), run="r")
        assert registry.swap(b"", b"x")
        registry = connect("tcp://127.0.0.1:1", run="r", timeout_s=0.05)
    del registry
    for _ in range(1000):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    for address in ("here", "http://a:1", "tcp://a", "etcd://a", "store://:1", 5, "tcp://a:b"):
        with pytest.raises(ValueError, match="address"):
            connect(address, run="r", insecure=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        connect("tcp://127.0.0.1:1", run="r", timeout_s=0)
    with pytest.raises(ValueError, match="registry_id must be 32 hexadecimal digits, got 'x'"):
        connect("tcp://127.0.0.1:1", run="r", registry_id="x")
    with pytest.raises(ValueError, match="drop_after must be 1 to 2592000 seconds, got 0"):
        RegistryServer(drop_after=0)
    with pytest.raises(ValueError, match=r"folder with ca\.pem"):
        connect("etcds://127.0.0.1:1", run="r", key=tmp_path)


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
