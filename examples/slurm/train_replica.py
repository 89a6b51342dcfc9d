"""One replica as a job of its own: it knows the store, its number, and how many there are.

    diloco-comm store
    python examples/slurm/train_replica.py --store tcp://127.0.0.1:29400 --replica 0 --replicas 2
    python examples/slurm/train_replica.py --store tcp://127.0.0.1:29400 --replica 1 --replicas 2

When another replica dies, the survivors go on without it; docs/reference/failures.md says, under
Joining, how one comes back.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from diloco_comm import DiLoCo, LeftBehind, StorePeers, SyncError

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--store", required=True)
parser.add_argument("--replica", type=int, required=True)
parser.add_argument("--replicas", type=int, required=True)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--sync-every", type=int, default=25)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diloco = DiLoCo(
    model,
    optimizer,
    sync_every=options.sync_every,
    peers=StorePeers(options.store, replica=options.replica, of=options.replicas),
)
data = torch.Generator().manual_seed(1 + options.replica)
for _ in range(options.steps):
    x = torch.randn(32, 8, generator=data)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    try:
        optimizer.step()
    except LeftBehind:
        raise  # the others go on; start again with init="join"
    except SyncError as error:
        print(f"replica {options.replica}: {error}", flush=True)
        diloco.change_group("survivors")
        print(f"replica {options.replica}: going on with {diloco.members}", flush=True)
    optimizer.zero_grad()
diloco.flush(final=True)
print(f"replica {options.replica}: loss {loss.item():.3f}  {diloco.outer_hash()[:16]}")
diloco.close()
