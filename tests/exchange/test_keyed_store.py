"""The project's own store: it behaves as a TCPStore; who is let in; what travels."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import CLI, serving_command
from exchange_helpers import folder_of, make_folders
from proxies import Forwarder
from workers import Pool

from diloco_comm import _C, DiLoCo, Link, StorePeers
from diloco_comm.base.service.keys import LinkKeys, allow, remove
from diloco_comm.base.store_host import HostedStore, dial_store, open_store

Fresh = Callable[..., Pool]
SOON_S = 10.0


@pytest.fixture
def keys(tmp_path: Path) -> list[LinkKeys]:
    """The keys of three processes that let each other in; the first process hosts."""
    make_folders(tmp_path, 3)
    return [LinkKeys.read(folder_of(tmp_path, number)) for number in range(3)]


@pytest.fixture
def plain() -> Iterator[HostedStore]:
    found = open_store("127.0.0.1", 0)
    yield found
    found.store.close()


@pytest.fixture(params=["keyed", "plain", "host", "tcpstore"])
def store(
    request: pytest.FixtureRequest,
    hosted: HostedStore,
    plain: HostedStore,
    keys: list[LinkKeys],
) -> dist.Store:
    """A client with keys, and without; the host's own side; and a TCPStore, which must agree."""
    if request.param == "keyed":
        return dial_store("127.0.0.1", hosted.port, SOON_S, keys[1])
    if request.param == "plain":
        return dial_store("127.0.0.1", plain.port, SOON_S)
    if request.param == "host":
        return hosted.store
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_calls_do_as_a_tcpstore_does(store: dist.Store) -> None:
    store.set("a", b"\0\xff")
    assert store.get("a") == b"\0\xff"
    store.set("empty", "")
    assert store.get("empty") == b"" and store.check(["a", "empty"])
    assert not store.check(["a", "b"])
    assert (store.add("n", 5), store.add("n", -7), store.get("n")) == (5, -2, b"-2")
    assert store.compare_set("new", "", "1") == b"1"
    assert store.compare_set("new", "2", "3") == b"1"
    assert store.compare_set("new", "1", "3") == b"3"
    # Where nothing stands and something was expected, the expectation comes back.
    assert store.compare_set("absent", "1", "2") == b"1"
    assert not store.check(["absent"])
    assert store.delete_key("a") and not store.delete_key("a")
    assert {"empty", "n", "new"} <= set(store.list_keys()) and "a" not in store.list_keys()
    store.wait(["n", "new"], timedelta(seconds=SOON_S))
    with pytest.raises(dist.DistStoreError):
        store.wait(["n", "absent"], timedelta(milliseconds=50))
    large = os.urandom(3 << 20)
    store.set("large", large)
    assert store.get("large") == large


def test_several_keys_at_a_time(store: dist.Store) -> None:
    assert store.has_extended_api()
    store.append("a", "x")
    store.append("a", "y")
    store.multi_set(["b", "c"], ["1", "2"])
    assert store.multi_get(["c", "a", "b"]) == [b"2", b"xy", b"1"]
    keyless = dist.PrefixStore("p", store)
    keyless.set("a", "z")
    assert store.get("p/a") == b"z"


def test_a_wait_ends_when_another_client_sets(hosted: HostedStore, keys: list[LinkKeys]) -> None:
    store = dial_store("127.0.0.1", hosted.port, SOON_S, keys[1])
    other = dial_store("127.0.0.1", hosted.port, SOON_S, keys[2])
    late = threading.Timer(0.2, other.set, ("late", "1"))
    late.start()
    assert store.get("late") == b"1"
    late.join()
    counts = [threading.Thread(target=lambda s=s: [s.add("n", 1) for _ in range(200)])  # type: ignore[misc]
              for s in (store, other, hosted.store)]  # fmt: skip
    for thread in counts:
        thread.start()
    for thread in counts:
        thread.join()
    assert store.get("n") == b"600"


# --------------------------------------------------------------------------------- who comes in


def test_a_stranger_gets_one_sentence(
    hosted: HostedStore, plain: HostedStore, keys: list[LinkKeys]
) -> None:
    remove(keys[0].folder, "r2")
    place = ("127.0.0.1", hosted.port)
    until_refused(hosted, keys[2])
    with pytest.raises(
        dist.DistStoreError, match=r"does not let in the key of this process, [0-9a-f]{64}"
    ):
        dial_store(*place, SOON_S, keys[2])
    remove(keys[2].folder, "r0")
    with pytest.raises(dist.DistStoreError, match="which is not among the allowed keys of this"):
        dial_store(*place, SOON_S, LinkKeys.read(keys[2].folder))
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"has keys: give Link\(keys=\.\.\.\), or --keys"):
        dial_store(*place, 60.0)
    with pytest.raises(dist.DistStoreError, match="does not speak TLS as a store with keys does"):
        dial_store("127.0.0.1", plain.port, 2.0, keys[1])
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(dist.DistStoreError, match="did not answer within 300 ms: Connection refu"):
        dial_store("127.0.0.1", port, 0.3, keys[1])
    assert time.monotonic() - begin < 30
    # All that left the host as it was.
    assert dial_store(*place, SOON_S, keys[1]).add("n", 1) == 1


def until_refused(hosted: HostedStore, keys: LinkKeys) -> None:
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            dial_store("127.0.0.1", hosted.port, SOON_S, keys)
        except dist.DistStoreError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_removed_key_ends_its_connections(hosted: HostedStore, keys: list[LinkKeys]) -> None:
    first, second = (dial_store("127.0.0.1", hosted.port, 60.0, one) for one in keys[1:])
    ended: list[Exception] = []

    def wait() -> None:
        try:
            second.get("never")
        except dist.DistStoreError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    remove(keys[0].folder, "r2")
    thread.join(SOON_S)
    assert "does not let in the key of this process" in str(ended[0])
    with pytest.raises(dist.DistStoreError, match="does not let in the key of this process"):
        second.set("a", "1")
    first.set("a", "1")
    allow(keys[0].folder, [keys[2].folder / "r2.key"])
    deadline = time.monotonic() + SOON_S
    while hosted.store.num_clients < 2:
        assert time.monotonic() < deadline
        # The same object dials anew.
        with suppress(dist.DistStoreError):
            assert second.get("a") == b"1"
        time.sleep(0.05)


def test_strangers_leave_nothing_behind(hosted: HostedStore, keys: list[LinkKeys]) -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))

    before = tasks()
    held = []
    for number in range(150):
        one = socket.create_connection(("127.0.0.1", hosted.port))
        if number % 3 == 0:
            one.sendall(b"GET / HTTP/1.0\r\n\r\n" if number % 2 else os.urandom(500))
        if number % 5 == 0:
            one.close()
        else:
            held.append(one)
    # An allowed client comes in beside the half-open connections of strangers.
    assert dial_store("127.0.0.1", hosted.port, SOON_S, keys[1]).add("n", 1) == 1
    for one in held:
        one.close()
    del one, held
    deadline = time.monotonic() + SOON_S
    while tasks() > before:
        assert time.monotonic() < deadline, (tasks(), before)
        time.sleep(0.05)
    assert hosted.store.num_clients == 0


def test_one_host_of_strangers_keeps_nobody_out(hosted: HostedStore) -> None:
    early = socket.create_connection(("127.0.0.1", hosted.port))
    many = []
    for _ in range(320):
        one = socket.socket()
        one.bind(("127.0.0.9", 0))
        one.connect(("127.0.0.1", hosted.port))
        many.append(one)
    early.settimeout(1.0)
    with pytest.raises(TimeoutError):
        early.recv(1)
    ended = sum(bool(select.select([one], [], [], 0)[0]) for one in many)
    assert ended >= 30
    for one in (early, *many):
        one.close()


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keyed"])
def test_a_host_that_closes_at_first_is_tried_again(has_keys: bool, keys: list[LinkKeys]) -> None:
    """As a forwarder of ports does, whose store has not started yet."""
    with socket.create_server(("127.0.0.1", 0)) as forwarder:
        port = forwarder.getsockname()[1]
        forwarder.settimeout(0.1)
        opened: list[HostedStore] = []

        def forward() -> None:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                with suppress(TimeoutError):
                    forwarder.accept()[0].close()
            forwarder.close()
            opened.append(open_store("127.0.0.1", port, keys[0] if has_keys else None))

        thread = threading.Thread(target=forward)
        thread.start()
        store = dial_store("127.0.0.1", port, 30.0, keys[1] if has_keys else None)
        assert store.add("n", 1) == 1
        thread.join()


def test_a_host_heeds_no_signal_and_keeps_no_port(keys: list[LinkKeys]) -> None:
    hosted = open_store("127.0.0.1", 0, keys[0])
    masks: dict[str, int] = {}
    deadline = time.monotonic() + 30
    # The thread gives itself its name.
    while "diloco-host" not in masks and time.monotonic() < deadline:
        for task in Path("/proc/self/task").iterdir():
            lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            masks[lines["Name"].strip()] = int(lines["SigBlk"], 16)
    # SIGHUP, SIGINT and SIGTERM, which would have the thread wait in accept().
    assert all(masks["diloco-host"] >> (number - 1) & 1 for number in (1, 2, 15))
    hosted.store.close()
    with pytest.raises((RuntimeError, ValueError)):
        open_store("127.0.0.1", hosted.port, replace(keys[0], seed=b"short"))
    open_store("127.0.0.1", hosted.port)


def test_what_is_too_large_or_no_number_is_a_sentence(store: dist.Store) -> None:
    store.set("word", "seven")
    with pytest.raises((dist.DistError, ValueError)) as caught:
        store.add("word", 1)
    if isinstance(store, dist.TCPStore):
        return
    assert "add() needs a number, and the store holds text at word" in str(caught.value)
    assert store.add("most", 2**63 - 1) == 2**63 - 1
    with pytest.raises((dist.DistError, ValueError), match="at most would be too large"):
        store.add("most", 1)
    if isinstance(store, _C.StoreHost):
        return
    for _ in range(2):
        store.append("large", "x" * (40 << 20))
    with pytest.raises(
        dist.DistStoreError, match="at most 64 MiB at a time, and these keys hold 838860"
    ):
        store.get("large")
    assert store.delete_key("large") and store.add("most", -1) == 2**63 - 2
    store.set_timeout(timedelta(0))
    store.set("soon", "1")
    assert store.check(["soon"])


def packet(kind: int, number: int, *parts: bytes) -> bytes:
    """A request as a client of the store writes it."""
    body = struct.pack("<Bq", kind, number)
    body += b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return struct.pack("<Q", len(body)) + body


def memory_mib(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(rf"{what}:\s+(\d+) kB", status)[0]) // 1024


@pytest.fixture
def store_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store without keys, and the port."""
    with serving_command([*CLI, "store", "--listen", "127.0.0.1:0"]) as (process, line):
        yield process, int(line.rpartition(":")[2])


@pytest.mark.nightly("1.6 GB; tests in C++ have strangers, and one client that waits")
@pytest.mark.timeout(300)
def test_clients_that_read_nothing_hold_half_a_gibibyte_at_most(
    store_process: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = store_process
    store = dial_store("127.0.0.1", port, SOON_S)
    store.set("large", b"x" * (40 << 20))  # type: ignore[arg-type]
    before = memory_mib(process.pid, "VmHWM")
    deaf = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    # The host finds the requests of all of them at one look.
    process.send_signal(signal.SIGSTOP)
    for number, one in enumerate(deaf):
        one.sendall(packet(0, 0, b"diloco store 2", b"deaf %d" % number))
        one.sendall(packet(3, 1000, b"large"))
    process.send_signal(signal.SIGCONT)
    ended, deadline = 0, time.monotonic() + 60
    while ended < 20 and time.monotonic() < deadline:
        ended = sum(is_cut(one) for one in deaf)
        assert store.check(["large"])
        time.sleep(0.05)
    assert ended >= 20
    assert len(store.get("large")) == 40 << 20
    assert memory_mib(process.pid, "VmHWM") < before + 900


@pytest.mark.nightly("a store of 40 MB; tests in C++ have small values")
def test_a_host_keeps_no_answer_that_was_taken(
    store_process: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = store_process
    clients = [dial_store("127.0.0.1", port, SOON_S) for _ in range(12)]
    clients[0].set("large", b"x" * (40 << 20))  # type: ignore[arg-type]
    before = memory_mib(process.pid, "VmRSS")
    for client in clients:
        assert len(client.get("large")) == 40 << 20
    assert memory_mib(process.pid, "VmRSS") < before + 200


def is_cut(connection: socket.socket) -> bool:
    """Whether the other side has ended a connection from which nothing is read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return any(events & (select.POLLRDHUP | select.POLLHUP) for _, events in poll.poll(0))


_IDLE = """
import socket, sys, time
held = []
for _ in range(10_000):
    one = socket.socket()
    one.bind(("127.0.0.9", 0))
    one.connect(("127.0.0.1", int(sys.argv[1])))
    held.append(one)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.nightly("11,000 connections; tests in C++ have 800")
@pytest.mark.timeout(300)
def test_a_thousand_clients_beside_ten_thousand_idle_connections(keys: list[LinkKeys]) -> None:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (16384, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    before = len(os.listdir("/proc/self/fd"))
    hosted = open_store("127.0.0.1", 0, keys[0])
    command = f"ulimit -n 16384; exec {sys.executable} -c '{_IDLE}' {hosted.port}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as idle:
        try:
            clients = [dial_store("127.0.0.1", hosted.port, 60.0, keys[1]) for _ in range(1000)]
            assert idle.stdout is not None and idle.stdout.readline() == "held\n"
            assert hosted.store.num_clients == 1000
            for number, client in enumerate(clients):
                assert client.add("n", 1) == number + 1
            # All of the idle ones that the host still holds fit into its bound.
            assert len(os.listdir("/proc/self/fd")) < before + 2000 + 256 + 100
        finally:
            idle.kill()
    hosted.store.close()


def test_a_closed_host_ends_all_waits(hosted: HostedStore, keys: list[LinkKeys]) -> None:
    store = dial_store("127.0.0.1", hosted.port, 60.0, keys[1])
    begin = time.monotonic()
    threading.Timer(0.2, hosted.store.close).start()
    with pytest.raises(dist.DistNetworkError, match="is not there any more: Connection refused"):
        store.get("never")
    assert time.monotonic() - begin < SOON_S


# ---------------------------------------------------------------------------------- whole runs


def _trains(rank: int, world: int, plain: Any, address: str, root: str) -> Any:
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peers = StorePeers(address, replica=rank, of=world, name="the run of paris")
    link = Link("tcp", listen="127.0.0.1:0", keys=folder_of(root, rank))
    with closing(DiLoCo(model, optimizer, sync_every=2, peers=peers, link=link)) as diloco:
        for _ in range(4):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return diloco.outer_hash()


def test_a_whole_run_holds_no_plaintext(fresh_workers: Fresh, tmp_path: Path) -> None:
    """Two replicas meet at the command's store; all that they say to the store is recorded."""
    make_folders(tmp_path, 3)
    command = [*CLI, "store", "--listen", "127.0.0.1:0", "--keys", folder_of(tmp_path, 2)]
    with serving_command(command) as (process, address):
        relay = Forwarder(int(address.rpartition(":")[2]))
        pool = fresh_workers(2, init_group=False)
        found = pool.run(_trains, pool.store, f"tcp://127.0.0.1:{relay.port}", str(tmp_path))
        assert found[0] == found[1]
        relay.close()
        passed = b"".join(relay.streams)
        assert len(passed) > 5000
        for word in (b"paris", b"diloco_comm", b"replica", b"127.0.0.1", b'{"mod'):
            assert word not in passed
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0
