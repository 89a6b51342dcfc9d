"""Replicas that are separate jobs meet at a store; its host dies, or hangs without dying."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from fault_replicas import (
    REPORT_S,
    Replica,
    Setup,
    connect,
    engine_threads,
    lasting_engine_threads,
    listen_to_the_log,
    wait_for,
)
from proxies import Forwarder
from workers import Pool
from zygote import Job, Zygote

from diloco_comm import Elastic, SyncError
from diloco_comm.base.store_host import open_store
from diloco_comm.elastic.exits import RESTART, status_of
from diloco_comm.rounds.handshake import connected_store

H = 4

STORE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host(zygote: Zygote) -> Any:
    """A process that hosts a store, to be killed or stopped, with its address."""
    job = Job(zygote, STORE)
    yield job, ("127.0.0.1", int(job.output.readline()))
    job.send_signal(signal.SIGKILL)
    job.finish()


def test_a_host_without_an_address_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    sentence = "the store is to be at no-such-host.invalid, and this host knows no address of that"
    began = time.monotonic()
    with pytest.raises(dist.DistError, match=sentence):
        connected_store("tcp://no-such-host.invalid:29500", 0.5)
    with pytest.raises(OSError, match=sentence):
        open_store("no-such-host.invalid", 0)
    assert time.monotonic() - began < 30
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly("5 s; the store's name has the same check")
def test_a_registry_without_an_address_is_one_sentence() -> None:
    elastic = Elastic("tcp://no-such-host.invalid:29400", insecure=True)
    sentence = "the registry is to be at no-such-host.invalid, and this host knows no address"
    with pytest.raises(SyncError, match=sentence) as refused:
        elastic.interface()
    # A launcher starts the replica again: the name server may have been late.
    assert status_of(refused.value) == RESTART


def test_separate_jobs_meet_at_a_store(zygote: Zygote, host: Any) -> None:
    script = """
    import sys
    import torch
    import torch.distributed as dist
    from fault_replicas import make_model, make_optimizer, take_inner_step
    from diloco_comm import DiLoCo, StorePeers
    torch.set_num_threads(1)
    port, replica = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model = make_model()
    optimizer = make_optimizer(model)
    peers = StorePeers(store, replica=replica, of=3)
    with DiLoCo(model, optimizer, sync_every=4, peers=peers) as d:
        for step in range(12):
            take_inner_step(model, optimizer, replica, step)
        assert not dist.is_initialized()
        print(d.outer_hash(), d.parts[0].round)
    """
    port = host[1][1]
    jobs = [Job(zygote, script, port, replica) for replica in range(3)]
    outputs = [job.finish() for job in jobs]
    assert all(code == 0 for code, _ in outputs), outputs
    assert len({output for _, output in outputs}) == 1, outputs
    assert outputs[0][1].split()[1] == "3"


def lose_the_store(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> list[tuple[str, bool, str]]:
    """The store's host dies or hangs; rounds go on, and a failure then is still a clear one."""
    replica = Replica(addresses[0], rank, range(world), setup)
    other = connect(addresses[1])
    replica.train_to(H)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    replica.train_to(2 * H)
    hashes = [(replica.diloco.outer_hash(), True, "")]
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(H)
    hashes.append((failure.kind, failure.is_state_kept, failure.message))
    try:
        replica.diloco.change_group([1, 2])
    except SyncError as error:
        hashes.append((type(error).__name__, True, str(error)))
    replica.diloco.change_group([1, 2], store=dist.PrefixStore("new", other))
    replica.train_to(5 * H)
    hashes.append((replica.diloco.outer_hash(), True, ""))
    replica.diloco.close()
    return hashes


@pytest.mark.nightly("11 s each; the first tier has a store that is dead")
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_store_that_is_lost_is_replaced(
    fresh_workers: Callable[..., Pool], host: Any, sig: int
) -> None:
    pool = fresh_workers(3, init_group=False)
    job, address = host
    pool.submit(lose_the_store, [address, pool.store], Setup("int8", 1, H, timeout=6.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(3)])
    job.send_signal(sig)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=60, expect_exit={0})
    for result in results[1:]:
        kind, is_kept, text = result[1]
        assert kind == "SyncError" and is_kept, result
        assert "fragment 0, round 2" in text and "\n" not in text, result
        assert "replica 0 has ended" in text, result
        assert result[2][0] == "SyncError" and "\n" not in result[2][2], result
        assert "the store did not answer" in result[2][2], result
        assert "argument store=" in result[2][2], result
        # One that hangs may answer again: who turned to another store at once would be alone there.
        assert ("if the store stays silent" in result[2][2]) == (sig == signal.SIGSTOP), result
    assert results[1][0] == results[2][0]
    assert results[1][-1] == results[2][-1]


def close_on_a_store_that_hangs(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> None:
    other = connect(addresses[1])
    replica = Replica(addresses[0], rank, range(world), setup)
    replica.train_to(H)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    with pytest.raises(dist.DistError, match="not answer"):
        connected_store("tcp://{}:{}".format(*addresses[0]), 0.5)
    replica.diloco.close()
    assert lasting_engine_threads(allowed=["diloco-store"]) == []
    other.set(f"closed/{rank}", "")
    # The calls that nobody waits for any more end with the store's next answers.
    while engine_threads():
        time.sleep(0.01)


@pytest.mark.nightly("4 s of waiting; the first tier has a store that is dead")
def test_close_does_not_wait_for_a_store_that_hangs(
    fresh_workers: Callable[..., Pool], host: Any
) -> None:
    pool = fresh_workers(2, init_group=False)
    job, address = host
    pool.submit(close_on_a_store_that_hangs, [address, pool.store], Setup(timeout=300.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(2)])
    job.send_signal(signal.SIGSTOP)
    pool.crew.store.set("store is gone", "")
    wait_for(pool, [f"closed/{rank}" for rank in range(2)])
    job.send_signal(signal.SIGCONT)
    pool.collect(timeout=30)


def leave_while_the_store_hangs(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> tuple[str, tuple[int, ...], tuple[int, ...], bool] | None:
    other = connect(addresses[1])
    replica = Replica(addresses[0], rank, range(world), setup)
    replica.train_to(H + 1)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    if rank == 0:
        replica.diloco.close()
        other.set("left", "")
        return None
    replica.train_to(2 * H - 1)
    other.wait(["left"])
    failure = replica.train_until_failure(1)
    # A process that ends leaves its group, too.
    other.set(f"failed/{rank}", "")
    other.wait([f"failed/{one}" for one in range(1, world)])
    details = failure.details
    return failure.kind, details["replicas"], details["inner_steps"], failure.is_state_kept


@pytest.mark.nightly("5 s; test_faults_values names a replica that closes")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_who_left_is_named_without_the_store(
    fresh_workers: Callable[..., Pool], host: Any, world: int
) -> None:
    pool = fresh_workers(world, init_group=False)
    job, address = host
    pool.submit(leave_while_the_store_hangs, [address, pool.store], Setup(timeout=300.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(world)])
    job.send_signal(signal.SIGSTOP)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=30)
    assert results[1:] == [("PeerLeft", (0,), (H + 1,), True)] * (world - 1)


def fail_while_the_store_is_in_use(
    rank: int, world: int, address: tuple[str, int], setup: Setup
) -> str | None:
    replica = Replica(address, rank, range(world), setup)
    waiter = threading.Thread(target=replica.store.wait, args=(["the end"],))
    waiter.start()
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(H)
    connect(address).set("the end", "")
    waiter.join()
    return failure.message


@pytest.mark.nightly("12 s of waiting; the first tier has a store that is dead")
def test_a_slow_way_to_the_store_does_not_cost_the_reports(
    fresh_workers: Callable[..., Pool],
) -> None:
    # Connecting takes longer than a report may: our own connection must come about all the same,
    # because the one that we were given is in use for as long as its owner likes.
    pool = fresh_workers(3, init_group=False)
    way = Forwarder(pool.store[1], delay_s=1.5 * REPORT_S)
    pool.submit(fail_while_the_store_is_in_use, ("127.0.0.1", way.port), Setup("int8", 1, H))
    results: list[Any] = pool.collect(timeout=60, expect_exit={0})
    way.close()
    for message in results[1:]:
        assert "replica 0 has ended" in message, message


# ------------------------------------------------------------------ what is said of a lost store


def wait_without_a_store(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> list[str]:
    """Replica 0 waits for replica 1, which comes when replica 0 has logged whom it waits for."""
    lines = listen_to_the_log()
    other = connect(addresses[1])
    replica = Replica(addresses[0], rank, range(world), setup)
    replica.train_to(H)
    # While the store lives, a wait may be told without a word of the store.
    lines.clear()
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    driver = replica.diloco.exchange._group.driver
    while driver.loss is None or not driver.loss.is_lost:
        time.sleep(0.01)
    if rank == 1:
        other.wait(["told"])
    else:
        teller = threading.Thread(target=tell_of_a_line, args=(lines, "waiting for", other))
        teller.start()
    replica.train_to(4 * H)
    # The engine's watcher looks several times more.
    time.sleep(2.0)
    replica.diloco.close()
    return lines


def tell_of_a_line(lines: list[str], words: str, store: dist.Store) -> None:
    while not any(words in line for line in lines):
        time.sleep(0.01)
    store.set("told", "")


def test_a_dead_store_is_said_once_and_not_asked_again(
    fresh_workers: Callable[..., Pool], host: Any
) -> None:
    pool = fresh_workers(2, init_group=False)
    job, address = host
    pool.submit(wait_without_a_store, [address, pool.store], Setup(timeout=60.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(2)])
    job.send_signal(signal.SIGKILL)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=60)
    for lines, worker in zip(results, pool.workers, strict=True):
        warnings = [line for line in lines if "has broken" in line]
        assert len(warnings) == 1, lines
        store = f"the store at tcp://127.0.0.1:{address[1]}"
        assert f"this replica's connection to {store} has broken" in warnings[0]
        assert "store=..." in warnings[0]
        # torch prints a trace for each call that meets the broken connection.
        assert worker.output(1 << 20).count("[c10d] ") <= 1, worker.output()
    waits = [line for line in results[0] if line.startswith("waiting for replica 1")]
    assert waits, results[0]
