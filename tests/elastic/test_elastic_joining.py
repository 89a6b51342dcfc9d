"""Replicas join while the others train; at the boundary no state is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_replicas import End, Fault, Run, check_one_line, live
from elastic_replicas import registry as registry
from fault_replicas import Setup, hash_of, make_model
from fault_simulation import Simulation
from registries import Host
from workers import Pool

from diloco_comm import Eager, Streaming
from diloco_comm.elastic.events import ViewChanged
from diloco_comm.ops.digests import digest_of

NUM_PARAMETERS = sum(param.numel() for param in make_model().parameters())
STATE_BYTES = 8 * NUM_PARAMETERS


def run_all(
    workers: Callable[..., Pool],
    registry: Host,
    run: Run,
    world: int,
    dead: frozenset[int] = frozenset(),
) -> list[Any]:
    pool = workers(world, init_group=False)
    ends = pool.run(live, pool.store, registry.address, run, timeout=100, expect_exit=set(dead))
    check_one_line(ends)
    living = [end for end in ends if end is not None]
    assert len({(end.outer, end.local, end.inner_step, end.members) for end in living}) == 1
    return ends


def joined_with(ends: Sequence[End], replica: int) -> ViewChanged:
    found = [view for view in ends[0].views if replica in view.joined and len(view.joined) == 1]
    assert len(found) == 1, ends[0].views
    return found[0]


def simulated(setup: Setup, views: Sequence[ViewChanged], last_step: int) -> Simulation:
    """Repeat a training with the same views in one process, where every round counts."""
    simulation = Simulation(setup, views[0].members)
    ends = [view.inner_step for view in views[1:]] + [last_step]
    for view, end in zip(views, ends, strict=True):
        for number in set(view.members) - set(simulation.replicas):
            simulation.join(number)
            simulation.step_count[number] = view.inner_step
        simulation.run(view.members, view.inner_step + 1, end)
    # The flush shares the fragments that are not due at the last step.
    for fragment in set(range(setup.fragments)) - set(setup.schedule.due(last_step)):
        simulation.sync(fragment, views[-1].members)
    return simulation


# Enough for a newcomer on a loaded machine; with it as a member, the others train without a rest.
LAST_STEP = 240
# Of the round logs: no round of these runs is too old.
LARGE_LOG = {"round_log_bytes": 1 << 24}


@pytest.mark.nightly("14 s; the frozen runs with a join have their bits")
@pytest.mark.parametrize("fragments", [1, 3])
def test_all_bits_are_those_of_the_simulation(
    fresh_workers: Callable[..., Pool], registry: Host, fragments: int
) -> None:
    options = {"fragments": fragments}
    run = Run(
        2,
        LAST_STEP,
        joins={2: 4},
        options=options,
        membership=LARGE_LOG,
        pace_s=0.08,
        pace_until=2,
    )
    ends = run_all(fresh_workers, registry, run, 3)
    joined = joined_with(ends, 2)
    assert joined.copied_bytes == 0
    setup = Setup(wire="int8", fragments=fragments)
    simulation = simulated(setup, ends[0].views, run.last_step)
    assert ends[2].outer == f"{digest_of(simulation.outer):016x}"
    for number, end in enumerate(ends):
        model, _ = simulation.replicas[number]
        assert end.local == hash_of(list(model.parameters()))
    # While the members waited, two rounds travelled at most, each of two payloads of int8.
    assert ends[2].caught_up_bytes <= 2 * 2 * 1.2 * NUM_PARAMETERS
    ready = ends[2].progress[-1]
    assert ready.is_ready and ready.rounds_behind <= 1
    assert ready.received_bytes >= ready.total_bytes == STATE_BYTES


@pytest.mark.nightly("10 s; test_history has the rounds since")
def test_a_replica_from_a_checkpoint_takes_the_rounds_since(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "replica.pt")
    run = Run(
        2,
        LAST_STEP,
        joins={2: 12},
        membership=LARGE_LOG,
        pace_s=0.08,
        pace_until=2,
        checkpoint=checkpoint,
        saved_step=8,
    )
    ends = run_all(fresh_workers, registry, run, 3)
    assert joined_with(ends, 2).copied_bytes == 0
    setup = Setup(wire="int8")
    simulation = simulated(setup, ends[0].views, run.last_step)
    assert ends[2].outer == f"{digest_of(simulation.outer):016x}"
    # Two payloads of int8 for each round since the save, and no outer state.
    rounds = (joined_with(ends, 2).inner_step - run.saved_step) // 4
    num_bytes = ends[2].progress[-1].received_bytes + ends[2].caught_up_bytes
    assert num_bytes <= rounds * 2 * 1.2 * NUM_PARAMETERS
    assert ends[2].progress[-1].is_ready


@pytest.mark.nightly("8 s each; the first tier has a newcomer beside training")
@pytest.mark.parametrize(
    ("options", "log", "is_beside"),
    [
        ({"overlap": Streaming(delay=2, alpha=0.5), "fragments": 3}, LARGE_LOG, True),
        ({"overlap": Eager()}, LARGE_LOG, False),
        ({}, {"round_log_bytes": 0}, False),
    ],
    ids=["streaming", "eager", "no log"],
)
def test_a_state_is_copied_beside_training_or_at_the_boundary(
    fresh_workers: Callable[..., Pool],
    registry: Host,
    options: dict[str, Any],
    log: dict[str, int],
    is_beside: bool,
) -> None:
    run = Run(
        2, LAST_STEP, joins={2: 4}, options=options, membership=log, pace_s=0.08, pace_until=2
    )
    copied_bytes = joined_with(run_all(fresh_workers, registry, run, 3), 2).copied_bytes
    assert copied_bytes == 0 if is_beside else copied_bytes >= STATE_BYTES


@pytest.mark.nightly("20 s; test_transfer changes donors, test_inner_state loses one")
def test_a_donor_dies_while_its_state_is_copied(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    fault = Fault(1, 4, "kill", "vote", is_donor=True)
    run = Run(
        3,
        LAST_STEP,
        joins={3: 4},
        faults=(fault,),
        options={"fragments": 4},
        membership={**LARGE_LOG, "join_bandwidth": STATE_BYTES / 4},
        pace_s=0.08,
        pace_until=3,
    )
    ends = run_all(fresh_workers, registry, run, 4, frozenset({1}))
    joined = joined_with(ends, 3)
    assert joined.copied_bytes == 0
    assert ends[0].members == (0, 2, 3)
    assert any(view.left == (1,) and 3 not in view.members for view in ends[0].views)
