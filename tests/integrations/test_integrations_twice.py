"""Refuse trainers that average the gradients of several replicas at every step."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from commands import torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainers import LEARNING_RATE, Rows, WithLoss, flat, is_installed, needs

from diloco_comm import StorePeers

pytestmark = pytest.mark.usefixtures("forked_programs")

SPANS = (
    "DistributedDataParallel averages gradients over ranks [0, 1] at every step, but these are "
    "different replicas, which DiLoCo averages every sync_every steps: write `replicas = "
    "replica_per_process()` (of diloco_comm.integrations.launch) before "
)

HUGGING_FACE = """
import torch.distributed as dist
from huggingface_runs import quiet_arguments
from transformers import Trainer
from trainers import Rows, WithLoss, flat
from diloco_comm import StorePeers
from diloco_comm.integrations.huggingface import DiLoCoCallback

args = quiet_arguments(f"out-{RANK}", max_steps=2, save_strategy="no")

def train(**arguments):
    callback = DiLoCoCallback(sync_every=1, shard=False, **arguments)
    model = WithLoss(RANK)
    Trainer(model, args, train_dataset=Rows(RANK), callbacks=[callback]).train()
    diloco = callback.diloco
    return [diloco.exchange.size, diloco.totals().num_syncs, flat(model).sum().item()]

store = dist.PrefixStore("place", dist.distributed_c10d._get_default_store())
tell(
    default=said(train),
    on_store=said(lambda: train(peers=StorePeers(store, RANK, of=2))),
    workers=train(peers=StorePeers(store, 0, of=1), shard_group=dist.group.WORLD),
    alone=train(peers="alone"),
)
dist.destroy_process_group()
"""


@pytest.mark.nightly(
    "6 s; the first tier has Accelerate, which Hugging Face's trainer uses, under torchrun"
)
@needs("transformers")
@pytest.mark.usefixtures("forked_trainers")
def test_hugging_face_under_torchrun(tmp_path: Path) -> None:
    first, second = torchrun(HUGGING_FACE, tmp_path)
    for told in (first, second):
        assert told["default"].startswith(f"ValueError: {SPANS}TrainingArguments and the Trainer")
        assert told["default"].endswith("are made, and DiLoCoCallback(..., **replicas)")
        assert told["on_store"] == told["default"]
    # The two processes as the workers of one replica: DDP makes them equal.
    assert first["workers"][:2] == first["alone"][:2] == [1, 2]
    assert first["workers"] == second["workers"] and first["alone"] == second["alone"]


# Without use_cpu=True transformers knows of one process where there is no GPU, and wraps nothing.
UNAWARE = (
    HUGGING_FACE[: HUGGING_FACE.index("store =")].replace(
        "max_steps=2", "max_steps=2, use_cpu=False"
    )
    + """
import torch
from accelerate import Accelerator
from diloco_comm.integrations.accelerate import attach

def accelerated():
    accelerator, model = Accelerator(), WithLoss(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(accelerator, *accelerator.prepare(model, optimizer), sync_every=1)

dist.init_process_group("gloo") if not dist.is_initialized() else None
tell(trainer=said(train), accelerate=said(accelerated), named=train(peers=dist.group.WORLD))
dist.destroy_process_group()
"""
)


@pytest.mark.nightly("5 s; the first tier sees every wrapper")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the trainers know the job")
@needs("transformers")
@pytest.mark.usefixtures("forked_trainers")
def test_a_trainer_that_does_not_know_of_the_job_is_refused(tmp_path: Path) -> None:
    for told in torchrun(UNAWARE, tmp_path):
        for said in (told["trainer"], told["accelerate"]):
            assert said.startswith("ValueError: the trainer knows of one process, in a job of 2: ")
            assert "write `replicas = replica_per_process()`" in said
        assert told["named"][:2] == [2, 2]


LIGHTNING = """
import torch, torch.distributed as dist
from lightning_runs import Module, quiet_trainer
from trainers import Rows, flat
from diloco_comm import StorePeers
from diloco_comm.integrations.lightning import DiLoCoCallback

def train(devices, **arguments):
    module, callback = Module(RANK), DiLoCoCallback(sync_every=1, shard=False, **arguments)
    trainer = quiet_trainer(devices=devices, max_steps=2, callbacks=[callback])
    trainer.fit(module, torch.utils.data.DataLoader(Rows(RANK), batch_size=8))
    diloco = callback.diloco
    return [diloco.exchange.size, diloco.totals().num_syncs, flat(module).sum().item()]

tell(each_alone=said(lambda: train(1)))
dist.init_process_group("gloo")
store = dist.PrefixStore("place", dist.distributed_c10d._get_default_store())
tell(
    default=said(lambda: train(2)),
    on_store=said(lambda: train(2, peers=StorePeers(store, RANK, of=2))),
    workers=train(2, peers=StorePeers(store, 0, of=1), shard_group=dist.group.WORLD),
    alone=train(2, peers="alone"),
)
dist.destroy_process_group()
"""


@pytest.mark.nightly("5 s; the first tier has Accelerate under torchrun")
@needs("lightning")
@pytest.mark.usefixtures("forked_trainers")
def test_lightning_under_torchrun(tmp_path: Path) -> None:
    first, second = torchrun(LIGHTNING, tmp_path)
    for told in (first, second):
        assert told["each_alone"].startswith("RuntimeError: torchrun has started 2 processes")
        assert "(in a trainer: replica_per_process())" in told["each_alone"]
        assert told["default"].startswith(f"ValueError: {SPANS}the Trainer is made")
        assert told["default"].endswith(
            "DiLoCoCallback(..., **replicas) and Trainer(..., devices=1)"
        )
        assert told["on_store"] == told["default"]
    assert first["workers"][:2] == first["alone"][:2] == [1, 2]
    assert first["workers"] == second["workers"] and first["alone"] == second["alone"]


ACCELERATE = """
import torch.distributed as dist
from accelerate import Accelerator
from trainers import WithLoss, make_optimizer
from diloco_comm.integrations.accelerate import attach

accelerator = Accelerator(cpu=True)
inner = WithLoss(RANK)
model, optimizer = accelerator.prepare(inner, make_optimizer(inner))
with attach(accelerator, model, optimizer, sync_every=1, peers="alone") as diloco:
    tell(alone=diloco.exchange.size)
tell(
    is_forked="lightning.pytorch" in sys.modules,
    default=said(lambda: attach(accelerator, model, optimizer, sync_every=1)),
    inner=said(lambda: attach(accelerator, inner, optimizer, sync_every=1)),
)
dist.destroy_process_group()
"""


@needs("accelerate")
@pytest.mark.usefixtures("forked_trainers")
def test_accelerate_under_torchrun(tmp_path: Path) -> None:
    for told in torchrun(ACCELERATE, tmp_path):
        assert told["alone"] == 1 and told["is_forked"] == is_installed("lightning")
        assert told["default"].startswith(f"ValueError: {SPANS}the Accelerator is made")
        assert told["default"].endswith(
            "and attach(accelerator, model, optimizer, ..., **replicas)"
        )
        assert told["inner"].startswith(
            "ValueError: attach() needs the model that accelerator.prep"
        )


# ------------------------------------------------------------------- every wrapper, over whom


def wrap(name: str, group: dist.ProcessGroup, mesh: Any) -> nn.Module:
    """Wrap a model as torch does, over the ranks of a group, or of the mesh of the same ranks."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = WithLoss()
    if name == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if name == "ddp inside":
        return nn.Sequential(DistributedDataParallel(model, process_group=group))
    if name == "replicate":
        return replicate(model, process_group=group)
    if name == "replicate, mesh":
        return replicate(model, device_mesh=mesh)
    if name == "replicate, used":
        replicate(model, process_group=group)
        model(*Rows(0)[:4].values())
        return model
    if name == "fsdp1":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, process_group=group, device_id=cpu)
    assert name == "fsdp2"
    return fully_shard(model, mesh=mesh)


NAMES = {
    "ddp": "DistributedDataParallel",
    "ddp inside": "DistributedDataParallel",
    "replicate": "replicate()",
    "replicate, mesh": "replicate()",
    "replicate, used": "replicate()",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "FullyShardedDataParallel",
}


def titan_wrapped(rank: int, world: int) -> list[list[str]]:
    """Return each wrapper's errors: if it spans replicas, and if it stays inside one."""
    from torch.distributed.device_mesh import init_device_mesh

    from diloco_comm.integrations.torchtitan import semi_sync_training

    section = {"enable": True, "semi_sync_method": "diloco"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    results = []
    for name in NAMES:
        said = []
        for dimension in ("replica", "worker"):
            model = wrap(name, mesh[dimension].get_group(), mesh[dimension])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with semi_sync_training(section, model, optimizer, peers=mesh["replica"]):
                    said.append("")
            except ValueError as error:
                said.append(str(error))
        results.append(said)
        dist.barrier()
    return results


# DTensors of a mesh may get the process groups of an equal one that this process had before.
def test_every_wrapper_is_seen(fresh_workers) -> None:
    for rank, results in enumerate(fresh_workers(4).run(titan_wrapped, timeout=110)):
        for name, (spans, own) in zip(NAMES.values(), results, strict=True):
            ranks = [rank % 2, rank % 2 + 2]
            assert spans.startswith(f"{name} averages gradients over ranks {ranks} at every step")
            assert 'write semi_sync_training(..., peers=mesh["replica"])' in spans
            assert own == ""


def warned(rank: int, world: int, name: str) -> list[str]:
    """``DiLoCo`` warns of a wrapper that spans replicas, and raises no error."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from diloco_comm import DiLoCo

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))
    model = WithLoss() if "zero" in name else wrap(name, mesh.get_group(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "zero" in name:
        groups = [dist.new_group([one]) for one in range(world)]
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            process_group=groups[rank] if name == "zero of its own" else None,
            lr=0.1,
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DiLoCo(model, optimizer, sync_every=1).close()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("ddp", "DistributedDataParallel averages gradients over ranks [0, 1] at every step"),
        ("replicate", "replicate() averages gradients over ranks [0, 1] at every step"),
        ("zero", "ZeroRedundancyOptimizer divides one optimizer step among ranks [0, 1] at every"),
        ("zero of its own", None),
    ],
)
def test_the_core_warns(name: str, begin: str | None, workers) -> None:
    for messages in workers(2).run(warned, name):
        spanning = [one for one in messages if "different replicas" in one]
        if begin is None:
            assert spanning == []
        else:
            assert len(spanning) == 1 and spanning[0].startswith(begin)
            assert "give it a process_group of this replica's own workers" in spanning[0]


def shards_of_two_replicas(rank: int, world: int, address: tuple[str, int]) -> str:
    """FSDP2 over processes that a store takes for different replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    from diloco_comm import DiLoCo, ReplicaMismatch

    mesh = init_device_mesh("cpu", (2,))
    model = wrap("fsdp2", mesh.get_group(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    with pytest.raises(ReplicaMismatch) as error:
        DiLoCo(model, optimizer, sync_every=1, peers=StorePeers(store, replica=rank, of=2))
    return str(error.value)


def test_workers_of_a_replica_know_which_one(fresh_workers) -> None:
    pool = fresh_workers(2)
    for sentence in pool.run(shards_of_two_replicas, pool.store):
        assert sentence == (
            "replica differs between the workers of a replica: 0 on its worker 0, 1 on worker 1"
        )


# -------------------------------------------- a replica of several workers in a trainer's hands


def hf_with_own_ddp(rank: int, world: int, address: tuple[str, int], folder: Path) -> list[Any]:
    """Two replicas of two workers each, in one launch; the trainer wraps one replica's workers."""
    import os

    from huggingface_runs import quiet_arguments
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    launched = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in launched.items()}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))

    class OwnDdp(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return DistributedDataParallel(model, process_group=mesh["worker"].get_group())

    args = quiet_arguments(
        folder / f"{rank}",
        max_steps=2,
        learning_rate=LEARNING_RATE,
        save_strategy="no",
    )
    place = {"mesh": mesh["replica"], "shard_group": mesh["worker"]}
    callback, model = DiLoCoCallback(sync_every=2, shard=False, **grouped(place)), WithLoss(rank)
    OwnDdp(model, args, train_dataset=Rows(rank), callbacks=[callback]).train()
    return [callback.diloco.exchange.size, callback.diloco.totals().num_syncs, flat(model).tolist()]


@needs("transformers")
def test_ddp_over_the_workers_of_a_replica(trainer_replicas, tmp_path: Path) -> None:
    pool = trainer_replicas(4)
    results = pool.run(hf_with_own_ddp, pool.store, tmp_path, timeout=110)
    assert results[0][:2] == [2, 1]
    assert all(result == results[0] for result in results)
