"""Replicas come, die and are replaced: ``change_group`` again and again, without a restart."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_replicas import (
    Failure,
    Replica,
    Result,
    Setup,
    check_agreement,
    check_sentence,
    describe,
    finish,
    least_resources,
)
from fault_simulation import Simulation
from workers import Pool

from diloco_comm import SyncError
from diloco_comm.exchange.membership import change

H = 4


# ------------------------------------------------------------------------------------ joiners


def grow(rank: int, world: int, address: tuple[str, int], setup: Setup, first: int) -> Result:
    """The first replicas train two rounds alone, then the others join; then two more rounds."""
    if rank >= first:
        return finish(Replica(address, rank, range(world), setup, init="join"), 4 * H)
    replica = Replica(address, rank, range(first), setup)
    replica.train_to(2 * H)
    replica.diloco.change_group(range(world))
    return finish(replica, 4 * H)


def join_after_the_end(rank: int, world: int, address: tuple[str, int], setup: Setup) -> str:
    replica = Replica(address, rank, range(world), setup)
    finish(replica, H)
    replica.store.set(f"ended/{rank}", "")
    replica.store.wait([f"ended/{other}" for other in range(world)])
    if rank == 0:
        return ""
    with pytest.raises(SyncError) as caught:
        Replica(address, rank, range(world), setup, init="join", join_timeout=2.0)
    return str(caught.value)


def test_a_joiner_hears_that_the_training_has_ended(workers: Callable[[int], Pool]) -> None:
    pool = workers(2)
    _, sentence = pool.run(join_after_the_end, pool.store, Setup("int8", 1, H), timeout=60)
    assert "the training of replicas [0, 1] has ended, and no process has its state" in sentence


@pytest.mark.nightly("2 s each; the quantised wire is the general case", but=["2-3-int8-3"])
@pytest.mark.parametrize(
    ("first", "world", "wire", "fragments"),
    [(2, 3, "fp32", 1), (2, 3, "int8", 3), (1, 2, "int8", 1), (3, 4, "fp32", 3), (1, 3, "int8", 1)],
)
def test_joiner_holds_the_outer_state_and_takes_part(
    workers: Callable[[int], Pool], first: int, world: int, wire: str, fragments: int
) -> None:
    setup = Setup(wire, fragments, H)
    pool = workers(world)
    results = pool.run(grow, pool.store, setup, first, timeout=30)
    check_agreement(results)
    simulation = Simulation(setup, range(first))
    simulation.run(range(first), 1, 2 * H)
    for number in range(first, world):
        simulation.join(number)
    simulation.run(range(world), 2 * H + 1, 4 * H)
    for rank, result in enumerate(results):
        simulation.check(rank, result)


def grow_at_another_store(
    rank: int, world: int, address: tuple[str, int], setup: Setup, first: int
) -> Result:
    """The others join at a store which the first replicas do not know before."""
    other = replace(setup, name="another run")
    if rank >= first:
        return finish(Replica(address, rank, range(world), other, init="join"), 4 * H)
    replica = Replica(address, rank, range(first), setup)
    replica.train_to(2 * H)
    store = dist.PrefixStore(other.name, replica.store)
    replica.diloco.change_group(range(world), store=store)
    return finish(replica, 4 * H)


def test_joiner_at_a_store_that_is_new_to_the_members_takes_part(
    workers: Callable[[int], Pool],
) -> None:
    pool = workers(2)
    # Its place stays in the store that it leaves, which other tests have, too.
    setup = Setup("int8", 1, H, timeout=15.0, name="a run that moves")
    check_agreement(pool.run(grow_at_another_store, pool.store, setup, 1, timeout=30))


def replace_the_dead(
    rank: int, world: int, address: tuple[str, int], setup: Setup, number_of_new: int
) -> Result:
    """Replica 0 of three dies; the fourth process takes its place under ``number_of_new``."""
    everyone = sorted({1, 2, number_of_new})
    if rank == 3:
        store = dist.TCPStore(*address, is_master=False)
        store.wait(["wanted"])
        return finish(Replica(address, number_of_new, everyone, setup, init="join"), 5 * H)
    replica = Replica(address, rank, range(3), setup)
    replica.train_to(3 * H - 1)
    if rank == 0:
        replica.fault("kill", "reduce", chunk=0)
    failure = replica.train_until_failure(1)
    replica.store.set("wanted", "")
    replica.diloco.change_group(everyone)
    return finish(replica, 5 * H, [failure])


@pytest.mark.nightly("3 s each; the quantised wire is the general case", but=["int8-1-7"])
@pytest.mark.parametrize("number_of_new", [0, 7])
@pytest.mark.parametrize(("wire", "fragments"), [("fp32", 3), ("int8", 1)])
def test_dead_replica_is_replaced(
    fresh_workers: Callable[..., Pool], wire: str, fragments: int, number_of_new: int
) -> None:
    # The same data whatever the number: the newcomer's batches follow its number.
    setup = Setup(wire, fragments, H)
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(
        replace_the_dead, pool.store, setup, number_of_new, expect_exit={0}, timeout=30
    )
    check_agreement(results)
    everyone = sorted({1, 2, number_of_new})
    failed = results[1].failures[0]
    simulation = Simulation(setup, range(3))
    simulation.run(
        range(3), 1, failed.inner_step, frozenset({(failed.inner_step, failed.fragment)})
    )
    simulation.join(number_of_new)
    simulation.run(everyone, failed.inner_step + 1, 5 * H)
    for number, result in ((1, results[1]), (2, results[2]), (number_of_new, results[3])):
        simulation.check(number, result)
    for result in results[1:3]:
        check_sentence(result.failures[0], [0])


# ------------------------------------------------------- a second replica dies in change_group


def die_in_connect(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def change_group_until_it_works(replica: Replica, groups: Sequence[Sequence[int]]) -> list[Failure]:
    failures = []
    for members in groups[:-1]:
        try:
            replica.diloco.change_group(members)
        except SyncError as error:
            failures.append(describe(error, replica, 0.0))
        else:
            raise AssertionError(f"a group with dead members {members} was formed")
    replica.diloco.change_group(groups[-1])
    return failures


def die_while_regrouping(
    rank: int, world: int, address: tuple[str, int], setup: Setup, where: str
) -> Result:
    """Replica 3 dies in the exchange, replica 2 while the group is formed without 3."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 3:
        # Only replica 0 gets the last vote: 1 and 2 are one round behind.
        replica.fault("kill", "vote", num_peers=1)
    failure = replica.train_until_failure(H + 1)
    if rank == 2:
        if where == "seal":
            change.seal = die_in_connect
        elif where == "connect":
            change.connect = die_in_connect
        else:
            replica.diloco.exchange.exchange_objects = die_in_connect
    failures = change_group_until_it_works(replica, [[0, 1, 2], [0, 1]])
    return finish(replica, 5 * H, [failure, *failures])


@pytest.mark.nightly("9 s; the explored models have it at every step")
@pytest.mark.parametrize("where", ["seal", "connect", "repair"])
def test_second_death_while_the_group_is_formed(
    fresh_workers: Callable[..., Pool], where: str
) -> None:
    setup = Setup("int8", 1, H, timeout=5.0)
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(
        die_while_regrouping, pool.store, setup, where, expect_exit={2, 3}, timeout=40
    )
    check_agreement(results)
    simulation = Simulation(setup, range(4))
    simulation.run(range(4), 1, 2 * H)
    # Replica 0 had applied the round and trained on before it heard of the death.
    simulation.train(0, H)
    simulation.run(range(2), 2 * H + 1, 5 * H)
    for number in (0, 1):
        assert len(results[number].failures) == 2
        second = results[number].failures[1]
        assert second.kind == "SyncError" and second.is_state_kept, second
        assert "\n" not in second.message, second.message
        simulation.check(number, results[number])


def die_with_a_beat_on_the_store(
    rank: int, world: int, address: tuple[str, int], setup: Setup
) -> Result | None:
    """Rank 3 beats as replica 2 and dies; rank 2 comes later under the same number."""
    if rank == 3:
        die = threading.Timer(1.0, die_in_connect)
        die.start()
        Replica(address, 2, range(3), setup)
        return None
    store = dist.TCPStore(*address, is_master=False)
    store.wait(["dead"])
    if rank == 2:
        store.wait(["others are here"])
    else:
        store.set("others are here", "")
    return finish(Replica(address, rank, range(3), setup), 2 * H)


def test_beat_of_a_dead_process_does_not_stand_for_its_successor(
    fresh_workers: Callable[..., Pool],
) -> None:
    setup = Setup("int8", 1, H, timeout=8.0)
    pool = fresh_workers(4, init_group=False)
    pool.submit(die_with_a_beat_on_the_store, pool.store, setup)
    pool.workers[3].exit_code()
    pool.crew.store.set("dead", "")
    pool.busy.discard(3)
    results = pool.collect(timeout=30)
    check_agreement(results)
    simulation = Simulation(setup, range(3))
    simulation.run(range(3), 1, 2 * H)
    for number in range(3):
        simulation.check(number, results[number])


# -------------------------------------------------------------------- failure after failure


def die_one_after_the_other(
    rank: int, world: int, address: tuple[str, int], setup: Setup
) -> tuple[Result, list[int]]:
    """Replica 3 of four dies, then 0, then 2 leaves; replica 1 goes on alone.

    Returns the end, and the rounds after each change.
    """
    replica = Replica(address, rank, range(world), setup)
    failures = []
    epochs = [replica.diloco.exchange.epoch]
    rounds: list[int] = []
    alive = list(range(world))
    for victim, stage, step in ((3, "post_publish", 2 * H), (0, "vote", 4 * H), (2, "", 6 * H)):
        replica.train_to(step - 1)
        if rank == victim and stage:
            replica.fault("kill", stage)
        elif rank == victim:
            replica.diloco.close()
            return replica.result(failures), rounds
        failures.append(replica.train_until_failure(1))
        alive.remove(victim)
        replica.diloco.change_group(alive)
        epochs.append(replica.diloco.exchange.epoch)
        rounds.append(replica.diloco.parts[0].round)
    assert epochs == sorted(set(epochs)), epochs
    return finish(replica, 8 * H, failures), rounds


@pytest.mark.nightly("6 s; the first tier has one failure at a time")
def test_failures_one_after_the_other(fresh_workers: Callable[..., Pool]) -> None:
    setup = Setup("int8", 1, H)
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(
        die_one_after_the_other, pool.store, setup, expect_exit={0, 3}, timeout=40
    )
    (end, rounds), (_, others) = results[1:3]
    assert rounds[:2] == others
    # Replica 0 died at its vote: the round counts if 1 and 2 had voted by the time they heard.
    counts = rounds[1] == 3
    assert rounds == ([1, 3, 4] if counts else [1, 2, 3])
    simulation = Simulation(setup, range(4))
    simulation.run(range(4), 1, 2 * H, frozenset({(2 * H, 0)}))
    lost = frozenset() if counts else frozenset({(4 * H, 0)})
    simulation.run(range(3), 2 * H + 1, 4 * H, lost)
    simulation.run([1, 2], 4 * H + 1, 6 * H - 1)
    simulation.run([1], 6 * H, 8 * H, frozenset({(6 * H, 0)}))
    assert [f.kind for f in end.failures] == ["SyncError", "SyncError", "PeerLeft"]
    assert all(f.is_state_kept for f in end.failures)
    simulation.check(1, end)


def flush_after_failure(
    rank: int, world: int, address: tuple[str, int], setup: Setup
) -> tuple[Result, bool]:
    """A flush right after a failed exchange shares the steps before that exchange."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    replica.diloco.change_group([1, 2])
    replica.diloco.flush()
    result = replica.result([failure])
    local = torch.cat([tensor.detach().flatten() for tensor in replica.model.parameters()])
    (part,) = replica.diloco._plan.parameter_parts()
    replica.diloco.close()
    return result, torch.equal(part.outer, local)


def test_flush_after_a_failure_shares_what_the_failed_round_held(
    fresh_workers: Callable[..., Pool],
) -> None:
    setup = Setup("fp32", 1, H)
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        flush_after_failure, pool.store, setup, expect_exit={0}, timeout=30
    )
    simulation = Simulation(setup, range(3))
    simulation.run(range(3), 1, 2 * H, frozenset({(2 * H, 0)}))
    simulation.sync(0, [1, 2])
    for number in (1, 2):
        result, is_flushed = results[number]
        assert is_flushed
        simulation.check(number, result)


# -------------------------------------------------------------------------- leaks, old stores


def change_again_and_again(
    rank: int, world: int, address: tuple[str, int], setup: Setup, num_cycles: int
) -> tuple[Result, list[tuple[int, int]], list[int], list[int]]:
    replica = Replica(address, rank, range(world), setup)
    seen, epochs, kilobytes = [], [], []
    for cycle in range(num_cycles):
        replica.train_to((cycle + 1) * H)
        replica.diloco.change_group(range(world))
        seen.append(least_resources())
        epochs.append(replica.diloco.exchange.epoch)
        status = Path("/proc/self/statm").read_text().split()
        kilobytes.append(int(status[1]) * os.sysconf("SC_PAGE_SIZE") // 1024)
    return finish(replica, (num_cycles + 1) * H), seen, epochs, kilobytes


def least(readings: Sequence[tuple[int, int]]) -> list[int]:
    """The counts that every one of several cycles had: a passing thread is in some of them only."""
    return [min(column) for column in zip(*readings, strict=True)]


@pytest.mark.nightly("9 s; test_exchange_lifetime counts threads and descriptors")
def test_changing_the_group_leaks_nothing(workers: Callable[[int], Pool]) -> None:
    setup = Setup("int8", 1, H, options={"lanes": 2})
    num_cycles = 20
    pool = workers(3)
    results = pool.run(change_again_and_again, pool.store, setup, num_cycles, timeout=60)
    check_agreement(result for result, *_ in results)
    simulation = Simulation(setup, range(3))
    simulation.run(range(3), 1, (num_cycles + 1) * H)
    for rank, (result, seen, epochs, kilobytes) in enumerate(results):
        assert len(set(epochs)) == num_cycles
        for early, late in zip(least(seen[2:7]), least(seen[-5:]), strict=True):
            assert late <= early, seen
        assert min(kilobytes[-5:]) - kilobytes[4] < 8192, kilobytes
        simulation.check(rank, result)


def run_again(rank: int, world: int, address: tuple[str, int], setup: Setup) -> list[int]:
    epochs = []
    for _ in range(6):
        replica = Replica(address, rank, range(world), setup)
        for _ in range(2):
            epochs.append(replica.diloco.exchange.epoch)
            replica.train_to(replica.diloco.inner_step + H)
            replica.diloco.change_group(range(world))
        epochs.append(replica.diloco.exchange.epoch)
        finish(replica, replica.diloco.inner_step + H)
    return epochs


@pytest.mark.nightly("3 s; the first tier forms groups on a new store")
def test_epochs_on_one_store_never_repeat(workers: Callable[[int], Pool]) -> None:
    pool = workers(2)
    results = pool.run(run_again, pool.store, Setup("int8", 1, H), timeout=30)
    assert results[0] == results[1]
    assert len(set(results[0])) == len(results[0]), results[0]
