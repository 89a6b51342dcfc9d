"""Replicas die, hang, leave and join while the others train on; all end with the same bits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from elastic_replicas import SUSPECT_AFTER_S, Fault, Run, check_one_line, live
from elastic_replicas import registry as registry
from fault_replicas import Setup, connect, hash_of
from fault_simulation import Simulation
from registries import Host
from workers import Pool

from diloco_comm import CO2, SGD, Blocking, Delayed, Eager, Streaming
from diloco_comm.ops.digests import digest_of

# For wires that take no block size.
SMALL: dict[str, Any] = {"block_size": None, "chunk_bytes": 64}
POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": Blocking()},
    "blocking-tcp": {"overlap": Blocking(), "backend": "tcp"},
    "blocking-feedback": {"overlap": Blocking(), "wire": "int4", "error_feedback": True},
    "streaming": {"overlap": Streaming(delay=2, alpha=0.5), "fragments": 3},
    "delayed": {"overlap": Delayed()},
    "eager": {"overlap": Eager()},
    "co2": {"overlap": CO2()},
    "rotated": {**SMALL, "wire": "int2r"},
    "rotated-eager": {**SMALL, "wire": "sub8", "overlap": Eager(), "outer": SGD(1.0)},
    "sparse-streaming": {
        **SMALL,
        **{"wire": "topk64", "overlap": Streaming(delay=2, alpha=0.5), "fragments": 3},
        **{"outer": SGD(1.0), "error_feedback": True},
    },
}


def run_all(
    workers: Callable[..., Pool],
    registry: Host,
    run: Run,
    world: int,
    dead: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[Any]:
    pool = workers(world, init_group=False)
    ends = pool.run(live, pool.store, registry.address, run, timeout=60, expect_exit=dead)
    check_one_line(ends)
    living = [end for end in ends if end is not None and not end.is_done]
    assert len({(end.inner_step, end.members) for end in living}) == 1, living
    for worker in range(run.num_workers):
        mates = [one for one in ends[worker :: run.num_workers] if one in living]
        assert len({(one.outer, one.local) for one in mates}) == 1, mates
    if not run.is_sharded:
        assert len({end.local for end in living}) == 1, living
    assert living[0].inner_step == run.last_step
    return ends


@pytest.mark.nightly("12 s each; they differ in policy and wire", but=["blocking-feedback"])
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_one_joins_and_one_dies(
    fresh_workers: Callable[..., Pool], registry: Host, name: str
) -> None:
    fault = Fault(1, 20, "kill", "vote", num_peers=1, num_members=4)
    run = Run(3, 240, joins={3: 12}, faults=(fault,), options=POLICIES[name], pace_until=3)
    ends = run_all(fresh_workers, registry, run, 4, {1})
    assert ends[0].members == (0, 2, 3)
    last = ends[0].views[-1]
    assert (last.joined, last.left) == ((), (1,))
    assert any(view.joined == (3,) for view in ends[0].views)


@pytest.mark.nightly("6 s; the first tier has a death of another replica")
@pytest.mark.parametrize("stage", ["header", "post_exchange", "vote"])
def test_the_host_of_the_store_dies(
    fresh_workers: Callable[..., Pool], registry: Host, stage: str
) -> None:
    run = Run(3, 40, faults=(Fault(0, 20, "kill", stage),))
    ends = run_all(fresh_workers, registry, run, 3, {0})
    assert ends[1].members == (1, 2)


@pytest.mark.nightly("7 s; the explored models have every order")
def test_those_who_are_left_finish_the_round_that_broke_off(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """All bits are as if the one that dies had never been: its first round is theirs."""
    run = Run(3, 24, faults=(Fault(2, 7, "kill", "header"),), options={"sync_every": 8})
    ends = run_all(fresh_workers, registry, run, 3, {2})
    assert [view.inner_step for view in ends[0].views] == [0, 8]
    assert ends[0].num_applied == ends[1].num_applied == 3
    simulation = Simulation(Setup(wire="int8", sync_every=8), (0, 1))
    simulation.run((0, 1), 1, 24)
    for number in (0, 1):
        assert ends[number].outer == f"{digest_of(simulation.outer):016x}"
        assert ends[number].local == hash_of(list(simulation.replicas[number][0].parameters()))


@pytest.mark.nightly("8 s; test_faults_termination counts each step once")
def test_what_is_sent_again_has_the_same_weight(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """A function that has given its tokens away has none left for the same inner step."""
    faults = (Fault(2, 7, "kill", "header"), Fault(1, 15, "kill", "header"))
    run = Run(3, 24, faults=faults, options={"sync_every": 8}, has_tokens=True)
    ends = run_all(fresh_workers, registry, run, 3, {1, 2})
    assert [view.inner_step for view in ends[0].views] == [0, 8, 16]
    assert ends[0].weights == [8.0, 8.0, 8.0]


@dataclass
class NoWeightAtFirst:
    """A weight that is 0 for the first calls, and 1 afterwards."""

    num_calls: int

    def __call__(self) -> float:
        self.num_calls -= 1
        return 0.0 if self.num_calls >= 0 else 1.0


@pytest.mark.nightly("5 s; a limit on what is sent again")
@pytest.mark.parametrize(
    ("num_calls", "views", "weights"),
    [(1, [0, 4], [1.0, 1.0]), (2, [0, 4, 4], [1.0])],
    ids=["counts when sent again", "fails twice"],
)
def test_a_round_without_any_weight_is_sent_twice_at_most(
    fresh_workers: Callable[..., Pool],
    registry: Host,
    num_calls: int,
    views: list[int],
    weights: list[float],
) -> None:
    """The function is asked again for what is sent again; after two failures training goes on."""
    run = Run(2, 8, options={"weight": NoWeightAtFirst(num_calls)})
    ends = run_all(fresh_workers, registry, run, 2)
    assert [view.inner_step for view in ends[0].views] == views
    assert ends[0].weights == ends[1].weights == weights


@pytest.mark.nightly("7 s; the explored models have every order")
def test_a_part_whose_round_counts_is_not_sent_again(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """Two parts are due at a step, and the last that one replica does is its vote for the first."""
    options = {"sync_every": 8, "fragments": 2, "offsets": [8, 8]}
    run = Run(3, 24, faults=(Fault(2, 7, "kill between parts"),), options=options)
    ends = run_all(fresh_workers, registry, run, 3, {2})
    assert [view.inner_step for view in ends[0].views] == [0, 8]
    assert ends[0].applied == ends[1].applied == {0: 3, 1: 3}
    simulation = Simulation(Setup(wire="int8", fragments=2, sync_every=8), (0, 1, 2))
    for step in range(1, 25):
        living = (0, 1, 2) if step <= 8 else (0, 1)
        for number in living:
            simulation.train(number)
        if step % 8 == 0:
            simulation.sync(0, living)
            simulation.sync(1, (0, 1))
    for number in (0, 1):
        assert ends[number].outer == f"{digest_of(simulation.outer):016x}"
        assert ends[number].local == hash_of(list(simulation.replicas[number][0].parameters()))


@pytest.mark.nightly("7 s; test_sharded_failures has replicas of two workers")
@pytest.mark.slow
def test_a_round_that_breaks_off_at_one_worker_of_each_replica(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """The other workers have applied theirs: none of them may wait for another to send again."""
    run = Run(3, 40, faults=(Fault(2, 20, "kill", "vote", worker=1),), num_workers=2)
    ends = run_all(fresh_workers, registry, run, 6, {5})
    assert ends[0].members == ends[1].members == (0, 1)
    assert ends[0].inner_step == ends[3].inner_step == 40
    assert "another worker of this replica is gone" in ends[4].error


@pytest.mark.nightly("11 s; the first tier has a death in a round")
def test_a_death_is_found_out_between_two_rounds(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """No exchange is under way: the host of the dead process says that nobody listens there."""
    run = Run(
        3,
        1000,
        faults=(Fault(2, 20, "kill now"),),
        options={"sync_every": 1000},
        membership={"suspect_after": 600.0},
        pace_s=0.02,
        pace_while=2,
    )
    ends = run_all(fresh_workers, registry, run, 3, {2})
    assert ends[0].views[-1].left == (2,) and ends[0].views[-1].inner_step < run.last_step
    assert ends[0].num_applied == 1


@pytest.mark.nightly("6 s; test_interrupts breaks off steps of a fixed group")
def test_a_boundary_is_no_later_after_an_interrupt(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """The round that ends the view is applied in the step after the one that a Ctrl-C broke off."""
    run = Run(
        2,
        160,
        joins={2: 4},
        options={"sync_every": 20},
        interrupted=1,
        pace_s=0.02,
        pace_until=2,
    )
    ends = run_all(fresh_workers, registry, run, 3)
    assert any(view.joined == (2,) for view in ends[1].views)
    # Of the steps after the boundary, the others take none.
    assert ends[1].num_steps <= run.last_step + 1


def test_a_replica_leaves_at_a_boundary(fresh_workers: Callable[..., Pool], registry: Host) -> None:
    run = Run(3, 48, faults=(Fault(0, 14, "leave"),))
    ends = run_all(fresh_workers, registry, run, 3)
    assert ends[0].is_done and ends[1].members == (1, 2)
    assert ends[1].views[-1].inner_step % 4 == 0


@pytest.mark.nightly("4 s; other tests lose one of three")
def test_two_of_three_die_and_one_trains_on(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    run = Run(3, 40, faults=(Fault(0, 20, "kill", "vote"), Fault(2, 20, "kill", "header")))
    ends = run_all(fresh_workers, registry, run, 3, {0, 2})
    assert ends[1].members == (1,)


@pytest.mark.nightly("8 s; the explorer of the core has it at every step")
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["seal", "connect", "open"])
def test_another_one_dies_in_the_change(
    fresh_workers: Callable[..., Pool], registry: Host, stage: str
) -> None:
    faults = (Fault(2, 20, "kill", "vote", num_peers=1), Fault(1, 20, "kill in change", stage))
    run = Run(4, 40, faults=faults, min_replicas=2)
    ends = run_all(fresh_workers, registry, run, 4, {1, 2})
    assert ends[0].members == (0, 3)


@pytest.mark.slow
def test_a_replica_of_two_workers_dies_and_another_joins(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    faults = (Fault(1, 20, "kill", "vote", num_members=3),)
    run = Run(2, 240, joins={2: 8}, faults=faults, num_workers=2, pace_until=2)
    ends = run_all(fresh_workers, registry, run, 6, {2, 3})
    assert ends[0].members == ends[4].members == (0, 2)


@pytest.mark.nightly("20 s; the explorer of the core has a death at every step of a change")
@pytest.mark.slow
def test_a_worker_dies_in_the_seal(fresh_workers: Callable[..., Pool], registry: Host) -> None:
    """Its replica has not said how far it is, and is lost as a whole; the others go on."""
    faults = (
        Fault(2, 20, "kill", "vote"),
        Fault(1, 20, "kill in change", "seal", worker=1),
    )
    run = Run(3, 40, faults=faults, num_workers=2)
    ends = run_all(fresh_workers, registry, run, 6, {3, 4, 5})
    assert ends[0].members == (0,)
    assert "another worker of this replica is gone" in ends[2].error


@pytest.mark.nightly("10 s; test_sharded_failures has a death of one of two workers")
@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["shard_group", "fsdp2"])
def test_a_replica_of_two_workers_is_lost_and_regained(
    fresh_workers: Callable[..., Pool], registry: Host, is_sharded: bool
) -> None:
    """All workers of a replica die by SIGKILL; a new one comes when the other trains alone."""
    faults = (Fault(1, 20, "kill", "vote"),)
    workers: dict[str, Any] = {"num_workers": 2, "is_sharded": is_sharded}
    run = Run(2, 200, joins={2: 40}, faults=faults, pace_until=2, **workers)
    ends = run_all(fresh_workers, registry, run, 6, {2, 3})
    assert ends[0].members == ends[4].members == (0, 2)
    assert [view.members for view in ends[0].views] == [(0, 1), (0,), (0, 2)]


@pytest.mark.nightly("7 s each; they differ in the policy", but=["1-eager"])
@pytest.mark.parametrize("name", ["blocking", "delayed", "eager"])
@pytest.mark.parametrize("num_peers", [0, 1])
def test_one_dies_in_the_flush(
    fresh_workers: Callable[..., Pool], registry: Host, name: str, num_peers: int
) -> None:
    """The last two steps are shared by all that are left, or by nobody."""
    run = Run(3, 22, faults=(Fault(2, 21, "kill", "vote", num_peers),), options=POLICIES[name])
    run_all(fresh_workers, registry, run, 3, {2})


@pytest.mark.nightly("10 s; test_faults_liveness stops a replica of a fixed group")
@pytest.mark.slow
def test_a_replica_that_hangs_is_left_behind(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(3, init_group=False)
    run = Run(3, 40, faults=(Fault(0, 20, "stop", "header"),))
    pool.submit(live, pool.store, registry.address, run)
    waker = threading.Timer(3 * SUSPECT_AFTER_S, pool.kill, (0, signal.SIGCONT))
    waker.start()
    ends = pool.collect(timeout=60)
    waker.join()
    assert "start this replica again" in ends[0].error
    assert ends[1].members == ends[2].members == (1, 2)
    assert ends[1].outer == ends[2].outer


@pytest.mark.nightly("15 s; test_registry_server has the registry's restart")
@pytest.mark.slow
def test_the_registry_is_away_for_a_while(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """Training goes on; who comes meanwhile waits."""
    pool = fresh_workers(3, init_group=False)
    run = Run(2, 1200, joins={2: 40}, pace_until=2)
    pool.submit(live, pool.store, registry.address, run)
    signs = connect(pool.store)
    signs.wait(["start 2"])
    registry.kill()
    time.sleep(2.0)
    registry.start()
    ends = pool.collect(timeout=60)
    assert ends[0].members == (0, 1, 2)
    assert len({(end.outer, end.local, end.inner_step) for end in ends}) == 1


# -------------------------------------------------------------------- A mean with a wire of its own


@pytest.mark.nightly("15 s; test_elastic_training joins on other wires")
@pytest.mark.slow
def test_one_joins_where_a_mean_has_a_wire_of_its_own(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    options = {**SMALL, "wire": "sub2", "outer": SGD(1.0)}
    joins = {4: 12, 5: 40}
    run = Run(4, 160, joins=joins, joins_in_turn=True, options=options, pace_until=5)
    pool = fresh_workers(6, init_group=False)
    ends = pool.run(live, pool.store, registry.address, run, timeout=60)
    check_one_line(ends)
    assert len({(end.outer, end.local, end.members, end.inner_step) for end in ends}) == 1
    assert [view.joined for view in ends[0].views if view.joined][1:] == [(4,), (5,)]
