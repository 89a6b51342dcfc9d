"""One line of groups: whatever fails half-way, no store has two trainings."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from fault_replicas import HALF_AN_HOUR, Address, Fresh, Replica, Result, Setup, finish

from diloco_comm import LeftBehind, SyncError
from diloco_comm.exchange.exchange import Exchange

H = 4


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
