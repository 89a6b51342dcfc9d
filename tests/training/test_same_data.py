"""Replicas that train on the same data are told so, once, at the first round that shows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, attach, train_step
from torch.distributed.device_mesh import init_device_mesh

from diloco_comm import DiLoCo, Eager, Streaming

WORDS = "train on the same data"


def told(rank: int, world: int, shards: tuple[int, ...], lr: float, **arguments: Any) -> list[str]:
    """Train each replica on the shard with its number; return the warnings about the data."""
    if arguments.get("overlap") == "Streaming":
        arguments |= {"overlap": Streaming(delay=1), "fragments": 2, "rounding": "stochastic"}
    elif arguments.get("overlap") == "Eager":
        arguments |= {"overlap": Eager()}
    num_steps = arguments.pop("num_steps", 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, diloco = attach(**arguments)
        optimizer.param_groups[0]["lr"] = lr
        with diloco:
            for step in range(num_steps):
                train_step(model, optimizer, shards[rank], step)
            diloco.flush()
    return [str(one.message) for one in caught if WORDS in str(one.message)]


@pytest.mark.each_value("the others need the same code")
@pytest.mark.parametrize("overlap", [None, "Streaming", "Eager"])
@pytest.mark.parametrize("world", [2, 3])
def test_all_replicas_on_the_same_data(
    workers: Callable[[int], Any], world: int, overlap: str | None
) -> None:
    """With three replicas the owners of runs reduce payloads, and nobody sees all of them."""
    arguments = {"overlap": overlap, "sync_every": 3, "checks": "raise"}
    for sentences in workers(world).run(told, (0,) * world, 0.01, **arguments):
        assert len(sentences) == 1, sentences
        assert sentences[0].startswith(
            "all replicas had equal parameters at a send up to inner step "
        )
        assert "see DiLoCo.shard" in sentences[0]


def test_two_of_three_replicas_are_named(workers: Callable[[int], Any]) -> None:
    for sentences in workers(3).run(told, (7, 1, 7), 0.01):
        assert len(sentences) == 1 and sentences[0].startswith("replicas 0, 2 had equal")


def test_a_flush_before_the_first_send_shows_it_too(workers: Callable[[int], Any]) -> None:
    ends = workers(2).run(told, (0, 0), 0.01, sync_every=100)
    assert [len(sentences) for sentences in ends] == [1, 1]


@pytest.mark.parametrize(
    ("shards", "lr", "arguments"),
    [
        ((0, 1), 0.01, {}),
        ((0, 0), 0.0, {}),
        ((0, 0), 0.01, {"checks": "off"}),
        # A first step may be one of signs, and there is no second one.
        ((0, 0), 0.01, {"sync_every": 1, "num_steps": 1}),
    ],
    ids=["own data", "nothing moves", "off", "one step"],
)
def test_silence(
    workers: Callable[[int], Any], shards: tuple[int, ...], lr: float, arguments: dict[str, Any]
) -> None:
    assert workers(2).run(told, shards, lr, **arguments) == [[], []]


def fragments_apart(rank: int, world: int) -> list[str]:
    """Weight decay alone moves the head alike; the data move the rest."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8), "rest": torch.nn.Linear(8, 8)})
    for param in model.parameters():
        torch.nn.init.ones_(param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DiLoCo(model, optimizer, sync_every=4, fragments=["head*", "rest*"]) as diloco:
            for step in range(12):
                for param in model["head"].parameters():
                    param.grad = torch.zeros_like(param)
                for param in model["rest"].parameters():
                    param.grad = torch.randn_like(param) * (rank + step + 1)
                optimizer.step()
            diloco.flush()
    return [str(one.message) for one in caught if WORDS in str(one.message)]


def test_a_fragment_that_no_data_reach_is_no_evidence(workers: Callable[[int], Any]) -> None:
    assert workers(2).run(fragments_apart) == [[], []]


def test_a_single_replica_hears_nothing() -> None:
    assert told(0, 1, (0,), 0.01, num_replicas=1) == []


def told_workers(rank: int, world: int) -> list[list[str]]:
    """Two replicas of two workers, of both kinds, on the same data and on data of their own."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    replica = rank // 2
    found: list[list[str]] = []
    for is_sharded in (True, False):
        for is_same in (True, False):
            model = Regression()
            arguments: dict[str, Any] = {"mesh": mesh["replica"]}
            if is_sharded:
                fully_shard(model, mesh=mesh["worker"])
            else:
                arguments["shard_group"] = mesh["worker"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with DiLoCo(model, optimizer, sync_every=2, **grouped(arguments)) as diloco:
                    for step in range(2):
                        train_step(model, optimizer, 0 if is_same else 1 + replica, step)
                    diloco.flush()
            found.append([str(one.message) for one in caught if WORDS in str(one.message)])
    return found


def test_each_worker_compares_what_it_holds(workers: Callable[[int], Any]) -> None:
    for found in workers(4).run(told_workers):
        assert [len(sentences) for sentences in found] == [1, 0, 1, 0]


def join_late(rank: int, world: int, address: tuple[str, int]) -> list[str]:
    """Replica 2 joins, and trains on the data of replica 0; both find out at their first round."""
    store = torch.distributed.TCPStore(*address, is_master=False)
    place: dict[str, Any] = {"store": store, "replica": rank}
    place |= {"members": [0, 1, 2], "init": "join"} if rank == 2 else {"num_replicas": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, diloco = attach(sync_every=3, **place)
        with diloco:
            for step in range(diloco.inner_step, 3):
                train_step(model, optimizer, rank, step)
            if rank != 2:
                diloco.change_group([0, 1, 2])
            for step in range(3, 9):
                train_step(model, optimizer, rank % 2, step)
            diloco.flush()
    return [str(one.message) for one in caught if WORDS in str(one.message)]


def test_a_newcomer_with_digests_that_nobody_else_sends(workers: Callable[[int], Any]) -> None:
    """The others have looked at their first round; one digest alone proves nothing."""
    pool = workers(3)
    assert pool.run(join_late, pool.store) == [[], [], []]
