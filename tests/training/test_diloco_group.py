"""Replicas that leave and replicas that join, without a restart of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, attach, train_step
from torch import Tensor, nn

from diloco_comm import DiLoCo, Link, Nesterov, ReplicaMismatch, StorePeers

# ----------------------------------------------------------------------- replicas that go away


def nesterov_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, nesterov=True)


def join_later(
    rank: int, world: int, address: tuple[str, int], outer: Any
) -> tuple[str, int, bool]:
    """Replica 2 comes when the others have trained two rounds."""
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "timeout": 60, "error_feedback": True}
    if rank == 2:
        torch.manual_seed(99)
        arguments |= {"members": [0, 1, 2], "init": "join", "model_seed": 5}
    else:
        arguments |= {"num_replicas": 2}
    model, optimizer, diloco = attach(fragments=2, outer=outer, wire="int8", **arguments)
    with diloco:
        for step in range(diloco.inner_step, 4):
            train_step(model, optimizer, rank, step)
        if rank != 2:
            diloco.change_group([0, 1, 2])
        joined = diloco.outer_hash()
        assert diloco.inner_step == 4 and diloco.exchange.members == (0, 1, 2)
        momenta = [t.norm().item() for part in diloco.parts for t in part.state.tensors().values()]
        assert all(norm > 0 for norm in momenta)
        for step in range(4, 8):
            train_step(model, optimizer, rank, step)
        local = [p.detach() for p in model.parameters()]
        outer = list(diloco.state_dict()["outer"].values())
        at_last = diloco.parts[-1].fragment.names
        names = [name for name, _ in model.named_parameters()]
        matches = all(
            torch.equal(local[i], outer[i]) for i, name in enumerate(names) if name in at_last
        )
        return f"{joined} {diloco.outer_hash()}", diloco.parts[0].round, matches


@pytest.mark.parametrize("outer", [Nesterov(0.5), nesterov_of_torch], ids=["fused", "torch"])
def test_a_newcomer_is_identical_from_its_first_sync(outer: Any, fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(join_later, pool.store, outer)
    assert results[0] == results[1] == results[2]
    assert results[0][1:] == (4, True)


def join_with_statistics(rank: int, world: int, address: tuple[str, int]) -> tuple[Tensor, Tensor]:
    """Return the running mean before and after replica 2 joined."""
    store = dist.TCPStore(*address, is_master=False)
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joins = {"members": [0, 1, 2], "init": "join"} if rank == 2 else {"num_replicas": 2}
    arguments = {"store": store, "replica": rank, "timeout": 60, "average_buffers": True, **joins}
    before = model.running_mean.clone()
    with DiLoCo(model, optimizer, sync_every=9, **grouped(arguments)) as diloco:
        if rank != 2:
            model.running_mean.fill_(10 + rank)
            before = model.running_mean.clone()
            diloco.change_group([0, 1, 2])
        return before, model.running_mean.clone()


def test_a_newcomer_takes_the_statistics_and_the_others_keep_theirs(fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    first, second, third = pool.run(join_with_statistics, pool.store)
    assert torch.equal(*first) and torch.equal(*second)
    assert torch.equal(third[1], first[1]) and not torch.equal(second[1], first[1])


def join_with_another_model(rank: int, world: int, address: tuple[str, int]) -> tuple[str, str]:
    store = dist.TCPStore(*address, is_master=False)
    if rank == 2:
        model = Regression(width=12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(ReplicaMismatch) as info:
            DiLoCo(
                model,
                optimizer,
                sync_every=2,
                wire="fp32",
                peers=StorePeers(store, replica=2, members=[0, 1, 2]),
                init="join",
                link=Link(timeout=60),
            )
        return str(info.value), ""
    model, optimizer, diloco = attach(store=store, replica=rank, num_replicas=2, timeout=60)
    with diloco:
        train_step(model, optimizer, rank, 0)
        with pytest.raises(ReplicaMismatch) as info:
            diloco.change_group([0, 1, 2])
        diloco.change_group([0, 1])
        train_step(model, optimizer, rank, 1)
        return str(info.value), diloco.outer_hash()


def test_a_newcomer_with_another_model_is_refused_and_the_rest_goes_on(fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(join_with_another_model, pool.store)
    assert all("the model differs between replicas" in message for message, _ in results)
    assert results[0][1] == results[1][1] != ""
