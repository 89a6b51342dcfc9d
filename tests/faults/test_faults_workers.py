"""Replicas of two workers change their group: a Ctrl-C in one worker, words of worker 0."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

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
    default_handler,
)

from diloco_comm import _C
from diloco_comm.exchange.membership import change
from diloco_comm.exchange.membership.follower import Mates
from diloco_comm.group.beats import Way

SETUP = Setup("int8", 1, H, timeout=1800.0, options={"backend": "tcp"})


def begin(rank: int, address: Address) -> Replica:
    """Train as worker ``rank % 2`` of replica ``rank // 2``, up to the first round."""
    number, worker = divmod(rank, 2)
    own = dist.PrefixStore(f"workers of {number}", connect(address))
    dist.init_process_group("gloo", store=own, rank=worker, world_size=2)
    replica = Replica(address, number, [0, 1], SETUP, shard_group=dist.group.WORLD)
    replica.train_to(H)
    return replica


def go_on(replica: Replica) -> Any:
    replica.train_to(3 * H)
    result = replica.result()
    replica.diloco.close()
    return result


def check(results: list[Any]) -> None:
    for worker in range(2):
        check_agreement(results[worker::2])
    assert {result.epoch for result in results} == {2}


def press_ctrl_c_on_one(rank: int, world: int, address: Address) -> Any:
    """Replica 0 waits for replica 1, and its worker 1 hears a Ctrl-C meanwhile."""
    replica = begin(rank, address)
    if rank >= 2:
        replica.store.wait(["pressed"])
        time.sleep(2.0)
    if rank != 1:
        replica.diloco.change_group([0, 1])
        return go_on(replica)
    signs = connect(address)

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        signs.set("pressed", "")

    threading.Timer(1.5, press).start()
    with default_handler(), pytest.raises(KeyboardInterrupt):
        replica.diloco.change_group([0, 1])
    return go_on(replica)


def test_a_ctrl_c_on_one_worker_comes_after_the_change(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    check(pool.run(press_ctrl_c_on_one, pool.store, timeout=40))


def hear_an_old_word(rank: int, world: int, address: Address) -> Any:
    """Worker 0 of replica 0 gives up an earlier attempt while worker 1 connects for this one."""
    replica = begin(rank, address)
    group, connect_all = replica.diloco.exchange._group, change.connect

    def connect_slowly(member: Any, attempt: Any) -> Any:
        if rank == 0:
            time.sleep(0.5)
            name = attempt.chosen.name
            group._mates.give_up(name._replace(counter=name.counter - 1))
        if rank >= 2:
            time.sleep(2.0)
        return connect_all(member, attempt)

    change.connect = connect_slowly
    replica.diloco.change_group([0, 1])
    return go_on(replica)


def test_a_word_about_an_earlier_attempt_ends_no_later_one(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    check(pool.run(hear_an_old_word, pool.store, timeout=40))


# --------------------------------------------------- a worker whose exchange is closed already


def test_a_worker_that_cannot_break_off_hears_the_next_word_of_worker_0() -> None:
    """Its attempt to join has failed, which has closed its exchange."""
    links = [_C.Link("127.0.0.1:0", "127.0.0.1:0") for _ in range(2)]
    ways = [Way(link.nonce, link.address, "", "") for link in links]
    first, second = [Mates(link, ways, rank, "service") for rank, link in enumerate(links)]
    engine, calls = _C.Engine(1.0), list[str]()
    engine.close(1.0)

    def seal_closed() -> None:
        calls.append("closed")
        engine.seal()

    def break_off(epoch: int, name: str) -> None:
        until = time.monotonic() + 20.0
        while name not in calls:
            assert time.monotonic() < until, f"worker 1 does not hear of epoch {epoch}"
            first.break_off(epoch)
            time.sleep(0.05)

    second.guard(seal_closed, lambda: 7)
    break_off(7, "closed")
    second.guard(lambda: calls.append("next"), lambda: 8)
    break_off(8, "next")
    for mates in (first, second):
        mates.close()
    for link in links:
        link.close()
