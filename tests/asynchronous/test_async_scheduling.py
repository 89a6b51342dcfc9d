"""DyLU, grace periods, shard sampling, learning rates of shards, and the virtual clock."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Regression, equal, parameters_of, train_step
from torch import nn

from diloco_comm import DiLoCo, Nesterov
from diloco_comm.asynchronous.coordinator import (
    Coordinator,
    GracePeriod,
    ShardSampler,
    ShardSchedule,
    Speeds,
    dylu_steps,
)
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.rules import DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.ops.wire import WireFormat

SECONDS = (0.58, 0.75, 1.51, 3.33)
# As in the worker processes: the bits of a matrix product depend on the number of threads.
torch.set_num_threads(1)

# ------------------------------------------------------------------------------------------ DyLU


def test_dylu_worked_example() -> None:
    speeds = [1 / s for s in SECONDS]
    assert [dylu_steps(v, speeds, 50) for v in speeds] == [50, 38, 19, 8]
    assert [dylu_steps(v, speeds, 3) for v in speeds] == [3, 2, 1, 1]
    assert [dylu_steps(v, speeds, 3, minimum=5) for v in speeds] == [5, 5, 5, 5]
    assert dylu_steps(None, speeds, 50) == 50 and dylu_steps(1.0, [], 50) == 50


def test_equal_speeds_get_equal_rounds_whatever_the_rounding() -> None:
    for seconds in (0.1, 0.3, 1 / 3, 7.7):
        speeds = Speeds()
        for worker, steps in enumerate((50, 30, 7)):
            speeds.measure(worker, steps, steps * seconds)
        assert [speeds.steps(worker, 50) for worker in range(3)] == [50, 50, 50]
    speeds.measure(0, 50, 0.0)
    speeds.measure(1, 50, math.nan)
    assert speeds.steps(0, 50, use_dylu=False) == 50
    assert set(speeds.by_worker.values()) == {30 / (30 * 7.7), 50 / (50 * 7.7), 7 / (7 * 7.7)}


# ----------------------------------------------------------------------------------------- grace


def test_a_window_takes_in_its_end_and_nothing_later() -> None:
    grace = GracePeriod(2.0)
    assert grace.closes_at is None and grace.release(0.0, is_anyone_training=True) == []
    grace.arrive("a", 10.0)
    grace.arrive("b", 11.0)
    assert grace.closes_at == 12.0
    assert grace.release(11.9, is_anyone_training=True) == []
    grace.arrive("c", 12.0)
    assert grace.is_waiting("b")
    assert grace.release(12.0, is_anyone_training=True) == ["a", "b", "c"]
    assert grace.closes_at is None and not grace.is_waiting("b")


def test_a_window_closes_when_nobody_is_left_to_wait_for() -> None:
    grace = GracePeriod(1000.0)
    grace.arrive("a", 1.0)
    assert grace.release(1.0, is_anyone_training=True) == []
    assert grace.release(1.0, is_anyone_training=False) == ["a"]
    grace.arrive("b", 2.0)
    grace.leave("b")
    assert grace.closes_at is None


# ---------------------------------------------------------------------------------------- shards


def test_shards_that_are_behind_are_likelier() -> None:
    sampler = ShardSampler([100, 100, 200], seed=1)
    assert sampler.probabilities() == [1 / 3] * 3
    sampler.learn(0, 60)
    sampler.learn(2, 40)
    # Shares of the data 1/4, 1/4, 1/2; of what was learned 0.6, 0, 0.4.
    assert sampler.probabilities() == pytest.approx([0, 0.25 / 0.35, 0.1 / 0.35])
    drawn = [sampler.draw() for _ in range(400)]
    assert 0 not in drawn and drawn.count(1) > drawn.count(2) > 50


def test_sampling_evens_shards_out_and_depends_on_the_seed_alone() -> None:
    def run(seed: int) -> list[int]:
        sampler = ShardSampler([1000, 3000], seed=seed)
        drawn = []
        for _ in range(400):
            drawn.append(sampler.draw())
            sampler.learn(drawn[-1], 10)
        assert sampler.learned[0] / 4000 == pytest.approx(0.25, abs=0.01)
        return drawn

    assert run(3) == run(3) != run(4)
    even = ShardSampler([1, 1])
    even.learn(0, 5)
    even.learn(1, 5)
    assert even.probabilities() == [0.5, 0.5]


def test_learning_rate_of_a_shard() -> None:
    schedule = ShardSchedule(peak=1.0, floor=0.1, warmup=10, total=110)
    assert schedule.at(0) == 0.0 and schedule.at(5) == 0.5 and schedule.at(10) == 1.0
    assert schedule.at(60) == pytest.approx(0.55)
    assert schedule.at(110) == pytest.approx(0.1) == schedule.at(10_000)
    short = ShardSchedule(peak=1.0, floor=0.1, warmup=10, total=5)
    assert short.at(7) == 0.7 and short.at(10) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"floor must lie in \(0"):
        ShardSchedule(peak=1.0, floor=0.0, warmup=1, total=2)
    with pytest.raises(ValueError, match="every shard must hold"):
        ShardSampler([3, 0])


# --------------------------------------------------------------------------------- virtual clock


def worker(rank: int, seconds: float, wire: str = "fp32", **options) -> tuple[nn.Module, object]:
    model = Regression(width=24, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = LocalModel(model, [optimizer], wire=WireFormat(wire), name=str(rank), **options)
    steps = iter(range(1_000_000))
    return model, VirtualWorker(
        local, lambda: train_step(model, optimizer, rank, next(steps)), seconds
    )


def run(
    rule: ServerRule, seconds: tuple[float, ...], num_updates: int, wire: str = "fp32", **options
) -> tuple[list[tuple[float, int, int]], VirtualRun]:
    trains = options.pop("trains", True)
    workers = [worker(rank, s, wire)[1] for rank, s in enumerate(seconds)]
    if not trains:
        for one in workers:
            one.train_step = lambda: None
    model = SharedModel(workers[0].local.sizes, rule)
    virtual = VirtualRun(Coordinator(model, **options), workers)
    events: list[tuple[float, int, int]] = []
    virtual.until(
        num_updates=num_updates,
        on_update=lambda now, index, outcome: events.append((now, index, outcome.staleness)),
    )
    return events, virtual


def replica(rank: int, world: int, num_rounds: int) -> list[torch.Tensor]:
    model = Regression(width=24, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=3, outer=Nesterov(0.7, 0.9), wire="fp32"):
        for step in range(3 * num_rounds):
            train_step(model, optimizer, rank, step)
        trained = parameters_of(model)
    return trained


@pytest.mark.nightly("up to 3 s each; they differ in the number of workers", but=["2"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_equal_workers_and_full_windows_are_synchronous_diloco_bit_for_bit(
    workers, world: int
) -> None:
    truth = workers(world).run(replica, 4)
    for options in ({"dylu": True}, {"dylu": False}):
        _, virtual = run(
            DelayedNesterov(lr=0.7, momentum=0.9, period=world),
            (1.0,) * world,
            4 * world,
            sync_every=3,
            grace=1000.0,
            **options,
        )
        local = virtual.workers[0].local
        flat = virtual.coordinator.model.read_all()[0]
        local.outer[0].copy_(flat)
        local.write()
        assert equal([t.clone() for t in local.fragments[0].tensors()], truth[0])


def test_arrivals_staleness_and_rounds_follow_from_the_speeds() -> None:
    events, virtual = run(Immediate(outer=Nesterov(0.1)), (1.0, 2.5), 7, sync_every=2)
    # Worker 0 arrives at 2, 4, 6, 8, 10; worker 1 at 5 and 10, after worker 0.
    assert [(t, i) for t, i, _ in events] == [
        (2, 0), (4, 0), (5, 1), (6, 0), (8, 0), (10, 0), (10, 1),
    ]  # fmt: skip
    assert [s for _, _, s in events] == [0, 0, 2, 1, 0, 0, 3]
    assert virtual.coordinator.model.version == 7


def test_a_window_makes_slower_workers_start_together() -> None:
    events, virtual = run(
        Immediate(outer=Nesterov(0.1)), (1.0, 1.2, 3.0), 6, sync_every=5, grace=1.0
    )
    # Windows [5, 6], [11, 12], then worker 2 at 15 in a window of its own, [15, 16], ...
    assert [(t, i) for t, i, _ in events] == [
        (5, 0), (6, 1), (11, 0), (12, 1), (15, 2), (17, 0),
    ]  # fmt: skip
    assert virtual.workers[1].version == 4


def test_dylu_lets_all_workers_arrive_at_about_the_same_time() -> None:
    events, virtual = run(
        DelayedNesterov(lr=0.1, period=4),
        SECONDS,
        40,
        sync_every=50,
        dylu=True,
        grace=0.0,
        trains=False,
    )
    # The first rounds have 50 steps, since speeds are unknown; then 50, 38, 19 and 8.
    rounds = [w.round_steps for w in virtual.workers]
    assert rounds == [50, 38, 19, 8]
    later = [staleness for _, _, staleness in events[20:]]
    assert max(later) <= 4


@pytest.mark.nightly("3 s; the frozen runs on virtual clocks repeat theirs")
def test_a_run_depends_on_its_seeds_alone() -> None:
    def values() -> tuple[list, list[torch.Tensor]]:
        events, virtual = run(
            DelayedNesterov(lr=0.3, period=3), (1.0, 1.3, 2.9), 17, "int4", sync_every=3, grace=0.5
        )
        return events, virtual.coordinator.model.read_all()

    one, other = values(), values()
    assert one[0] == other[0] and equal(one[1], other[1])


def test_bad_virtual_workers() -> None:
    with pytest.raises(ValueError, match="seconds_per_step must be positive"):
        worker(0, 0.0)
    with pytest.raises(ValueError, match="at least one worker"):
        VirtualRun(Coordinator(SharedModel([1], Immediate())), [])
