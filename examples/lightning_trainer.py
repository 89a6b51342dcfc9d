"""Lightning's Trainer as one replica of several; the lines that make it DiLoCo are marked.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py

Each process is a replica that learns to add on its own part of the numbers, which the callback
divides, and has a folder of checkpoints of its own. trainer.fit(..., ckpt_path=...) would go on
from one to the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_comm.integrations.launch import replica_per_process
from diloco_comm.integrations.lightning import DiLoCoCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync-every", type=int, default=25)
parser.add_argument("--output-dir", type=Path, default=Path("lightning-checkpoints"))
options = parser.parse_args()

# Before anything asks how many processes there are: the Trainer would take them for one group.
replicas = replica_per_process()  # DiLoCo: 1
replica = replicas["peers"].replica if replicas else 0
torch.manual_seed(0)


class Adder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


x = torch.randn(4096, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
module = Adder()
callback = DiLoCoCallback(sync_every=options.sync_every, **replicas)  # DiLoCo: 2
trainer = pl.Trainer(
    max_steps=options.steps,
    callbacks=[callback],  # DiLoCo: 3
    default_root_dir=options.output_dir / f"replica-{replica}",
    accelerator="auto",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
print(f"replica {replica}: loss {module.training_step(data[:512], 0).item():.3f}")
print(f"replica {replica}: parameters {callback.diloco.outer_hash()[:16]}")
