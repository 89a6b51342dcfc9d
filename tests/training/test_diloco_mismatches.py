"""Replicas that differ, values that are not finite, skipped steps: one clear sentence each."""

from __future__ import annotations

import math
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from problems import Regression, attach, batch
from torch import nn

from diloco_comm import (
    SGD,
    DiLoCo,
    Nesterov,
    ReplicaMismatch,
)
from diloco_comm.replica.hooks import SkippedSteps

# ------------------------------------------------------------------- replicas that do not agree


def attach_differently(rank: int, world: int, choices: list[dict[str, Any]]) -> str:
    try:
        attach(**choices[rank])[2].close()
    except ReplicaMismatch as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        (
            [{}, {"width": 12}],
            "the model differs between replicas: [0 layers.0.weight [24, 24] [24, 1] float32] on "
            "replica 0, [0 layers.0.weight [12, 12] [12, 1] float32] on replica 1",
        ),
        (
            [{"fragments": 2}, {"fragments": 3}],
            "number of fragments differs between replicas: 2 on replica 0, 3 on replica 1",
        ),
        (
            [{}, {"init": "check"}],
            "init differs between replicas: 'broadcast' on replica 0, 'check' on replica 1",
        ),
        (
            [{"wire": "int8"}, {"wire": "int4"}],
            "wire differs between replicas: 'int8' on replica 0, 'int4' on replica 1",
        ),
        (
            [{"sync_every": 10}, {"sync_every": 20}],
            "sync_every differs between replicas: 10 on replica 0, 20 on replica 1",
        ),
        (
            [{"block_size": 64}, {"block_size": 256}],
            "block_size differs between replicas: 64 on replica 0, 256 on replica 1",
        ),
        (
            [{"offsets": [1]}, {"offsets": [2]}],
            "offsets differs between replicas: [1] on replica 0, [2] on replica 1",
        ),
        (
            [{"outer": SGD(1.0)}, {"outer": Nesterov(0.7)}],
            "outer differs between replicas: {'name': 'SGD', 'lr': 1.0} on replica 0, "
            "{'name': 'Nesterov', 'lr': 0.7, 'momentum': 0.9} on replica 1",
        ),
        (
            [{"error_feedback": True}, {}],
            "error_feedback differs between replicas: True on replica 0, False on replica 1",
        ),
        (
            [{"init": "check"}, {"init": "check", "model_seed": 1}],
            "initial weights differ: parameter 'layers.0.weight' on replica 1 is not that of "
            'replica 0; load the same weights or use init="broadcast"',
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(sorted(value[0] | value[1])),
)
def test_replicas_that_differ_are_told_how(choices: Any, sentence: str, workers) -> None:
    assert workers(2).run(attach_differently, choices) == [sentence, sentence]


def test_the_odd_one_of_three_is_named(workers) -> None:
    choices = [{}, {}, {"sync_every": 3}]
    messages = workers(3).run(attach_differently, choices)
    assert messages == ["sync_every differs between replicas: 2 on replica 0, 3 on replica 2"] * 3


def attach_equal_weights(rank: int, world: int) -> bool:
    diloco = attach(init="check")[2]
    with diloco:
        return bool(diloco.outer_hash())


def test_check_accepts_equal_weights(workers) -> None:
    assert workers(2).run(attach_equal_weights) == [True, True]


def broadcast_start(rank: int, world: int) -> tuple[bool, str]:
    own = Regression(seed=rank)
    first = Regression(seed=0)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    with DiLoCo(own, optimizer, sync_every=2) as diloco:
        pairs = zip(own.parameters(), first.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs), diloco.outer_hash()


def test_broadcast_gives_the_weights_of_replica_0(workers) -> None:
    (is_equal_0, hash_0), (is_equal_1, hash_1) = workers(2).run(broadcast_start)
    assert is_equal_0 and is_equal_1 and hash_0 == hash_1


def average_a_mask(rank: int, world: int) -> str:
    """The buffer is left out on replica 1 alone."""
    model = Regression()
    model.register_buffer("mean", torch.full((3,), math.nan if rank else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ReplicaMismatch) as info:
        DiLoCo(model, optimizer, sync_every=2, average_buffers=True)
    return str(info.value)


def test_buffers_that_are_averaged_are_counted(workers) -> None:
    count = len(list(Regression().parameters()))
    sentence = (
        f"the model differs between replicas: {count + 1} parameters and averaged buffers on "
        f"replica 0, {count} on replica 1"
    )
    assert workers(2).run(average_a_mask) == [sentence] * 2


def one_calls(rank: int, world: int, call: str, steps: list[int]) -> str:
    """Replica 1 calls something else while replica 0 takes the step that sends."""
    with closing(attach(attach=False, timeout=30.0, checks="off")[2]) as diloco:
        for _ in range(steps[rank]):
            diloco.step()
        with pytest.raises(ReplicaMismatch) as info:
            getattr(diloco, call if rank else "step")()
        return str(info.value)


def test_calls_that_differ_go_by_the_names_of_the_user(workers) -> None:
    sentence = "kind differs between replicas: sync on replica 0; consensus on replica 1"
    subjects = ["sync of fragment 0, round 0", "consensus"]
    found = workers(2).run(one_calls, "consensus", [1, 1])
    assert found == [f"{subject}: {sentence}" for subject in subjects]


def one_agrees(rank: int, world: int) -> str:
    with attach(attach=False, timeout=30.0, checks="off")[2] as diloco:
        diloco.step()
        with pytest.raises(ReplicaMismatch) as info:
            diloco.agree_on_steps(3) if rank else diloco.step()
        return str(info.value)


def test_only_a_flush_is_an_end(workers) -> None:
    """Another call for all replicas that one makes alone is an error of all, with no round lost."""
    for text in workers(2).run(one_agrees):
        assert "replica 1 has ended at inner step 1" in text


def test_a_replica_that_lacks_a_whole_round_is_named(workers) -> None:
    sentence = (
        "replica 1 has ended at inner step 2 (flush, or another call for all replicas), while "
        "replica 0 still trains, at inner step 4: give all replicas the same number of steps, see "
        "DiLoCo.agree_on_steps; one that a GradScaler skips counts if the optimizer is fused, or "
        "with attach=False and diloco.step() after each batch"
    )
    subjects = ["sync of fragment 0, round 1", "start of flush"]
    found = workers(2).run(one_calls, "flush", [3, 2])
    assert found == [f"{subject}: {sentence}" for subject in subjects]


# ------------------------------------------------------------------------------ skipped steps


def overflow(rank: int, world: int, fused: bool) -> tuple[list[str], int, str]:
    """A GradScaler skips a step of replica 1 alone."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        warnings.catch_warnings(record=True) as caught,
        DiLoCo(model, optimizer, sync_every=3) as diloco,
    ):
        warnings.simplefilter("always")
        for step in range(20):
            if diloco.inner_step == 9:
                break
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            if rank == 1 and step == 1:
                model.head.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sentences = [str(w.message) for w in caught if "inner steps" in str(w.message)]
        return sentences, step, diloco.outer_hash()


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_fewer_is_no_mismatch_but_is_seen(fused: bool, workers) -> None:
    first, second = workers(2).run(overflow, fused)
    assert first[2] == second[2]
    if fused:
        # The hook ran on the overflow, too: the applied steps differ.
        assert (first[1], second[1]) == (9, 9)
        assert first[0] == second[0] and len(first[0]) == 1
        assert "({0: 3, 1: 2} by replica)" in first[0][0]
    else:
        # The hook did not run, and the replica took one more batch.
        assert (first[1], second[1]) == (9, 10) and first[0] == second[0] == []


def test_a_parameter_without_a_gradient_is_no_skipped_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    skipped = SkippedSteps([optimizer])
    for part in (model, model[1], model, model[1], model[1]):
        optimizer.zero_grad()
        for param in part.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        skipped.observe()
    assert skipped.count == 0
    skipped.observe()
    assert skipped.count == 1


def test_a_counter_that_comes_later_is_seen() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    skipped = SkippedSteps([optimizer])
    first.grad = second.grad = torch.ones(1)
    for has_counter in (False, False, True, True):
        if has_counter:
            optimizer.state[second]["step"] = torch.tensor(1.0)
        else:
            first.grad, second.grad = torch.ones(1), None
        optimizer.step()
        skipped.observe()
        second.grad = torch.ones(1)
    assert skipped.count == 1
