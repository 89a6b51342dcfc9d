"""The schedule of the outer learning rate: values, settings, saved states, replicas."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, train_step

from diloco_comm import DiLoCo, Nesterov, ReplicaMismatch, WarmupCosine
from diloco_comm.methods.outer import make_outer

WARMUP, TOTAL = 3, 7
SCHEDULE = WarmupCosine(0.8, WARMUP, TOTAL, final=0.1)


def expected(round: int) -> float:
    """A line to round 2, then half a cosine of four rounds, then a constant."""
    if round <= 2:
        return (0.8 / 3, 1.6 / 3, 0.8)[round]
    return 0.45 + 0.35 * math.cos(math.pi * min(round - 2, 4) / 4)


@pytest.mark.parametrize("round", range(10))
def test_values(round: int) -> None:
    assert SCHEDULE(round) == pytest.approx(expected(round), rel=1e-12)


def test_ends_of_the_schedule() -> None:
    assert [SCHEDULE(2), SCHEDULE(6), SCHEDULE(1000)] == pytest.approx([0.8, 0.1, 0.1], rel=1e-12)
    without_warmup = WarmupCosine(0.5, 0, 11)
    assert [without_warmup(round) for round in (0, 5, 10)] == pytest.approx([0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((-1.0, 0, 10), "peak must be finite and not negative, got -1.0"),
        ((0.7, 10, 10), r"warmup_rounds must be at least 0 and below total_rounds \(10\), got 10"),
        ((0.7, -1, 10), r"warmup_rounds must be at least 0 and below total_rounds \(10\), got -1"),
        ((0.7, 0.5, 10), "warmup_rounds must be an integer, got 0.5"),
        ((0.7, 0, 10, math.nan), "final must be finite and not negative, got nan"),
    ],
)
def test_arguments_that_cannot_be(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WarmupCosine(*arguments)


def test_a_configuration_restores_it() -> None:
    outer = Nesterov(lr=SCHEDULE)
    restored = make_outer(json.loads(json.dumps(outer.config())))
    assert restored == outer and restored.lr == SCHEDULE


@pytest.mark.parametrize(
    ("lr", "sentence"),
    [
        ({"name": "Linear", "peak": 1.0}, "unknown schedule 'Linear'"),
        ({"name": "WarmupCosine", "height": 1.0}, "the saved schedule WarmupCosine cannot be made"),
    ],
)
def test_a_configuration_of_another_schedule_is_refused(lr: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_outer({"name": "Nesterov", "lr": lr, "momentum": 0.9})


def attach(lr: Any, config: dict[str, Any] | None = None) -> Any:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments = {"config": config} if config else {"sync_every": 2, "outer": Nesterov(lr)}
    return model, optimizer, DiLoCo(model, optimizer, **grouped(arguments))


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        train_step(model, optimizer, rank, step)


def follow_the_schedule(rank: int, world: int) -> dict[str, str]:
    """Train eight rounds with the schedule, with its values by hand, and saved after five."""
    hashes = {}
    model, optimizer, diloco = attach(SCHEDULE)
    with diloco:
        config = json.loads(json.dumps(diloco.config()))
        train(model, optimizer, rank, range(10))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
            {**state, "diloco": diloco.state_dict()},
        )
        train(model, optimizer, rank, range(10, 16))
        hashes["schedule"] = diloco.outer_hash()
    model, optimizer, diloco = attach(None, config)
    with diloco:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        diloco.load_state_dict(saved["diloco"])
        train(model, optimizer, rank, range(10, 16))
        hashes["resumed from its configuration"] = diloco.outer_hash()
    model, optimizer, diloco = attach(0.0)
    with diloco:
        for round in range(8):
            diloco.outer.lr = SCHEDULE(round)
            train(model, optimizer, rank, range(2 * round, 2 * round + 2))
        hashes["by hand"] = diloco.outer_hash()
    model, optimizer, diloco = attach(0.8)
    with diloco:
        train(model, optimizer, rank, range(16))
        hashes["constant"] = diloco.outer_hash()
    return hashes


def test_replicas_follow_the_schedule(workers) -> None:
    first, second = workers(2).run(follow_the_schedule)
    assert first == second
    constant = first.pop("constant")
    assert len(set(first.values())) == 1 and constant not in first.values()


def differ_in_the_schedule(rank: int, world: int) -> str:
    with pytest.raises(ReplicaMismatch) as info:
        attach(WarmupCosine(0.8, WARMUP, TOTAL + rank))
    return str(info.value)


def test_another_schedule_on_one_replica_is_refused(workers) -> None:
    for message in workers(2).run(differ_in_the_schedule):
        assert "outer" in message and "\n" not in message
        assert "'total_rounds': 7" in message and "'total_rounds': 8" in message


def join_late(rank: int, world: int, address: tuple[str, int]) -> tuple[list[float], str]:
    """Replica 1 joins after four rounds; both go on with the rates of rounds 4 and 5."""
    store = torch.distributed.TCPStore(*address, is_master=False)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    place = {"store": store, "replica": rank, "timeout": 60}
    arguments = {"sync_every": 2, "outer": Nesterov(SCHEDULE), **place}
    seen: list[float] = []
    if rank == 0:
        diloco = DiLoCo(model, optimizer, **grouped({"members": [0], **arguments}))
        train(model, optimizer, rank, range(8))
        diloco.change_group([0, 1])
    else:
        diloco = DiLoCo(model, optimizer, init="join", **grouped({"members": [0, 1], **arguments}))
    with diloco:
        (part,) = diloco.parts
        for step in range(8, 12, 2):
            seen.append(diloco.outer.lr_at(part.round, part.state))
            train(model, optimizer, rank, range(step, step + 2))
        return seen, diloco.outer_hash()


def test_a_joining_replica_goes_on_where_the_others_are(fresh_workers) -> None:
    pool = fresh_workers(2, init_group=False)
    first, second = pool.run(join_late, pool.store)
    assert first == second
    assert first[0] == pytest.approx([expected(4), expected(5)], rel=1e-12)
