"""The decision through every kind of store, without one, and with notices that are lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_replicas
import pytest
import torch.distributed as dist
from fault_ends import Address, Fresh, H, end
from fault_replicas import Replica, Setup, check_agreement, connect, wait_for
from test_faults_store import STORE
from zygote import Job, Zygote

from diloco_comm import SyncError
from diloco_comm.exchange.membership.stores import StoreTable

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
