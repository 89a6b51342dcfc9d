"""A loop on accelerate as one replica of several; the lines that make it DiLoCo are marked.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Each process is a replica that learns to add on its own part of the numbers. Half-way it saves
everything in a folder of its own and goes on from there, as a run that was interrupted would.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_comm.integrations.accelerate import attach
from diloco_comm.integrations.launch import replica_per_process

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--sync-every", type=int, default=25)
parser.add_argument("--output-dir", type=Path, default=Path("accelerate-checkpoints"))
options = parser.parse_args()

# Before the Accelerator is made, which would take the processes for one group.
replicas = replica_per_process()  # DiLoCo: 1
replica = replicas["peers"].replica if replicas else 0
torch.manual_seed(0)

x = torch.randn(4096, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(model, optimizer)
diloco = attach(accelerator, model, optimizer, sync_every=options.sync_every, **replicas)  # 2
loader = accelerator.prepare(diloco.shard(loader, batches_per_step=2))  # DiLoCo: 3

folder = str(options.output_dir / f"replica-{replica}")
for epoch in range(options.epochs):
    if epoch == options.epochs // 2:
        accelerator.save_state(folder)  # with DiLoCo's state
        accelerator.load_state(folder)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(f"replica {replica}: epoch {epoch}  loss {loss.item():.3f}")

diloco.flush(final=True)  # DiLoCo: 4. Share the last steps; all replicas are equal now.
print(f"replica {replica}: parameters {diloco.outer_hash()[:16]}")
diloco.close()
