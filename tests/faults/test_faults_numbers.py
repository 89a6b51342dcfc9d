"""Processes that come to a running group, or take a number twice; lists of members that differ."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

import pytest
from fault_replicas import (
    HALF_AN_HOUR,
    Address,
    Fresh,
    Replica,
    Result,
    check_agreement,
    connect,
    finish,
)

from diloco_comm import LeftBehind, ReplicaMismatch, SyncError
from diloco_comm.exchange.membership import fixed_group

H = 4


def refusal(*arguments: Any, **options: Any) -> str:
    """Return why a replica may not attach."""
    with pytest.raises(SyncError) as caught:
        Replica(*arguments, **options)
    assert "\n" not in str(caught.value) and caught.value.stage == "rendezvous"
    return str(caught.value)


# --------------------------------------------------------------- a replica that was started again


def start_again(rank: int, world: int, address: Address) -> Any:
    """Replica 1 dies and is started again by rank 2: first as for a first start, then to join."""
    store = connect(address)
    text = ""
    if rank == 2:
        store.wait(["dying"])
        text = refusal(address, 1, [0, 1], HALF_AN_HOUR, suspect_after=2.0)
        store.set("refused", "")
        replica = Replica(address, 1, [0, 1], HALF_AN_HOUR, init="join")
    else:
        replica = Replica(address, rank, [0, 1], HALF_AN_HOUR)
        replica.train_to(H)
        if rank == 1:
            store.set("dying", "")
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["refused"])
        replica.diloco.change_group([0, 1])
    return text, finish(replica, 3 * H)


@pytest.mark.nightly("7 s; the first tier has a number that is taken")
def test_a_replica_that_is_started_again_is_told_to_join(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(start_again, pool.store, expect_exit={1}, timeout=60)
    text = results[2][0]
    assert "the group of replicas [0, 1] runs already, in epoch 1" in text
    assert 'init="join"' in text and "change_group with replica 1 among" in text
    check_agreement([results[0][1], results[2][1]])


def close_and_come_back(rank: int, world: int, address: Address) -> Result:
    """Replica 0 has closed, and waits for replica 1, which lives in the old group for a while."""
    replica = Replica(address, rank, range(world), HALF_AN_HOUR)
    replica.train_to(H)
    if rank == 0:
        replica.diloco.close()
        runs_already = fixed_group.FixedGroup._runs_already

        def see_and_tell(group: Any, driver: Any) -> Any:
            found = runs_already(group, driver)
            if group._runs_since:
                replica.store.set("seen", "")
            return found

        fixed_group.FixedGroup._runs_already = see_and_tell  # type: ignore[method-assign]
    else:
        replica.store.wait(["seen"])
        replica.diloco.close()
    return finish(Replica(address, rank, range(world), HALF_AN_HOUR), 2 * H)


@pytest.mark.nightly("6 s; the first tier has two groups that would begin")
def test_a_group_that_a_member_has_left_is_founded_anew(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    check_agreement(pool.run(close_and_come_back, pool.store, timeout=60))


# --------------------------------------------------------------------- two processes, one number


def take_a_number_twice(rank: int, world: int, address: Address, init: str) -> Any:
    store = connect(address)
    if rank == 2:
        store.wait(["trained/0", "trained/1"])
        text = refusal(address, 1, [0, 1], HALF_AN_HOUR, init=init)
        store.set("refused", "")
        return text
    replica = Replica(address, rank, [0, 1], HALF_AN_HOUR)
    replica.train_to(H)
    store.set(f"trained/{rank}", "")
    store.wait(["refused"])
    return os.getpid(), finish(replica, 3 * H)


@pytest.mark.nightly("5 s each", but=["join"])
@pytest.mark.parametrize("init", ["broadcast", "join"])
def test_a_number_of_a_running_group_is_taken(fresh_workers: Fresh, init: str) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(take_a_number_twice, pool.store, init, timeout=60)
    place = f"{socket.gethostname()}:{results[1][0]}"
    assert f"replica number 1 is already taken by process {place} (host:pid)" in results[2]
    assert "in the group of epoch 1" in results[2]
    check_agreement(result for _, result in results[:2])


def come_to_the_first_meeting_twice(rank: int, world: int, address: Address) -> Any:
    """Replica 1 waits for replica 0; rank 2 comes with its number; replica 0 comes then."""
    store = connect(address)
    if rank == 2:
        store.wait(["waits"])
        text = refusal(address, 1, [0, 1], HALF_AN_HOUR)
        store.set("refused", "")
        return text
    if rank == 1:
        threading.Timer(1.0, lambda: store.set("waits", "")).start()
    else:
        store.wait(["refused"])
    return os.getpid(), finish(Replica(address, rank, [0, 1], HALF_AN_HOUR), 2 * H)


def test_a_number_of_the_first_meeting_is_taken(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(come_to_the_first_meeting_twice, pool.store, timeout=60)
    place = f"{socket.gethostname()}:{results[1][0]}"
    assert f"replica number 1 is already taken by process {place} (host:pid): " in results[2]
    check_agreement(result for _, result in results[:2])


# ----------------------------------------------------------------------- two lists, nobody in both


def go_apart(rank: int, world: int, address: Address, first: int) -> Any:
    """Replica 0 and replicas 1, 2 each call ``change_group`` without the others."""
    replica = Replica(address, rank, range(world), HALF_AN_HOUR)
    replica.train_to(H)
    parts = [[0], [1, 2]]
    own = parts[0 if rank == 0 else 1]
    if first < 2 and own != parts[first]:
        replica.store.wait([f"went on/{one}" for one in parts[first]])
    try:
        try:
            replica.diloco.change_group(own)
        except LeftBehind:
            raise
        except SyncError as error:
            # The other replica of the list was told first that a group went on, and gave up.
            assert first == 2 and "has given up" in str(error), error
            replica.diloco.change_group(own)
    except LeftBehind as error:
        replica.diloco.close()
        return str(error), error.went_on_in, error.survivors
    replica.store.set(f"went on/{rank}", "")
    epoch = replica.diloco.epoch
    return finish(replica, 3 * H), epoch, replica.diloco.members


@pytest.mark.parametrize("first", [0, 1, 2], ids=["the one", "the two", "at once"])
def test_of_two_disjoint_groups_one_begins(fresh_workers: Fresh, first: int) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(go_apart, pool.store, first, timeout=60)
    begun = [one for one in results if isinstance(one[0], Result)]
    refused = [one for one in results if isinstance(one[0], str)]
    assert begun and refused, results
    _, epoch, members = begun[0]
    assert len(begun) == len(members) and len(refused) == 3 - len(members), results
    if first < 2:
        assert members == ((0,), (1, 2))[first]
    for text, went_on_in, survivors in refused:
        assert went_on_in == epoch and survivors == members
        assert f"replicas {list(members)} went on in epoch {epoch} without replica" in text
        assert 'init="join"' in text and "\n" not in text
    check_agreement(result for result, *_ in begun)


# ------------------------------------------------------------------------------- nobody is missing


def differ_in_a_learning_rate(rank: int, world: int, address: Address) -> Any:
    replica = Replica(address, rank, range(world), HALF_AN_HOUR)
    diloco = replica.diloco
    texts = []
    with pytest.raises(ValueError) as caught:
        diloco.change_group("survivors")
    texts.append(str(caught.value))
    own_lr = diloco.outer.lr
    diloco.outer.lr = 0.5 + 0.1 * rank
    with pytest.raises(ReplicaMismatch):
        replica.train_to(H)
    with pytest.raises(ValueError) as caught:
        diloco.change_group("survivors")
    texts.append(str(caught.value))
    diloco.outer.lr = own_lr
    replica.train_to(2 * H)
    with pytest.raises(ValueError) as caught:
        diloco.change_group("survivors")
    texts.append(str(caught.value))
    return texts, finish(replica, 3 * H)


def test_survivors_of_a_mismatch_are_all(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    results: list[Any] = pool.run(differ_in_a_learning_rate, pool.store, timeout=60)
    for (before, mismatch, after), _ in results:
        assert before == after and "train on without change_group" in before
        assert "of replicas [0, 1]: nobody is missing" in mismatch and "\n" not in mismatch
        assert "ended with ReplicaMismatch (sync of fragment 0, round 0" in mismatch
        assert "make that equal on all replicas, and train on without change_group" in mismatch
    check_agreement(result for _, result in results)
