"""The link of an elastic replica outlives its exchanges: attempts to begin, and the last round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from elastic_replicas import registry as registry
from fault_replicas import make_model, make_optimizer, take_inner_step
from registries import Host
from workers import Pool

from diloco_comm import DiLoCo, Elastic, Streaming, SyncError
from diloco_comm.group.records import Record
from diloco_comm.rounds.round_log import Standing
from diloco_comm.training.elastic_group import Chosen, ElasticGroup

H = 4


def peers_of(registry: str, **options: Any) -> Elastic:
    return Elastic(registry, run="test", min_replicas=2, quorum_wait=40.0, **options)


def _founder(rank: int, world: int, registry: str) -> tuple[tuple[int, ...], int, str]:
    wait, calls = ElasticGroup.wait_until_entered, []

    def fail_once(self: ElasticGroup, chosen: Chosen, failure: SyncError | None) -> Record:
        """As where devices do not connect."""
        calls.append(chosen)
        if len(calls) == 1:
            failure = SyncError("the devices did not connect", stage="connect", cuts=[(7, 8)])
        return wait(self, chosen, failure)

    ElasticGroup.wait_until_entered = fail_once  # type: ignore[method-assign]
    model = make_model()
    optimizer = make_optimizer(model)
    peers = peers_of(registry, founding_wait=0.5)
    with closing(DiLoCo(model, optimizer, peers=peers, sync_every=H)) as diloco:
        while diloco.inner_step < 2 * H:
            take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        return diloco.members, len(calls), diloco.outer_hash()


def test_a_second_attempt_begins_over_the_same_link(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    ends = pool.run(_founder, registry.address, timeout=80)
    assert [end[0] for end in ends] == [(0, 1)] * 2 and all(end[1] > 1 for end in ends)
    assert ends[0][2] == ends[1][2]


def _end_in_a_round(rank: int, world: int, registry: str) -> tuple[int, int]:
    """Replica 0 closes while a round is under way; return the view and the rounds that count."""
    model = torch.nn.Linear(2000, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peers = Elastic(registry, run="test", founding_wait=4.0, replica=rank)
    diloco = DiLoCo(model, optimizer, peers=peers, sync_every=H, overlap=Streaming(2))
    diloco.emulate_link(0.008)
    for _ in range(H if rank == 0 else 2 * H):
        model(torch.full((1, 2000), rank + 1.0)).sum().backward()
        optimizer.step()
    view = diloco.view
    diloco.close()
    return view, int(diloco.parts[0].round)


@pytest.mark.nightly("8 s; a slow link")
def test_a_replica_that_closes_finishes_its_round(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    _, stayed = pool.run(_end_in_a_round, registry.address, timeout=80)
    assert stayed == (1, 1)


def _loader(rank: int, world: int, registry: str) -> tuple[Any, Any]:
    """Load a state of a later round where the run begins; return the part's place and the log's."""
    seen: list[Any] = []
    saved: Any = None
    for is_first in (True, False):
        model = make_model()
        optimizer = make_optimizer(model)
        peers = Elastic(registry, run=f"test-{is_first}", founding_wait=0.1)
        with closing(DiLoCo(model, optimizer, peers=peers, sync_every=H)) as diloco:
            if is_first:
                while diloco.inner_step < 3 * H:
                    take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
                saved = diloco.state_dict()
                continue
            transfer: Any = diloco._elastic and diloco._elastic.transfer
            transfer.log._source = Spy(transfer.log._source, seen)
            diloco.load_state_dict(saved)
            return seen[-1], Standing.of(diloco.parts[0]).numbers()
    raise AssertionError


class Spy:
    """Notes the standings that a source is told."""

    def __init__(self, source: Any, seen: list[Any]) -> None:
        self._source, self._seen = source, seen

    def begin_write(self, fragment: int) -> None:
        self._source.begin_write(fragment)

    def end_write(self, fragment: int, standing: Any) -> None:
        self._source.end_write(fragment, standing)
        self._seen.append(standing)


def test_a_loaded_state_is_served_with_its_own_numbers(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    ((told, stands),) = fresh_workers(1, init_group=False).run(_loader, registry.address)
    assert told == stands and stands[0] == 3
