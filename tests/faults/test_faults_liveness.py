"""Silence is noticed long before a timeout: in a meeting, in a round, at the store."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from fault_ends import HALF_AN_HOUR, Address, Fresh, finish, wait_until_stopped
from fault_replicas import (
    Replica,
    Result,
    Setup,
    check_agreement,
    check_sentence,
    connect,
    wait_for,
)

from diloco_comm import SyncError
from diloco_comm.exchange.membership import regroup
from diloco_comm.exchange.membership.meeting import attendance
from diloco_comm.exchange.membership.meeting.attendance import Attendance, Limits, OwnTime, Pulses
from diloco_comm.exchange.membership.stores import read_known

H = 4
PREFIX = "run/diloco_comm/default"


def kill_ourselves(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_ourselves(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# --------------------------------------------------------------------------------- newcomers


def wait_for_a_newcomer(rank: int, world: int, address: Address, when: str) -> Any:
    """Replica 2 is to join 0 and 1, and dies before it has said hello, or soon after."""
    limits = {"join_timeout": 3.0, "suspect_after": 20.0}
    if when == "after its hello":
        limits = {"join_timeout": 60.0, "suspect_after": 3.0}
    if rank == 2:
        # Who is there sees it come.
        connect(address).wait([f"{PREFIX}/meeting/{r}" for r in (0, 1)])
        if when == "before its hello":
            kill_ourselves()
        regroup.rendezvous._wait_for_plan = kill_ourselves
        Replica(address, 2, range(3), HALF_AN_HOUR, init="join", **limits)
    replica = Replica(address, rank, [0, 1], HALF_AN_HOUR, **limits)
    replica.train_to(H)
    tell_when_here(replica)
    with pytest.raises(SyncError) as caught:
        replica.diloco.change_group([0, 1, 2])
    error = caught.value
    if when == "before its hello":
        # Nothing has happened to the old group: it goes on.
        with pytest.raises(ValueError, match="none is known"):
            replica.diloco.change_group("survivors")
    else:
        # All had met, and the old epoch was at an end.
        replica.diloco.change_group("survivors")
        assert replica.diloco.members == (0, 1)
    return str(error), error.missing, error.survivors, finish(replica, 3 * H)


def tell_when_here(replica: Replica) -> None:
    """Set a key when this replica has looked for the others of a meeting."""
    see = Attendance.see

    def see_and_tell(here: Attendance, marks: dict[int, attendance.Mark]) -> None:
        see(here, marks)
        replica.store.set(f"{PREFIX}/meeting/{replica.number}", "")

    Attendance.see = see_and_tell  # type: ignore[method-assign]


@pytest.mark.nightly("4 s each", but=["after its hello"])
@pytest.mark.parametrize("when", ["before its hello", "after its hello"])
def test_a_newcomer_that_dies_does_not_cost_the_timeout(fresh_workers: Fresh, when: str) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        wait_for_a_newcomer, pool.store, when, expect_exit={2}, timeout=30
    )
    assert results[0][:3] == results[1][:3]
    text, missing, survivors, _ = results[0]
    assert missing == (2,) and survivors == (0, 1) and "\n" not in text
    assert "replicas [0, 1, 2] were to form a group, but [2] " in text
    check_agreement(result for *_, result in results[:2])


def come_when_they_like(rank: int, world: int, address: Address) -> Result:
    """Newcomer and members wait for each other far longer than for one that is dead."""
    limits = {"join_timeout": 3.0, "suspect_after": 3.0}
    newcomer = world - 1
    if rank == newcomer:
        replica = Replica(address, rank, range(world), HALF_AN_HOUR, init="join", **limits)
        return finish(replica, 3 * H)
    replica = Replica(address, rank, range(newcomer), HALF_AN_HOUR, **limits)
    replica.train_to(H)
    time.sleep(5.0 * (rank + 1.2))
    replica.diloco.change_group(range(world))
    return finish(replica, 3 * H)


@pytest.mark.nightly("6 s each of waiting; the first tier has peers that do not live")
@pytest.mark.parametrize("members", [1, 2])
def test_who_lives_is_waited_for(fresh_workers: Fresh, members: int) -> None:
    pool = fresh_workers(members + 1, init_group=False)
    results = pool.run(come_when_they_like, pool.store, timeout=40)
    check_agreement(results)


# ------------------------------------------------------------------------- the first meeting


def meet_for_the_first_time(rank: int, world: int, address: Address) -> Any:
    if rank == 2:
        connect(address).wait(["gone/1"])
    with pytest.raises(SyncError) as caught:
        Replica(address, rank, range(3), HALF_AN_HOUR, join_timeout=1.0, suspect_after=2.0)
    return str(caught.value), caught.value.missing


@pytest.mark.nightly("4 s; the first tier has a newcomer that dies")
def test_who_was_there_and_is_silent_ends_the_first_meeting(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    pool.submit(meet_for_the_first_time, pool.store)
    wait_for(pool, [f"{PREFIX}/hello/{rank}" for rank in (0, 1)])
    # Who has not come at all is waited for longer than the time for joining.
    time.sleep(2.0)
    assert len(pool.busy) == 3
    pool.kill(1)
    deadline = time.monotonic() + 20
    while not pool.workers[0].connection.poll(0.1):
        assert time.monotonic() < deadline
    pool.kill(2)
    results: list[Any] = pool.collect(timeout=20, expect_exit={1, 2})
    text, missing = results[0]
    assert missing == (1,), text
    assert "[1] came, and was silent for 2 s then" in text, text


def meet_and_die_connecting(rank: int, world: int, address: Address) -> Any:
    if rank == 1:
        regroup.rendezvous.build_groups = kill_ourselves
    setup = Setup("int8", 1, H, timeout=3.0)
    with pytest.raises(SyncError) as caught:
        Replica(address, rank, range(3), setup)
    error = caught.value
    return str(error), error.missing, error.survivors, error.stage


@pytest.mark.nightly("5 s; the first tier has a newcomer that dies")
def test_a_death_while_connecting_is_one_error_for_all(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(meet_and_die_connecting, pool.store, expect_exit={1}, timeout=30)
    assert results[0] == results[2]
    text, missing, survivors, stage = results[0]
    assert missing == (1,) and survivors == (0, 2) and stage == "connect"
    assert text == "replicas [1] did not connect to the others in epoch 1"


# ------------------------------------------------------------------------------- in a round


def lose_a_peer(rank: int, world: int, address: Address, stage: str) -> Any:
    replica = Replica(address, rank, range(world), HALF_AN_HOUR, suspect_after=1.5)
    replica.train_to(2 * H - 1)
    if rank == world - 1:
        if stage == "in training":
            stop_ourselves()
        replica.fault("stop", stage)
    # Who wakes up with all votes applies the round, and hears at the next one.
    failure = replica.train_until_failure(1 if rank < world - 1 else 2 * H)
    replica.store.set(f"failed/{rank}", "")
    return failure, finish_without_the_last(replica, world)


def finish_without_the_last(replica: Replica, world: int) -> Result | None:
    if replica.number == world - 1:
        replica.diloco.close()
        return None
    replica.diloco.change_group("survivors")
    return finish(replica, 4 * H)


@pytest.mark.nightly("5 s each; three replicas are the general case", but=["3-header"])
@pytest.mark.parametrize(
    ("world", "stage"), [(2, "in training"), (3, "header"), (3, "reduce"), (3, "vote")]
)
def test_a_stopped_peer_costs_the_silence_and_not_the_timeout(
    fresh_workers: Fresh, world: int, stage: str
) -> None:
    pool = fresh_workers(world, init_group=False)
    pool.submit(lose_a_peer, pool.store, stage)
    wait_until_stopped(pool.pid(world - 1))
    wait_for(pool, [f"failed/{rank}" for rank in range(world - 1)])
    pool.kill(world - 1, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    for failure, _ in results[:-1]:
        check_sentence(failure, [world - 1])
        assert failure.is_state_kept and failure.seconds < 60
    told = [failure.message for failure, _ in results[:-1]]
    assert any(f"nothing was heard of replica {world - 1} for 1.5 s" in text for text in told), told
    assert results[-1][0].missing == (world - 1,)
    check_agreement(result for _, result in results[:-1])


def hold_the_lock(rank: int, world: int, address: Address) -> Result:
    """Replica 1 does nothing that Python sees for far longer than a silent peer is waited for."""
    replica = Replica(address, rank, range(world), HALF_AN_HOUR, suspect_after=1.5)
    replica.train_to(H)
    if rank == 1:
        # A PyDLL's functions keep Python's lock.
        ctypes.PyDLL(None).usleep(5_000_000)
    return finish(replica, 2 * H)


def test_a_busy_peer_is_not_suspected(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    check_agreement(pool.run(hold_the_lock, pool.store, timeout=40))


# --------------------------------------------------------------------------------- own time


def test_own_standstills_count_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for an hour neither gives up its peers nor its meeting."""
    now = [100.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    limits = Limits(timeout=60.0, unheard=20.0, silence=5.0)
    pulses = Pulses(store, lambda: (0, []), limits.silence)
    here = Attendance(0, [0, 1, 2], limits, pulses, time=OwnTime())
    here.see({})
    here.see({1: ("nonce", 0)})
    now[0] += 3600.0
    here.see({1: ("nonce", 0)})
    assert here.given_up() == {} and not here.is_over
    for _ in range(4):
        now[0] += 1.0
        here.see({1: ("nonce", 0)})
    assert here.given_up() == {1: "came, and was silent for 5 s then"}
    here.see({1: ("nonce", 1)})
    assert here.given_up() == {} and here.heard == {1}
    for beat in range(20):
        now[0] += 1.0
        here.see({1: ("nonce", beat)})
    assert here.given_up() == {2: "did not come within 20 s"}
    assert here.describe() == "replica 2 (never heard of)"


class FarStore:
    """A store whose answers take a while, by a clock of the test's own."""

    def __init__(self, now: list[float], delay_s: float) -> None:
        self.store, self.now, self.delay_s = dist.HashStore(), now, delay_s

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            self.now[0] += self.delay_s
            return method(*arguments)

        return call


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_far_store_does_not_stretch_the_limits(
    monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(attendance.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(attendance.time, "sleep", sleep)
    store: Any = FarStore(now, delay_s)
    for replica in range(1, 16):
        # They have been in an epoch with us, and all have died.
        store.store.set(f"1/board/beat/{replica}", "7")
    with pytest.raises(SyncError, match="did not come within 6 s"):
        regroup.rendezvous.agree(
            store,
            0,
            range(16),
            former=range(16),
            epoch=1,
            newest=1,
            settings={},
            say=lambda all_are_here: {"address": ""},
            limits=Limits(timeout=600.0, unheard=6.0, silence=6.0),
        )
    # To come and to go costs a call for each member, and a look a few, however many there are.
    assert 6.0 <= now[0] - 100.0 <= 6.0 + (16 + 16 + 20) * delay_s + 0.1


def test_keys_that_exist_are_read_though_others_are_absent() -> None:
    """A replica that has come is seen before all have, and a key is looked for once."""
    now = [0.0]
    store: Any = FarStore(now, 1.0)
    known: set[str] = set()
    keys = [f"accepted/{replica}" for replica in range(4)]
    assert read_known(store, keys, known) == {} and known == set()
    for replica in (3, 1):
        store.store.set(f"accepted/{replica}", str(replica))
    assert read_known(store, keys, known) == {"accepted/1": b"1", "accepted/3": b"3"}
    for replica in (0, 2):
        store.store.set(f"accepted/{replica}", str(replica))
    before = now[0]
    found = read_known(store, keys, known)
    assert list(found.items()) == [(key, str(i).encode()) for i, key in enumerate(keys)]
    # One check of the two new keys, and one read of all; then one read.
    assert now[0] - before == 2.0
    assert read_known(store, keys, known) == found and now[0] - before == 3.0


def test_a_counter_is_a_sign_of_life_though_another_replica_never_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    pulses = Pulses(store, lambda: (3, [1, 2]), 4.0)
    for beat in range(3):
        store.set("3/board/beat/1", str(beat))
        now[0] += 1.0
        pulses.look([1, 2])
    assert pulses.lives(1) and not pulses.lives(2)


def test_a_hello_from_before_is_no_sign_of_life() -> None:
    limits = Limits(timeout=60.0, unheard=60.0, silence=5.0)
    pulses = Pulses(dist.HashStore(), lambda: (0, []), limits.silence)
    here = Attendance(0, [0, 1], limits, pulses)
    here.see({1: ("dead", 7)})
    assert here.heard == set()
    here.see({1: ("successor", 0)})
    assert here.heard == {1}
    here.see({})
    assert here.heard == set() and here.describe() == "replica 1 (it has left again)"


def test_counters_that_rise_are_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    pulses = Pulses(store, lambda: (3, [1, 2]), 4.0)
    for beat in range(3):
        store.set("3/board/beat/1", str(beat))
        store.set("3/board/beat/2", "7")
        now[0] += 1.0
        pulses.look([1, 2, 9])
    assert [pulses.lives(replica) for replica in (1, 2, 9)] == [True, False, False]
    for _ in range(5):
        now[0] += 1.0
        pulses.look([1, 2, 9])
    assert not pulses.lives(1)
