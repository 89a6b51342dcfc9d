"""The link: all payloads, headers and votes over one port of each process, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_helpers import N, connect_replica, gives_reference_bytes, sync, values
from fault_replicas import connect, least_resources, wait_for
from test_link_keys import free_ports
from workers import Pool

from diloco_comm import DiLoCo, Link
from diloco_comm.base.errors import ReplicaMismatch, SyncError
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.membership import change
from diloco_comm.ops.wire import WireFormat

Fresh = Callable[..., Pool]
Address = tuple[str, int]
LISTENS = "0A"
# A member that stops while it connects costs the others this, and no more than SLACK_S.
SUSPECT_AFTER_S = 3.0
SLACK_S = 2.0
# How long what takes no time may take on a loaded machine.
PATIENCE_S = 5.0
pytestmark = pytest.mark.usefixtures("loopback")


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def member(address: Address, replica: int, members: list[int], **options: Any) -> Iterator[Any]:
    """An exchange over the link, and its buffers."""
    options = {"collectives": "tcp", **options}
    with closing(connect_replica(address, replica, members, **options)) as ex:
        yield ex, ex.buffers(N, WireFormat("int8"))


def own_sockets() -> dict[int, str]:
    """Return the TCP sockets of this process by inode, each with its state and local port."""
    known = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()[:4]
            known[int(line.split()[9])] = f"{state} {int(local.rpartition(':')[2], 16)}"
    return {inode: known[inode] for inode in own_inodes() if inode in known}


def own_inodes() -> set[int]:
    """Return the inodes of the sockets that this process has open."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = os.stat(f"/proc/self/fd/{name}")
            inodes |= {found.st_ino} if stat.S_ISSOCK(found.st_mode) else set()
    return inodes


def listeners() -> set[int]:
    """Return the ports at which this process listens."""
    return {int(text.split()[1]) for text in own_sockets().values() if text.startswith(LISTENS)}


def port_of(ex: Exchange) -> int:
    return int(ex.address.rpartition(":")[2])


# ------------------------------------------------------------------------------------- rounds


def _listening(rank: int, world: int, address: Address, collectives: str) -> Any:
    before = listeners()
    options = {"lanes": 2, "collectives": collectives}
    with member(address, rank, list(range(world)), **options) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, list(range(world)))
        found = listeners() - before
        port = port_of(ex)
    return found, port, listeners() - before


def test_a_process_listens_at_one_port(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    for found, port, afterwards in pool.run(_listening, pool.store, "tcp"):
        assert found == {port} and afterwards == set()


@pytest.mark.nightly("1 s; shows that the count sees more than one port")
def test_gloo_listens_at_more_ports(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    for found, port, _ in pool.run(_listening, pool.store, "gloo"):
        assert port in found and len(found) > 1


def _given_port(rank: int, world: int, address: Address, ports: list[int]) -> Any:
    listen = f"0.0.0.0:{ports[rank]}"
    everybody, told = list(range(world)), f"localhost:{ports[rank]}"
    found = []
    # A closed link gives its port back at once; a name is a place too.
    for place in ({"listen": listen}, {"listen": listen, "advertise": told}):
        with member(address, rank, everybody, name=f"{len(place)}", **place) as (ex, buffers):
            fine = gives_reference_bytes(ex, buffers, 0, everybody)
            found.append((fine, ex.address, listeners() >= {ports[rank]}))
    return found


def test_a_port_and_an_address_that_are_given(fresh_workers: Fresh) -> None:
    ports = free_ports(2)
    pool = fresh_workers(2, init_group=False)
    for port, found in zip(ports, pool.run(_given_port, pool.store, ports), strict=True):
        assert found == [(True, f"127.0.0.1:{port}", True), (True, f"localhost:{port}", True)]


def _version_six(rank: int, world: int, address: Address, ports: list[int]) -> Any:
    everybody, port = list(range(world)), ports[rank]
    places = [
        {"listen": f"[::1]:{port}"},
        {"listen": f"[::]:{port}", "advertise": f"[::1]:{port}"},
        {"advertise": ""} if rank else {"listen": f"[::1]:{port}"},
    ]
    found = []
    for number, place in enumerate(places):
        with member(address, rank, everybody, name=f"{number}", **place) as (ex, buffers):
            found.append((gives_reference_bytes(ex, buffers, 0, everybody), ex.address))
    return found


def test_replicas_that_have_addresses_of_version_6_alone(fresh_workers: Fresh) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    ports = free_ports(2)
    pool = fresh_workers(2, init_group=False)
    first, second = pool.run(_version_six, pool.store, ports)
    assert first == 3 * [(True, f"[::1]:{ports[0]}")]
    assert second == [*2 * [(True, f"[::1]:{ports[1]}")], (True, "")]


def test_diloco_listens_where_its_link_says() -> None:
    (port,) = free_ports(1)
    place = {"listen": f"127.0.0.1:{port}", "advertise": f"203.0.113.5:{port}"}
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone", link=Link("tcp", **place)) as diloco:
        assert port in listeners()
        assert diloco.exchange.address == place["advertise"]
        assert "listen" not in diloco.config()
    assert port not in listeners()


def _taken(rank: int, world: int, address: Address) -> str:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError) as caught:
            connect_replica(address, rank, [0, 1], collectives="tcp", listen=place)
    assert place in str(caught.value), caught.value
    return str(caught.value)


def test_a_port_that_is_taken_is_named(fresh_workers: Fresh) -> None:
    pool = fresh_workers(1, init_group=False)
    (text,) = pool.run(_taken, pool.store)
    assert "in use" in text and "\n" not in text


def _mixed(rank: int, world: int, address: Address) -> str:
    with pytest.raises(ReplicaMismatch) as caught:
        connect_replica(address, rank, [0, 1], collectives=("gloo", "tcp")[rank])
    return str(caught.value)


@pytest.mark.nightly("4 s; test_exchange_disagreement has other settings that differ")
def test_gloo_and_a_link_are_no_group(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    for text in pool.run(_mixed, pool.store):
        assert "collectives differs between replicas" in text
        assert '"gloo"' in text and '"tcp"' in text


# ------------------------------------------------------------------- processes without an address


def _behind_nat(rank: int, world: int, address: Address, hidden: list[int]) -> Any:
    before, everybody = listeners(), list(range(world))
    options = {"advertise": ""} if rank in hidden else {}
    with member(address, rank, everybody, **options, suspect_after=2.0) as (ex, buffers):
        fine = [gives_reference_bytes(ex, buffers, round, everybody) for round in range(3)]
        return fine, ex.address, len(listeners() - before)


def test_a_replica_that_cannot_be_dialled_dials_the_others(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_behind_nat, pool.store, [1])
    assert [fine for fine, *_ in results] == [[True] * 3] * 3
    assert [num for *_, num in results] == [1, 0, 1]
    assert results[1][1] == "" and results[0][1] and results[2][1]


def _shut(rank: int, world: int, address: Address, ports: list[int]) -> Any:
    """Nothing listens where replica 1 says, as where a firewall lets nobody in."""
    places = {"listen": f"127.0.0.1:{ports[0]}", "advertise": f"127.0.0.1:{ports[1]}"}
    everybody = list(range(world))
    with member(address, rank, everybody, **(places if rank == 1 else {})) as (ex, buffers):
        fine = [gives_reference_bytes(ex, buffers, round, everybody) for round in range(2)]
        ex.change_group(everybody, last_rounds={0: 1})
        return [*fine, gives_reference_bytes(ex, buffers, 2, everybody)]


def test_one_direction_in_which_replicas_can_dial_is_enough(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    assert pool.run(_shut, pool.store, free_ports(2)) == [[True] * 3] * 2


def _both_behind_nat(rank: int, world: int, address: Address) -> Any:
    members = [0, 4, 7]
    options = {"advertise": ""} if rank else {}
    with pytest.raises(SyncError) as caught:
        connect_replica(
            address, members[rank], members, collectives="tcp", suspect_after=2.0, **options
        )
    error = caught.value
    return str(error), error.stage, error.seconds


def test_two_replicas_that_nobody_can_dial_are_named(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_both_behind_nat, pool.store)
    assert any("no address that others can dial" in text for text, *_ in results)
    for text, stage, seconds in results:
        assert stage == "connect" and seconds < 2.0 + SLACK_S + PATIENCE_S
        assert "rank" not in text and "\n" not in text
        assert "replica 4" in text or "replica 7" in text


# ------------------------------------------------------------------------ a change of the group


def _change(rank: int, world: int, address: Address) -> Any:
    """Replica 2 leaves, and another process with that number comes; 0 and 1 stay."""
    everybody, pair = list(range(world)), [0, 1]
    if rank == 2:
        with member(address, 2, everybody) as (ex, buffers):
            assert gives_reference_bytes(ex, buffers, 0, everybody)
            first = ex.tcp.nonce
        connect(address).wait(["alone"])
        with member(address, 2, everybody, join=True) as (ex, buffers):
            return gives_reference_bytes(ex, buffers, 2, everybody), first != ex.tcp.nonce
    with member(address, rank, everybody) as (ex, buffers):
        counts = [ex.tcp.counters()["connects"]]
        assert gives_reference_bytes(ex, buffers, 0, everybody)
        for number, members in enumerate((pair, pair, pair), 1):
            ex.change_group(members, last_rounds={0: 0})
            assert gives_reference_bytes(ex, buffers, 10 * number, members)
            counts.append(ex.tcp.counters()["connects"])
        ex.store.set(f"alone/{rank}", "")
        if rank == 0:
            ex.store.wait(["alone/0", "alone/1"])
            connect(address).set("alone", "")
        ex.change_group(everybody, last_rounds={0: 1})
        fine = gives_reference_bytes(ex, buffers, 2, everybody)
        counts.append(ex.tcp.counters()["connects"])
        return fine, counts


def test_members_that_stay_keep_their_connections(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_change, pool.store)
    assert results[2] == (True, True)
    for fine, counts in results[:2]:
        first, *pairs, last = counts
        assert fine and pairs == [first] * 3
        # A lane to the newcomer is at most one connection that this process dials.
        assert first < last <= first + 2


# ------------------------------------------------------------- members that stop, die or fork


def stop_ourselves(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise SyncError("stopped on purpose", stage="connect")


def _stops_connecting(rank: int, world: int, address: Address) -> Any:
    everybody = list(range(world))
    limits = {"join_timeout": 30.0, "suspect_after": SUSPECT_AFTER_S}
    with member(address, rank, everybody, **limits) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, everybody)
        build = change.connect
        if rank == 2:
            change.connect = stop_ourselves
        begin = time.monotonic()
        with pytest.raises(SyncError) as caught:
            ex.change_group(everybody, last_rounds={0: 0})
        change.connect = build
        seconds = time.monotonic() - begin
        if rank == 2:
            return None
        error = caught.value
        ex.change_group([0, 1], last_rounds={0: 0})
        fine = gives_reference_bytes(ex, buffers, 1, [0, 1])
        ex.store.set(f"went on/{rank}", "")
        return fine, seconds, error.missing, error.stage, str(error)


def test_a_member_that_stops_while_it_connects(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    pool.submit(_stops_connecting, pool.store)
    prefix = "diloco_comm/default/went on"
    wait_for(pool, [f"{prefix}/0", f"{prefix}/1"])
    pool.kill(2, signal.SIGCONT)
    for fine, seconds, missing, stage, text in pool.collect()[:2]:
        assert fine and stage in ("connect", "rendezvous") and missing in ((), (2,)), text
        assert seconds < SUSPECT_AFTER_S + SLACK_S + PATIENCE_S
        assert "replicas [2]" in text or "replica 2" in text


def child_after_fork(keep: set[int], seconds: float) -> tuple[int, set[int]]:
    """Fork a child that lives on; return its number, and the sockets of ``keep`` that it has.

    The child closes the connection to the test, whose end tells the test that the worker died.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = own_inodes() & keep
        os.write(write, " ".join(map(str, sorted(kept))).encode())
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.stat(int(name)).st_ino not in kept:
                    os.close(int(name))
        time.sleep(seconds)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        return pid, set(map(int, pipe.read().split()))


def _forks(rank: int, world: int, address: Address) -> Any:
    """Replica 1 forks, as a loader does, exchanges once more, and is killed; the child lives on."""
    store = connect(address)
    before = set(own_sockets())
    with member(address, rank, [0, 1], suspect_after=60.0) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, [0, 1])
        own = set(own_sockets()) - before
        if rank == 1:
            pid, kept = child_after_fork(own, 60.0)
            store.set("child", str(pid))
            store.set("kept", str(len(kept)))
            assert own
        assert gives_reference_bytes(ex, buffers, 1, [0, 1])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(SyncError) as caught:
            sync(ex, buffers, [values(2, rank, N)], round=2)
        return str(caught.value), time.monotonic() - begin


def test_a_forked_child_does_not_keep_the_connections(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    try:
        text, seconds = pool.run(_forks, pool.store, expect_exit={1})[0]
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pool.crew.store.get("child")), signal.SIGKILL)
    # The store's connection, which the link does not have, stays in the child.
    assert "the connection was closed" in text
    assert seconds < 2.0 + PATIENCE_S


# --------------------------------------------------------------------------------- strangers


def knock(address: str, words: bytes) -> None:
    """Connect to a link, say something that no peer says, and close."""
    host, _, port = address.rpartition(":")
    with suppress(ConnectionError), socket.create_connection((host, int(port)), 5.0) as stranger:
        stranger.sendall(words)


def _visited(rank: int, world: int, address: Address) -> Any:
    with member(address, rank, [0, 1]) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, [0, 1])
        files, threads = least_resources()
        for number in range(1, 200):
            if rank == 0:
                knock(ex.address, (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64))[number % 3])
            if number % 50 == 0:
                assert gives_reference_bytes(ex, buffers, number // 50, [0, 1])
        end = time.monotonic() + PATIENCE_S
        while least_resources() != (files, threads) and time.monotonic() < end:
            time.sleep(0.05)
        is_same = least_resources() == (files, threads)
        # The peer's connections count until both have looked.
        assert gives_reference_bytes(ex, buffers, 4, [0, 1])
        return is_same, ex.tcp.counters()["strangers"]


def test_strangers_leave_nothing_behind(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    results = pool.run(_visited, pool.store)
    assert [is_same for is_same, _ in results] == [True, True]
    # A connection that says nothing at all may be the probe of a peer.
    assert results[0][1] >= 132
