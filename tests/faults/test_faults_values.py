"""Rounds that must not count, and replicas that disagree or leave; the connections stay sound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_replicas import Failure, Replica, Result, Setup, check_agreement
from fault_simulation import Simulation
from workers import Pool

H = 4


# ------------------------------------------------------------------------- NaN, Inf, too large


def poison_and_heal(
    rank: int, world: int, address: tuple[str, int], setup: Setup, value: float, victims: list[int]
) -> Result:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    param = list(replica.model.parameters())[-1]
    healthy = torch.empty(0)

    def poison() -> None:
        nonlocal healthy
        healthy = param[3].detach().clone()
        param.data[3] = value

    if rank in victims:
        replica.before_exchange = poison
    failure = replica.failing_step()
    replica.before_exchange = lambda: None
    failures = [failure] if failure else []
    assert replica.before == replica.state()
    if rank in victims:
        param.data[3] = healthy
    # No change_group: the epoch lives.
    replica.train_to(4 * H)
    result = replica.result(failures)
    replica.diloco.close()
    return result


@pytest.mark.parametrize(
    ("world", "wire", "fragments", "value", "victims"),
    [
        (2, "fp32", 1, math.nan, [0]),
        (2, "int8", 3, math.inf, [1]),
        (3, "int8", 1, -math.inf, [2]),
        (3, "fp32", 3, math.nan, [0, 2]),
        (4, "fp16", 1, 7e4, [1]),
        (4, "int4", 1, 3e38, [3]),
        (2, "fp32", 1, 1e38, [1]),
    ],
)
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_round_with_a_bad_value_counts_on_no_replica(
    workers: Callable[[int], Pool],
    world: int,
    wire: str,
    fragments: int,
    value: float,
    victims: list[int],
    on_nonfinite: str,
) -> None:
    setup = Setup(wire, fragments, H, options={"on_nonfinite": on_nonfinite})
    pool = workers(world)
    results = pool.run(poison_and_heal, pool.store, setup, value, victims, timeout=30)
    simulation = Simulation(setup, range(world))
    # The poisoned parameter lies in the last fragment, which is sent at the end of the round.
    simulation.run(range(world), 1, 4 * H, frozenset({(2 * H, fragments - 1)}))
    for rank, result in enumerate(results):
        if on_nonfinite == "raise":
            check_nonfinite(result.failures[0], fragments - 1, victims)
        else:
            assert not result.failures
        simulation.check(rank, result)
    check_agreement(results)


def check_nonfinite(failure: Failure, fragment: int, victims: list[int]) -> None:
    assert failure.kind == "NonFiniteError", failure
    assert (failure.fragment, failure.round, failure.stage) == (fragment, 1, "vote"), failure
    assert f"fragment {fragment}, round 1" in failure.message, failure.message
    assert failure.details["replicas"] == tuple(victims), failure
    assert failure.is_state_kept, failure
    for victim in victims:
        assert f"on replica {victim}" in failure.message, failure.message


# ---------------------------------------------------------------------- replicas that disagree


def change_lr(replica: Replica) -> Callable[[], None]:
    outer = replica.diloco.outer
    before, outer.lr = outer.lr, 0.25
    return lambda: setattr(outer, "lr", before)


def weigh_nothing(replica: Replica) -> Callable[[], None]:
    rounds = replica.diloco._rounds
    before, rounds._weight = rounds._weight, lambda: 0.0
    return lambda: setattr(rounds, "_weight", before)


def skip_a_round(replica: Replica) -> Callable[[], None]:
    part = replica.diloco.parts[0]
    part.round += 1
    return lambda: setattr(part, "round", part.round - 1)


def disagree(
    rank: int,
    world: int,
    address: tuple[str, int],
    setup: Setup,
    change: Callable[[Replica], Callable[[], None]],
    odd: list[int],
) -> Result:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    undo = change(replica) if rank in odd else lambda: None
    failure = replica.train_until_failure(1)
    undo()
    replica.train_to(4 * H)
    result = replica.result([failure])
    replica.diloco.close()
    return result


DISAGREEMENTS = [
    (change_lr, 2, [1], "ReplicaMismatch", r"outer_lr differs.* 0.25 on replica 1"),
    (change_lr, 3, [0], "ReplicaMismatch", r"outer_lr differs.* 0.25 on replica 0"),
    (skip_a_round, 3, [2], "ReplicaMismatch", r"round differs.* 2 on replica 2: load"),
    (weigh_nothing, 3, [0, 1, 2], "SyncError", r"weights must be .* not all zero"),
]


@pytest.mark.parametrize(
    ("change", "world", "odd", "kind", "pattern"),
    DISAGREEMENTS,
    ids=["lr-w2", "lr-w3", "round", "weights"],
)
def test_disagreement_is_named_on_every_replica_and_can_be_mended(
    workers: Callable[[int], Pool],
    change: Callable[[Replica], Callable[[], None]],
    world: int,
    odd: list[int],
    kind: str,
    pattern: str,
) -> None:
    setup = Setup("int8", 1, H)
    pool = workers(world)
    results = pool.run(disagree, pool.store, setup, change, odd, timeout=30)
    simulation = Simulation(setup, range(world))
    simulation.run(range(world), 1, 4 * H, frozenset({(2 * H, 0)}))
    for rank, result in enumerate(results):
        failure = result.failures[0]
        assert failure.kind == kind, failure
        assert failure.is_state_kept, failure
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(failure.message)
        assert "\n" not in failure.message
        simulation.check(rank, result)
    check_agreement(results)


# ---------------------------------------------------------------------------- leaving early


def leave_early(
    rank: int,
    world: int,
    address: tuple[str, int],
    setup: Setup,
    leaver: int,
    leaves_at: int,
    is_late: bool,
) -> Result | None:
    """One replica closes after ``leaves_at`` inner steps, the others meet without it.

    If it is late, all others but the last wait for it in the exchange; the last is still in its
    forward, and they must not wait for that one either.
    """
    replica = Replica(address, rank, range(world), setup)
    others = [number for number in range(world) if number != leaver]
    if rank == leaver:
        replica.train_to(leaves_at)
        if is_late:
            replica.store.wait(["begins"])
        replica.diloco.close()
        replica.store.set("left", "")
        return None
    replica.train_to(2 * H - 1)
    if not is_late:
        replica.store.wait(["left"])
    elif rank == others[-1] and len(others) > 1:
        replica.store.wait([f"failed/{number}" for number in others[:-1]])
    replica.before_exchange = lambda: replica.store.set("begins", "")
    failure = replica.train_until_failure(1)
    replica.store.set(f"failed/{rank}", "")
    replica.diloco.change_group(others)
    replica.train_to(4 * H)
    result = replica.result([failure])
    replica.diloco.close()
    return result


@pytest.mark.parametrize(
    ("world", "leaver", "leaves_at", "is_late"),
    [
        (2, 0, 2 * H - 1, False),
        (2, 1, H + 1, True),
        (3, 2, H + 2, False),
        (3, 0, 2 * H - 1, True),
        (4, 1, H, True),
    ],
)
def test_replica_that_closes_early_is_named_at_once(
    workers: Callable[[int], Pool], world: int, leaver: int, leaves_at: int, is_late: bool
) -> None:
    # Who waits for the timeout does not end within the test's.
    setup = Setup("fp32", 1, H, timeout=300.0)
    pool = workers(world)
    results: list[Any] = pool.run(
        leave_early, pool.store, setup, leaver, leaves_at, is_late, timeout=30
    )
    others = [number for number in range(world) if number != leaver]
    simulation = Simulation(setup, range(world))
    simulation.run(range(world), 1, 2 * H - 1)
    simulation.run(others, 2 * H, 4 * H, frozenset({(2 * H, 0)}))
    for number in others:
        failure = results[number].failures[0]
        assert failure.kind == "PeerLeft", failure
        assert failure.is_state_kept, failure
        assert failure.details["replicas"] == (leaver,), failure
        assert failure.details["inner_steps"] == (leaves_at,), failure
        assert f"replica {leaver} " in failure.message, failure.message
        assert f"inner step {leaves_at}" in failure.message, failure.message
        simulation.check(number, results[number])
    check_agreement(results)


# -------------------------------------------------------------------- one step fewer (overflow)


def overflow_once(rank: int, world: int, address: tuple[str, int], setup: Setup) -> Result:
    """Replica 0's optimizer skips one step, as under a GradScaler after an overflow."""
    replica = Replica(address, rank, range(world), setup)
    for step in range(4 * H):
        if rank == 0 and step == H + 1:
            continue
        failure = replica.failing_step()
        if failure is not None:
            break
    if rank == 0:
        replica.step()
    result = replica.result([failure] if failure else [])
    replica.diloco.close()
    return result


def test_replica_with_a_skipped_step_meets_the_others_one_step_later(
    workers: Callable[[int], Pool],
) -> None:
    setup = Setup("int8", 1, H)
    pool = workers(3)
    results = pool.run(overflow_once, pool.store, setup, timeout=30)
    simulation = Simulation(setup, range(3))
    simulation.run(range(3), 1, 4 * H)
    for rank, result in enumerate(results):
        assert not result.failures
        simulation.check(rank, result)
