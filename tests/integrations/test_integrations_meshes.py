"""Replicas of several workers, as the example makes them: FSDP2 and DDP inside, DiLoCo between."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from problems import Regression, batch, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco_comm import DiLoCo
from diloco_comm.integrations.attachment import (
    Swap,
    attach,
    parameters_of,
    savable,
    state_with_local,
)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "replicas_of_several_workers.py"


def run_example(rank: int, world: int, inside: str, replicas: int) -> tuple[float, str, bytes, int]:
    """Return the last loss, the shard's hash, the whole parameters, and the outer elements here."""
    sys.argv = [str(SCRIPT), "--inside", inside, "--replicas", str(replicas), "--steps", "60"]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        # A mesh that spans replicas is a warning of DiLoCo's.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="torch")
        end = runpy.run_path(str(SCRIPT))
    whole = [
        param.full_tensor() if isinstance(param, DTensor) else param
        for param in end["model"].parameters()
    ]
    parameters = torch.cat([param.detach().flatten() for param in whole])
    diloco = end["diloco"]
    num_outer = sum(part.outer.numel() for part in diloco.parts)
    hashes = [""] * world
    dist.all_gather_object(hashes, diloco.outer_hash())
    per_replica = world // replicas
    same_shard = {hashes[r] for r in range(rank % per_replica, world, per_replica)}
    assert len(same_shard) == 1
    return end["loss"].item(), hashes[rank], parameters.numpy().tobytes(), num_outer


@pytest.mark.nightly("4 s; they differ in what is inside a replica", but=["4-ddp-2"])
@pytest.mark.parametrize(("world", "inside", "replicas"), [(4, "fsdp2", 2), (4, "ddp", 2)])
def test_replicas_of_several_workers(world: int, inside: str, replicas: int, workers) -> None:
    results = workers(world).run(run_example, inside, replicas)
    # All replicas end with the same parameters, of which each worker keeps its part.
    assert len({parameters for _, _, parameters, _ in results}) == 1
    num_elements = len(results[0][2]) // 4
    per_replica = world // replicas
    assert sum(num_outer for *_, num_outer in results[:per_replica]) == pytest.approx(
        num_elements, abs=256 * per_replica
    )
    # The sum of eight standard normal numbers has variance 8.
    assert all(loss < 6.0 for loss, *_ in results)


def sharded_with_local(rank: int, world: int, path: Path) -> list[bool]:
    """FSDP2 inside a replica: what trainers' callbacks do for an evaluation and a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    arguments = {"sync_every": 2, "wire": "fp32", "peers": mesh["replica"]}

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Regression(seed=seed)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["worker"])
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def shards(diloco: DiLoCo) -> torch.Tensor:
        return torch.cat([value.flatten() for value in parameters_of(diloco).values()]).clone()

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            train_step(model, optimizer, rank // 2, step)

    model, optimizer = make(0)
    diloco = attach(DiLoCo, model, optimizer, arguments)
    train(model, optimizer, range(3))
    local, swap = shards(diloco), Swap(diloco)
    swap.enter()
    model(batch(0, 9)[0])  # without a backward: FSDP keeps gathered parameters
    outer, digest = shards(diloco), diloco.outer_hash()
    swap.leave()
    facts = [torch.equal(shards(diloco), local), not torch.equal(outer, local)]
    torch.save(savable(state_with_local(diloco)), path / f"{rank}.pt")
    train(model, optimizer, range(3, 6))
    diloco.flush()
    end = shards(diloco)
    diloco.close()

    model, optimizer = make(7)
    saved = torch.load(path / f"{rank}.pt", weights_only=True)
    diloco = attach(DiLoCo, model, optimizer, arguments, saved)
    facts += [torch.equal(shards(diloco), local), diloco.outer_hash() == digest]
    train(model, optimizer, range(3, 6))
    diloco.flush()
    facts.append(torch.equal(shards(diloco), end))
    diloco.close()
    wrong = {**saved, "local": {**saved["local"], "head.bias": torch.zeros(3)}}
    model, optimizer = make(7)
    with pytest.raises(ValueError, match=r"'head\.bias' has shape \(3,\) in the checkpoint"):
        attach(DiLoCo, model, optimizer, arguments, wrong)
    return facts


def test_shards_are_saved_with_their_local_parameters(fresh_workers, tmp_path: Path) -> None:
    assert fresh_workers(4).run(sharded_with_local, tmp_path) == [[True] * 5] * 4
