"""The round log keeps payloads where they are, and no later round writes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import attach, train_step
from torch import Tensor, nn
from workers import Pool

from diloco_comm import DiLoCo, Streaming
from diloco_comm.rounds.round_log import RoundLog
from diloco_comm.training.state_transfer import default_log_bytes

NUM_ROUNDS, NUM_KEPT = 9, 3


def contents(log: RoundLog) -> dict[tuple[int, int], Tensor]:
    found = {}
    for entry in log.rounds():
        found[entry.fragment, entry.number] = torch.cat(log.payloads(entry.fragment, entry.number))
    return found


def train(rank: int, world: int, is_logged: bool, options: dict[str, Any]) -> str:
    model, optimizer, diloco = attach(rank, **options)
    with diloco:
        num_payloads = world if world == 2 or options["wire"] == "sub8" else 1
        sizes = [part.buffers.mean_layout.payload_bytes for part in diloco.parts]
        log = RoundLog(NUM_KEPT * num_payloads * sum(sizes))
        if is_logged:
            diloco._rounds.log = log
        seen: dict[tuple[int, int], Tensor] = {}
        places: set[int] = set()
        for step in range(2 * NUM_ROUNDS):
            train_step(model, optimizer, rank, step)
            for key, payloads in contents(log).items():
                assert torch.equal(seen.setdefault(key, payloads), payloads), key
            for kept in log._rounds.values():
                places |= {payload.data_ptr() for payload in kept.payloads}
        if is_logged:
            fragments = {fragment for fragment, _ in seen}
            assert fragments == set(range(len(sizes)))
            assert len(log.rounds()) == NUM_KEPT * len(sizes)
            # The rounds that are kept, and one that is under way.
            assert len(places) == (NUM_KEPT + 1) * num_payloads * len(sizes)
        return diloco.outer_hash()


@pytest.mark.nightly(
    "up to 2 s each; they differ in options", but=["2-options1", "3-options4", "1-options0"]
)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"wire": "int8"}),
        (2, {"wire": "int8"}),
        (2, {"wire": "fp32", "fragments": 2, "overlap": Streaming(1, 0.5)}),
        (3, {"wire": "int4", "fragments": 2}),
        (3, {"wire": "sub8"}),
        (5, {"wire": "sub2"}),
    ],
)
def test_logged_payloads_stay_as_they_are(
    workers: Callable[..., Pool], world: int, options: dict[str, Any]
) -> None:
    pool = workers(world)
    hashes = pool.run(train, True, options) + pool.run(train, False, options)
    assert len(set(hashes)) == 1


def fill(rank: int, world: int, wire: str) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, wire=wire) as diloco:
        diloco._rounds.log = log = RoundLog(default_log_bytes(diloco.parts))
        for _ in range(12):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
        return [entry.number for entry in log.rounds()]


@pytest.mark.parametrize(("wire", "kept"), [("fp32", [4, 5]), ("int8", [3, 4, 5])])
def test_the_default_keeps_two_rounds_of_two_replicas(
    workers: Callable[..., Pool], wire: str, kept: list[int]
) -> None:
    assert workers(2).run(fill, wire) == [kept, kept]
