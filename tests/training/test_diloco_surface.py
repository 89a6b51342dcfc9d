"""The rest of the API: weights, flush, evaluation, metrics, configuration, groups."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, equal, parameters_of, train_step
from torch import nn

from diloco_comm import (
    Blocking,
    DiLoCo,
    HeavyBall,
    Nesterov,
    Streaming,
    Wire,
    fedavg,
    local_sgd,
)

# -------------------------------------------------------------------------------- the surface


def weighted(rank: int, world: int, is_callable: bool) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = 1.0 + 2.0 * rank
    with fedavg(
        model, optimizer, sync_every=1, weight=(lambda: weight) if is_callable else weight
    ) as diloco:
        model.weight.data.fill_(10.0)
        diloco.parts[0].read_local()
        model.weight.grad = torch.full((1, 1), float(rank))
        optimizer.step()
        assert [m.weight for m in diloco.metrics()] == [weight]
    return [model.weight.item()]


@pytest.mark.parametrize("is_callable", [True, False])
def test_mean_is_weighted(is_callable: bool, workers) -> None:
    # Replica 0 stays at 10, replica 1 goes to 9; weights 1 and 3.
    assert workers(2).run(weighted, is_callable) == [[9.25], [9.25]]


def test_a_weight_is_read_once() -> None:
    """A tensor that the caller writes later: other replicas know the first value."""
    model = torch.nn.Linear(1, 1)
    optimizer, weight = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor(2.0)
    with DiLoCo(model, optimizer, sync_every=1, peers="alone", weight=weight) as diloco:
        weight.fill_(5.0)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert [m.weight for m in diloco.metrics()] == [2.0]


def flush_twice(rank: int, world: int) -> tuple[list[int], str, bool]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with local_sgd(model, optimizer, sync_every=4, fragments=2) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        synced = diloco.outer_hash()
        # Fragment 0 was sent at step 2 and has trained since; fragment 1 has not.
        diloco.flush()
        counts = [len(diloco.metrics())]
        assert [m.fragment for m in diloco.metrics()][-1] == 0
        diloco.flush()
        counts.append(len(diloco.metrics()))
        train_step(model, optimizer, rank, 5)
        diloco.flush()
        counts.append(len(diloco.metrics()))
        outer = diloco.state_dict()["outer"]
        same = all(torch.equal(p.detach(), outer[n]) for n, p in model.named_parameters())
        assert synced != diloco.outer_hash()
        return counts, diloco.outer_hash(), same


def test_flush_sends_what_was_trained_and_nothing_else(workers) -> None:
    first, second = workers(2).run(flush_twice)
    assert first == second == ([3, 3, 5], first[1], True)


def use_outer_parameters(rank: int, world: int) -> bool:
    model = Regression().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=3) as diloco:
        for step in range(5):
            train_step(model, optimizer, rank, step)
        local = parameters_of(model)
        addresses = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(KeyError, match="inside"), diloco.outer_parameters():
            outer = diloco.state_dict()["outer"]
            for name, param in model.named_parameters():
                assert torch.equal(param.detach(), outer[name].bfloat16())
            with pytest.raises(RuntimeError, match="leave outer_parameters"):
                optimizer.step()
            raise KeyError("inside")
        assert [p.data_ptr() for p in model.parameters()] == addresses
        return equal(parameters_of(model), local)


def test_outer_parameters_come_and_go_exactly(workers) -> None:
    assert workers(2).run(use_outer_parameters) == [True, True]


def measure(rank: int, world: int) -> list[dict[str, Any]]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    arguments = {"fragments": 2, "wire": "int8", "norms": True}
    with closing(DiLoCo(model, optimizer, sync_every=2, **grouped(arguments))) as diloco:
        diloco.on_sync(seen.append)
        for step in range(4):
            train_step(model, optimizer, rank, step)
        assert diloco.metrics() == seen
        totals = diloco.totals()
        assert totals.num_syncs == 4 and totals.num_skipped == 0
        assert totals.sent_bytes == sum(m.sent_bytes for m in seen)
        assert totals.exposed_s == pytest.approx(sum(m.exposed_s for m in seen))
        all_buffers = {part.index: part.buffers for part in diloco.parts}
    for metrics in seen:
        # One phase for two replicas: the payload without the padding of its last run, and two
        # messages of control.
        buffers = all_buffers[metrics.fragment]
        assert buffers.num_elements < metrics.sent_bytes < buffers.layout.payload_bytes + 512
        assert metrics.encode_s > 0 and metrics.outer_step_s > 0 and metrics.exposed_s > 0
        assert 0 <= metrics.overlap_fraction <= 1
        assert 0 < metrics.pseudo_gradient_norm < 10
    return [(m.fragment, m.round, m.inner_step, m.is_applied) for m in seen]


def test_metrics(workers) -> None:
    expected = [(0, 0, 1, True), (1, 0, 2, True), (0, 1, 3, True), (1, 1, 4, True)]
    assert workers(2).run(measure) == [expected] * 2


def step_by_hand(rank: int, world: int) -> tuple[int, int]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, attach=False) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        before = len(diloco.metrics())
        diloco.step()
        diloco.step()
        return before, len(diloco.metrics())


def test_without_hooks_the_user_steps(workers) -> None:
    assert workers(2).run(step_by_hand) == [(0, 1), (0, 1)]


def with_config(rank: int, world: int, config: dict[str, Any] | None) -> dict[str, Any]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config is not None:
        with DiLoCo(model, optimizer, config=config, wire=Wire(block_size=32)) as diloco:
            return diloco.config()
    arguments = {"fragments": ["layers.*", "rest"], "outer": HeavyBall(0.2), "wire": "e3m0"}
    with DiLoCo(model, optimizer, sync_every=7, overlap=Blocking(), **grouped(arguments)) as diloco:
        return diloco.config()


def test_configuration_can_be_saved_and_used_again(workers) -> None:
    saved = workers(1).run(with_config, None)[0]
    again = workers(1).run(with_config, json.loads(json.dumps(saved)))[0]
    assert saved["sync_every"] == 7 and saved["wire"] == "e3m0"
    assert again == {**saved, "block_size": 32}


def test_given_arguments_win_over_the_configuration_even_at_their_defaults() -> None:
    config = {
        "sync_every": 3,
        "fragments": 2,
        "wire": "int4",
        "block_size": 64,
        "rounding": "stochastic",
        "seed": 5,
        "error_feedback": True,
        "average_buffers": True,
        "on_nonfinite": "skip",
        "max_skipped": 7,
    }
    defaults = {
        "fragments": 1,
        "wire": "int8",
        "block_size": 256,
        "rounding": "nearest",
        "seed": 0,
        "error_feedback": False,
        "average_buffers": False,
        "on_nonfinite": "raise",
        "max_skipped": 3,
    }
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in ({}, defaults, *({name: value} for name, value in defaults.items())):
        with DiLoCo(model, optimizer, config=config, attach=False, **grouped(given)) as diloco:
            shared = diloco.config()
        assert {name: shared[name] for name in config} == {**config, **given}
    with DiLoCo(model, optimizer, sync_every=1, attach=False) as diloco:
        assert {name: diloco.config()[name] for name in defaults} == defaults


def over_mesh_and_subgroup(rank: int, world: int) -> list[str]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    hashes = []
    for arguments in ({"mesh": mesh["replica"]}, {"group": mesh["replica"].get_group()}):
        model = Regression(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=1, **grouped(arguments)) as diloco:
            train_step(model, optimizer, rank, 0)
            assert diloco.exchange.size == 2
            hashes.append(diloco.outer_hash())
    return hashes


def test_replicas_along_one_dimension_of_a_mesh(workers) -> None:
    results = workers(4).run(over_mesh_and_subgroup)
    assert results[0] == results[2] and results[1] == results[3] and results[0] != results[1]


# ------------------------------------------------------------------------ what is printed


def printed_while_training(rank: int, world: int) -> list[str]:
    """Look at one replica alone, before and after a round, when closed, and half made."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy, outer = Streaming(delay=1, alpha=0.5), Nesterov(lr=0.7, momentum=0.9)
    options = {"overlap": policy, "outer": outer, "wire": "int4", "fragments": 2}
    diloco = DiLoCo(model, optimizer, sync_every=4, **grouped(options))
    shown = [repr(diloco)] * (rank == 0)
    for step in range(5):
        train_step(model, optimizer, rank, step)
    shown.append(repr(diloco))
    diloco.close()
    return [*shown, repr(diloco), repr(DiLoCo.__new__(DiLoCo))]


def test_repr_is_one_line_and_no_collective(workers) -> None:
    """Replica 0 alone prints before the first step; a collective there would wait for the other."""
    first, second = workers(2).run(printed_while_training)
    same = "sync_every=4, overlap=Streaming(delay=1, alpha=0.5), "
    same += "outer=Nesterov(lr=0.7, momentum=0.9), wire=int4, 2 fragments, inner step"
    assert first == [
        f"DiLoCo(replica 0 of members [0, 1], {same} 0, round 0)",
        f"DiLoCo(replica 0 of members [0, 1], {same} 5, round 1)",
        f"DiLoCo(replica 0 of members [0, 1], {same} 5, round 1, closed)",
        "DiLoCo(not attached)",
    ]
    assert second == [line.replace("replica 0", "replica 1") for line in first[1:]]


def rounds_of_fragments(rank: int, world: int) -> str:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=4, fragments=2, wire="fp32") as diloco:
        for step in range(2):
            train_step(model, optimizer, rank, step)
        return repr(diloco)


def test_repr_tells_fragments_apart_that_are_in_different_rounds(workers) -> None:
    for line in workers(2).run(rounds_of_fragments):
        assert line.endswith(
            "overlap=Blocking(), outer=Nesterov(lr=0.7, momentum=0.9), "
            "wire=fp32, 2 fragments, inner step 2, rounds 0 to 1)"
        )
