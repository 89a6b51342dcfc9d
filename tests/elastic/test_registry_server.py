"""The registry's own server: crashes, full disks, lost answers, garbage, beats."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from async_helpers import wait_until
from proxies import Forwarder
from registries import Host, in_threads, increment, make_registry_keys, serving, stopped
from test_registry_journal import disk_of

from diloco_comm.elastic.registry import (
    Registry,
    RegistryMismatch,
    RegistryUnavailable,
    connect,
)
from diloco_comm.elastic.registry import journal as journal_module
from diloco_comm.elastic.registry.client import RegistryClient


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keyed"])
def test_sigkill_in_mid_traffic_loses_no_acknowledged_swap(tmp_path: Path, has_keys: bool) -> None:
    """The record counts each client's swaps; a client adds to its own count only."""
    options: dict[str, Any] = {"journal": tmp_path / "journal"}
    key = None
    if has_keys:
        keys = make_registry_keys(tmp_path / "keys", "member")
        options["keys"], key = keys / "server.key_secret", keys / "member.key_secret"
    host = Host(**options)
    ends_at = threading.Event()
    told: dict[int, tuple[int, int]] = {}

    def work(client: int) -> None:
        registry = connect(host.address, run="r", timeout_s=0.3, key=key)
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
    counts = json.loads(connect(host.address, run="r", key=key).read())
    host.kill()
    assert len(told) == len(counts)
    for client, (acknowledged, doubtful) in told.items():
        assert acknowledged <= counts[client] <= acknowledged + doubtful


def test_a_restart_keeps_the_records_and_forgets_the_beats(tmp_path: Path) -> None:
    host = Host(journal=tmp_path)
    registry = connect(host.address, run="r", timeout_s=20)
    assert registry.swap(b"", b"x") and registry.beat("0", b"alive") == {"0": b"alive"}
    registry_id = registry.registry_id
    host.send_signal(signal.SIGINT)
    host.kill()
    host.start()
    assert registry.read() == b"x" and registry.beat("", b"") == {}
    assert registry.registry_id == registry_id
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


class Disk:
    """Stands in for ``os`` in the journal's module: a swap waits until ``let_go``, or fails.

    Attributes:
        count: Calls of ``fsync``.
        error: Number of the error of the waiting call; 0 for none.
    """

    def __init__(self) -> None:
        self.count, self.error = 0, 0
        self.waits, self.let_go = threading.Event(), threading.Event()

    def fsync(self, file: int) -> None:
        self.count += 1
        self.waits.set()
        assert self.let_go.wait(60)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Disk]:
    """Put a slow disk under the journals of this process."""

    def put() -> Disk:
        disk = Disk()
        monkeypatch.setattr(journal_module.os, "fsync", disk.fsync)
        return disk

    return put


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in a thread; return the thread, and a list for the result or the error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except RegistryUnavailable as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_swaps_share_one_fsync_and_nothing_else_waits_for_it(
    tmp_path: Path, disk: Callable[[], Disk]
) -> None:
    with serving(journal=tmp_path) as server:

        def opened(run: str) -> Registry:
            return connect(server.address, run=run, timeout_s=60)

        slow = disk()
        first = in_background(lambda: opened("run-0").swap(b"", b"0"))
        assert slow.waits.wait(60)
        reading = opened("run-0")
        assert reading.read() == b"", "a read must not see what a crash may take back"
        assert reading.beat("m", b"text") == {"m": b"text"}
        later = [
            in_background(lambda i=i: opened(f"run-{i % 4 + 1}").swap(b"", b"%d" % i))  # type: ignore[misc]
            for i in range(5)
        ]
        # One fsync for all that come meanwhile.
        time.sleep(1.0)
        assert reading.read() == b"" and slow.count == 1 and not first[1]
        slow.let_go.set()
        for thread, _ in (first, *later):
            thread.join()
        assert slow.count < 5
    # The first and the fifth swap compete for one run.
    outcomes = [found[0] for _, found in later]
    assert first[1] == [True] and outcomes[1:4] == [True] * 3 and sum(outcomes[::4]) == 1


def test_a_doubtful_swap_is_told_apart_from_a_certain_one(
    tmp_path: Path, disk: Callable[[], Disk]
) -> None:
    with serving(journal=tmp_path) as server:
        one, two, three = (connect(server.address, run="a", timeout_s=60) for _ in range(3))
        assert one.swap(b"", b"1")
        failing = disk()
        failing.error = errno.EIO
        doubtful = in_background(lambda: one.swap(b"1", b"2"))
        assert failing.waits.wait(60)
        # This one depends on the outcome of the swap before.
        depends = in_background(lambda: two.swap(b"1", b"3"))
        assert not depends[0].join(1.0) and not depends[1]
        failing.let_go.set()
        for thread, found in (doubtful, depends):
            thread.join()
            assert "journal cannot be written: Input/output error" in str(found[0])
        failing.error = 0
        assert not three.swap(b"0", b"2") and three.read() == b"1"


def test_a_read_whose_answer_is_lost_is_asked_again_and_a_swap_is_not() -> None:
    with serving() as server:
        cuts = threading.Event()

        def cut_one(data: bytes, is_answer: bool) -> bytes | None:
            """End the connection in place of passing an answer on."""
            if not (is_answer and cuts.is_set()):
                return data
            return cuts.clear()

        way = Forwarder(int(server.address.rpartition(":")[2]), look=cut_one)
        registry = connect(f"tcp://{way.address}", run="r", timeout_s=20)
        assert registry.swap(b"", b"x")
        cuts.set()
        assert registry.read() == b"x"
        cuts.set()
        assert registry.beat("m", b"1") == {"m": b"1"}
        cuts.set()
        # The swap happened, which the client cannot know.
        with pytest.raises(RegistryUnavailable):
            registry.swap(b"x", b"y")
        assert registry.read() == b"y" and not registry.swap(b"x", b"z")
        way.close()


def test_garbage_on_the_port_changes_nothing(tmp_path: Path) -> None:
    with serving() as server:
        registry = connect(server.address, run="r", timeout_s=20)
        assert registry.swap(b"", b"x")
        place = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        huge = struct.pack("<Q", 1 << 60) + struct.pack(">Q", 1 << 60)
        texts = [b"GET / HTTP/1.0\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f", huge, bytes(4096), b""]
        texts += [secrets.token_bytes(500) for _ in range(50)]
        for text in texts:
            with socket.create_connection(place) as raw, suppress(OSError):
                raw.sendall(text)
        with socket.create_connection(place) as raw, suppress(OSError):
            raw.settimeout(60)
            raw.sendall(huge * 100)
            # The host ends such a connection.
            assert raw.recv(1 << 16) == b""
        assert registry.read() == b"x" and registry.swap(b"x", b"y")


def test_a_look_brings_the_record_and_the_texts_that_have_changed() -> None:
    with serving() as server:
        one, two = (RegistryClient(server.address, "r", 20.0) for _ in range(2))
        beats = {"0": b"a\n1", "é": b"b\n1"}
        assert one.look("0", beats["0"]) == (b"", {"0": b"a\n1"}, {"0": 1})
        assert two.swap(b"", b"record")
        assert two.look("é", beats["é"]) == (b"record", beats, {"0": 1, "é": 1})
        # Behind the first line a text is what the client was told last.
        assert one.look("0", b"a\n2") == (b"record", beats, {"0": 2, "é": 1})
        assert two.look("é", b"c\n2")[1:] == ({"0": b"a\n1", "é": b"c\n2"}, {"0": 2, "é": 2})
        assert one.look("", b"")[1:] == ({"0": b"a\n1", "é": b"c\n2"}, {"0": 2, "é": 2})
        assert one.beat("", b"") == {"0": b"a\n2", "é": b"c\n2"}
        # Counts go on, where the server's byte begins anew.
        for _ in range(300):
            two.beat("é", b"c\n3")
            counts = one.look("", b"")[2]
        assert counts == {"0": 2, "é": 302}
        assert two.look("0", b"") == (b"record", {"é": b"c\n3"}, {"é": 302 - 256})
        assert one.look("", b"")[1:] == ({"é": b"c\n3"}, {"é": 302})


def test_beats_are_dropped_after_time_in_which_the_server_ran() -> None:
    host = Host(drop_after=2.5)
    registry = connect(host.address, run="r", timeout_s=20)
    registry.beat("old", b"1")
    with stopped(host):
        # Nobody can beat meanwhile.
        time.sleep(3.0)
    assert registry.beat("new", b"2") == {"old": b"1", "new": b"2"}
    wait_until(lambda: "old" not in registry.beat("new", b"2"), 60)
    assert registry.beat("", b"") == {"new": b"2"}
    host.kill()


def test_beats_and_runs_are_bounded() -> None:
    with serving() as server:

        def opened(run: str) -> Registry:
            return connect(server.address, run=run, timeout_s=20)

        registry = opened("beats")
        for number in range(1024):
            registry.beat(f"m{number}", b"1")
        with pytest.raises(RegistryUnavailable, match="1024"):
            registry.beat("more", b"1")
        assert "more" not in registry.beat("m7", b"")
        assert registry.beat("more", b"1")["more"] == b"1"

        def swap(number: int, old: bytes, new: bytes) -> bool:
            with closing(opened(f"run-{number}")) as run:
                return run.swap(old, new)

        assert all(swap(number, b"", b"1") for number in range(1024))
        with pytest.raises(RegistryUnavailable, match="1024 runs"):
            swap(1024, b"", b"1")
        assert swap(0, b"1", b"") and swap(1024, b"", b"1")
        assert opened("run-0").read() == b"" and opened("run-1024").read() == b"1"


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
