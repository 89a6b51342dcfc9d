"""The decision through every kind of store, without one, and with notices that are lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_replicas
import pytest
import torch.distributed as dist
from fault_ends import Address, Fresh, H, end
from fault_replicas import Replica, Setup, check_agreement, connect, wait_for
from test_faults_store import STORE
from zygote import Job, Zygote

from diloco_comm import _C, SyncError
from diloco_comm.base.store_host import dial_store, open_store
from diloco_comm.exchange.membership.verdicts import decide_once

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
    reason = "was not decided, because this replica's connection to the store has broken"
    with pytest.raises(SyncError, match=reason):
        replica.diloco.change_group("survivors")
    # Nobody's listener is closed before all have looked.
    other.set(f"looked/{rank}", "")
    other.wait([f"looked/{r}" for r in range(action == "kill", world)])
    replica.diloco.close()
    return failure


@pytest.mark.parametrize(("action", "missing"), [("kill", (0,)), ("fail", ())])
def test_without_the_store_nobody_is_missing_who_may_live(
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
        assert failure.details["survivors"] == (), failure
        assert "because the store does not answer" in failure.message, failure
        assert ("the connection to replica 0 is lost" in failure.message) == bool(missing)


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
    ways = [store]
    if kind != "plain":
        ways += [dist.PrefixStore("p", store), _C.bounded_store(dist.PrefixStore("q", store), 10.0)]
    for way in ways:
        assert decide_once(way, "fate", "first") == "first"
        assert decide_once(way, "fate", "second") == "first"
        assert way.get("fate") == b"first"


@pytest.mark.parametrize("kind", ["tcp", "tcp without libuv", "diloco"])
def test_threads_that_share_a_connection_wait_beside_each_other(kind: str) -> None:
    """Two processes wait for a key of each other, each in one of its two threads."""
    if kind == "diloco":
        hosted = open_store("127.0.0.1", 0)
        connections: list[dist.Store] = [
            dial_store("127.0.0.1", hosted.port, 10.0) for _ in range(2)
        ]
    else:
        options: dict[str, Any] = {"wait_for_workers": False, "use_libuv": kind == "tcp"}
        options["timeout"] = timedelta(seconds=15.0)
        here = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
        connections = [here, dist.TCPStore("127.0.0.1", here.port, **options)]
    begin, limit_s = time.monotonic(), 5.0
    with ThreadPoolExecutor(2) as threads:
        waits = [
            threads.submit(_C.bounded_store(store, limit_s).wait, [f"key/{1 - i}"])
            for i, store in enumerate(connections)
        ]
        # Both wait by now.
        time.sleep(0.5)
        for i, store in enumerate(connections):
            _C.bounded_store(store, limit_s).set(f"key/{i}", "there")
        for wait in waits:
            wait.result()
    assert time.monotonic() - begin < limit_s


class Forgetful(dist.Store):
    """A way to a store on which one notice is lost, once ``forget`` names a part of its key."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.way, self.forget = store, ""

    def _is_lost(self, key: str) -> bool:
        is_lost = bool(self.forget) and re.search(self.forget, key) is not None
        self.forget = "" if is_lost else self.forget
        return is_lost

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if self._is_lost(key):
            # As a call that was not answered in time: what we wait for next gets its answers.
            raise dist.DistStoreError("the store did not answer, on purpose")
        self.way.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:  # type: ignore[override]
        if self._is_lost(key):
            raise dist.DistStoreError("the store did not answer, on purpose")
        texts = (text if isinstance(text, str) else text.decode() for text in (expected, desired))
        return self.way.compare_set(key, *texts)

    def get(self, key: str) -> bytes:
        return self.way.get(key)

    def add(self, key: str, value: int) -> int:
        return self.way.add(key, value)

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        return self.way.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # type: ignore[override]
        self.way.wait(keys) if timeout is None else self.way.wait(keys, timeout)


def lose_a_notice(rank: int, world: int, address: Address, setup: Setup, notice: str) -> Any:
    """Replica 1 dies, and what replica 0 says of it is lost at first. Replica 2 is in training."""
    way = Forgetful(connect(address))
    if rank == 0:
        fault_replicas.connect = lambda address: way
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 1:
        replica.fault("kill", "header")
    if rank == 2:
        replica.store.wait(["decided"])
    way.forget = notice
    failure = replica.train_until_failure(1)
    assert rank != 0 or way.forget == ""
    way.forget = ""
    replica.store.set("decided", "")
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.nightly("3 s each", but=["any_failed"])
@pytest.mark.parametrize("notice", ["any_failed", r"board/(failed|report)/0"])
def test_a_notice_that_is_lost_is_sent_again(fresh_workers: Fresh, notice: str) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        lose_a_notice, pool.store, setup, notice, expect_exit={1}, timeout=40
    )
    for one in (results[0], results[2]):
        assert one.missing == (1,) and one.survivors == one.members == (0, 2), one
    check_agreement([results[0].result, results[2].result])


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
