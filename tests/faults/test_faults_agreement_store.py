"""The decision through every kind of store, without one, and with notices that are lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_replicas
import pytest
import torch.distributed as dist
from fault_replicas import (
    Address,
    Fresh,
    H,
    Replica,
    Setup,
    check_agreement,
    connect,
    end,
    wait_for,
)
from test_faults_store import STORE
from zygote import Job, Zygote

from diloco_comm import SyncError
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.membership import fixed_group, stores
from diloco_comm.exchange.membership.stores import StoreTable
from diloco_comm.group import state as st
from diloco_comm.group.beats import name_of
from diloco_comm.group.records import Key
from diloco_comm.group.table import TableAway

# --------------------------------------------------------------------------------- the store


@pytest.fixture
def host(zygote: Zygote) -> Any:
    """A process that hosts a store, to be killed, with its address."""
    job = Job(zygote, STORE)
    yield job, ("127.0.0.1", int(job.output.readline()))
    job.send_signal(signal.SIGKILL)
    job.finish()


def fail_without_a_store(
    rank: int, world: int, addresses: list[Address], setup: Setup, action: str
) -> Any:
    replica = Replica(addresses[0], rank, range(world), setup)
    other = connect(addresses[1])
    replica.train_to(2 * H - 1)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    if rank == 0:
        replica.fault(action, "reduce")
    failure = replica.train_until_failure(1)
    reason = "the store did not answer while replicas .* give all of them another store"
    with pytest.raises(SyncError, match=reason):
        replica.diloco.change_group("survivors")
    # Nobody's listener is closed before all have looked.
    other.set(f"looked/{rank}", "")
    other.wait([f"looked/{r}" for r in range(action == "kill", world)])
    replica.diloco.close()
    return failure


@pytest.mark.parametrize(("action", "missing"), [("kill", (0,)), ("fail", ())])
def test_without_the_store_the_links_tell_who_is_missing(
    fresh_workers: Fresh, host: Any, action: str, missing: tuple[int, ...]
) -> None:
    job, address = host
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=20.0)
    pool.submit(fail_without_a_store, [address, pool.store], setup, action)
    wait_for(pool, [f"ready/{rank}" for rank in range(3)])
    job.send_signal(signal.SIGKILL)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=40, expect_exit={0} if action == "kill" else set())
    for failure in results[1:]:
        assert failure.missing == missing, failure
        assert failure.details["survivors"] == ((1, 2) if missing else (0, 1, 2)), failure
        assert ("replica 0 has ended" in failure.message) == bool(missing), failure


# ------------------------------------------------------------------- the silence of a store


def own_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_silence_of_a_former_store_says_nothing_of_the_next(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_group, "STORE_LIMIT_S", 2.0)
    job, address = host
    exchange = Exchange(connect(address), 0, [0], timeout=60.0)
    assert exchange._group is not None and exchange._group.driver is not None
    former = exchange._group.driver._table._table
    job.send_signal(signal.SIGKILL)
    time.sleep(2.5)
    look, slow = StoreTable.look, list[StoreTable]()

    def look_late(table: StoreTable, name: str, text: bytes) -> Any:
        if table is not former and not slow:
            slow.append(table)
            time.sleep(1.0)
        return look(table, name, text)

    monkeypatch.setattr(StoreTable, "look", look_late)
    exchange.change_group([0], store=own_store(), last_rounds={})
    assert slow and exchange.epoch == 2
    exchange.close()


def test_a_late_word_of_a_former_store_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = own_store(), own_store()
    exchange = Exchange(store, 0, [0], timeout=60.0)
    assert exchange._group is not None and exchange._group.driver is not None
    driver, noted = exchange._group.driver, list[Any]()
    monkeypatch.setattr(driver, "_note_loss", noted.append)
    # The word waits for the driver when the caller names another store.
    post = driver._table._post
    driver.move(StoreTable(other))
    post(TableAway("the former store has died"))
    exchange.change_group([0], last_rounds={})
    assert noted == [] and exchange.epoch == 2
    exchange.close()


def test_a_refusal_ends_with_its_demand() -> None:
    store = own_store()
    exchange = Exchange(store, 0, [0], timeout=60.0)
    assert exchange._group is not None and exchange._group.driver is not None
    driver = exchange._group.driver
    # The driver asks another process for its settings when the caller gives up.
    other = Key(1, bytes(16))
    driver._refused = st.Fail("other settings", other), time.monotonic() + 60.0, other
    driver.tell(st.GivenUp())
    until = time.monotonic() + 20.0
    while driver._refused is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    exchange.change_group([0], last_rounds={})
    exchange.close()


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ('{"diloco_comm": ["x"], "the handshake": 2}', "diloco_comm differs"),
        ("[" * 100_000 + "]" * 100_000, "differs between replicas"),
        ('["x"]', "differs between replicas"),
    ],
    ids=["list", "deep", "no settings"],
)
def test_settings_of_any_peer_make_a_sentence(shown: str, said: str) -> None:
    store = own_store()
    exchange = Exchange(store, 0, [0], timeout=60.0)
    assert exchange._group is not None and exchange._group.driver is not None
    assert said in exchange._group.driver._words_of_difference(1, shown)
    exchange.close()


def found_a_group(rank: int, world: int, address: Address) -> int:
    fixed_group.STORE_LIMIT_S = 4.0
    store = connect(address)
    store.set(f"founds/{rank}", "")
    if rank == 1:
        store.wait(["goes on"])
    exchange = Exchange(store, rank, range(world), timeout=60.0)
    exchange.close()
    return exchange.epoch


@pytest.mark.nightly("10 s of waiting; the first tier has the silence of a former store")
def test_a_standstill_of_a_caller_is_no_silence_of_the_store(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.submit(found_a_group, pool.store)
    wait_for(pool, ["founds/0", "founds/1"])
    time.sleep(1.0)
    pool.kill(0, signal.SIGSTOP)
    time.sleep(6.0)
    pool.kill(0, signal.SIGCONT)
    time.sleep(0.5)
    pool.crew.store.set("goes on", "")
    assert pool.collect(timeout=40) == [1, 1]


class PlainStore(dist.Store):
    """One that can do no more than torch asks of every store."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("kind", ["tcp", "tcp without libuv", "hash", "file", "plain"])
def test_every_store_decides(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Callable[[], dist.Store]] = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "tcp without libuv": lambda: dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
        ),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "plain": PlainStore,
    }
    store = stores[kind]()
    ways = [store] if kind == "plain" else [store, dist.PrefixStore("p", store)]
    for way in ways:
        first, second = StoreTable(way), StoreTable(way)
        assert first.look("a", b"1").beats == second.look("", b"").beats == {"a": b"1"}
        assert second.look("b", b"2").beats == {"a": b"1", "b": b"2"}
        assert first.id == second.id and len(first.id) == 16
        assert first.look("", b"").record == b"" and not first.swap(b"x", b"y")
        assert first.swap(b"", b"one")
        assert not second.swap(b"", b"other") and second.swap(b"one", b"two")
        assert first.look("", b"").record == b"two"


def forget_the_dead(rank: int, world: int, address: Address) -> tuple[list[bool], Any]:
    """Return which of the three beats are kept in the end."""
    stores.FORGET_S, stores.DELETE_S = 2.0, 1.0
    replica = Replica(address, rank, range(world), Setup("int8", 1, H), suspect_after=4.0)
    replica.train_to(2 * H - 1)
    group = replica.diloco.exchange._group
    assert group is not None and group.driver is not None
    names = [f"beat/{name_of(key)}" for key in group.driver.beats or {}]
    table = replica.diloco.exchange.store
    assert len(names) == world and table.check(names)
    if rank == 2:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    replica.diloco.change_group("survivors")
    until = time.monotonic() + 20.0
    while table.check(names) and time.monotonic() < until:
        time.sleep(0.1)
    kept = [table.check([name]) for name in names]
    replica.train_to(4 * H)
    return kept, end(replica, failure)


def test_the_beat_of_a_dead_process_is_deleted(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(forget_the_dead, pool.store, expect_exit={2}, timeout=60)
    assert [kept for kept, _ in results[:2]] == 2 * [[True, True, False]]
    check_agreement(one.result for _, one in results[:2])


def test_a_living_process_gives_its_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still for longer than the others kept its name."""
    monkeypatch.setattr(stores, "FORGET_S", 0.3)
    monkeypatch.setattr(stores, "DELETE_S", 0.3)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = StoreTable(host), StoreTable(host)
    second.look("b", b"1")
    for count in range(20):
        beats = first.look("a", str(count).encode()).beats
        time.sleep(0.05)
    assert set(beats) == {"a"} and not host.check(["beat/b"])
    assert second.look("b", b"2").beats["b"] == b"2"
    assert set(first.look("a", b"again").beats) == {"a", "b"}


def die_on_a_file(rank: int, world: int, path: str) -> Any:
    """The replicas share a file, and nothing else."""
    fault_replicas.connect = lambda address: dist.FileStore(path, world)
    replica = Replica(("", 0), rank, range(world), Setup("int8", 1, H), suspect_after=4.0)
    replica.train_to(2 * H - 1)
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.nightly("3 s; the first tier agrees through a TCPStore")
def test_survivors_agree_through_a_file(fresh_workers: Fresh, tmp_path: Path) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        die_on_a_file, str(tmp_path / "store"), expect_exit={0}, timeout=40
    )
    for one in results[1:]:
        assert one.missing == (0,) and one.survivors == one.members == (1, 2)
    check_agreement(one.result for one in results[1:])
