"""Posts: the figures of each replica at the host of its table, which other replicas do not read."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from async_helpers import wait_until
from elastic_replicas import Run, live
from fault_replicas import BLOCK, connect, make_model, make_optimizer, take_inner_step
from registries import serving
from workers import Pool

from diloco_comm import _C, DiLoCo, Elastic, Link, StorePeers, Wire
from diloco_comm.base.store_host import open_store
from diloco_comm.elastic.registry.client import RegistryClient
from diloco_comm.exchange.membership.stores import StoreTable
from diloco_comm.group import table
from diloco_comm.group.table import Look, TableThread
from diloco_comm.monitor.figures import MAX_BYTES, MOST_NAMED, Figures

H = 4


def figures_at(host: _C.StoreHost, run: str = "test") -> dict[int, Figures]:
    """Return the figures of a run by replica; each member's name begins with that number."""
    found = {}
    for of, member, text, age_s in host.posted():
        figures = Figures.from_bytes(text)
        assert of == run and figures is not None and len(text) <= MAX_BYTES and age_s >= 0.0
        assert member.partition(".")[0] == str(figures.replica)
        found[figures.replica] = figures
    return found


def live_and_post(
    rank: int, world: int, store: tuple[str, int], address: str, kind: str
) -> tuple[int, int]:
    """Train until the test says so; return the inner steps, and the applied rounds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    table.POST_S = 0.3
    signs = connect(store)
    signs.set(f"pid {rank}", str(os.getpid()))
    signs.wait([f"begin {rank}"])
    model = make_model()
    optimizer = make_optimizer(model)
    elastic = Elastic(address, run="test", replica=rank, min_replicas=1, founding_wait=5.0)
    fixed = StorePeers(address, replica=rank, of=world, name="two of them")
    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=H,
        peers=elastic if kind == "elastic" else fixed,
        wire=Wire(block_size=BLOCK),
        link=Link("tcp", chunk_bytes=512, timeout=60.0),
        norms=True,
    )
    while not (diloco.inner_step % H == 0 and signs.check([f"end after {diloco.inner_step}"])):
        if signs.check([f"pause {rank}"]):
            with diloco.doing("evaluation"):
                signs.wait([f"go on {rank}"])
            signs.delete_key(f"pause {rank}")
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.02)
        if rank == 0 and diloco.inner_step % H == 0 and signs.check(["end"]):
            signs.set(f"end after {diloco.inner_step + H}", "")
    diloco.close()
    return diloco.inner_step, diloco.totals().num_syncs


def test_the_registry_has_the_figures_of_each_replica(
    fresh_workers: Callable[..., Pool],
) -> None:
    with serving() as server:
        host = server.host
        pool = fresh_workers(2, init_group=False)
        signs = connect(pool.store)
        for rank in range(2):
            signs.set(f"begin {rank}", "")
        pool.submit(live_and_post, pool.store, server.address, "elastic")

        def is_seen(condition: Callable[[Figures], bool], *replicas: int) -> bool:
            found = figures_at(host)
            return found.keys() >= set(replicas) and all(condition(found[one]) for one in replicas)

        wait_until(lambda: is_seen(lambda one: one.group_size == 2 and one.rounds > 1, 0, 1), 60)
        found = figures_at(host)
        for one in found.values():
            assert one.sent_bytes > 0 and one.received_bytes > 0 and one.rate > 0.0
            assert one.inner_step >= H * one.rounds and one.norm > 0.0 and one.round_trip_s > 0.0
            assert 0.0 < one.goodput <= 1.0 and one.view > 0 and one.skipped == 0
        # The beats, which the members read, have none of this.
        assert not [text for *_, text, _ in host.beats() if b"retransmits" in text]
        assert host.records().keys() == {"test"} and host.facts()["connections"] >= 2
        # One replica stands still: the other one waits, and says for whom.
        pid = int(signs.get("pid 1"))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_seen(lambda one: one.waits_for == (1,) and one.waits_s > 2.0, 0), 60)
        os.kill(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: is_seen(lambda one: one.group_size == 1 and one.rounds > 5, 0), 60)
        # The last post of a killed replica stays, and grows old.
        ages = {member[0]: age for _, member, _, age in host.posted()}
        assert ages["1"] > ages["0"]
        signs.set("end", "")
        pool.collect(timeout=60, expect_exit={1})
        # Nobody waits until the host has heard that a post is taken back.
        wait_until(lambda: figures_at(host).keys() == {1}, 60)


def test_a_fixed_group_posts_at_its_store(fresh_workers: Callable[..., Pool]) -> None:
    hosted = open_store("127.0.0.1", 0)
    pool = fresh_workers(2, init_group=False)
    signs = connect(pool.store)
    signs.set("begin 0", "")
    pool.submit(live_and_post, pool.store, hosted.address, "fixed")

    def found() -> dict[int, Figures]:
        return figures_at(hosted.store, "two-of-them")

    # Before there is a group, a replica says for whom it waits.
    wait_until(lambda: 0 in found() and found()[0].waits_for == (1,), 60)
    assert found()[0].group_size == 0 and found()[0].waits_s > 0.0
    signs.set("begin 1", "")
    wait_until(lambda: [one.rounds > 2 for one in found().values()] == [True, True], 60)
    for one in found().values():
        assert one.group_size == 2 and one.sent_bytes > 0 and one.round_trip_s > 0.0
        assert one.goodput != one.goodput
    # A replica that lives evaluates: the other one says for whom it waits.
    for late in (1, 0):
        signs.set(f"pause {late}", "")
        wait_until(lambda late=late: found()[1 - late].waits_for == (late,), 60)  # type: ignore[misc]
        wait_until(lambda late=late: found()[1 - late].waits_s > 1.0, 60)  # type: ignore[misc]
        assert (found()[late].phase, found()[late].waits_s) == ("evaluation", 0.0)
        signs.set(f"go on {late}", "")
        rounds = found()[late].rounds
        wait_until(lambda late=late, n=rounds: found()[late].rounds > n, 60)  # type: ignore[misc]
        wait_until(lambda: all(one.waits_s < 1.0 for one in found().values()), 60)
    signs.set("end", "")
    pool.collect(timeout=60)
    wait_until(lambda: found() == {}, 60)


@pytest.mark.nightly("10 s; the other tests have replicas of one worker")
def test_worker_0_alone_posts(fresh_workers: Callable[..., Pool]) -> None:
    with serving() as server:
        pool = fresh_workers(2, init_group=False)
        run = Run(1, 150, num_workers=2)
        pool.submit(live, pool.store, server.address, run)
        wait_until(lambda: bool(server.host.posted()), 60)
        found = {member for _ in range(20) for _, member, *_ in server.host.posted()}
        pool.collect(timeout=100)
        assert len(found) == 1
        wait_until(lambda: server.host.posted() == [], 60)


class Counted:
    """Figures whose first call fails, as one may that meets the training thread's work."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> bytes:
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return str(self.num_calls).encode()


def start(client: RegistryClient | StoreTable, figures: Callable[[], bytes]) -> TableThread:
    # Without a first look there is no connection.
    thread = TableThread(client, 0.01, lambda: ("0.ab", b"beat"), lambda _: None, figures)
    thread.start()
    return thread


def test_posts_keep_their_period_and_the_last_one_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "POST_S", 0.25)
    monkeypatch.setattr(table, "_FIRST_POST_S", 0.0)
    with serving() as server:
        figures, began = Counted(), time.monotonic()
        thread = start(RegistryClient(server.address, "r", 20.0), figures)
        wait_until(lambda: figures.num_calls >= 4, 60)
        assert (figures.num_calls - 1) * table.POST_S <= time.monotonic() - began
        wait_until(lambda: bool(server.host.posted()), 60)
        ((run, member, text, _),) = server.host.posted()
        assert (run, member) == ("r", "0.ab") and int(text) >= 2
        thread.close(20.0)
        wait_until(lambda: server.host.posted() == [], 60)


class Failing(StoreTable):
    """A table whose posts raise an error that no connection raises."""

    def post(self, name: str, text: bytes) -> None:
        raise TypeError("an error of ours")


@pytest.mark.parametrize("part", ["figures", "post"])
def test_figures_that_always_fail_are_said_once_and_end_nothing(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table, "POST_S", 0.0)
    monkeypatch.setattr(table, "_FIRST_POST_S", 0.0)
    calls: list[int] = []

    def figures() -> bytes:
        calls.append(1)
        if part == "figures":
            raise ValueError("no figures")
        return b"x"

    kind = StoreTable if part == "figures" else Failing
    thread = start(kind(dist.HashStore(), "run"), figures)
    wait_until(lambda: len(calls) > 10, 60)
    assert thread._thread.is_alive()
    thread.close(20.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "cannot post its figures" in caplog.text
    assert ("no figures" if part == "figures" else "an error of ours") in caplog.text


def test_a_post_while_another_thread_closes_raises_nothing() -> None:
    class Closing(RegistryClient):
        """Another thread closes behind the first look at the connection."""

        @property
        def _client(self) -> Any:
            found, self.found = self.found, None
            return found

        @_client.setter
        def _client(self, client: Any) -> None:
            self.found = client

    with serving() as server, closing(Closing(server.address, "r", 20.0)) as client:
        one = RegistryClient(server.address, "r", 20.0)
        one.look("0.ab", b"beat")
        client._client = one._client
        client.post("0.ab", b"x")
        wait_until(lambda: bool(server.host.posted()), 60)
        one.close()


# ------------------------------------------------------------------- hosts that take no posts


def whole(stream: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = stream.recv(num_bytes - len(found))
        if not more:
            raise OSError("closed")
        found += more
    return found


def packet(stream: socket.socket) -> bytes:
    """Read a packet of the store's protocol, without the size before it."""
    return whole(stream, struct.unpack("<Q", whole(stream, 8))[0])


@contextmanager
def before_posts(address: str) -> Iterator[tuple[str, list[int]]]:
    """Pass on what a host says, but for the word in its hello that it takes posts.

    Yields:
        The address, and the kinds of all requests that have come there.
    """
    target = "127.0.0.1", int(address.rpartition(":")[2])
    kinds: list[int] = []

    def ask(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                request = packet(client)
                kinds.append(request[0])
                server.sendall(struct.pack("<Q", len(request)) + request)
        server.close()

    def answer(client: socket.socket, server: socket.socket) -> None:
        word = struct.pack("<Q", 5) + b"posts"
        with suppress(OSError):
            hello = packet(server)
            assert hello.endswith(word)
            hello = hello.removesuffix(word)
            client.sendall(struct.pack("<Q", len(hello)) + hello)
            while data := server.recv(1 << 16):
                client.sendall(data)
        client.close()

    def accept() -> None:
        with suppress(OSError):
            while True:
                ends = listener.accept()[0], socket.create_connection(target)
                for work in (ask, answer):
                    threading.Thread(target=work, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", kinds
        listener.shutdown(socket.SHUT_RDWR)


def test_a_host_from_before_posts_is_sent_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table, "POST_S", 0.01)
    monkeypatch.setattr(table, "_FIRST_POST_S", 0.0)
    with serving() as server, before_posts(server.address) as (address, kinds):
        figures = Counted()
        thread = start(RegistryClient(address, "r", 20.0), figures)
        wait_until(lambda: figures.num_calls > 3 and len(kinds) > 5, 60)
        thread.close(20.0)
        hello, beat = 0, 14
        assert set(kinds) == {hello, beat} and kinds.count(hello) == 1
        assert server.host.posted() == [] and caplog.records == []


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore"])
def test_a_store_of_torch_is_sent_none(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(table, "POST_S", 0.01)
    monkeypatch.setattr(table, "_FIRST_POST_S", 0.0)
    store: Any = dist.HashStore()
    if kind == "TCPStore":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elif kind == "FileStore":
        store = dist.FileStore(str(tmp_path / "store"), 1)
    figures = Counted()
    thread = start(StoreTable(dist.PrefixStore("p", store), "run"), figures)
    wait_until(lambda: figures.num_calls > 3, 60)
    thread.close(20.0)
    # The table's id, its names, and the beat.
    assert store.num_keys() - (kind == "FileStore") <= 3
    assert caplog.records == []


# ------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("prefixes", "run"),
    [
        ([], "two-words"),
        (["a job/1"], "a-job-1-two-words"),
        (["a", "b"], "a-b-two-words"),
        (["a\u202eb\x01"], "a-b--two-words"),
        (["default_pg", "0/", f"diloco_comm/{'0a' * 16}"], "two-words"),
        (["default_pg", "0/", "3/", "diloco_comm/named"], "3-two-words"),
        (["job", "default_pg", "0/", "diloco_comm/named"], "job-two-words"),
        (["job", "diloco-comm/two words"], "job-two-words"),
        (["x" * 200], "x" * 90 + "-two-words"),
    ],
)
def test_the_run_of_a_store_has_the_prefixes_of_its_job(prefixes: list[str], run: str) -> None:
    host: Any = open_store("127.0.0.1", 0).store
    # Another job at the same store.
    StoreTable(dist.PrefixStore("other", host)).look("0.cd", b"beat")
    store = host
    is_elastic = prefixes[-1:] == ["diloco-comm/two words"]
    for prefix in prefixes if is_elastic else (*prefixes, "diloco_comm/two words"):
        store = dist.PrefixStore(prefix, store)
    tables = [StoreTable(store, "two words") for _ in range(2)]
    for number, one in enumerate(tables):
        one.look(f"{number}.ab", b"beat")
        one.post(f"{number}.ab", b"text")
    assert {found[0] for found in host.posted()} == {run} and len(host.posted()) == 2
    for number, one in enumerate(tables):
        one.post(f"{number}.ab", b"")
    assert host.posted() == []


def test_a_post_that_does_not_fit_disturbs_nobody() -> None:
    with serving() as server:
        with closing(RegistryClient(server.address, "r", 20.0)) as client:
            client.post("0.ab", b"too early")
            assert client.look("0.ab", b"beat") == Look(b"", {"0.ab": b"beat"}, {"0.ab": 1})
            for name, text in (("0.ab", b"x" * 2049), ("a b", b"x"), ("", b"x")):
                client.post(name, text)
            assert client.swap(b"", b"record") and server.host.posted() == []
            # Any client of the run may post under the name of another one, as it may beat.
            client.post("1.cd", b"x" * 2048)
            assert client.look("", b"").beats == {"0.ab": b"beat"}
            assert [one[:3] for one in server.host.posted()] == [("r", "1.cd", b"x" * 2048)]
        client.post("1.cd", b"")


def test_all_figures_fit_into_a_post() -> None:
    longest = {"int": (1 << 62) - 1, "float": 1.2345678901234567e-300, "str": '"' * 64}
    values = {one.name: longest.get(str(one.type), ()) for one in fields(Figures)}
    values["waits_for"] = ((1 << 62) - 1,) * MOST_NAMED
    found = Figures(**values)
    assert len(found.to_bytes()) <= MAX_BYTES and Figures.from_bytes(found.to_bytes()) == found
    for value in ("1" + "0" * 999, "1e400", "-1", "NaN", "true", '"1"'):
        text = b'{"schema": 1, "replica": 3, "rounds": 7, "rate": %s}' % value.encode()
        assert repr(Figures.from_bytes(text)) == repr(Figures(3, rounds=7))
        assert Figures.from_bytes(b'{"schema": 1, "replica": %s}' % value.encode()) is None
    assert Figures.from_bytes(b'{"schema": 1, "rate": 1}') is None


@pytest.mark.parametrize("norm", [2.0**62, 1e300, math.inf])
def test_the_norm_of_a_replica_that_diverges_is_sent(norm: float) -> None:
    found = Figures.from_bytes(Figures(3, norm=norm).to_bytes())
    assert found is not None and found.norm == min(norm, sys.float_info.max)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0])
def test_one_value_that_is_not_sound_does_not_hide_a_replica(value: float) -> None:
    for name in ("rate", "exchange_s", "created"):
        sent = Figures(3, rounds=7, phase="steps", **{name: value}).to_bytes()
        assert b"Infinity" not in sent and b"NaN" not in sent and name.encode() not in sent
        assert repr(Figures.from_bytes(sent)) == repr(Figures(3, rounds=7, phase="steps"))
    counts = Figures(3, rounds=-1, sent_bytes=1 << 62, phase="x" * 65, inner_step=8)
    assert repr(Figures.from_bytes(counts.to_bytes())) == repr(Figures(3, inner_step=8))
