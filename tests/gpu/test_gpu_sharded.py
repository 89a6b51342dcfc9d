"""Workers of a replica on a device whose group serves no host memory, as NCCL's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, Replica
from problems import equal
from test_gpu_streams import NCCL_RANKS, on_streams, use_streams
from torch import Tensor

from diloco_comm.base.errors import NonFiniteError
from diloco_comm.exchange.nccl import group as nccl_group

NAMES = {
    "diloco": {**METHODS["diloco"], "fragments": 2, "chunk_bytes": 8192},
    "eager": {**METHODS["eager"], "chunk_bytes": 8192},
}


def make_worker(rank: int, here: torch.device, name: str, arguments: dict[str, Any]) -> Replica:
    """Attach one of the workers, two a replica."""
    replica, worker = divmod(rank, 2)
    store = dist.PrefixStore(f"{name}/{here.type}", dist.group.WORLD.get_group_store())
    mates = dist.PrefixStore(f"workers/{replica}", store)
    if here.type == "cpu":
        group = dist.new_group([2 * replica, 2 * replica + 1], use_local_synchronization=True)
    elif here.type == "cuda":
        backend = dist.ProcessGroupNCCL(mates, worker, 2, dist.ProcessGroupNCCL.Options())
        group = nccl_group.group_of(backend, mates, worker, 2, here)
    else:
        from lagging_group import WorkersOnDevice

        group = WorkersOnDevice(mates, worker, 2, here)
    num_replicas = dist.get_world_size() // 2
    on_store = {"store": store, "replica": replica, "num_replicas": num_replicas}
    return Replica(replica, here, checks=True, shard_group=group, **on_store, **arguments)


def run_sharded(
    rank: int, here: torch.device, name: str, arguments: dict[str, Any]
) -> tuple[list[Tensor], bool]:
    """Train, flush, go on; say whether the group for messages is gone afterwards."""
    one = make_worker(rank, here, name, arguments)
    with one.diloco as diloco:
        one.steps(0, 9)
        diloco.flush()
        one.steps(9, 13)
        tensors = one.all()
    return tensors, diloco._workers._control.is_closed


def no_host_wait(rank: int, world: int, device: str, library: str) -> list[bool]:
    here = use_streams(rank, device, library)
    checks = []
    for name, arguments in NAMES.items():
        expected, _ = run_sharded(rank, torch.device("cpu"), name, {**arguments, "lanes": 1})
        given, is_closed = run_sharded(rank, here, name, on_streams(arguments))
        checks += [equal(expected, given), is_closed]
    return checks


# One replica on a GPU: its workers are two ranks of NCCL.
TWO_ON_A_GPU = [pytest.param("cuda", 2, marks=pytest.mark.gpu)] if NCCL_RANKS > 1 else []


@pytest.mark.nightly("15 s; test_gpu_streams waits for no device without shards")
@pytest.mark.parametrize(("device", "world"), [("lagging", 4), *TWO_ON_A_GPU])
def test_the_device_is_not_waited_for(device: str, world: int, replicas, stand_in) -> None:
    results = replicas(world).run(no_host_wait, device, stand_in)
    assert results == [[True] * 2 * len(NAMES)] * world


def norms_of(rank: int, world: int, device: str, library: str) -> list[Any]:
    """The norms that all workers of a replica have measured together, on the device and without."""
    results = []
    for here in (torch.device("cpu"), use_streams(rank, device, library)):
        arguments = NAMES["diloco"] if here.type == "cpu" else on_streams(NAMES["diloco"])
        one = make_worker(rank, here, "norms", {**arguments, "norms": True, "lanes": 1})
        one.checks = False  # norms are numbers that the host waits for
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "Stream", None)  # none is taken from torch's pool in a step
            one.steps(0, 13)
        one.diloco.flush()
        # In the order of the sends: on a device a round is recorded when its verdict is there.
        records = sorted(one.diloco.metrics(), key=lambda m: (m.round, m.fragment))
        results.append([m.pseudo_gradient_norm for m in records])
        one.diloco.close()
    return results


@pytest.mark.parametrize(("device", "world"), [("lagging", 4), *TWO_ON_A_GPU])
def test_norms_of_all_workers(device: str, world: int, replicas, stand_in) -> None:
    results = replicas(world).run(norms_of, device, stand_in)
    for on_host, on_device in results:
        assert on_device == on_host and len(on_host) >= 3
        assert all(norm > 0 for norm in on_host)
    assert all(result == results[rank // 2 * 2] for rank, result in enumerate(results))


def one_shard_voted_down(rank: int, world: int, library: str) -> str:
    """Replica 0 has a NaN among the elements that its worker 1 owns."""
    here = use_streams(rank, "lagging", library)
    one = make_worker(rank, here, "voted", on_streams(METHODS["eager"]))
    one.steps(0, 3)
    if rank < 2:
        with torch.no_grad():
            one.model.tensors[-1][-1:].fill_(torch.nan)
    message = ""
    try:
        one.steps(3, 8)
    except NonFiniteError as error:
        message = f"{one.diloco.inner_step} {error}"
    one.diloco.close()
    return message


def test_all_workers_hear_of_one_that_failed(replicas, stand_in) -> None:
    messages = replicas(4).run(one_shard_voted_down, stand_in)
    for rank, message in enumerate(messages):
        assert message.startswith("8 ") and message.endswith("1 on replica 0")
        assert ("worker 1 of this replica failed" in message) == (rank % 2 == 0)
