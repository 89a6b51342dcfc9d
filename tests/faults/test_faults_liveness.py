"""Silence is noticed long before a timeout: in a meeting, in a round, at the store."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
from fault_replicas import (
    HALF_AN_HOUR,
    Address,
    Fresh,
    Replica,
    Result,
    Setup,
    check_agreement,
    check_sentence,
    connect,
    finish,
    wait_for,
)
from zygote import wait_until_stopped

from diloco_comm import LeftBehind, SyncError
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.membership import change

H = 4


def kill_ourselves(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_ourselves(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# --------------------------------------------------------------------------------- newcomers


def wait_for_a_newcomer(rank: int, world: int, address: Address, when: str) -> Any:
    """Replica 2 is to join 0 and 1, and dies before it has come, or while it connects."""
    limits = {"join_timeout": 3.0, "suspect_after": 20.0}
    if when == "while it connects":
        limits = {"join_timeout": 60.0, "suspect_after": 3.0}
    if rank == 2:
        connect(address).wait([f"meeting/{r}" for r in (0, 1)])
        if when == "before it has come":
            kill_ourselves()
        change.connect = kill_ourselves
        Replica(address, 2, range(3), HALF_AN_HOUR, init="join", **limits)
    replica = Replica(address, rank, [0, 1], HALF_AN_HOUR, **limits)
    replica.train_to(H)
    replica.store.set(f"meeting/{rank}", "")
    with pytest.raises(SyncError) as caught:
        replica.diloco.change_group([0, 1, 2])
    error = caught.value
    if when == "before it has come":
        # Nothing has happened to the old group: it goes on.
        with pytest.raises(ValueError, match="none is known"):
            replica.diloco.change_group("survivors")
    else:
        # All had met, and the old epoch was at an end.
        replica.diloco.change_group("survivors")
        assert replica.diloco.members == (0, 1)
    return str(error), error.missing, error.survivors, finish(replica, 3 * H)


@pytest.mark.nightly("4 s each", but=["while it connects"])
@pytest.mark.parametrize("when", ["before it has come", "while it connects"])
def test_a_newcomer_that_dies_does_not_cost_the_timeout(fresh_workers: Fresh, when: str) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        wait_for_a_newcomer, pool.store, when, expect_exit={2}, timeout=30
    )
    assert results[0][1:3] == results[1][1:3]
    text, missing, survivors, _ = results[0]
    assert missing == (2,) and survivors == (0, 1) and "\n" not in text
    if when == "before it has come":
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
    time.sleep(1.0)
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
        change.connect = kill_ourselves
    setup = Setup("int8", 1, H, timeout=3.0)
    with pytest.raises(SyncError) as caught:
        Replica(address, rank, range(3), setup)
    error = caught.value
    return str(error), error.missing, error.survivors, error.stage


@pytest.mark.nightly("5 s; the first tier has a newcomer that dies")
def test_a_death_while_connecting_is_one_error_for_all(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(meet_and_die_connecting, pool.store, expect_exit={1}, timeout=30)
    # The words are each replica's own.
    for text, missing, survivors, stage in (results[0], results[2]):
        assert missing == (1,) and survivors == (0, 2) and stage == "connect", text
        assert "could not be connected: " in text and "replica 1 at " in text


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
    # A process that wakes up may have heard nothing of the decision yet.
    assert results[-1][0].missing in ((), (world - 1,))
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


# -------------------------- One line of groups: whatever fails half-way, no store has two trainings


# ------------------------------------------------------- a change that fails for one member alone


def fail_alone(rank: int, world: int, address: Address, first: int) -> Any:
    """Replica 0 fails once it is connected, and replica 1 enters; then each goes on alone."""
    replica = Replica(address, rank, range(world), HALF_AN_HOUR)
    diloco, begin = replica.diloco, Exchange.begin
    replica.train_to(H)

    def begin_and_fail(*arguments: Any) -> None:
        begin(*arguments)
        # A failure before would keep replica 1 from the new epoch.
        replica.store.wait(["replica 1 has attached"])
        raise SyncError("as a test wants it", stage="attach")

    def begin_and_tell(*arguments: Any) -> None:
        begin(*arguments)
        replica.store.set("replica 1 has attached", "")

    if rank == 0:
        with mock.patch.object(Exchange, "begin", begin_and_fail):
            with pytest.raises(SyncError, match="as a test"):
                diloco.change_group([0, 1])
        diloco.exchange.seal()
    else:
        # The first agreement in the new epoch is one that replica 0 does not come to.
        with mock.patch.object(Exchange, "begin", begin_and_tell), pytest.raises(SyncError):
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
