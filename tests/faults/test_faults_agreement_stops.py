"""A stopped replica, a zombie and a replica that is left out are told what the others decided."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from fault_replicas import (
    Address,
    Fresh,
    H,
    Replica,
    Result,
    Setup,
    check_agreement,
    end,
    wait_for,
)
from zygote import wait_until_stopped

from diloco_comm import LeftBehind, SyncError

# --------------------------------------------------------------------------- stops and zombies


def stop_for_a_while(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.fault("stop", "reduce")
    failure = None
    while failure is None and replica.diloco.inner_step < 3 * H:
        failure = replica.failing_step()
    if failure is None:
        return replica.result()
    try:
        replica.diloco.change_group("survivors")
    except LeftBehind as error:
        return end(replica, failure, [str(error)])
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.nightly("3 s each; the first tier has a stop well past the timeout")
@pytest.mark.parametrize("seconds", [1.9, 2.0, 2.1, 3.0])
def test_a_stop_near_the_timeout_is_one_decision(fresh_workers: Fresh, seconds: float) -> None:
    pool = fresh_workers(4, init_group=False)
    pool.submit(stop_for_a_while, pool.store, Setup("int8", 1, H, timeout=2.0))
    wait_until_stopped(pool.pid(2))
    time.sleep(seconds)
    pool.kill(2, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=40)
    if isinstance(results[0], Result):
        # It came back in time.
        check_agreement(results)
        return
    kinds = [one.result.failures[0].kind for one in results]
    assert all(one.missing == results[0].missing for one in results), results
    assert all(one.survivors == results[0].survivors for one in results), results
    if results[0].missing:
        # Decided without the one that stood still: it is told so, twice.
        assert results[0].missing == (2,) and kinds[2] == "LeftBehind", results
        assert "without replica 2" in results[2].errors[0]
    going_on = [one for rank, one in enumerate(results) if rank not in one.missing]
    assert all(one.members == one.survivors for one in going_on)
    check_agreement(one.result for one in going_on)


def sleep_through_it(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup, suspect_after=1.5)
    replica.train_to(2 * H - 1)
    if rank == 0:
        replica.fault("stop", "reduce")
    failure = replica.train_until_failure(1)
    errors = []
    if rank == 0:
        # What a handler may do with the error, in each of the forms that the documents show.
        others = set(replica.diloco.members) - set(failure.missing)
        for members in ("survivors", others):
            with pytest.raises(LeftBehind) as caught:
                replica.diloco.change_group(members)
            errors.append((str(caught.value), caught.value.went_on_in))
    else:
        replica.diloco.change_group(set(replica.diloco.members) - set(failure.missing))
        replica.train_to(3 * H)
        replica.store.set(f"went on/{rank}", "")
    return end(replica, failure), errors


def test_a_zombie_is_told_that_the_group_went_on(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    # The peers give it up by its silence, not by the timeout.
    pool.submit(sleep_through_it, pool.store, Setup("int8", 1, H, timeout=1800.0))
    wait_for(pool, ["went on/1", "went on/2"], timeout=40)
    pool.kill(0, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    (zombie, errors), (first, _), (second, _) = results
    failure = zombie.result.failures[0]
    assert failure.kind == "LeftBehind" and failure.is_state_kept, failure
    assert failure.missing == first.missing == second.missing == (0,)
    assert failure.details["went_on_in"] == first.epoch == second.epoch
    assert f"replicas [1, 2] went on in epoch {first.epoch} without replica 0" in failure.message
    assert 'init="join"' in failure.message
    for text, epoch in errors:
        assert epoch == first.epoch and "\n" not in text
        assert f"replicas [1, 2] went on in epoch {first.epoch} without replica 0" in text, text
    for one in (first, second):
        failure = one.result.failures[0]
        assert failure.kind == "SyncError" and failure.seconds < 60, failure
    # One notices it, and the other hears of that.
    told = [one.result.failures[0].message for one in (first, second)]
    assert any("nothing was heard of replica 0 for 1.5 s" in text for text in told), told
    check_agreement([first.result, second.result])


# ---------------------------------------------------------------------- left out without a failure


def check_left_out(error: SyncError, epoch: int, left_out: int) -> None:
    others = tuple(r for r in range(3) if r != left_out)
    assert isinstance(error, LeftBehind) and "\n" not in str(error), error
    assert error.missing == (left_out,) and error.survivors == others, error
    assert error.went_on_in == epoch, error
    assert f"in epoch {epoch}" in str(error), error


def leave_one_out(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replicas 0 and 1 go on without 2, which trains all the while, and comes back at the end."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    diloco = replica.diloco
    if rank < 2:
        diloco.change_group([0, 1])
        replica.store.set("new epoch", str(diloco.epoch))
        replica.train_to(3 * H)
        replica.store.set(f"went on/{rank}", "")
        replica.store.wait(["told"])
        diloco.change_group(range(world))
        replica.train_to(5 * H)
        return replica.result()
    replica.store.wait(["went on/0", "went on/1"])
    epoch = int(replica.store.get("new epoch"))
    with pytest.raises(SyncError) as caught:
        replica.train_to(3 * H)
    check_left_out(caught.value, epoch, 2)
    for members in ("survivors", set(diloco.members) - set(caught.value.missing)):
        with pytest.raises(LeftBehind) as again:
            diloco.change_group(members)
        check_left_out(again.value, epoch, 2)
    diloco.close()
    replica.store.set("told", "")
    newcomer = Replica(address, 2, range(world), setup, init="join")
    newcomer.train_to(5 * H)
    return newcomer.result()


def test_who_is_left_out_without_a_failure_is_told_so(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(leave_one_out, pool.store, setup, timeout=40)
    check_agreement(results)


def leave_out_who_waits(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 2 waits in an exchange when the others go on without it."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    if rank < 2:
        replica.store.wait(["waits"])
        replica.diloco.change_group([0, 1])
        replica.train_to(3 * H)
        replica.store.wait(["told"])
        return replica.diloco.epoch
    replica.train_to(2 * H - 1)
    replica.before_exchange = lambda: replica.store.set("waits", "")
    failure = replica.train_until_failure(1)
    with pytest.raises(LeftBehind):
        # The others may not have begun yet when they leave it out.
        replica.diloco.change_group("survivors")
    replica.store.set("told", "")
    return failure


def test_who_is_left_out_in_an_exchange_does_not_go_on_alone(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(leave_out_who_waits, pool.store, setup, timeout=40)
    assert results[0] == results[1]
    # Told as LeftBehind, unless it was heard before the others had agreed to leave it out.
    assert set(results[2].missing) <= {2}, results[2]


def leave_out_after_a_decision(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 3 dies, and all others survive it; but 0 and 1 go on without 2 then."""
    limits = {"join_timeout": 1800.0, "suspect_after": 4.0}
    replica = Replica(address, rank, range(world), setup, **limits)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "header")
    if rank == 2:
        # In no exchange: its engine alone answers.
        replica.store.wait(["went on/0", "went on/1"])
        failure = replica.train_until_failure(1)
        with pytest.raises(LeftBehind) as caught:
            replica.diloco.change_group("survivors")
        replica.store.set("told", "")
        return failure, caught.value
    failure = replica.train_until_failure(1)
    replica.diloco.change_group([0, 1])
    replica.train_to(4 * H)
    replica.store.set(f"went on/{rank}", "")
    replica.store.wait(["told"])
    return failure, replica.diloco.epoch


@pytest.mark.nightly("8 s; the first tier has a zombie that hears of a new group")
def test_a_group_that_has_begun_says_more_than_the_decision_before(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        leave_out_after_a_decision, pool.store, setup, expect_exit={3}, timeout=40
    )
    for failure, _ in results[:2]:
        assert failure.details["survivors"] == (0, 1, 2), failure
    failure, error = results[2]
    assert failure.kind == "LeftBehind" and failure.missing == (2, 3), failure
    assert "the group of replicas [0, 1] went on in epoch 2 without replica 2" in failure.message
    assert failure.details["went_on_in"] == error.went_on_in == results[0][1]
    assert error.survivors == (0, 1)
