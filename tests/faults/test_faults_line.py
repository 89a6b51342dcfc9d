"""One line of groups: whatever fails half-way, no store has two trainings."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from fault_ends import HALF_AN_HOUR, Address, Fresh, finish
from fault_replicas import Replica, Result, Setup, check_agreement, connect

from diloco_comm import LeftBehind, SyncError
from diloco_comm.exchange import waiting
from diloco_comm.exchange.membership import line, plans, regroup, stores
from diloco_comm.exchange.membership.meeting import attendance, meetings
from diloco_comm.exchange.membership.meeting.attendance import Attendance, Limits, Pulses

H = 4


# ------------------------------------------------------- a change that fails for one member alone


def fail_alone(rank: int, world: int, address: Address, first: int) -> Any:
    """Replica 0 fails once it is connected, and replica 1 enters; then each goes on alone."""
    replica = Replica(address, rank, range(world), HALF_AN_HOUR)
    diloco, attach = replica.diloco, regroup.attach
    replica.train_to(H)

    def attach_and_fail(*arguments: Any) -> None:
        attach(*arguments)
        # A failure before would keep replica 1 from the new epoch.
        replica.store.wait(["replica 1 has attached"])
        raise SyncError("as a test wants it", stage="attach")

    def attach_and_tell(*arguments: Any) -> None:
        attach(*arguments)
        replica.store.set("replica 1 has attached", "")

    if rank == 0:
        with mock.patch.object(regroup, "attach", attach_and_fail):
            with pytest.raises(SyncError, match="as a test"):
                diloco.change_group([0, 1])
        assert diloco.epoch == 1
        diloco.exchange.seal()
    else:
        # The first agreement in the new epoch is one that replica 0 does not come to.
        with mock.patch.object(regroup, "attach", attach_and_tell), pytest.raises(SyncError):
            diloco.change_group([0, 1])
        assert diloco.epoch == 2
    if rank != first:
        replica.store.wait([f"went on/{first}"])
    try:
        diloco.change_group([rank])
    except LeftBehind as error:
        diloco.close()
        return str(error), error.survivors
    replica.store.set(f"went on/{rank}", "")
    return finish(replica, 3 * H)


@pytest.mark.parametrize("first", [0, 1])
def test_a_change_that_one_member_misses_makes_no_second_training(
    fresh_workers: Fresh, first: int
) -> None:
    pool = fresh_workers(2, init_group=False)
    results: list[Any] = pool.run(fail_alone, pool.store, first, timeout=60)
    assert isinstance(results[first], Result), results
    text, survivors = results[1 - first]
    assert survivors == (first,) and "close this DiLoCo" in text


def test_counters_of_the_newest_group_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose last change has failed reads the counter of one for whom that change did not fail."""
    now = [100.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    pulses = Pulses(store, lambda: (1, [0, 1]), 4.0, (2, [0, 1]))
    store.set("1/board/beat/1", "7")
    for beat in range(4):
        store.set("2/board/beat/1", str(beat))
        now[0] += 1.0
        pulses.look([1])
    assert pulses.lives(1) and pulses.rising(2) == {1}
    for _ in range(6):
        now[0] += 1.0
        pulses.look([1])
    assert pulses.risen(2) == {1} and not pulses.rising(2)


# --------------------------------------------------------------------------- claims of one line


class Claimant:
    """What ``claim_line`` asks of an exchange."""

    def __init__(self, store: dist.Store, replica: int, worker: str = "") -> None:
        self.users_store, self.replica = store, replica
        self.line_name, self.name = "default", "default" + worker
        self.collectives, self.timeout, self.epoch, self.members = "gloo", 10.0, 1, (0, 1, 2)
        self.store = self.store_of(self.name)

    def store_of(self, name: str) -> dist.Store:
        return dist.PrefixStore(f"diloco_comm/{name}", self.users_store)

    def claim(self, epoch: int, members: list[int], patience: float = 5.0) -> None:
        infos = {member: {"epoch": 1, "ack": {"epoch": 1}} for member in members}
        exchange: Any = self
        bounded = stores.bounded(exchange)
        line.claim_line(exchange, bounded, infos, epoch, members, patience)


def test_a_group_that_never_began_gives_its_line_up() -> None:
    store = dist.HashStore()
    Claimant(store, 0).claim(2, [0, 1])
    other = Claimant(store, 2)
    begin = time.monotonic()
    other.claim(3, [2], patience=0.5)
    assert time.monotonic() - begin >= 0.5
    # Whoever of them connects later finds that it has failed.
    assert json.loads(other.store.get("2/outcome"))["why"]


def test_a_group_whose_connecting_failed_gives_its_line_up() -> None:
    store = dist.HashStore()
    first, other = Claimant(store, 0), Claimant(store, 2)
    first.claim(3, [0, 1])
    first.store.set("3/outcome", json.dumps({"why": "no way", "missing": [], "survivors": []}))
    with pytest.raises(SyncError, match="could not connect: call change_group again"):
        other.claim(2, [2])
    other.claim(4, [2])


def test_a_group_that_has_begun_keeps_its_line() -> None:
    store = dist.HashStore()
    first = Claimant(store, 0)
    first.claim(2, [0, 1])
    first.store.set("2/outcome", json.dumps({"why": "", "missing": [], "survivors": []}))
    with pytest.raises(LeftBehind, match=r"replicas \[0, 1\] went on in epoch 2"):
        Claimant(store, 2).claim(3, [2])


@pytest.mark.parametrize("epoch", [2, 3])
def test_workers_of_a_replica_claim_together(epoch: int) -> None:
    """Each of two lists has one worker that comes first: one list wins on both workers."""
    store = dist.HashStore()
    Claimant(store, 0, "@0of2").claim(2, [0])
    with pytest.raises(LeftBehind):
        Claimant(store, 1, "@1of2").claim(epoch, [1])
    Claimant(store, 0, "@1of2").claim(epoch, [0])
    with pytest.raises(LeftBehind):
        Claimant(store, 1, "@0of2").claim(3, [1])


# ------------------------------------------------------------------- all replicas started again


def start_all_again(rank: int, world: int, address: Address) -> Any:
    """Ranks 0 to 2 are the old processes; of them replica 2 takes its time to end."""
    store = connect(address)
    number, is_new = rank % 3, rank >= 3
    if not is_new:
        replica = Replica(address, number, range(3), HALF_AN_HOUR)
        replica.train_to(H)
        store.set(f"trained/{rank}", "")
        if number == 2:
            store.wait(["warned/3", "warned/4"])
            store.set("ended", "")
        store.wait(["trained/0", "trained/1", "trained/2"])
        # An end without a word, as of a process that a signal ends.
        os._exit(0)
    store.wait(["trained/0", "trained/1", "trained/2"])
    handler = logging.Handler()
    handler.emit = lambda record: (  # type: ignore[method-assign]
        store.set(f"warned/{rank}", record.getMessage())
        if "runs already" in record.getMessage()
        else None
    )
    logging.getLogger("diloco_comm").addHandler(handler)
    if number == 2:
        store.wait(["ended"])
    return finish(Replica(address, number, range(3), HALF_AN_HOUR), 2 * H)


@pytest.mark.nightly("4 s; the first tier has a replica that is told of a newer group")
def test_an_old_process_that_ends_late_does_not_end_a_new_start(fresh_workers: Fresh) -> None:
    pool = fresh_workers(6, init_group=False)
    results: list[Any] = pool.run(start_all_again, pool.store, expect_exit={0, 1, 2}, timeout=90)
    check_agreement(results[3:])


# ------------------------------------------------------------------------------------ sentences


def test_a_number_that_this_process_has_is_given_back_by_closing() -> None:
    own = str(plans.number_is_taken(1, plans.own_place(), 3))
    assert "close the DiLoCo of this process first" in own and "a number of its own" not in own
    assert "process there:7 (host:pid)" in str(plans.number_is_taken(1, "there:7"))
    assert "by another process: give" in str(plans.number_is_taken(1, ""))


def test_a_hello_of_another_handshake_is_read() -> None:
    store = dist.HashStore()
    limits = Limits(timeout=60.0, unheard=60.0, silence=5.0)
    here = Attendance(0, [0, 1], limits, Pulses(store, lambda: (0, []), 5.0))
    hello = {"nonce": "own", "beat": 0, "members": [0, 1], "settings": {}, "meeting": "m"}
    hello |= {"info": None, "epoch": 0, "newest": 0}
    meetings.make_room(store, [0, 1])
    meeting = meetings.Meeting(store, [0, 1], hello, lambda _: None, here, found="other")
    for beat in range(2):
        store.set("hello/1", json.dumps(hello | {"nonce": "old", "beat": beat}))
        meeting.look()
    assert here.heard == {1} and meeting.members_here() == []
    store.set("hello/0", json.dumps(hello | {"nonce": "other"}))
    with pytest.raises(SyncError, match="already taken by another process"):
        meeting.look()


def test_a_slow_store_is_asked_again_before_another_one() -> None:
    slow = waiting.store_advice(dist.DistStoreError("late"))
    assert slow.startswith("call again; if the store stays silent")
    assert waiting.store_advice(dist.DistNetworkError("broken")) == waiting.ANOTHER_STORE


# ------------------------------------------------------------- left behind while waiting for others


def wait_for_those_that_went_on(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replicas 0 and 1 go on alone while replica 2 waits for both at a meeting of all three."""
    limits = {"join_timeout": 1800.0, "suspect_after": 6.0}
    replica = Replica(address, rank, range(world), setup, **limits)
    replica.train_to(H)
    if rank < 2:
        replica.store.wait(["waits"])
        replica.diloco.change_group([0, 1])
        replica.train_to(2 * H)
        replica.store.wait(["told"])
        return replica.diloco.epoch
    replica.store.set("waits", "")
    with pytest.raises(LeftBehind) as caught:
        replica.diloco.change_group(range(world))
    replica.store.set("told", "")
    return caught.value


def test_who_waits_for_a_group_that_went_on_is_told_so(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(wait_for_those_that_went_on, pool.store, setup, timeout=40)
    epoch, error = results[0], results[2]
    assert results[1] == epoch and error.went_on_in == epoch
    assert error.missing == (2,) and error.survivors == (0, 1)
    assert f"replicas [0, 1] went on in epoch {epoch} without replica 2" in str(error), error
