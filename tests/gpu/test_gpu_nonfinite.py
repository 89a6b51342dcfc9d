"""Replicas on a device are reset, and count what was skipped, as those in host memory do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, Replica
from problems import equal
from test_gpu_streams import cases, on_streams, use_streams

from diloco_comm.base.errors import NonFiniteError, SyncError

VICTIM = 1
NAMES = {
    1: ["diloco", "eager"],
    2: ["diloco", "streaming", "eager_2", "delayed"],
    3: ["streaming", "eager", "adam"],
}


def places(device: torch.device, arguments: dict[str, Any], backend: str) -> Any:
    """The same arguments on the device and in host memory."""
    own = on_streams(arguments) if backend == "nccl" else arguments
    return (device, own), (torch.device("cpu"), {**arguments, "lanes": own.get("lanes", 1)})


@torch.no_grad()
def spoil(replica: Replica, value: float = float("nan")) -> None:
    replica.model.tensors[3].view(-1)[77].fill_(value)


def reset(
    rank: int, world: int, device: str, library: str, backend: str, names: list[str]
) -> list[str]:
    """One replica is sick in one round, all are in another; the names of methods that differ."""
    here, wrong = use_streams(rank, device, library), []
    for name in names:
        runs = []
        for there, arguments in places(here, METHODS[name], backend):
            options = {"on_nonfinite": "reset", "num_steps": 24, **arguments}
            replica = Replica(rank, there, **options)
            replica.steps(0, 5)
            if rank == VICTIM % world:
                spoil(replica)
            replica.steps(5, 15)
            spoil(replica, float("inf"))
            replica.steps(15, 24)
            before = replica.all()
            replica.diloco.flush()
            seen = [
                (m.fragment, m.round, m.is_applied, m.is_reset, m.reset_replicas, m.weight)
                for m in replica.diloco.metrics()
            ]
            assert any(m[4] == (VICTIM % world,) for m in seen), seen
            assert any(m[4] == tuple(range(world)) and not m[2] for m in seen), seen
            assert all(tensor.isfinite().all() for tensor in replica.all())
            runs.append((before + replica.all(), seen))
            replica.diloco.close()
        # Verdicts that the device has may be looked at a step later.
        is_equal = equal(runs[0][0], runs[1][0]) and sorted(runs[0][1]) == sorted(runs[1][1])
        wrong += [] if is_equal else [name]
    return wrong


@pytest.mark.nightly("5 s each; they differ in the backend", but=["lagging-3-gloo"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("device", "world"), cases(1, 2, 3))
def test_resets_equal_those_in_host_memory(
    device: str, world: int, backend: str, replicas, stand_in
) -> None:
    result = replicas(world).run(reset, device, stand_in, backend, NAMES[world], timeout=100)
    assert result == [[]] * world


def offloaded(rank: int, world: int, device: str, library: str) -> bool:
    """The outer parameters that a sick replica takes come from host memory, chunk by chunk."""
    here, runs = use_streams(rank, device, library), []
    for offload in (None, "cpu"):
        options = {"on_nonfinite": "reset", "offload": offload, **METHODS["diloco"]}
        replica = Replica(rank, here, **options)
        replica.steps(0, 5)
        if rank == VICTIM:
            spoil(replica)
        replica.steps(5, 14)
        runs.append(replica.all())
        assert replica.diloco.totals().num_reset == (rank == VICTIM)
        replica.diloco.close()
    return equal(*runs)


@pytest.mark.parametrize(("device", "world"), cases(2))
def test_resets_with_offload(device: str, world: int, replicas, stand_in) -> None:
    assert replicas(world).run(offloaded, device, stand_in) == [True] * world


def stuck(rank: int, world: int, device: str, library: str, backend: str) -> list[Any]:
    """A NaN that stays: the verdicts are looked at late, and raise for the same round."""
    here, failures = use_streams(rank, device, library), []
    for there, arguments in places(here, METHODS["diloco"], backend):
        replica = Replica(rank, there, on_nonfinite="skip", num_steps=60, **arguments)
        replica.steps(0, 5)
        if rank == VICTIM:
            spoil(replica)
        try:
            replica.steps(5, 60)
        except NonFiniteError as error:
            failures.append((error.replicas, error.round, str(error)))
        replica.diloco.close()
    return failures


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("device", "world"), cases(2))
def test_a_replica_that_stays_bad_ends_the_run(
    device: str, world: int, backend: str, replicas, stand_in
) -> None:
    results = replicas(world).run(stuck, device, stand_in, backend)
    first = results[0]
    assert [failure[:2] for failure in first] == [((VICTIM,), 1)] * 2
    assert first[0][2] == first[1][2] and "3 rounds in a row" in first[0][2]
    assert results == [first] * world


def left(rank: int, world: int, device: str, library: str, name: str) -> list[bool]:
    """A replica leaves before the round in which another one is reset; the others go on."""
    here = use_streams(rank, device, library)
    store = dist.PrefixStore(f"left/{name}", dist.group.WORLD.get_group_store())
    members = {"store": store, "replica": rank, "num_replicas": world, "timeout": 30.0}
    options = {"on_nonfinite": "reset", **members, **on_streams(METHODS[name])}
    replica = Replica(rank, here, **options)
    replica.steps(0, 7)
    replica.diloco.state_dict()  # waits for the first round
    dist.barrier()
    if rank == world - 1:
        replica.diloco.close()
        return [True] * 3
    if rank == VICTIM:
        spoil(replica)
    failed = ""
    try:
        replica.steps(7, 13)
        replica.diloco._rounds.settle_verdicts(13)
    except SyncError as error:
        failed = str(error)
    is_finite = all(tensor.isfinite().all() for tensor in replica.all())
    replica.diloco.change_group(range(world - 1))
    replica.steps(13, 20)
    replica.diloco.flush()
    hashes = replica.diloco.exchange.exchange_objects(replica.diloco.outer_hash().encode())
    replica.diloco.close()
    return [bool(failed), is_finite, len(set(hashes)) == 1]


@pytest.mark.parametrize("name", ["diloco", "eager"])
@pytest.mark.parametrize(("device", "world"), cases(3))
def test_a_group_that_fails_in_the_round_of_a_reset(
    device: str, world: int, name: str, replicas, stand_in
) -> None:
    assert replicas(world).run(left, device, stand_in, name) == [[True] * 3] * world
