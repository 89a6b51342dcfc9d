"""A replica stops answering, by SIGSTOP; later it wakes up again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fault_replicas import (
    Failure,
    Replica,
    Result,
    Setup,
    check_agreement,
    check_sentence,
    wait_for,
)
from fault_simulation import Simulation
from workers import Pool

H = 4
# All replicas but the stopped one must come to every exchange within it, on a loaded machine too.
TIMEOUT_S = 5.0


def run_without_the_stopped(
    rank: int, world: int, address: tuple[str, int], setup: Setup, stage: str, comes_back: bool
) -> Result:
    """Rank 0 stops in its third round; the others go on, and take it back if it ``comes_back``."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(3 * H - 1)
    if rank == 0:
        replica.fault("stop", stage)
    failures = [replica.train_until_failure(1)]
    everyone, others = range(world), range(1, world)
    if rank > 0:
        replica.diloco.change_group(others)
        replica.store.set(f"rounds/{rank}", str([part.round for part in replica.diloco.parts]))
        replica.train_to(4 * H)
        replica.store.set(f"survived/{rank}", "")
        replica.store.wait(["woken"])
    if comes_back:
        replica = rejoin(replica, everyone) if rank == 0 else replica
        if rank > 0:
            replica.diloco.change_group(everyone)
        replica.train_to(6 * H)
    result = replica.result(failures)
    replica.diloco.close()
    return result


def rejoin(replica: Replica, members: Sequence[int]) -> Replica:
    """Come back as a newcomer: the others have gone on without us."""
    replica.diloco.close()
    replica.store.set("woken", "")
    again = Replica(replica.address, replica.number, members, replica.setup, init="join")
    return again


def check_failure(failure: Failure, missing: Sequence[int]) -> None:
    assert failure.kind == "SyncError", failure
    assert failure.is_state_kept, failure
    check_sentence(failure, missing)


@pytest.mark.nightly(
    "9 s each; test_faults_liveness has a stopped peer, test_faults_group one that joins"
)
@pytest.mark.parametrize(
    ("world", "stage", "setup"),
    [
        (2, "header", Setup("int8", 3, H, TIMEOUT_S)),
        (3, "reduce", Setup("fp32", 1, H, TIMEOUT_S)),
        (4, "vote", Setup("int8", 1, H, TIMEOUT_S)),
    ],
    ids=["w2-header", "w3-reduce", "w4-vote"],
)
def test_stopped_replica_is_left_behind_and_joins_again(
    fresh_workers: Callable[..., Pool], world: int, stage: str, setup: Setup
) -> None:
    pool = fresh_workers(world, init_group=False)
    pool.submit(run_without_the_stopped, pool.store, setup, stage, True)
    wait_for(pool, [f"survived/{rank}" for rank in range(1, world)])
    pool.kill(0, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    for rank in range(1, world):
        check_failure(results[rank].failures[0], [0])
        assert results[rank].failures[0].seconds >= TIMEOUT_S
    # Its own clock went on while it stood still.
    assert results[0].failures[0].is_state_kept
    check_agreement(results)
    rounds = {pool.crew.store.get(f"rounds/{rank}").decode() for rank in range(1, world)}
    # All survivors had voted, unless this machine is very slow: then the round counts.
    counted, lost = str([3] * setup.fragments), str([3] * (setup.fragments - 1) + [2])
    assert rounds in ([{counted}, {lost}] if stage == "vote" else [{lost}])
    simulation = Simulation(setup, range(world))
    step = 3 * H
    skipped = () if rounds == {counted} else [(step, setup.fragments - 1)]
    simulation.run(range(world), 1, step, frozenset(skipped))
    simulation.run(range(1, world), step + 1, 4 * H)
    simulation.join(0)
    simulation.run(range(world), 4 * H + 1, 6 * H)
    for rank, result in enumerate(results):
        simulation.check(rank, result)
