"""Who is missing is decided once: the same for all survivors, and said to whoever was left out."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from fault_replicas import (
    Address,
    End,
    Fresh,
    H,
    Replica,
    Setup,
    check_agreement,
    default_handler,
    end,
    wait_for,
)

from diloco_comm import LeftBehind, NonFiniteError, SyncError
from diloco_comm.exchange.membership import change

# ------------------------------------------------------------------------- one and two deaths


def die_together(
    rank: int, world: int, address: Address, setup: Setup, deaths: dict[int, str]
) -> End:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank in deaths:
        replica.fault("kill", deaths[rank], num_peers=1 if deaths[rank] == "vote" else 0)
    failure = replica.train_until_failure(2 * H)
    replica.diloco.change_group("survivors")
    replica.train_to(5 * H)
    return end(replica, failure)


@pytest.mark.nightly("up to 10 s each; the first tier has one vote", but=["0vote"])
@pytest.mark.parametrize(
    "deaths",
    [
        {2: "header"},
        {0: "vote"},
        {2: "header", 3: "header"},
        {0: "post_exchange", 3: "post_exchange"},
        {1: "reduce"},
        {1: "vote", 3: "vote"},
    ],
    ids=lambda deaths: "-".join(f"{r}{stage}" for r, stage in deaths.items()),
)
def test_survivors_agree_on_who_is_missing(fresh_workers: Fresh, deaths: dict[int, str]) -> None:
    pool = fresh_workers(4, init_group=False)
    # One chunk: then the second to die gets to its stage, whenever the first one dies.
    setup = Setup("int8", 1, H, chunk_bytes=1 << 20)
    results: list[Any] = pool.run(
        die_together, pool.store, setup, deaths, expect_exit=set(deaths), timeout=40
    )
    survivors = tuple(rank for rank in range(4) if rank not in deaths)
    ends = [results[rank] for rank in survivors]
    for one in ends:
        assert one.missing == tuple(sorted(deaths)), ends
        assert one.survivors == one.members == survivors, ends
        assert one.epoch == ends[0].epoch
    check_agreement(one.result for one in ends)


def die_before_the_new_group(
    rank: int, world: int, address: Address, setup: Setup, is_named: bool
) -> Any:
    """Replica 3 dies in the exchange; replica 2 when all have found that, and it does not come."""
    replica = Replica(address, rank, range(world), setup, join_timeout=3.0, suspect_after=3.0)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    replica.store.set(f"failed/{rank}", "")
    if rank == 2:
        replica.store.wait([f"failed/{other}" for other in range(2)])
        os.kill(os.getpid(), signal.SIGKILL)
    errors: list[SyncError] = []
    if is_named:
        with pytest.raises(SyncError) as caught:
            replica.diloco.change_group([0, 1, 2])
        errors.append(caught.value)
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return (
        end(replica, failure, [str(error) for error in errors]),
        [(error.missing, error.survivors) for error in errors],
    )


@pytest.mark.nightly("6 s; the first tier has one death")
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "survivors"])
def test_a_second_death_is_agreed_on_too(fresh_workers: Fresh, is_named: bool) -> None:
    """The survivors go on without the second dead one, too; a call that names it fails."""
    pool = fresh_workers(4, init_group=False)
    # Nobody waits for the timeout of an exchange.
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        die_before_the_new_group, pool.store, setup, is_named, expect_exit={2, 3}, timeout=50
    )
    for one, lost in results[:2]:
        assert one.missing == (3,) and one.survivors == (0, 1, 2)
        assert one.members == (0, 1) and lost == is_named * [((2,), (0, 1))]
        assert all("replicas [0, 1, 2] were to form a group, but [2]" in e for e in one.errors)
    check_agreement(one.result for one, _ in results[:2])


def come_late(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 0 has applied the round and trains on; meanwhile replica 2 is lost in regrouping."""
    replica = Replica(address, rank, range(world), setup, join_timeout=2.0, suspect_after=2.0)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "vote", num_peers=1)
    if rank == 0:
        replica.step()
        replica.store.wait(["regrouped"])
    failure = replica.train_until_failure(H)
    if rank == 2:
        replica.store.wait(["failed"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        replica.store.set("failed", "")
        with pytest.raises(SyncError) as caught:
            replica.diloco.change_group([0, 1, 2])
        assert caught.value.missing == (2,), str(caught.value)
        replica.store.set("regrouped", "")
    # A late replica follows the newest decision, not the decision that its own exchange knows.
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.nightly("5 s; the explorer of termination has late processes")
def test_who_comes_late_follows_the_newest_decision(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(come_late, pool.store, setup, expect_exit={2, 3}, timeout=50)
    # Each names those that it misses at the moment of its error.
    assert [one.missing for one in results[:2]] == [(2, 3), (3,)]
    assert [one.survivors for one in results[:2]] == [(0, 1), (0, 1, 2)]
    assert all(one.members == (0, 1) for one in results[:2])
    check_agreement(one.result for one in results[:2])


def lose_one_connection(rank: int) -> None:
    """Let the next group fail while it connects, on replica 0; the others wait for it briefly."""
    limit, connect = change.LIMIT_S, change.connect

    def connect_once(*arguments: Any) -> Any:
        change.LIMIT_S, change.connect = limit, connect
        if rank == 0:
            raise SyncError("lost on purpose", stage="connect")
        return connect(*arguments)

    change.LIMIT_S, change.connect = 2.0, connect_once


def take_time_before_the_next_try(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Connecting fails once. Replica 1 does other things then, for longer than ``join_timeout``."""
    replica = Replica(address, rank, range(world), setup, join_timeout=4.0, suspect_after=4.0)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.fault("stop", "reduce")
    failure = replica.train_until_failure(1)
    if rank == 2:
        with pytest.raises(LeftBehind) as told:
            replica.diloco.change_group("survivors")
        return failure, told.value
    lose_one_connection(rank)
    with pytest.raises(SyncError, match="lost on purpose") as caught:
        replica.diloco.change_group("survivors")
    assert caught.value.survivors == (0, 1)
    if rank == 1:
        time.sleep(9.0)
    replica.diloco.change_group([0, 1])
    replica.train_to(4 * H)
    replica.store.set(f"went on/{rank}", "")
    return failure, replica.result()


@pytest.mark.nightly("18 s; the explored models have tries that fail")
def test_a_try_that_failed_does_not_hide_who_lives(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    pool.submit(take_time_before_the_next_try, pool.store, setup)
    wait_for(pool, ["went on/0", "went on/1"], timeout=60)
    pool.kill(2, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    check_agreement(result for _, result in results[:2])
    # The replica that was left out finds the others, though it knows of the first epoch alone.
    failure, error = results[2]
    epoch = results[0][1].epoch
    assert failure.kind == "LeftBehind" and failure.details["went_on_in"] == epoch, failure
    assert error.went_on_in == epoch and error.survivors == (0, 1)


# --------------------------------------------------- a Ctrl-C when a change has come to its end


def press_ctrl_c_before_the_repair(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 2 dies in its vote: one of the others lacks the round, which counts."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.fault("kill", "vote", num_peers=1)
    failure = replica.train_until_failure(2 * H)
    exchange = replica.diloco.exchange
    change_group = exchange.change_group

    def interrupted(*arguments: Any, **options: Any) -> Any:
        del exchange.change_group
        change_group(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)

    exchange.change_group = interrupted  # type: ignore[method-assign]
    with default_handler(), pytest.raises(KeyboardInterrupt):
        replica.diloco.change_group([0, 1])
    num_owed = len(exchange._repairs)
    replica.diloco.change_group([0, 1])
    replica.train_to(4 * H)
    return num_owed, end(replica, failure)


def test_what_a_replica_lacks_is_owed_after_a_ctrl_c(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, chunk_bytes=1 << 20)
    results: list[Any] = pool.run(
        press_ctrl_c_before_the_repair, pool.store, setup, expect_exit={2}, timeout=40
    )
    assert sorted(num_owed for num_owed, _ in results[:2]) == [0, 1]
    check_agreement(one.result for _, one in results[:2])


# ------------------------------------------------------------------------- what a handler sees


def leave_and_die(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 1:
        replica.diloco.close()
        return None
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    failure = replica.train_until_failure(1)
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.nightly("3 s; the first tier has both apart")
def test_one_leaves_and_another_dies(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(
        leave_and_die, pool.store, Setup("int8", 1, H), expect_exit={3}, timeout=40
    )
    for one in (results[0], results[2]):
        failure = one.result.failures[0]
        assert failure.kind == "PeerLeft", failure
        assert failure.details["replicas"] == (1,), failure
        assert failure.details["inner_steps"] == (2 * H - 1,), failure
        assert one.missing == (1, 3) and one.survivors == one.members == (0, 2), failure
        assert "replica 1 closed its DiLoCo and left" in failure.message
        assert "replica 3 has ended" in failure.message
    check_agreement([results[0].result, results[2].result])


def handle_bad_values(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """A handler that leaves out whom the error names goes on without the sick replica."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H - 1)
    if rank == 1:
        next(replica.model.parameters()).data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        replica.step()
    error = caught.value
    diloco = replica.diloco
    with pytest.raises(
        ValueError, match='"survivors"\\) follows the loss of a replica, but none is known'
    ):
        diloco.change_group("survivors")
    # All have asked before the first one decides: after that, survivors are known.
    replica.store.set(f"asked/{rank}", "")
    replica.store.wait([f"asked/{other}" for other in range(world)])
    if rank == 1:
        # The others may have gone on by now.
        told = r"replica 1 is not one of the members \[0, 2\]|went on in epoch 2 without replica 1"
        with pytest.raises((ValueError, LeftBehind), match=told):
            diloco.change_group(set(diloco.members) - set(error.missing))
    else:
        diloco.change_group(set(diloco.members) - set(error.missing))
        replica.train_to(3 * H)
    return error.missing, error.replicas, error.survivors, diloco.members, replica.result()


def test_bad_values_name_their_replicas_where_a_handler_looks(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(handle_bad_values, pool.store, Setup("fp32", 1, H), timeout=40)
    assert all(result[:3] == ((1,), (1,), ()) for result in results), results
    assert [result[3] for result in results] == [(0, 2), (0, 1, 2), (0, 2)]
    check_agreement([results[0][4], results[2][4]])


def test_a_name_for_members_that_means_nothing(fresh_workers: Fresh) -> None:
    pool = fresh_workers(1, init_group=False)
    assert pool.run(ask_for_nonsense, pool.store) == [1]


def ask_for_nonsense(rank: int, world: int, address: Address) -> int:
    diloco = Replica(address, rank, (number for number in [0]), Setup()).diloco
    assert diloco.members == (0,) and diloco.epoch > 0
    with pytest.raises(ValueError, match="members must be replicas or \"survivors\", got 'all'"):
        diloco.change_group("all")
    with pytest.raises(ValueError, match=f"none is known in epoch {diloco.epoch} of replicas"):
        diloco.change_group("survivors")
    diloco.close()
    return 1
