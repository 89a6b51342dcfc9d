"""Workers of a replica that hold the same parameters: each has a share of the outer state."""

from __future__ import annotations

import io
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, batch, equal
from sharded_runs import POLICIES, norms_of, resolved
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from diloco_comm import CO2, SGD, DiLoCo, HeavyBall, Nesterov, NonFiniteError, Streaming, SyncError
from diloco_comm.ops.wire import WireFormat

WIDTH = 25
# The last fragment has fewer blocks than there are workers.
FRAGMENTS = ["layers.*", "norm.*", "head.*"]
# Tensors start at whole blocks, and the shares of the workers end within tensors and padding.
ALIGNED = {
    "wire": {"norm|bias": "int8", "rest": "int2r"},
    "align_tensors": True,
    "fragments": 1,
    "outer": Nesterov(0.5),
}


def adam_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def make_mesh(world: int, num_replicas: int = 2) -> DeviceMesh:
    shape = (num_replicas, world // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))


def attach(
    mesh: DeviceMesh, *, is_shared: bool, ddp: bool = False, zero: bool = False, **arguments: Any
):
    model: nn.Module = Regression(width=WIDTH)
    group = mesh["shard"].get_group()
    if ddp:
        model = DistributedDataParallel(model, process_group=group)
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments = {
        "sync_every": 2,
        "fragments": FRAGMENTS,
        "wire": "fp32",
        "block_size": 32,
        "outer": Nesterov(0.5),
        "mesh": None if "store" in arguments else mesh["replica"],
        "shard_group": group if is_shared else None,
        **resolved(arguments, optimizer),
    }
    return model, optimizer, DiLoCo(model, optimizer, **grouped(arguments))


def train(model: nn.Module, optimizer: Any, mesh: DeviceMesh, steps: range) -> None:
    """All workers of a replica have the same batch: the mean of two gradients is exact."""
    for step in steps:
        x, y = batch(mesh["replica"].get_local_rank(), step, WIDTH)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    state = diloco.state_dict()
    home = state if "outer" in state else state[f"replica_{diloco.exchange.replica}"]
    kept = [home["outer"], *home["buffers"].values()]
    tensors = [*model.parameters(), *(t for group in kept for t in group.values())]
    return [tensor.detach().clone() for tensor in tensors]


def outer_bytes(diloco: DiLoCo) -> int:
    buffers = [t for part in diloco.parts for t in (part.outer, *part.state.tensors().values())]
    return sum(tensor.numel() * 4 for tensor in buffers)


def equals_unsharded(
    rank: int, world: int, num_replicas: int, variants: list[dict[str, Any]]
) -> list[Any]:
    """Return, for each variant, what is equal, and the share of the outer state held here."""
    mesh = make_mesh(world, num_replicas)
    results = []
    for variant in variants:
        seen, sizes = [], []
        for is_shared in (False, True):
            model, optimizer, diloco = attach(mesh, is_shared=is_shared, **variant)
            with diloco:
                train(model, optimizer, mesh, range(7))
                before = everything(model, diloco)
                with diloco.outer_parameters():
                    outer = [param.detach().clone() for param in model.parameters()]
                restored = everything(model, diloco)
                diloco.flush()
                end = [*everything(model, diloco), norms_of(diloco)]
                seen.append([*before, *outer, *restored, *end])
                sizes.append(outer_bytes(diloco))
        results.append((equal(*seen), sizes[1] / sizes[0]))
    return results


@pytest.mark.nightly("4 s each; workers that share unevenly are the general case", but=["2-3"])
@pytest.mark.parametrize(("num_replicas", "num_workers"), [(2, 2), (2, 3), (3, 2)])
def test_the_run_is_that_of_one_worker_a_replica(
    num_replicas: int, num_workers: int, workers
) -> None:
    """Blocks are cut at the same elements, so that 8 bits give the same bytes, too."""
    variants: list[dict[str, Any]] = {
        (2, 2): [*POLICIES[::2], {"ddp": True}, {"ddp": True, "zero": True}],
        (2, 3): [*POLICIES[1::2], {"wire": "int8"}],
        (3, 2): [
            {"wire": "int8", "error_feedback": True, **POLICIES[5]},
        ],
    }[num_replicas, num_workers]
    world = num_replicas * num_workers
    for results in workers(world).run(equals_unsharded, num_replicas, variants):
        assert [matches for matches, _ in results] == [True] * len(variants)
        assert all(abs(share - 1 / num_workers) < 0.05 for _, share in results)


def test_an_optimizer_of_torch_has_a_share_too(workers) -> None:
    variants = [{**ALIGNED, "outer": adam_of_torch}]
    assert [run[0][0] for run in workers(4).run(equals_unsharded, 2, variants)] == [True] * 4


@pytest.mark.nightly("3 s; the first tier has small blocks")
def test_large_blocks_are_cut_at_the_same_elements(workers) -> None:
    """Few blocks: the workers' shares of this small model are uneven, and one may have none."""
    variants = [
        ALIGNED,
        {"wire": WireFormat("int1r"), "block_size": None, "fragments": 1},
        {"wire": WireFormat("topk256"), "block_size": None, "error_feedback": True},
    ]
    for results in workers(6).run(equals_unsharded, 3, variants):
        assert [matches for matches, _ in results] == [True] * len(variants)


def meet_on_a_store(rank: int, world: int, address: tuple[str, int]) -> bool:
    mesh = make_mesh(world)
    store = dist.TCPStore(*address, is_master=False)
    replica = mesh["replica"].get_local_rank()
    on_store = {"store": store, "replica": replica, "num_replicas": 2}
    results = []
    for arguments in ({}, on_store):
        model, optimizer, diloco = attach(mesh, is_shared=True, timeout=60, **arguments)
        with diloco:
            train(model, optimizer, mesh, range(4))
            results.append(everything(model, diloco))
    return equal(*results)


def test_workers_find_their_peers_on_a_store(fresh_workers) -> None:
    pool = fresh_workers(4)
    assert pool.run(meet_on_a_store, pool.store) == [True] * 4


# ---------------------------------------------------------------------------------- checkpoints


def save(rank: int, world: int, num_replicas: int, arguments: dict[str, Any]) -> Any:
    """Save after 4 of 9 steps; return the file and what the run ends with."""
    mesh = make_mesh(world, num_replicas)
    model, optimizer, diloco = attach(mesh, is_shared=True, sync_every=3, **arguments)
    with diloco:
        train(model, optimizer, mesh, range(4))
        if isinstance(arguments.get("overlap"), CO2):
            # Rounds under way would belong to this number of workers.
            diloco.flush()
        file = io.BytesIO()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "diloco": diloco.state_dict()}, file)
        train(model, optimizer, mesh, range(4, 9))
        return file.getvalue(), everything(model, diloco)


def resume(rank: int, world: int, files: list[bytes], arguments: dict[str, Any]) -> list[Tensor]:
    mesh = make_mesh(world)
    is_shared = world > 2
    model, optimizer, diloco = attach(mesh, is_shared=is_shared, sync_every=3, **arguments)
    with diloco:
        state = torch.load(io.BytesIO(files[rank]), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        diloco.load_state_dict(state["diloco"])
        train(model, optimizer, mesh, range(4, 9))
        return everything(model, diloco)


def test_a_checkpoint_is_read_by_another_number_of_workers(workers) -> None:
    policy = {"overlap": CO2(0.5, "gap-aware"), "outer": HeavyBall(0.5, 0.5)}
    arguments = {"wire": "int8", **policy}
    results = workers(4).run(save, 2, arguments)
    files, ends = zip(*results, strict=True)
    for world in (4, 6, 2):
        # Replicas have consecutive workers, and any worker's file will do.
        mine = [files[rank * 2 // world * 2] for rank in range(world)]
        for rank, tensors in enumerate(workers(world).run(resume, mine, arguments)):
            assert equal(tensors, ends[rank * 2 // world * 2])


def test_a_checkpoint_with_rounds_under_way_is_of_its_workers(workers) -> None:
    for error_feedback, reason in ((False, "another number of shards"), (True, "residuals")):
        arguments = {
            "wire": "int8",
            "error_feedback": error_feedback,
            "overlap": Streaming(delay=2),
        }
        results = workers(4).run(save, 2, arguments)
        files, ends = [list(column) for column in zip(*results, strict=True)]
        again = workers(4).run(resume, files, arguments)
        assert all(equal(a, b) for a, b in zip(again, ends, strict=True))
        with pytest.raises(ValueError, match=reason):
            workers(2).run(resume, files, arguments)


# ------------------------------------------------------------------------------------- failures


def spoil_one_range(rank: int, world: int) -> tuple[str, bool, bool]:
    """Worker 1 of replica 0 has a NaN in its range; the other range is applied everywhere."""
    mesh = make_mesh(world)
    arguments = {"outer": SGD(1.0), "fragments": 1, "attach": False}
    model, optimizer, diloco = attach(mesh, is_shared=True, **arguments)
    with diloco:
        train(model, optimizer, mesh, range(2))
        last = list(model.parameters())[-1]
        if mesh["replica"].get_local_rank() == 0:
            last.data.fill_(torch.nan)
        message = ""
        diloco.step()
        try:
            diloco.step()
        except SyncError as error:
            message = f"{type(error).__name__}: {error}"
        first = next(iter(model.parameters()))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, first.detach())
        is_spoilt = bool(last.detach().isnan().any())
        return message, equal([first.detach()] * world, everyone), is_spoilt


def test_a_failure_of_one_worker_is_that_of_all(workers) -> None:
    results = workers(4).run(spoil_one_range)
    assert {message.split(":")[0] for message, _, _ in results} == {NonFiniteError.__name__}
    assert all("worker 1 of this replica" in message for message, _, _ in results[::2])
    assert all("replica 0" in message for message, _, _ in results)
    assert all(is_equal for _, is_equal, _ in results)
    assert [is_spoilt for _, _, is_spoilt in results] == [True, True, False, False]


def regroup(rank: int, world: int) -> tuple[tuple[int, ...], list[Tensor]]:
    """Replica 2 leaves; the two workers of each other one go on, with the shares that they have."""
    mesh = make_mesh(world, 3)
    replica = mesh["replica"].get_local_rank()
    model, optimizer, diloco = attach(mesh, is_shared=True, timeout=60)
    with closing(diloco):
        for step in range(8):
            if replica == 2 and step == 3:
                return (), []
            try:
                train(model, optimizer, mesh, range(step, step + 1))
            except SyncError:
                optimizer.zero_grad()
                diloco.change_group([0, 1])
        return diloco.exchange.members, everything(model, diloco)


def test_workers_of_the_survivors_regroup(workers) -> None:
    results = workers(6).run(regroup)
    for rank, (members, tensors) in enumerate(results[:4]):
        assert members == (0, 1)
        assert equal(tensors, results[rank // 2 * 2][1])
    outers = [tensors[len(tensors) // 3 :] for _, tensors in results[:4]]
    assert equal(outers[0], outers[2])


def attach_wrongly(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with pytest.raises(SyncError, match="sync_every differs between the workers"):
        attach(mesh, is_shared=True, sync_every=2 + rank % 2)
    with pytest.raises(TypeError, match="shard_group must be"):
        DiLoCo(*model_and_optimizer(), sync_every=2, peers=mesh["replica"], shard_group="ddp")
    model = fully_shard(Regression(width=WIDTH), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="leave it away"):
        DiLoCo(model, optimizer, sync_every=2, peers=mesh["replica"], shard_group=mesh["shard"])


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Regression(width=WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_wrong_shard_groups_are_refused(workers) -> None:
    workers(4).run(attach_wrongly)
