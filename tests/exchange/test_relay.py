"""Replicas that nobody can dial meet at a relay: real processes, strangers, a relay that dies."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CLI, serving_command
from exchange_helpers import N, connect_replica, gives_reference_bytes, sync, values
from fault_replicas import wait_for
from workers import Pool

from diloco_comm import DiLoCo, Link
from diloco_comm.base.errors import SyncError
from diloco_comm.base.service import relay as relays
from diloco_comm.base.service.keys import LinkKeys, allow, make_pairs
from diloco_comm.base.service.relay import RECORD, Kind, Relay, RelaySeat, parse_record, record
from diloco_comm.exchange.membership.own_link import OwnLink
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.common.workers import free_port

Fresh = Callable[..., Pool]
Address = tuple[str, int]
# How long what takes no time may take on a loaded machine.
PATIENCE_S = 20.0
NONCE = bytes(range(16))
# The host of many strangers.
BUSY = "127.0.0.9"


@pytest.fixture
def relay() -> Iterator[Relay]:
    with ExitStack() as stack:
        yield started(stack)


def started(stack: ExitStack, port: int = 0, **options: Any) -> Relay:
    """Run a relay in a thread until the stack ends."""
    server = Relay("127.0.0.1", port, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.stop_soon)
    return server


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.02)


# ------------------------------------------------------------------------------------- replicas


def _meet(rank: int, world: int, address: Address, place: str, root: str | None) -> Any:
    """Replica 2 can be dialled; the others have no address. Then replica 2 leaves."""
    everybody = list(range(world))
    options: dict[str, Any] = {} if rank == 2 else {"relay": place}
    if root is not None:
        options["link_keys"] = Path(root, str(rank))
    with closing(
        connect_replica(address, rank, everybody, collectives="tcp", lanes=2, **options)
    ) as ex:
        buffers = ex.buffers(N, WireFormat("int8"))
        fine = [gives_reference_bytes(ex, buffers, round, everybody) for round in range(3)]
        if rank < 2:
            before = ex.tcp.counters()["connects"]
            ex.change_group([0, 1], last_rounds={0: 2})
            fine.append(gives_reference_bytes(ex, buffers, 3, [0, 1]))
            assert ex.tcp.counters()["connects"] == before
        return fine, ex.address == ""


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
def test_replicas_without_an_address_meet_at_the_relay(
    fresh_workers: Fresh, relay: Relay, tmp_path: Path, with_keys: bool
) -> None:
    if with_keys:
        for replica in range(3):
            make_pairs(tmp_path / str(replica), [f"r{replica}"])
        for replica in range(3):
            files = [tmp_path / str(r) / f"r{r}.key" for r in range(3) if r != replica]
            allow(tmp_path / str(replica), files)
    pool = fresh_workers(3, init_group=False)
    most, pool_ended = [0], threading.Event()

    def count() -> None:
        while not pool_ended.wait(0.005):
            most[0] = max(most[0], relay.num_pairs)

    counting = threading.Thread(target=count)
    counting.start()
    results = pool.run(_meet, pool.store, relay.address, str(tmp_path) if with_keys else None)
    pool_ended.set()
    counting.join()
    assert results == [([True] * 4, True)] * 2 + [([True] * 3, False)]
    # Two lanes, and each of the two replicas sends over connections that it has dialled, unless
    # its own dial comes much later. The messages of the group come before its lanes.
    assert 2 <= most[0] <= 6
    until(lambda: relay.num_pairs == 0, "the pairs end with the replicas")


def relay_process(
    port: int = 0, *, descriptors: int = 0
) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Start the command; with ``descriptors`` the process may have so many and no more."""
    limit = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"] if descriptors else []
    return serving_command([*limit, *CLI, "relay", "--listen", f"127.0.0.1:{port}"])


def _outlive(rank: int, world: int, address: Address, place: str) -> Any:
    everybody = list(range(world))
    limits = {"suspect_after": 10.0, "relay": place}
    with closing(connect_replica(address, rank, everybody, collectives="tcp", **limits)) as ex:
        buffers = ex.buffers(N, WireFormat("int8"))
        fine = [gives_reference_bytes(ex, buffers, 0, everybody)]
        ex.store.set(f"first/{rank}", "")
        ex.store.wait(["killed"])
        with pytest.raises(SyncError) as caught:
            sync(ex, buffers, [values(1, rank, N)], round=1)
        ex.store.set(f"failed/{rank}", "")
        ex.store.wait(["back"])
        ex.change_group(everybody, last_rounds={0: 0})
        fine.append(gives_reference_bytes(ex, buffers, 1, everybody))
        return fine, caught.value.missing


def _meet_at_own(rank: int, world: int, address: Address, places: list[str]) -> Any:
    everybody = list(range(world))
    options = {"collectives": "tcp", "relay": places[rank // 2]}
    with closing(connect_replica(address, rank, everybody, **options)) as ex:
        buffers = ex.buffers(N, WireFormat("int8"))
        return [gives_reference_bytes(ex, buffers, round, everybody) for round in range(3)]


def test_the_workers_of_a_host_share_the_port_of_its_relay(fresh_workers: Fresh) -> None:
    """Two hosts with a relay each: every worker is dialled at the relay of its own host."""
    with ExitStack() as stack:
        servers = [started(stack) for _ in range(2)]
        pool = fresh_workers(4, init_group=False)
        places = [server.address for server in servers]
        assert pool.run(_meet_at_own, pool.store, places) == [[True] * 3] * 4
        # No worker has an address, so that nothing but the relays can have joined the workers.
        for server in servers:
            until(lambda server=server: server.num_pairs == 0, "the pairs end")  # type: ignore[misc]


def test_a_relay_that_is_killed_and_comes_back(fresh_workers: Fresh) -> None:
    # The kernel gives the port to nobody else while the relay is gone.
    port = free_port()
    pool = fresh_workers(2, init_group=False)
    prefix = "diloco_comm/default"
    with relay_process(port) as (_, place):
        pool.submit(_outlive, pool.store, place)
        wait_for(pool, [f"{prefix}/first/{rank}" for rank in range(2)])
    pool.crew.store.set(f"{prefix}/killed", "")
    wait_for(pool, [f"{prefix}/failed/{rank}" for rank in range(2)])
    with relay_process(port) as (_, again):
        assert again == place
        pool.crew.store.set(f"{prefix}/back", "")
        # A closed connection does not say whether its replica has ended.
        assert [fine for fine, _ in pool.collect()] == [[True, True]] * 2


# ------------------------------------------------------------------------------- in this process


def meet(links: list[OwnLink], token: str, limit_s: float = PATIENCE_S) -> list[Any]:
    """Return the groups of both links, or their errors."""
    ways = [link.ways() for link in links]
    peers = [tuple(way[name] for name in ("link", "address", "link key", "relay")) for way in ways]
    found: list[Any] = [None, None]

    def connect(rank: int) -> None:
        try:
            found[rank] = links[rank].link.groups(token, rank, peers, 1, limit_s)
        except RuntimeError as error:
            found[rank] = str(error)

    other = threading.Thread(target=connect, args=(1,))
    other.start()
    connect(0)
    other.join()
    return found


def carry(groups: list[Any], size: int = 300_000) -> None:
    """Send a message each way."""
    for sender in (0, 1):
        sent = torch.arange(size).to(torch.uint8)
        got = torch.zeros(size, dtype=torch.uint8)
        recv = groups[1 - sender][sender].recv([got], sender, 3)
        send = groups[sender][sender].send([sent], 1 - sender, 3)
        assert send.wait() and recv.wait() and torch.equal(sent, got)


def pair(stack: ExitStack, place: str) -> list[OwnLink]:
    return [stack.enter_context(closing(OwnLink(None, None, None, place))) for _ in range(2)]


def test_a_seat_is_taken_again_when_the_relay_is_back() -> None:
    with ExitStack() as stack:
        with ExitStack() as first:
            relay = started(first)
            links = pair(stack, relay.address)
            carry(meet(links, "before"))
        relay = started(stack, int(relay.address.rpartition(":")[2]))
        until(lambda: len(relay._seats) == 2, "both processes sit down again")
        carry(meet(links, "after"))


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
def test_a_process_that_has_left_the_relay_is_named(
    relay: Relay, tmp_path: Path, with_keys: bool
) -> None:
    keys: list[LinkKeys | None] = [None, None]
    if with_keys:
        make_pairs(tmp_path, ["a", "b"])
        allow(tmp_path, [tmp_path / "a.key", tmp_path / "b.key"])
        keys = [LinkKeys.read(tmp_path / f"{name}.key_secret") for name in "ab"]
    with ExitStack() as stack:
        links = [
            stack.enter_context(closing(OwnLink(None, None, each, relay.address))) for each in keys
        ]
        links[1].close()
        until(lambda: len(relay._seats) == 1, "the seat ends")
        text, _ = meet(links, "alone", 1.0)
    assert f"rank 1 through the relay at {relay.address[6:]} cannot be reached" in text
    assert "the relay has closed the connection: that process may have" in text and "\n" not in text


def test_a_relay_on_one_side_alone_is_told_both_at_once(relay: Relay) -> None:
    with ExitStack() as stack:
        links = [
            stack.enter_context(closing(OwnLink(None, "", None, place)))
            for place in (relay.address, None)
        ]
        texts = meet(links, "one side")
    assert all("or both need a relay" in text for text in texts)


def test_a_forked_child_does_not_touch_the_seat(relay: Relay) -> None:
    with ExitStack() as stack:
        links = pair(stack, relay.address)
        assert links[0]._seat is not None
        seat = links[0]._seat._connection.fileno()
        child = os.fork()
        if child == 0:
            links[0].close()
            with suppress(OSError):
                os.fstat(seat)
                os._exit(1)
            os._exit(0)
        # Else the child would keep the seat of a parent that is killed.
        assert os.waitpid(child, 0)[1] == 0
        carry(meet(links, "beside a child"))


def test_a_call_at_the_end_does_not_hold_up_the_relay() -> None:
    for _ in range(20):
        with ExitStack() as stack:
            relay = started(stack)
            seat = stack.enter_context(sit(relay.address))
            relay.stop_soon()
            with suppress(OSError):
                stack.enter_context(say(relay.address, record(Kind.DIAL, NONCE)))
            assert seat is not None


def test_a_relay_that_is_not_there_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        DiLoCo(model, optimizer, sync_every=2, peers="alone", link=Link("tcp", relay=place))
    text = str(caught.value)
    assert f"cannot wait at the relay at tcp://{place}" in text and "`diloco-comm relay`" in text


def test_a_connection_through_a_relay_needs_no_reading_ahead(relay: Relay) -> None:
    """A receiver that does not read holds up the sender: the relay keeps a buffer, and no more."""
    with connected(relay.address) as ends, ExitStack() as stack:
        sender, receiver = (stack.enter_context(one) for one in ends)
        sender.settimeout(0.5)
        num_sent = 0
        with suppress(TimeoutError):
            while num_sent < 1 << 30:
                num_sent += sender.send(bytes(1 << 20))
        assert num_sent < 1 << 28
        sender.settimeout(PATIENCE_S)
        sender.shutdown(socket.SHUT_WR)
        num_read = 0
        while data := receiver.recv(1 << 20):
            num_read += len(data)
        assert num_read == num_sent
        # The other direction is open still.
        receiver.sendall(b"goodbye")
        assert sender.recv(7) == b"goodbye"


def place_of(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


def say(address: str, words: bytes) -> socket.socket:
    connection = socket.create_connection(place_of(address), PATIENCE_S)
    connection.sendall(words)
    return connection


def read(connection: socket.socket) -> tuple[int, bytes]:
    data = b""
    while len(data) < RECORD.size:
        more = connection.recv(RECORD.size - len(data))
        if not more:
            raise EOFError
        data += more
    return parse_record(data)


def sit(address: str) -> socket.socket:
    seat = say(address, record(Kind.SEAT, NONCE))
    assert read(seat) == (Kind.SEATED, NONCE)
    return seat


class connected:
    """Two connections that a relay has joined."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        self._seat = sit(self._address)
        dialler = say(self._address, record(Kind.DIAL, NONCE))
        kind, number = read(self._seat)
        assert kind == Kind.CALL
        return dialler, say(self._address, record(Kind.ACCEPT, number))

    def __exit__(self, *_: object) -> None:
        self._seat.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the relay has ended a connection without a word."""
    with connection, suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: relay.example\r\n\r\n",
        os.urandom(RECORD.size),
        record(Kind.DIAL, os.urandom(16)),
        record(Kind.ACCEPT, os.urandom(16)),
        record(Kind.SEATED, NONCE),
    ],
    ids=["http", "noise", "unknown nonce", "unknown call", "no request"],
)
def test_strangers_are_sent_away(relay: Relay, words: bytes) -> None:
    assert is_closed(say(relay.address, words))
    with connected(relay.address) as (dialler, other), dialler, other:
        dialler.sendall(b"hello")
        assert other.recv(5) == b"hello"


def test_another_version_is_answered_by_the_own_one(relay: Relay) -> None:
    with say(relay.address, RECORD.pack(b"DILORELY", 2, Kind.SEAT, NONCE)) as other:
        assert read(other)[0] == Kind.PING
        assert other.recv(1) == b""


def test_a_relay_keeps_nothing_of_what_has_ended(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def descriptors() -> Counter[str]:
        """Count the open descriptors by name; each socket has a name of its own."""
        names: Counter[str] = Counter()
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                names[os.readlink(f"/proc/self/fd/{number}")] += 1
        return names

    before = descriptors()
    with sit(relay.address):
        # Half a record, and a call that nobody answers.
        for limit, words in (("_RECORD_S", b"DILO"), ("_CALL_S", record(Kind.DIAL, NONCE))):
            with monkeypatch.context() as short:
                short.setattr(relays, limit, 0.2)
                assert is_closed(say(relay.address, words))
    for _ in range(20):
        with connected(relay.address) as (dialler, other), dialler, other:
            dialler.sendall(b"hello")
    until(lambda: not (relay.num_pairs or relay._seats or relay._calls), "all has ended")
    until(lambda: not descriptors() - before, "no descriptor is kept")


def test_the_newest_seat_of_a_nonce_counts(relay: Relay) -> None:
    former = sit(relay.address)
    with connected(relay.address) as (dialler, other), dialler, other:
        assert is_closed(former)
        other.sendall(b"hello")
        assert dialler.recv(5) == b"hello"


def test_a_full_relay_still_takes_answers(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        relay = started(stack, most=2)
        with connected(relay.address) as (dialler, other), dialler, other:
            assert is_closed(say(relay.address, record(Kind.DIAL, NONCE)))
            dialler.sendall(b"hello")
            assert other.recv(5) == b"hello"
    assert [record.message for record in caplog.records if "is full (2 conn" in record.message]


def test_silent_strangers_keep_nobody_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "_RECORD_S", PATIENCE_S)
    with ExitStack() as stack:
        relay = started(stack)
        early = [
            stack.enter_context(from_host(host, relay.address)) for host in (BUSY, "127.0.0.1")
        ]
        for one in early:
            one.sendall(b"D")
        silent = [stack.enter_context(from_host(BUSY, relay.address)) for _ in range(2000)]
        carries(relay.address)
        assert is_closed(silent[0])
        # Older connections have spoken, also one of that host, and stay.
        for one in early:
            one.sendall(record(Kind.SEAT, NONCE)[1:])
            assert read(one) == (Kind.SEATED, NONCE)
    assert [one.message for one in caplog.records if "connections that say nothing" in one.message]


def test_a_relay_without_a_descriptor_ends_silent_strangers() -> None:
    with relay_process(descriptors=64) as (_, address), ExitStack() as stack:
        silent = [stack.enter_context(from_host(BUSY, address)) for _ in range(200)]
        carries(address)
        assert is_closed(silent[0])


SERVING = """
import resource, sys
from diloco_comm.base.service import relay

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit))
relay._RECORD_S = 100.0
server = relay.Relay("127.0.0.1", 0)
print(server.address, flush=True)
server.serve()
"""


@pytest.mark.parametrize(("limit", "kept"), [(100, 25), (2000, 256)])
def test_strangers_have_a_quarter_of_the_descriptors(limit: int, kept: int) -> None:
    """A quarter, and at most 256: the relay needs some for those whom it serves."""
    command = [sys.executable, "-c", SERVING, str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        silent = [stack.enter_context(from_host(BUSY, address)) for _ in range(kept + 9)]
        # The relay takes connections in their order, and a seat is a stranger at first.
        stack.enter_context(sit(address))
        time.sleep(0.1)
        assert select.select(silent, [], [], 0.0)[0] == silent[:10]


def from_host(host: str, address: str) -> socket.socket:
    """Connect to a relay from an address of loopback."""
    return socket.create_connection(place_of(address), PATIENCE_S, (host, 0))


def carries(address: str) -> None:
    with connected(address) as (dialler, other), dialler, other:
        dialler.sendall(b"hello")
        assert other.recv(5) == b"hello"


def test_a_dialler_that_hangs_up_frees_its_place() -> None:
    with ExitStack() as stack:
        relay = started(stack, most=2)
        stack.enter_context(sit(relay.address))
        begin = time.monotonic()
        say(relay.address, record(Kind.DIAL, NONCE)).close()
        until(lambda: relay._num_held == 1, "the place is free again")
        assert time.monotonic() - begin < relays._CALL_S


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (b"", "the relay may have too many connections, see its option --connections"),
        (RECORD.pack(b"DILORELY", 7, Kind.PING, NONCE), "give all machines one version of"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n----", "start the relay with `diloco-comm relay`"),
    ],
    ids=["full", "another version", "another program"],
)
def test_a_seat_that_is_not_given_names_the_cure(answer: bytes, advice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(RECORD.size)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=advice):
            RelaySeat(place, NONCE.hex(), lambda fd: None)
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_by_a_signal(number: signal.Signals) -> None:
    with relay_process() as (process, address), sit(address):
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
