"""A link with keys: who may connect, and what others on the way can read; with real processes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_helpers import (
    N,
    connect_replica,
    folder_of,
    gives_reference_bytes,
    make_folders,
    sync,
    values,
)
from fault_replicas import wait_for
from proxies import Forwarder
from workers import Pool

from diloco_comm import DiLoCo, Elastic, Link, StorePeers
from diloco_comm.base.errors import ReplicaMismatch, SyncError
from diloco_comm.base.service.keys import Keys, allow, remove
from diloco_comm.exchange.membership import own_link
from diloco_comm.group import signs
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.common.workers import free_port

Fresh = Callable[..., Pool]
Address = tuple[str, int]
# A removed key ends its connections within REMOVED_S; how long it may take on a loaded machine.
REMOVED_S, PATIENCE_S = 2.0, 10.0
# A JSON that replicas send each other, with a name in it.
SAID = b'{"replica": "the replica of paris", "tokens": 17}'


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def member(
    address: Address, replica: int, world: int, root: str, wire: str = "int8", **options: Any
) -> Iterator[Any]:
    """An exchange over a link with keys, and its buffers."""
    options = {"link_keys": folder_of(root, replica), "collectives": "tcp", **options}
    with closing(connect_replica(address, replica, list(range(world)), **options)) as ex:
        yield ex, ex.buffers(N, WireFormat(wire))


# ------------------------------------------------------------------------------------- rounds


def _rounds(rank: int, world: int, address: Address, root: str, lanes: int) -> Any:
    everybody = list(range(world))
    with member(address, rank, world, root, lanes=lanes) as (ex, buffers):
        fine = [gives_reference_bytes(ex, buffers, round, everybody) for round in range(4)]
        return fine, len(ex.tcp.public_key)


@pytest.mark.nightly("3 s each; more replicas and lanes are the general case", but=["2-3"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lanes", [1, 2])
def test_rounds_give_the_bytes_of_the_reference(
    fresh_workers: Fresh, tmp_path: Path, world: int, lanes: int
) -> None:
    make_folders(tmp_path, world)
    pool = fresh_workers(world, init_group=False)
    assert pool.run(_rounds, pool.store, str(tmp_path), lanes) == [([True] * 4, 64)] * world


def free_ports(count: int) -> list[int]:
    """Return different free ports; the kernel gives none of them to another connection."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def parameters_of(replica: int) -> torch.Tensor:
    return values(7, replica, N)


def _through_relays(
    rank: int, world: int, address: Address, root: str, ways: list[tuple[int, int]], keyed: bool
) -> Any:
    own, relay = ways[rank]
    places = {"listen": f"127.0.0.1:{own}", "advertise": f"127.0.0.1:{relay}"}
    keys = {} if keyed else {"link_keys": None}
    with member(address, rank, world, root, "fp32", **places, **keys) as (ex, buffers):
        sync(ex, buffers, [parameters_of(rank)])
        buffers.commit()
        return ex.exchange_objects(SAID)


@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "plain"])
def test_a_relay_reads_nothing_of_a_link_with_keys(
    fresh_workers: Fresh, tmp_path: Path, keyed: bool
) -> None:
    """Without keys the relay reads everything, which shows that the test looks well."""
    make_folders(tmp_path, 2)
    ports = free_ports(2)
    relays = [Forwarder(port) for port in ports]
    ways = [(port, relay.port) for port, relay in zip(ports, relays, strict=True)]
    pool = fresh_workers(2, init_group=False)
    try:
        assert pool.run(_through_relays, pool.store, str(tmp_path), ways, keyed) == [[SAID] * 2] * 2
    finally:
        for relay in relays:
            relay.close()
    streams = [bytes(stream) for relay in relays for stream in relay.streams]
    # All has gone through the relays: one half of the parameters of each replica, at least.
    assert sum(map(len, streams)) > 4 * N
    for replica in (0, 1):
        flat = parameters_of(replica).numpy()
        # Both halves, because one of them stays where it is.
        parts = [flat[begin : begin + 8].tobytes() for begin in (0, 1000, N // 2 + 1000, N - 8)]
        assert any(part in stream for part in parts for stream in streams) is not keyed
    for words in (SAID, b"the replica of paris", b"tokens"):
        assert any(words in stream for stream in streams) is not keyed, words


# ------------------------------------------------------------------------------ who may connect


def _refused(rank: int, world: int, address: Address, root: str) -> Any:
    with pytest.raises(SyncError) as caught, member(address, rank, world, root):
        pass
    return str(caught.value), caught.value.stage, caught.value.seconds


def test_a_replica_whose_key_is_not_allowed_is_named(fresh_workers: Fresh, tmp_path: Path) -> None:
    make_folders(tmp_path, 3)
    remove(folder_of(tmp_path, 0), "r2")
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_refused, pool.store, str(tmp_path))
    assert {stage for _, stage, _ in results} == {"connect"}, results
    # The replica that refuses says why; the others may know that there is no way alone.
    text = results[0][0]
    assert "\n" not in text
    command = f"`diloco-comm keys allow {folder_of(tmp_path, 0)} NAME.key`"
    assert "the key of replica 2 is not among the allowed keys of replica 0" in text
    assert command in text


def _refused_late(rank: int, world: int, address: Address, root: str) -> Any:
    """The wait ends before a process counts as cut off."""
    signs._REACH_AGAIN_S = 60.0
    # Replica 0 ends first: the key of a process that has ended is no reason.
    timeout = 3.0 if rank == 0 else 8.0
    with pytest.raises(SyncError) as caught, member(address, rank, world, root, timeout=timeout):
        pass
    return str(caught.value), caught.value.stage


def test_a_wait_that_ends_first_names_the_key_too(fresh_workers: Fresh, tmp_path: Path) -> None:
    make_folders(tmp_path, 3)
    remove(folder_of(tmp_path, 0), "r1")
    pool = fresh_workers(2, init_group=False)
    (text, stage), (other, _) = pool.run(_refused_late, pool.store, str(tmp_path))
    assert stage == "rendezvous"
    start = "replicas [0, 1] cannot form a group: the key of replica 1 is not among the allowed"
    assert text.startswith(start) and folder_of(tmp_path, 0).name in text, text
    assert "were to form a group, but" in other, other


# ------------------------------------------------------------------------------ bound to a number


def bind(root: str | Path, replica: int, other: int, *numbers: int) -> None:
    """Bind the key of another replica to numbers, in the folder of a replica."""
    allow(folder_of(root, replica), [folder_of(root, other) / f"r{other}.key"], numbers)


def sentence(root: Path, replica: int, key: int, to: str, member: int) -> str:
    """Return the refusal of ``replica``, up to the remedy."""
    link = Keys.read(folder_of(root, key) / f"r{key}.key").link
    return (
        f"the allowed keys of replica {replica} bind the key r{key}.key ({link}) to {to}, and the "
        f"owner of that key takes part as replica {member}: "
    )


def _numbered(rank: int, world: int, address: Address, root: str, numbers: list[int]) -> Any:
    """Take part under a number with the keys of ``rank``; return a sentence, or whether is fine."""
    everybody = sorted(numbers)
    options = {"link_keys": folder_of(root, rank), "collectives": "tcp", "suspect_after": 5.0}
    try:
        ex = connect_replica(address, numbers[rank], everybody, **options)
    except SyncError as error:
        return str(error), error.stage, error.cuts
    with closing(ex):
        return gives_reference_bytes(ex, ex.buffers(N, WireFormat("int8")), 0, everybody)


def test_bound_keys_take_part_under_their_numbers_alone(
    fresh_workers: Fresh, tmp_path: Path
) -> None:
    make_folders(tmp_path, 2)
    bind(tmp_path, 0, 1, 1, 3)
    bind(tmp_path, 1, 0, 0)
    pool = fresh_workers(2, init_group=False)
    # The owner of the key r1 is replica 0.
    ends = pool.run(_numbered, pool.store, str(tmp_path), [1, 0])
    # Both have refused, each for a reason of its own.
    assert all(stage == "connect" and len(cuts) == 1 for _, stage, cuts in ends), ends
    text = next(text for text, _, _ in ends if sentence(tmp_path, 0, 0, "replica 0", 1) in text)
    assert "\n" not in text
    copy = folder_of(tmp_path, 1) / "allowed" / "r0.key"
    assert f"keys allow {folder_of(tmp_path, 1)} {copy} --replica 1` on the host of" in text


@pytest.mark.parametrize("numbers", [[0, 1], [0, 3]], ids=str)
def test_bound_keys_train_under_their_numbers(
    fresh_workers: Fresh, tmp_path: Path, numbers: list[int]
) -> None:
    make_folders(tmp_path, 2)
    bind(tmp_path, 0, 1, 1, 3)
    bind(tmp_path, 1, 0, 0)
    pool = fresh_workers(2, init_group=False)
    assert pool.run(_numbered, pool.store, str(tmp_path), numbers) == [True, True]


def test_the_side_that_refuses_says_why(fresh_workers: Fresh, tmp_path: Path) -> None:
    make_folders(tmp_path, 2)
    bind(tmp_path, 1, 0, 5)
    pool = fresh_workers(2, init_group=False)
    (of_0, stage_0, cuts_0), (of_1, stage_1, cuts_1) = pool.run(
        _numbered, pool.store, str(tmp_path), [0, 1]
    )
    assert {stage_0, stage_1} == {"connect"}
    assert sentence(tmp_path, 1, 0, "replica 5", 0) in of_1 and cuts_1 == ((1, 0),)
    assert "replica 1" in of_0 or "replica 5" in of_0, (of_0, cuts_0)


def _bound_anew(rank: int, world: int, address: Address, root: str) -> Any:
    pair, texts = [0, 1], []
    with member(address, rank, world, root, suspect_after=5.0) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, pair)
        if rank == 0:
            bind(root, 0, 1, 3)
        told = ""
        try:
            # The replica that is refused may wait until the other one has mended that.
            ex.change_group(pair, last_rounds={0: 0})
        except SyncError as error:
            told = str(error)
        if rank == 0:
            bind(root, 0, 1, 3, 1)
        if told:
            ex.change_group(pair, last_rounds={0: 0})
        fine = gives_reference_bytes(ex, buffers, 1, pair)
        # The own key: nobody is asked, and the group is as before.
        if rank == 0:
            bind(root, 0, 0, 3)
            with pytest.raises(ValueError) as own:
                ex.change_group(pair, last_rounds={0: 1})
            texts.append(str(own.value))
        fine &= gives_reference_bytes(ex, buffers, 2, pair)
        return [told, *texts], fine


def test_a_binding_counts_at_the_next_change_of_the_group(
    fresh_workers: Fresh, tmp_path: Path
) -> None:
    make_folders(tmp_path, 2)
    pool = fresh_workers(2, init_group=False)
    ends = pool.run(_bound_anew, pool.store, str(tmp_path))
    assert [fine for _, fine in ends] == [True, True]
    assert sentence(tmp_path, 0, 1, "replica 3", 1) in ends[0][0][0]
    assert sentence(tmp_path, 0, 0, "replica 3", 0) in ends[0][0][1]


def test_an_own_key_of_other_numbers_is_refused_at_once(tmp_path: Path) -> None:
    """Before the store or the registry is dialled: nothing listens there."""
    make_folders(tmp_path, 1)
    bind(tmp_path, 0, 0, 2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link, place = Link("tcp", keys=folder_of(tmp_path, 0)), "tcp://127.0.0.1:1"
    alone: list[Any] = ["alone", StorePeers(place, replica=0, of=3), Elastic(place, replica=0)]
    for peers in alone:
        with pytest.raises(ValueError) as caught:
            DiLoCo(model, optimizer, sync_every=2, peers=peers, link=link)
        assert sentence(tmp_path, 0, 0, "replica 2", 0) in str(caught.value)


# ------------------------------------------------------------------------------ removed keys


def _removed(rank: int, world: int, address: Address, root: str) -> Any:
    everybody, pair = list(range(world)), [0, 1]
    with member(address, rank, world, root, suspect_after=3.0) as (ex, buffers):
        assert gives_reference_bytes(ex, buffers, 0, everybody)
        before = ex.tcp.counters()["open"]
        ex.store.set(f"first/{rank}", "")
        ex.store.wait(["removed"])
        begin = time.monotonic()
        # A lane to each of the two others is two connections.
        while ex.tcp.counters()["open"] > before - (2 if rank < 2 else 4):
            assert time.monotonic() < begin + REMOVED_S + PATIENCE_S, ex.tcp.counters()
            time.sleep(0.05)
        seconds = time.monotonic() - begin
        with pytest.raises(SyncError) as caught:
            sync(ex, buffers, [values(1, rank, N)], round=1)
        if rank == 2:
            return None
        ex.change_group(pair, last_rounds={0: 0})
        return seconds, str(caught.value), gives_reference_bytes(ex, buffers, 1, pair)


def test_a_key_that_is_removed_ends_its_connections(fresh_workers: Fresh, tmp_path: Path) -> None:
    """The others go on without the replica whose key is removed in the middle of the run."""
    make_folders(tmp_path, 3)
    pool = fresh_workers(3, init_group=False)
    pool.submit(_removed, pool.store, str(tmp_path))
    prefix = "diloco_comm/default"
    wait_for(pool, [f"{prefix}/first/{rank}" for rank in range(3)])
    for replica in (0, 1):
        remove(folder_of(tmp_path, replica), "r2")
    pool.crew.store.set(f"{prefix}/removed", "")
    for seconds, text, fine in pool.collect()[:2]:
        assert fine and seconds < REMOVED_S + PATIENCE_S
        assert "replica 2: the connection was closed: its key is not allowed" in text, text


def _one_sided(rank: int, world: int, address: Address, root: str) -> Any:
    keys = {"link_keys": None} if rank == 1 else {}
    with pytest.raises(ReplicaMismatch) as caught, member(address, rank, world, root, **keys):
        pass
    return str(caught.value)


def test_keys_on_one_side_alone_are_a_mismatch(fresh_workers: Fresh, tmp_path: Path) -> None:
    make_folders(tmp_path, 3)
    pool = fresh_workers(3, init_group=False)
    texts = pool.run(_one_sided, pool.store, str(tmp_path))
    for text in texts:
        assert "Link(keys=) differs between replicas" in text and "\n" not in text
        assert '"given" on replica' in text and '"none" on replica 1' in text


# ---------------------------------------------------------------------------------- one process


def test_diloco_takes_keys_and_tells_nobody(tmp_path: Path) -> None:
    make_folders(tmp_path, 2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = Link("tcp", keys=folder_of(tmp_path, 0))
    with DiLoCo(model, optimizer, sync_every=2, peers="alone", link=link) as diloco:
        assert diloco.exchange.tcp is not None and diloco.exchange.tcp.public_key
        assert not {"keys", "link_keys"} & diloco.config().keys()
        names = {thread.name for thread in threading.enumerate()}
        assert "diloco_comm allowed keys" in names
    deadline = time.monotonic() + PATIENCE_S
    while "diloco_comm allowed keys" in {one.name for one in threading.enumerate()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("host", "warns"),
    [("8.8.8.8", True), ("[2606:4700::1]", True), ("10.1.2.3", False), ("localhost", False)],
)
def test_an_open_address_without_keys_is_a_warning(host: str, warns: bool) -> None:
    (port,) = free_ports(1)
    own_link._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            own_link.OwnLink(f"127.0.0.1:{port}", f"{host}:{port}", None).close()
    texts = [str(one.message) for one in caught]
    assert len(texts) == warns
    for text in texts:
        assert f"{host}:{port} travels unencrypted" in text and "\n" not in text


def test_an_open_address_with_keys_is_no_warning(tmp_path: Path) -> None:
    make_folders(tmp_path, 2)
    (port,) = free_ports(1)
    keys = own_link.LinkKeys.read(folder_of(tmp_path, 0))
    own_link._told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own_link.OwnLink(f"127.0.0.1:{port}", f"8.8.8.8:{port}", keys).close()
