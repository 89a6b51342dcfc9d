"""A replica that stops, or dies, while payloads travel on a device: the others notice in time.

They have exchanged the headers by then, so that no message over gloo is waited for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from device_training import METHODS, Replica
from fault_replicas import connect, wait_for
from test_gpu_streams import NCCL_RANKS, on_streams, use_streams
from workers import Pool

from diloco_comm import Eager
from diloco_comm.base.errors import SyncError
from diloco_comm.base.memory import current
from diloco_comm.exchange.nccl import member
from diloco_comm.exchange.nccl.streams import StreamDriver

SUSPECT_S = 2.0
# Of an exchange: what the others must not have to wait for.
TIMEOUT_S = 900.0
# Of devices that connect: the others wait so long for one that does not.
CONNECT_S = 8.0
# Of a GPU: more than a minute at 2 GHz.
HOLD_CYCLES = 1 << 37


def hold(replica: Replica, device: str) -> None:
    """Keep the device busy, so that nothing that is enqueued from now on is exchanged."""
    driver: Any = replica.diloco.exchange._driver
    if device == "cuda":
        with current(driver.side):
            torch.cuda._sleep(HOLD_CYCLES)
    else:
        driver.group.enqueue("nothing", lambda: time.sleep(2 * TIMEOUT_S))


def abandoned(
    rank: int, world: int, address: tuple[str, int], device: str, library: str, sig: int
) -> dict[str, Any]:
    here = use_streams(rank, device, library)
    store = connect(address)
    members = {"store": store, "replica": rank, "num_replicas": world}
    limits = {"timeout": TIMEOUT_S, "suspect_after": SUSPECT_S}
    replica = Replica(rank, here, **members, **limits, **on_streams(METHODS["diloco"]))
    replica.steps(0, 7)
    before = replica.diloco.outer_hash()
    is_victim = rank == world - 1
    if is_victim:
        hold(replica, device)
    # The headers of all replicas are compared when this returns.
    replica.steps(7, 8)
    if is_victim:
        os.kill(os.getpid(), sig)
    begin, failure = time.monotonic(), None
    try:
        replica.diloco._rounds.settle_verdicts(8)
    except SyncError as error:
        failure = error
    assert failure is not None
    result = {
        "elapsed": time.monotonic() - begin,
        "missing": failure.missing,
        "message": str(failure),
        "is_kept": replica.diloco.outer_hash() == before,
    }
    replica.diloco.change_group("survivors")
    replica.steps(8, 16)
    replica.diloco.flush()
    result["hash"] = replica.diloco.outer_hash()
    replica.diloco.close()
    store.set(f"survived/{rank}", "")
    return result


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
NCCL = [pytest.param("cuda", 2, sig, marks=pytest.mark.gpu) for sig in (STOP, KILL)]


@pytest.mark.nightly("7 s of waiting; the first tier has weights of a round that breaks off")
@pytest.mark.parametrize(
    ("device", "world", "sig"),
    [("lagging", 3, STOP), ("lagging", 2, KILL), *(NCCL if NCCL_RANKS > 1 else [])],
)
def test_the_others_go_on(
    device: str,
    world: int,
    sig: int,
    fresh_workers: Callable[..., Pool],
    stand_in: str,
) -> None:
    pool, victim = fresh_workers(world, init_group=False), world - 1
    pool.submit(abandoned, pool.store, device, stand_in, sig)
    wait_for(pool, [f"survived/{rank}" for rank in range(victim)], timeout=60)
    pool.kill(victim)
    results = pool.collect(timeout=30, expect_exit={victim})[:victim]
    for result in results:
        assert result["missing"] == (victim,) and result["is_kept"], result
        # The host of one that died refuses connections.
        signs = f"replica {victim} did not report within", f"replica {victim} has ended"
        assert any(sign in result["message"] for sign in signs), result
        assert "sync of fragment 0, round 1 failed at exchange" in result["message"]
        least = 0.0 if sig == signal.SIGKILL else SUSPECT_S
        assert least < result["elapsed"] < TIMEOUT_S / 10
    assert len({result["hash"] for result in results}) == 1


def sealed_from_elsewhere(
    rank: int, world: int, address: tuple[str, int], library: str
) -> tuple[str, str, bool] | None:
    """Another thread ends the epoch of replica 0's engine while payloads travel."""
    here = use_streams(rank, "lagging", library)
    store = connect(address)
    members = {"store": store, "replica": rank, "num_replicas": world}
    method = on_streams(METHODS["diloco"])
    replica = Replica(rank, here, **members, timeout=TIMEOUT_S, **method)
    replica.steps(0, 7)
    before = replica.diloco.outer_hash()
    if rank == 1:
        hold(replica, "lagging")
    replica.steps(7, 8)
    if rank == 1:
        signal.pause()
    thread = threading.Thread(target=replica.diloco.exchange.engine.seal)
    thread.start()
    with pytest.raises(SyncError) as info:
        replica.diloco._rounds.settle_verdicts(8)
    thread.join()
    result = str(info.value), info.value.stage, replica.diloco.outer_hash() == before
    replica.diloco.close()
    store.set("survived/0", "")
    return result


def test_an_epoch_that_ends_takes_its_exchanges_on_streams_along(
    fresh_workers: Callable[..., Pool], stand_in: str
) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.submit(sealed_from_elsewhere, pool.store, stand_in)
    wait_for(pool, ["survived/0"], timeout=60)
    pool.kill(1)
    message, stage, is_kept = pool.collect(timeout=30, expect_exit={1})[0]
    assert message.startswith("sync of fragment 0, round 1 failed at exchange after ")
    assert stage == "exchange" and is_kept


def without_headers(
    rank: int, world: int, address: tuple[str, int], library: str, votes: bool
) -> dict[str, Any]:
    """The last replica's payloads arrive, and its vote if it ``votes``; its header does not."""
    here = use_streams(rank, "lagging", library)
    store = connect(address)
    members = {"store": store, "replica": rank, "num_replicas": world}
    limits = {"timeout": TIMEOUT_S, "suspect_after": SUSPECT_S}
    sends: list[float] = []

    def weight() -> float:
        sends.append(1.0 + rank + len(sends))
        return sends[-1]

    method = {"overlap": Eager(), "wire": "int8", "weight": weight}
    replica = Replica(rank, here, **members, **limits, **on_streams(method))
    diloco: Any = replica.diloco
    (part,) = diloco.parts
    replica.steps(0, 7)
    if rank == world - 1:
        control = SimpleNamespace(is_done=False, failure=None, headers=[], waiting="")
        diloco.exchange.submit_header = lambda *arguments: control
        if not votes:
            diloco.exchange._driver._vote = lambda ballot: None
        replica.steps(7, 8)
        torch.accelerator.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    replica.steps(7, 8)
    work, failure = part.in_flight[-1].work, ""
    try:
        work.wait(TIMEOUT_S / 10)
    except SyncError as error:
        failure = error.stage
    result: dict[str, Any] = {"failure": failure, "state": work.state, "own": sends[-1]}
    result["presumed"] = [header.weight for header in work.headers]
    diloco.change_group("survivors")
    result |= {"weight_sum": part.weight_sum, "round": part.round}
    replica.steps(8, 16)
    diloco.flush()
    result["hash"] = diloco.outer_hash()
    diloco.close()
    store.set(f"survived/{rank}", "")
    return result


@pytest.mark.nightly("10 s of waiting; test_faults_values has weights that fail")
@pytest.mark.parametrize("votes", [False, True])
def test_weights_of_a_round_whose_headers_did_not_come(
    votes: bool, fresh_workers: Callable[..., Pool], stand_in: str
) -> None:
    """Weights that change are known before the payloads travel, and count with the round.

    A replica's own share of the next round goes by their sum.
    """
    world = 3
    pool = fresh_workers(world, init_group=False)
    pool.submit(without_headers, pool.store, stand_in, votes)
    wait_for(pool, [f"survived/{rank}" for rank in range(world - 1)], timeout=60)
    results = pool.collect(timeout=30, expect_exit={world - 1})[: world - 1]
    for rank, result in enumerate(results):
        assert result["failure"] == ("" if votes else "vote"), result
        assert result["state"] == ("agreed" if votes else "voted")
        # The second send of each replica.
        assert result["presumed"] == [2.0, 3.0, 4.0] and result["own"] == 2.0 + rank
        assert result["weight_sum"] == 9.0 and result["round"] == 2
    assert len({result["hash"] for result in results}) == 1


def fail_to_connect(*_: Any) -> None:
    raise SyncError("as a test wants it", stage="connect")


def devices_of_one_do_not_connect(
    rank: int, world: int, address: tuple[str, int], device: str, library: str
) -> tuple[str, tuple[int, ...], int, str]:
    here = use_streams(rank, device, library)
    members = {"store": connect(address), "replica": rank, "num_replicas": world}
    limits = {"timeout": TIMEOUT_S, "join_timeout": CONNECT_S}
    replica = Replica(rank, here, **members, **limits, **on_streams(METHODS["diloco"]))
    replica.steps(0, 8)
    with mock.patch.object(member, "_CONNECT_S", CONNECT_S):
        with mock.patch.object(
            StreamDriver, "connect", fail_to_connect if rank == 0 else StreamDriver.connect
        ):
            with pytest.raises(SyncError) as caught:
                replica.diloco.change_group(range(world))
        epoch = replica.diloco.epoch
        replica.diloco.change_group(range(world))
    replica.steps(8, 16)
    replica.diloco.flush()
    outer_hash = replica.diloco.outer_hash()
    replica.diloco.close()
    return str(caught.value), caught.value.missing, epoch, outer_hash


@pytest.mark.nightly("10 s of waiting; the first tier has connecting that ends in time")
@pytest.mark.parametrize("device", ["lagging"])
def test_devices_connect_on_all_replicas_or_on_none(
    device: str, fresh_workers: Callable[..., Pool], stand_in
) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.submit(devices_of_one_do_not_connect, pool.store, device, stand_in)
    results: list[Any] = pool.collect(timeout=60)
    assert results[0] == results[1] and results[0][1:3] == ((), 1), results
    assert "as a test wants it" in results[0][0]
