"""Replicas of several workers each: FSDP2 or DDP inside a replica, DiLoCo between the replicas.

    torchrun --nproc-per-node 4 examples/replicas_of_several_workers.py                 FSDP2
    torchrun --nproc-per-node 4 examples/replicas_of_several_workers.py --inside ddp
    torchrun --nproc-per-node 6 examples/replicas_of_several_workers.py --replicas 3
    torchrun --nproc-per-node 2 examples/replicas_of_several_workers.py --store ADDRESS --replica 0

The processes form a mesh of replicas by workers. FSDP2 and DDP are given the workers of one
replica, never the whole mesh, or they would average gradients over the replicas at every step.
DiLoCo is given the other dimension: who holds the same parameters, or the same shards, elsewhere.
With --store, the address that `diloco-comm store` prints, all processes are the workers of one
replica, and each other replica has a launcher of its own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco_comm import DiLoCo, StorePeers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--inside", choices=["fsdp2", "ddp"], default="fsdp2")
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--store")
parser.add_argument("--replica", type=int, default=0)  # with --store
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync-every", type=int, default=25)
options = parser.parse_args()

is_launched = not dist.is_initialized()
if is_launched:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
num_launched = 1 if options.store else options.replicas
shape = (num_launched, dist.get_world_size() // num_launched)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "worker"))
replica, worker = mesh["replica"].get_local_rank(), mesh["worker"].get_local_rank()
arguments = {"peers": mesh["replica"]}
if options.store:
    replica = options.replica
    arguments["peers"] = StorePeers(options.store, replica=replica, of=options.replicas)

torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
if options.inside == "fsdp2":
    for module in [*model, model]:
        fully_shard(module, mesh=mesh["worker"])
else:
    model = DistributedDataParallel(model, process_group=mesh["worker"].get_group())
    # The workers hold the same parameters: they split the outer state and the exchange.
    arguments["shard_group"] = mesh["worker"]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diloco = DiLoCo(model, optimizer, sync_every=options.sync_every, **arguments)

data = torch.Generator().manual_seed(1 + replica * shape[1] + worker)
for _ in range(options.steps):
    x = torch.randn(32, 8, generator=data)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()  # inside the replica every step, between the replicas every 25th
    optimizer.zero_grad()
diloco.flush(final=True)
print(f"replica {replica} worker {worker}: loss {loss.item():.3f}  {diloco.outer_hash()[:16]}")
diloco.close()
if is_launched:
    dist.destroy_process_group()
